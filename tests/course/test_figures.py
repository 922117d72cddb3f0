"""Figures: letters can be read, what is drawn is what was computed, and no picture changes unnoticed."""

import base64
import io
import itertools
import json
import math
import re
import zlib
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from PIL import Image, ImageChops, ImageStat
from sage_course import figures
from sage_course.figures import time_line
from sage_course.outline import notebook_files
from sage_course.results import full_batch
from sage_course.results.pretraining import noise_checkpoints, noise_of
from sage_course.teaching import letter_inputs
from sage_lab.experiments.table1 import closest_setting
from sage_lab.records import read_record

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.quantization import quantize, quantized_matmul
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sla2 import top_blocks

SHOWN_WIDTH = 9.5  # inches of a notebook's column; a wider figure is made smaller
SCORES = 2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double()
VALUES = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()
CAUSAL = SCORES[:, :8].masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf)
LARGE = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).double()
ALL_TILES = torch.ones(3, 3, dtype=torch.bool)
MASK = torch.tensor(
    [[1, 1, 0, 0, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1, 1, 0]]
).bool()
ROW = torch.tensor([1.2, 2.0, 0.4, 1.6], dtype=torch.float64)
QUERY, KEY, VALUE, GRADIENT = (x[0, 0].double() for x in letter_inputs("less precise attention is still attention"))
FEW = [36, 17, 6, 3, 20]  # keys that notebook 01 draws for its last query
FACTORS = (
    torch.tensor([[0.254, -1.27, 0.127], [0.381, 2.54, -0.635]]),
    torch.tensor([[0.5, -0.889], [0.635, 0.3], [-0.21, 0.62]]),
)
LISTED = top_blocks(torch.rand(4, 8, generator=torch.Generator().manual_seed(1)), 3)
FILMS = {
    "softmax": figures.softmax_film(ROW),
    "delta": figures.delta_film((KEY[FEW] @ QUERY[-1] / 8).softmax(0), VALUE[FEW] @ GRADIENT[-1]),
    "scales": figures.scales_film(*FACTORS),
    "forward": figures.forward_film(SCORES, VALUES, 4),
    "backward": figures.backward_film(ALL_TILES),
    "table": figures.table_film(LISTED, 16 * 32 * 2),
    "ring": figures.ring_film(),
}
DRAWINGS = {
    "memory": figures.memory_hierarchy,
    "precision": lambda: figures.precision_map(SageBwdSettings.printed(exact_matmuls=("S", "dP"))),
    "precision by row": lambda: figures.precision_map(SageBwdSettings()),
    "forward step": lambda: figures.forward_step_figure(CAUSAL, VALUES[:8], 4, 2),
    "backward step": lambda: figures.backward_step_figure(ALL_TILES.tril(), 3),
    "owners": figures.owners,
    "sparse owners": lambda: figures.sparse_owners(MASK, rows=(0, 2), columns=(1, 6)),
    "sparse owner of nothing": lambda: figures.sparse_owners(torch.tensor([[True, False]]), rows=(), columns=(1,)),
    "sparse owners, large": lambda: figures.sparse_owners(torch.ones(6, 10).bool(), rows=(5,), columns=(9,)),
    "SLA2": lambda: figures.sla2_flow(MASK),
    "two warps": figures.two_warps_and_a_barrier,
}
DRAWINGS |= {f"{name}, picture {i}": partial(film.figure, i) for name, film in FILMS.items() for i in range(film.count)}


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def drawn(monkeypatch):
    """drawn(figure) -> the texts that appear in it, with the pixels they take."""
    seen, draw = {}, Text.draw

    def remember(text, renderer, *args, **options):
        if text.get_visible() and text.get_text().strip():
            seen[text] = text.get_window_extent(renderer)
        return draw(text, renderer, *args, **options)

    monkeypatch.setattr(Text, "draw", remember)
    return lambda figure: figure.draw_without_rendering() or seen


