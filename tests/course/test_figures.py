"""Figures: letters can be read, what is drawn is what was computed, and no picture changes unnoticed."""

import itertools
import math
import zlib

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from sage_course import figures
from sage_course.results import full_batch
from sage_course.results.pretraining import noise_checkpoints, noise_of
from sage_lab.experiments.table1 import closest_setting
from sage_lab.records import read_record

from sage_ref.sagebwd import SageBwdSettings

SHOWN_WIDTH = 9.5  # inches of a notebook's column; a wider figure is made smaller
SCORES = 2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double()
VALUES = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()
CAUSAL = SCORES[:, :8].masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf)
LARGE = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).double()
ALL_TILES = torch.ones(3, 3, dtype=torch.bool)
MASK = torch.tensor(
    [[1, 1, 0, 0, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1, 1, 0]]
).bool()
DRAWINGS = {
    "memory": figures.memory_hierarchy,
    "precision": lambda: figures.precision_map(SageBwdSettings.printed(exact_matmuls=("S", "dP")), highlight="dK"),
    "precision by row": lambda: figures.precision_map(SageBwdSettings()),
    "forward film": lambda: figures.forward_film(SCORES, VALUES, 4),
    "forward film, large": lambda: figures.forward_film(LARGE, LARGE[:, :8], 4, shown=(0, 5, 15)),
    "forward step": lambda: figures.forward_step_figure(CAUSAL, VALUES[:8], 4, 2),
    "backward film": lambda: figures.backward_film(ALL_TILES),
    "backward film, large": lambda: figures.backward_film(torch.ones(5, 5).bool().tril(), shown=(0, 9, 14)),
    "backward step": lambda: figures.backward_step_figure(ALL_TILES.tril(), 3),
    "owners": figures.owners,
    "sparse owners": lambda: figures.sparse_owners(MASK, rows=(0, 2), columns=(1, 6)),
    "sparse owner of nothing": lambda: figures.sparse_owners(torch.tensor([[True, False]]), rows=(), columns=(1,)),
    "sparse owners, large": lambda: figures.sparse_owners(torch.ones(6, 10).bool(), rows=(5,), columns=(9,)),
    "SLA2": lambda: figures.sla2_flow(MASK),
    "two warps": figures.two_warps_and_a_barrier,
}


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
BY_HAND = ("memory", "precision", "precision by row", "forward film", "forward step", "backward film", "backward step",
           "owners", "sparse owners", "sparse owner of nothing", "SLA2", "two warps")  # fmt: skip
SEEN = {
    "overview": 1416291446, "table 1": 3347692746, "choices of table 1": 1226421414,
    "predictions": 422334160, "busy": 1167434420, "curves": 3217129273,
    "final losses": 1678875001, "gaps": 4209771848, "noise": 2053049639, "T*": 4075139534, "SLA2 ladder": 981905570,
    "SLA2 in turn": 1874718096, "training for INT8": 2943237775, "whole corpus": 4050150043,
    "repaired runs": 3365346669, "arms": 2006634444, "SLA2 ladder with a gap": 1653879184, "mass": 2619025790,
    "block sizes": 3232043888, "probabilities": 3660505103, "lists": 1699190351,
    "soft masks": 576334941, "selected": 337922805, "frames": 2915839367, "gradients": 3328921577,
    "who works": 475709382, "instructions": 3620918819,
    "memory": 436858876, "precision": 4184497105, "precision by row": 3252307961,
    "forward film": 1048836279, "forward step": 3059536074, "backward film": 2336505091, "backward step": 2185246879,
    "owners": 3673800219, "sparse owners": 195109386, "sparse owner of nothing": 1860916307, "SLA2": 1805374965,
    "two warps": 3294617789,
}  # fmt: skip


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


@pytest.mark.parametrize("name", [*OTHERS, *BY_HAND])
def test_a_picture_is_as_it_was_when_somebody_looked_at_it(name):
    """nbval compares no pictures. If you change one, look at it, then write its new number into SEEN."""
    figure = DRAWINGS[name]() if name in DRAWINGS else OTHERS[name](read_record)
    assert fingerprint(figure) == SEEN[name]