def holds(box, extent):
    return box.contains(extent.x0, extent.y0) and box.contains(extent.x1, extent.y1)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_can_be_read(name, drawn):
    figure = DRAWINGS[name]()
    found = drawn(figure)
    assert figure.dpi >= 150
    boxes = [patch.get_window_extent() for patch in figure.findobj(FancyBboxPatch)]
    cells = [patch.get_window_extent() for patch in figure.findobj(Rectangle)]
    for text, extent in found.items():
        assert text.get_fontsize() * min(1, SHOWN_WIDTH / figure.get_figwidth()) >= 9, text
        assert holds(figure.bbox.padded(0.5), extent), f"{text} is cut off"
        for box in boxes:
            assert holds(box, extent) or not box.overlaps(extent), f"{text} lies on the edge of a box"
        middle = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
        for cell in cells:
            assert holds(cell, extent) or not cell.contains(*middle), f"{text} leaves its cell"
    for (one, a), (other, b) in itertools.combinations(found.items(), 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{one} lies on {other}"


@pytest.mark.parametrize("name", FILMS)
def test_a_film_is_small_and_its_strip_has_the_same_pictures(name):
    film = FILMS[name]
    assert set(FILMS) == set(figures.IDEAS)
    assert max(len(film.gif), len(film.strip)) < 300_000
    with Image.open(io.BytesIO(film.gif)) as gif, Image.open(io.BytesIO(film.strip)) as strip:
        assert (gif.n_frames, gif.info["loop"]) == (film.count, 0)
        strip, width = strip.convert("RGB"), gif.width
        height, head = gif.height, strip.height - gif.height * math.ceil(film.count / film.columns)
        assert (strip.width, 0 < head < 100) == (width * film.columns, True)
        for i in range(film.count):
            gif.seek(i)
            line, column = divmod(i, film.columns)
            corner = column * width, head + line * height
            there = strip.crop((*corner, corner[0] + width, corner[1] + height))
            assert max(ImageStat.Stat(ImageChops.difference(gif.convert("RGB"), there)).mean) < 1
            shown = gif.info["duration"] / 1000
            assert 1 <= shown <= 5


def test_every_film_is_in_a_notebook_with_its_strip_below_and_words_for_both():
    outputs = [
        output
        for path in notebook_files()
        for cell in json.loads(path.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    plain = ["".join(output.get("data", {}).get("text/plain", "")) for output in outputs]
    for idea in figures.IDEAS.values():
        film, twin = outputs[at := plain.index(f"film: {idea.title}")], outputs[at + 1]
        assert f'alt="{idea.alt}"' in "".join(film["data"]["text/html"])
        assert twin["metadata"]["image/png"]["alt"] == idea.alt


@cache
def words(film, i):
    figure = film.figure(i)
    texts = [text.get_text() for axes in figure.axes for text in (axes.title, *axes.texts)]
    return "\n".join([figure.get_suptitle(), *texts])


def test_the_film_of_the_softmax_shows_the_softmax():
    film = FILMS["softmax"]
    shown = [[float(text.get_text()) for text in film.figure(i).axes[2].texts] for i in range(film.count)]
    for added, found in zip(figures.ADDED, shown, strict=True):
        assert found == [round(x, 2) for x in torch.softmax(ROW + added, 0).tolist()]
        assert (found == shown[0]) == bool((added == added[0]).all())


def test_the_film_of_delta_balances_where_dO_meets_O_and_shows_dS():
    film, scores = FILMS["delta"], (KEY[FEW] @ QUERY[-1] / 8).requires_grad_()
    output = torch.softmax(scores, 0) @ VALUE[FEW]
    (output @ GRADIENT[-1]).backward()
    assert f"x = {output.detach() @ GRADIENT[-1]:.2f} (delta): P (dP - x) adds up to 0.00" in words(film, 4)
    assert re.findall(r"[+-]\d\.\d\d", words(film, 5)) == [f"{x:+.2f}" for x in scores.grad.tolist()]
    assert all("adds up to 0.00" not in words(film, i) for i in range(4))


def test_the_film_of_scales_is_near_the_product_by_rows_and_not_along_the_sum():
    film, (a, b) = FILMS["scales"], FACTORS
    by_row, exact = quantized_matmul(quantize(a, (1, None)), quantize(b, (None, 1)))[0, 0], (a @ b)[0, 0]
    one_scale = quantize(a, (None, 1)).scale.mean() * quantize(b, (None, 1)).scale[0, 0]
    meaningless = (quantize(a, (None, 1)).values.int() @ quantize(b, (None, 1)).values.int())[0, 0] * one_scale
    assert f"= {by_row:.2f}, exact {exact:.2f}" in words(film, 2)
    assert f"= {meaningless:.2f}, exact {exact:.2f}" in words(film, 5)
    assert abs(by_row - exact) < 0.01 < 0.1 < abs(meaningless - exact)


@pytest.mark.parametrize("scores", [SCORES, CAUSAL])
def test_the_forward_film_ends_with_the_softmax_of_each_block_times_V(scores):
    steps = figures.forward_steps(scores, VALUES[: scores.shape[1]], 4)
    found = torch.cat([step.o for step in steps if step.is_last])
    torch.testing.assert_close(found, torch.softmax(scores, -1) @ VALUES[: scores.shape[1]])
    for i in range(len(steps)):
        assert all(f"{x:.1f}" in words(FILMS["forward"], i) for x in steps[i].m) or scores is CAUSAL


def test_the_backward_film_calls_a_gradient_complete_when_it_is():
    q, k, v, do = gaussian(4, 6, 3).unbind()
    o, log_sum_exp, _ = attention_forward(q, k, v)
    exact = attention_backward(do, q, k, v, o, log_sum_exp)
    ds, sums = exact.grad_scores / 3**0.5, {name: torch.zeros(6, 3).double() for name in ("dQ", "dK", "dV")}
    whole = {"dQ": exact.grad_query, "dK": exact.grad_key, "dV": exact.grad_value}
    for turn, (i, j) in enumerate(figures.backward_order(ALL_TILES)):
        rows, keys = slice(2 * i, 2 * i + 2), slice(2 * j, 2 * j + 2)
        sums["dQ"][rows] += ds[rows, keys] @ k[keys]
        sums["dK"][keys] += ds[rows, keys].mT @ q[rows]
        sums["dV"][keys] += exact.probabilities[rows, keys].mT @ do[rows]
        said = re.findall(r"(d[QKV])_(\d)\$ (\d)/3", words(FILMS["backward"], turn))
        assert len(said) == 9
        for name, block, parts in said:
            mine = slice(2 * int(block), 2 * int(block) + 2)
            assert torch.allclose(sums[name][mine], whole[name][mine]) == (parts == "3")


def test_the_film_of_the_look_up_table_reads_the_listed_blocks_where_they_are():
    film, key = FILMS["table"], torch.empty(8, 16, 32, dtype=torch.float16)
    read = torch.zeros_like(LISTED[:2])
    for i in range(film.count):
        program, place, j, byte = re.search(
            r"program (\d): j = table\[\1, (\d)\] = (\d)[^=]*= ([\d,]+)\n", words(film, i)
        ).groups()
        read[int(program), int(j)] = True
        assert int(byte.replace(",", "")) == key[int(j)].data_ptr() - key.data_ptr()
        so_far = (int(place) + 1) * key[0].nbytes
        assert f"program {program} has read {read[int(program)].sum()} of 8 blocks: {so_far:,} bytes" in words(film, i)
    assert read.equal(LISTED[:2])


def test_nobody_in_the_ring_begins_before_the_barriers_phase_has_ended():
    jobs = time_line.schedule(7, 2, 3, time_line.READ)
    assert len(jobs) == 7 * 3
    for job in jobs:
        place, phase = job.tile % 3, job.tile // 3 % 2
        before = time_line.place_at(jobs, place, 3, 2, job.start - 0.5)
        now = time_line.place_at(jobs, place, 3, 2, job.start)
        if job.worker == 0:
            assert (before.tile is None or before.tile == job.tile - 3, now.empty) == (True, phase)
        else:
            assert (now.tile, now.is_ready, now.ready) == (job.tile, True, 1 - phase)
    waits = "\n".join(words(FILMS["ring"], i) for i in range(8))
    assert "loading warp waits" in waits
    assert "ends phase 1 of ready" in waits


def test_a_slider_holds_a_picture_for_each_value_and_shows_the_first_where_styles_are_cut_out():
    def draw(turn=2, far=0):
        figure, (axes,) = figures.panels(1, width=1.6, height=1.4, title=f"turn {turn}, far {far}")
        axes.set(xlim=(0, turn), xlabel=r"$\sigma$ | x", ylabel="y")
        return figure

    made = figures.slider(draw, turn=range(1, 4), far=range(0, 3, 2))
    text = made._repr_html_()
    assert text == figures.slider(draw, turn=range(1, 4), far=range(0, 3, 2))._repr_html_()  # nothing is random
    first, strip = (Image.open(io.BytesIO(base64.b64decode(x))) for x in re.findall(r"base64,([^\"')]*)", text))
    assert strip.size == (6 * first.width, first.height)
    third = strip.convert("RGB").crop((2 * first.width, 0, 3 * first.width, first.height))
    assert np.abs(np.asarray(third, float) - np.asarray(first.convert("RGB"), float)).mean() < 1
    assert made.alts[2:4] == ["turn 2, far 0. y over sigma / x", "turn 2, far 2. y over sigma / x"]
    assert plt.get_fignums() == []
    with pytest.raises(ValueError, match="draw: expected a default of turn among range"):
        figures.slider(draw, turn=range(3, 9))
    with pytest.raises(ValueError, match="expected one size"):
        figures.slider(lambda n=1: figures.panels(n)[0], n=range(1, 3))


def test_a_description_has_a_diagrams_words_and_ends_somewhere():
    assert "HBM" in figures.describe(figures.memory_hierarchy())
    figure, (axes,) = figures.panels(1, title="word " * 200)
    assert len(figures.describe(figure)) <= 504


def on_axes(draw, *arguments, **options):
    figure, (axes,) = figures.panels(1)
    draw(axes, *arguments, **options)
    return figure


def noise_rows():
    return next(iter(noise_checkpoints(read_record("noise_h200")).values()))


BENCH, SLA2_BENCH, RUNS = "bench_h200", "bench_sla2_h200", "pretrain_h200"
SLA2_POINT = ((8192, 32760), 0.97)
PROFILED = {"forward": 5, "dq": 4, "dk": 4, "dv": 4, "no such program": 4}
OTHERS = {
    "overview": lambda r: figures.overview_figure(r("table2_captures"), r("paired_h200")),
    "table 1": lambda r: figures.table1_figure(r("table1_sweep"), closest_setting(r("table1_sweep"))),
    "choices of table 1": lambda r: figures.table1_choices_figure(r("table1_sweep")),
    "predictions": lambda r: figures.prediction_figure(
        r(BENCH), figures.compare_levels(r(BENCH), r("instructions_sm90"), "bwd"), title=""
    ),
    "busy": lambda r: figures.busy_figure(
        r("profile_h200"), r("instructions_sm90"), PROFILED, scores={128: 1e9, 64: 2e9}, title=""
    ),
    "curves": lambda r: figures.pretrain_curves_figure(r(RUNS), title=""),
    "final losses": lambda r: figures.final_losses_figure(r(RUNS), title=""),
    "gaps": lambda r: figures.gap_figure(r(RUNS), title=""),
    "noise": lambda r: figures.noise_figure(
        {name: noise_of(noise_rows(), "whole", name) for name in figures.VARIANT_STYLES}, {"a": 2**15}, title="",
        caption="",
    ),
    "T*": lambda r: figures.tokens_at_bias_figure({"a": noise_rows()}, {"b": 2**20}, title="", caption=""),
    "SLA2 ladder": lambda r: figures.sla2_ladder_figure(r(SLA2_BENCH), *SLA2_POINT, title="", here=r(SLA2_BENCH)),
    "SLA2 in turn": lambda r: figures.sla2_paired_figure(r("paired_sla2_h200"), title=""),
    "training for INT8": lambda r: figures.quantization_aware_figure(r("quantization_aware_cpu"), title=""),
    "whole corpus": lambda r: full_batch.gaps_figure(full_batch.conditions(r("full_batch_h200")), title=""),
    "repaired runs": lambda r: full_batch.pretraining_figure(r("pretrain_repair_h200"), title=""),
    "arms": lambda r: figures.arms_figure({"worse": (2e-3, 1e-3, 3e-3, 3), "a": (1e-3, -1e-3, 2e-3, 1)}, title=""),
    "SLA2 ladder with a gap": lambda r: figures.sla2_ladder_figure(
        r(SLA2_BENCH)._replace(rows=[row for row in r(SLA2_BENCH).rows if row["level"] != 2]), *SLA2_POINT, title=""
    ),
    "mass": lambda r: on_axes(figures.draw_block_mass, SCORES.softmax(-1), block_mask=SCORES > 1, title=""),
    "block sizes": lambda r: on_axes(figures.draw_block_sizes, gaussian(64, 16), where=gaussian(64, 16) < 2, title=""),
    "probabilities": lambda r: on_axes(figures.draw_probabilities, (SCORES - SCORES.amax(1)[:, None]).exp(), title=""),
    "lists": lambda r: figures.list_lengths_figure(MASK, title=""),
    "soft masks": lambda r: figures.soft_mask_figure(SCORES.flatten(), 4, (1.0, 0.01)),
    "selected": lambda r: figures.selected_figure(
        torch.ones(3, 2, 8, 8), {"one": MASK.view(2, 4, 4)}, MASK.view(2, 4, 4).roll(1, 2), title=""
    ),
    "frames": lambda r: figures.film_strips_figure(
        {"one": torch.linspace(-1, 1, 8).view(1, 8, 1, 1).expand(3, 8, 2, 2)}, title="", frames=3
    ),
    "gradients": lambda r: figures.gradients_figure((64, 1024), title=""),
    "who works": lambda r: on_axes(
        figures.draw_activity, {"a": ["x", "x", "-", "y"], "b": ["-", "x"]}, {"x": "red", "y": "blue"}, title=""
    ),
    "instructions": lambda r: on_axes(
        figures.draw_instructions, {"2": r("instructions_sm90").select(kernel="forward", level=2)}, title=""
    ),
}  # fmt: skip
BY_HAND = ("memory", "precision", "precision by row", "forward step", "backward step", "owners", "sparse owners",
           "sparse owner of nothing", "SLA2", "two warps")  # fmt: skip
SEEN = {
    "overview": 2151632167, "table 1": 3347692746, "choices of table 1": 1226421414,
    "predictions": 2066730344, "busy": 1167434420, "curves": 3217129273,
    "final losses": 1678875001, "gaps": 4209771848, "noise": 2053049639, "T*": 4075139534, "SLA2 ladder": 981905570,
    "SLA2 in turn": 3865687458, "training for INT8": 2943237775, "whole corpus": 4050150043,
    "repaired runs": 3365346669, "arms": 2006634444, "SLA2 ladder with a gap": 1653879184, "mass": 2619025790,
    "block sizes": 3232043888, "probabilities": 3660505103, "lists": 1699190351,
    "soft masks": 576334941, "selected": 337922805, "frames": 2915839367, "gradients": 3328921577,
    "who works": 475709382, "instructions": 3620918819,
    "memory": 436858876, "precision": 4184497105, "precision by row": 3252307961,
    "forward step": 3059536074, "backward step": 2185246879,
    "owners": 3196429242, "sparse owners": 3118647713, "sparse owner of nothing": 1737883908, "SLA2": 1805374965,
    "two warps": 3294617789,
    "softmax": 1013201544, "delta": 1264256397, "scales": 4110096127, "forward": 3296011175, "backward": 2390966683,
    "table": 155926498, "ring": 3799761810,
}  # fmt: skip


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_prediction_has_no_legend_for_a_unit_that_no_bar_shows(direction):
    levels = figures.compare_levels(read_record(BENCH), read_record("instructions_sm90"), direction)
    figure = figures.prediction_figure(read_record(BENCH), levels, title="")
    drawn = {bar.get_facecolor() for axes in figure.axes for bar in axes.patches if bar.get_height()}
    assert drawn == {x.get_facecolor() for x in figure.legends[0].legend_handles if isinstance(x, Rectangle)}


def fingerprint(figure):
    """Return a number that changes with every text, line, bar, cell or picture in a figure, to 5 digits."""
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [text.get_text() for text in (*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label)]
        found += [name for name in axes.get_legend_handles_labels()[1] if name]
        found += [line.get_xydata() for line in axes.lines] + [image.get_array() for image in axes.images]
        found += [patch.get_bbox().get_points() for patch in axes.patches if hasattr(patch, "get_bbox")]
        found += [path.vertices for collection in axes.collections for path in collection.get_paths()]
    numbers = [x if isinstance(x, str) else [f"{number:.5g}" for number in np.ma.filled(x, 0.0).ravel()]
               for x in found]  # fmt: skip
    return zlib.crc32(repr(numbers).encode())


@pytest.mark.parametrize("name", [*OTHERS, *BY_HAND, *FILMS])
def test_a_picture_is_as_it_was_when_somebody_looked_at_it(name):
    """nbval compares no pictures. If you change one, look at it, then write its new number into SEEN."""
    if name in FILMS:
        figure = FILMS[name].figure(FILMS[name].count - 1)
    else:
        figure = DRAWINGS[name]() if name in DRAWINGS else OTHERS[name](read_record)
    assert fingerprint(figure) == SEEN[name]
