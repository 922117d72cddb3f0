"""The drawn pictures: positions, labels and data are right, and every letter can be read."""

import itertools
import math
import re

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from sage_course import figures
from sage_course.figures import memory, precision, tile_loop, time_line
from sage_course.figures.diagrams import Box
from torch.testing import assert_close

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sagebwd.settings import MATMULS

SHOWN_WIDTH = 9.5  # inches a notebook's column has; a wider figure is made smaller
SCORES = 2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double()
VALUES = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()
CAUSAL = SCORES[:, :8].masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf)
LARGE = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).double()
ALL_TILES = torch.ones(3, 3, dtype=torch.bool)
MASK = torch.tensor(
    [[1, 1, 0, 0, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1, 1, 0]]
)
SIX_BY_TEN = torch.ones(6, 10, dtype=torch.bool)
PICTURES = {
    "memory": figures.memory_hierarchy,
    "precision": lambda: figures.precision_map(SageBwdSettings()),
    "precision, one": lambda: figures.precision_map(SageBwdSettings.printed(exact_matmuls=()), highlight="dK"),
    "forward film": lambda: figures.forward_film(SCORES, VALUES, 4),
    "forward film, causal": lambda: figures.forward_film(CAUSAL, VALUES[:8], 4),
    "forward film, large": lambda: figures.forward_film(LARGE, LARGE[:, :8], 4, shown=(0, 5, 15)),
    "forward step": lambda: figures.forward_step_figure(SCORES, VALUES, 4, 2),
    "backward film": lambda: figures.backward_film(ALL_TILES),
    "backward film, large": lambda: figures.backward_film(torch.ones(5, 5).bool().tril(), shown=(0, 9, 14)),
    "backward step": lambda: figures.backward_step_figure(ALL_TILES.tril(), 3),
    "owners": figures.owners,
    "sparse owners": lambda: figures.sparse_owners(MASK.bool(), rows=(0, 2), columns=(1, 6)),
    "sparse owners, large": lambda: figures.sparse_owners(SIX_BY_TEN, rows=(5,), columns=(9,)),
    "sparse owner": lambda: figures.sparse_owner_figure(MASK.bool(), column=3),
    "SLA2": lambda: figures.sla2_flow(MASK.bool()),
    "Hopper": figures.hopper_time_line,
    "Hopper, long": lambda: figures.hopper_time_line(tiles=4, warpgroups=2, places=3),
    "two warps": figures.two_warps_and_a_barrier,
    "choices": lambda: figures.block_choices_figure(SCORES.softmax(-1), {"a": SCORES > 1, "b": SCORES < 0}, title="T"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture
def drawn(monkeypatch):
    """Draws a figure and gives back the texts that appear in it, with the pixels they take."""
    seen = {}
    draw = Text.draw

    def remember(text, renderer, *args, **options):
        if text.get_visible() and text.get_text().strip():
            seen[text] = text.get_window_extent(renderer)
        return draw(text, renderer, *args, **options)

    monkeypatch.setattr(Text, "draw", remember)

    def texts_of(figure):
        figure.draw_without_rendering()  # lays it out
        seen.clear()
        figure.canvas.draw()
        return dict(seen)

    return texts_of


def holds(box, extent):
    return box.contains(extent.x0, extent.y0) and box.contains(extent.x1, extent.y1)


def texts(artist):
    return [text.get_text() for text in artist.findobj(Text) if text.get_text()]


class TestEveryPicture:
    @pytest.mark.parametrize("name", PICTURES)
    def test_can_be_read(self, name, drawn):
        figure = PICTURES[name]()
        found = drawn(figure)
        shrunk = min(1, SHOWN_WIDTH / figure.get_figwidth())
        boxes = [patch.get_window_extent() for patch in figure.findobj(FancyBboxPatch)]
        cells = [patch.get_window_extent() for patch in figure.findobj(Rectangle)]
        for text, extent in found.items():
            assert text.get_fontsize() * shrunk >= 9, text
            assert holds(figure.bbox.padded(0.5), extent), f"{text} is cut off"
            for box in boxes:
                assert holds(box, extent) or not box.overlaps(extent), f"{text} lies on the edge of a box"
            middle = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
            for cell in cells:
                assert holds(cell, extent) or not cell.contains(*middle), f"{text} leaves its cell"
        for (one, a), (other, b) in itertools.combinations(found.items(), 2):
            assert not a.padded(-1).overlaps(b.padded(-1)), f"{one} lies on {other}"

    def test_has_150_dots_per_inch_or_more(self):
        assert figures.memory_hierarchy().dpi >= 150
        assert figures.panels(1)[0].dpi >= 150


class TestMemory:
    def test_what_is_nearer_to_the_multiprocessor_is_faster(self):
        shared, l2, hbm = memory.memory_rates()
        assert shared > l2 > hbm == 4.8
        assert shared == pytest.approx(128 * 132 * 1.83e9 / 1e12, rel=1e-3)
        assert l2 == pytest.approx(5120 * 1.83e9 / 1e12, rel=1e-3)

    def test_sizes_add_up_over_132_multiprocessors(self):
        for level in memory.MEMORIES[:2]:
            count, each, total = (int(word) for word in level.size.split() if word.isdigit())
            assert count == 132
            assert total == round(count * each / 1024)

    def test_rates_stand_between_the_two_memories_they_join(self, drawn):
        found = {text.get_text(): extent for text, extent in drawn(figures.memory_hierarchy()).items()}
        order = ["registers", "31 TB/s", "shared memory", "9.4 TB/s (estimate)", "L2 cache", "4.8 TB/s", "HBM"]
        assert sorted(order, key=lambda name: -found[name].y0) == order

    def test_every_tensor_stands_in_its_memory(self, drawn):
        found = {text.get_text(): extent for text, extent in drawn(figures.memory_hierarchy()).items()}
        for level in memory.MEMORIES:
            for tensor in level.tensors:
                assert abs(found[tensor].y0 - found[level.name].y0) < 0.4 * 150


class TestPrecisionMap:
    def operands(self, figure):
        """{matmul's number: its two operands' texts}, by where they stand."""
        (ax,) = figure.axes
        matmuls = precision.matmuls_of(SageBwdSettings())
        found = {matmul.number: [] for matmul in matmuls.values()}
        for text in ax.texts:
            x, y = text.get_position()
            for matmul in matmuls.values():
                inside = abs(x - matmul.box.x) < matmul.box.width / 2 and abs(y - matmul.box.y) < matmul.box.height / 2
                if inside and "scale" in text.get_text():
                    found[matmul.number].append(text.get_text().replace("$", ""))
        return found

    def test_as_printed(self):
        tile, sixteen = "INT8\nscale per tile", "16 bit\nno scale"
        assert self.operands(figures.precision_map(SageBwdSettings.printed())) == {
            1: [f"Q  {tile}", f"K  {tile}"],
            2: ["\\tilde P  INT8\nscale per query", f"V  {tile}"],
            3: [f"P^T  {tile}", f"dO  {tile}"],
            4: [f"dO  {sixteen}", f"V  {sixteen}"],
            5: [f"Q  {tile}", f"K  {tile}"],
            6: [f"dS  {tile}", f"K  {tile}"],
            7: [f"dS^T  {tile}", f"Q  {tile}"],
        }

    def test_one_scale_per_row_is_per_query_for_dq_and_per_key_for_dk_and_dv(self):
        found = self.operands(figures.precision_map(SageBwdSettings(granularity="row")))
        assert [found[number][0].split()[-1] for number in (3, 6, 7)] == ["key", "query", "key"]

    def test_formats_follow_the_settings(self):
        figure = figures.precision_map(SageBwdSettings(exact_matmuls=("S", "O")))
        found = self.operands(figure)
        assert [number for number, pair in found.items() if all("16 bit" in text for text in pair)] == [1, 2]
        assert figure.get_suptitle() == "The seven matmuls of attention, 5 of them in INT8"
        blue = to_rgba(figures.BLUE)
        patches = [patch for patch in figure.axes[0].patches if patch.get_facecolor() == blue]
        assert len(patches) == 2 * 5 + 1  # two operands of each, and the key

    @pytest.mark.parametrize("name", MATMULS)
    def test_one_matmul_in_front_of_the_others(self, name):
        settings = SageBwdSettings()
        (ax,) = figures.precision_map(settings, highlight=name).axes
        box = precision.matmuls_of(settings)[name].box
        (framed,) = (patch for patch in ax.patches if patch.get_linewidth() == 3)
        assert (framed.get_x() + framed.get_width() / 2, framed.get_y() + framed.get_height() / 2) == pytest.approx(
            box[:2]
        )
        faded = [text for text in ax.texts if text.get_alpha() == 0.25]
        assert len(faded) == 6 * 3

    def test_formulas_are_those_of_attention(self):
        q, k, v, do = torch.randn(4, 6, 4, dtype=torch.float64)
        forward = attention_forward(q, k, v, scale=0.5)
        s = 0.5 * q @ k.mT
        backward = attention_backward(do, q, k, v, forward.output, forward.log_sum_exp, scale=0.5)
        p_tilde = torch.exp(s - s.amax(-1, keepdim=True))
        known = {"Q": q, "K": k, "V": v, "dO": do, "P": backward.probabilities, "dS": backward.grad_scores}
        known |= {"c": torch.tensor(0.5), r"\tilde P": p_tilde, "/ l": 1 / p_tilde.sum(-1, keepdim=True)}
        dp = do @ v.mT
        found = [evaluate(matmul.formula, known) for matmul in precision.matmuls_of(SageBwdSettings()).values()]
        gradients = backward.grad_value, dp, backward.grad_query, backward.grad_key
        for ours, theirs in zip(found, (s, forward.output, s, *gradients), strict=True):
            assert_close(ours, theirs)

    def test_refuses_another_name(self):
        with pytest.raises(ValueError, match="highlight: expected one of"):
            figures.precision_map(SageBwdSettings(), highlight="P")


def evaluate(formula, known):
    """The matrix that a formula such as "$dK = c\\,dS^T Q$" names."""
    product = None
    for name, transposed in re.findall(r"(\\tilde P|/ l|d?[A-Z]|c)(\^T)?", formula.partition("=")[2]):
        factor = known[name].mT if transposed else known[name]
        if product is None:
            product = factor
        else:
            product = product * factor if product.ndim == 0 or name == "/ l" else product @ factor
    return product


def rectangles(ax, color):
    """(x, y) of the corners of what is filled with a colour."""
    found = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return {patch.get_xy() for patch in found if patch.get_fill() and patch.get_facecolor() == to_rgba(color)}


class TestForwardFilm:
    @pytest.mark.parametrize(("scores", "values"), [(SCORES, VALUES), (CAUSAL, VALUES[:8])])
    def test_the_last_step_of_each_row_has_the_softmax_and_its_sums(self, scores, values):
        steps = figures.forward_steps(scores, values, 4)
        expected = torch.softmax(scores, -1) @ values
        for i in range(2):
            own, rows = [step for step in steps if step.i == i], slice(4 * i, 4 * i + 4)
            assert [step.is_last for step in own] == [False] * (len(own) - 1) + [True]
            assert_close(own[-1].o, expected[rows])
            assert_close(own[-1].m + own[-1].l.log(), scores[rows].logsumexp(-1))

    def test_every_step_has_the_sums_so_far(self):
        for step in figures.forward_steps(SCORES, VALUES, 4):
            rows, keys = slice(4 * step.i, 4 * step.i + 4), slice(0, 4 * step.j + 4)
            seen = SCORES[rows, keys]
            assert_close(step.m, seen.amax(-1))
            assert_close(step.l, torch.exp(seen - step.m[:, None]).sum(-1))
            before = SCORES[rows, : 4 * step.j].amax(-1) if step.j else torch.full((4,), -math.inf).double()
            assert_close(step.rescale, torch.exp(before - step.m))

    def test_a_masked_tile_is_left_out_and_a_row_without_keys_yet_is_empty(self):
        assert [(step.i, step.j) for step in figures.forward_steps(CAUSAL, VALUES[:8], 4)] == [(0, 0), (1, 0), (1, 1)]
        scores = torch.tensor([[-math.inf, -math.inf, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).double()
        first, last = figures.forward_steps(scores, VALUES[:4], 2)
        assert first.l[0] == 0
        assert_close(last.o, torch.softmax(scores, -1) @ VALUES[:4])

    def test_the_strip_shows_tile_past_and_numbers_of_every_step(self):
        figure, steps = figures.forward_film(SCORES, VALUES, 4), figures.forward_steps(SCORES, VALUES, 4)
        for number, (ax, step) in enumerate(zip(figure.axes, steps, strict=True)):
            check_forward(ax, step, [(other.i, other.j) for other in steps[:number]])

    def test_one_step_is_the_same_picture(self):
        (ax,) = figures.forward_step_figure(SCORES, VALUES, 4, 4).axes
        strip = figures.forward_film(SCORES, VALUES, 4, shown=[1, 4]).axes[1]
        steps = figures.forward_steps(SCORES, VALUES, 4)
        check_forward(ax, steps[4], [(0, 0), (0, 1), (0, 2), (1, 0)])
        assert texts(ax) == texts(strip)


def check_forward(ax, step, past):
    tile, *outputs = ax.images
    rows, columns = slice(4 * step.i, 4 * step.i + 4), slice(4 * step.j, 4 * step.j + 4)
    assert tile.get_extent() == [columns.start, columns.stop, rows.stop, rows.start]
    assert_close(torch.tensor(tile.get_array().data), SCORES[rows, columns])
    assert_close(torch.tensor(outputs[-1].get_array().data), step.o)
    assert outputs[-1].get_extent()[2:] == [rows.stop, rows.start]
    assert len(outputs) == step.i + 1
    assert rectangles(ax, tile_loop.FORGOTTEN) == {(4 * j, 4 * i) for i, j in past}
    numbers = [text for text in ax.texts if text.get_position()[1] == rows.start + 0.5]
    assert [text.get_text() for text in numbers] == [f"{x[0]:.1f}" for x in (step.rescale, step.m, step.l)]
    assert f"i = {step.i}, j = {step.j}" in ax.get_title()


class TestBackwardFilm:
    def test_the_order_is_algorithm_2s(self):
        assert figures.backward_order(ALL_TILES.tril()) == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]

    @pytest.mark.parametrize("visible", [ALL_TILES, ALL_TILES.tril()], ids=["full", "causal"])
    def test_every_picture_counts_the_parts_in_each_sum(self, visible):
        figure, order = figures.backward_film(visible), figures.backward_order(visible)
        for number, ax in enumerate(figure.axes[: len(order)]):
            check_backward(ax, visible, order[: number + 1])

    def test_one_step_is_the_same_picture(self):
        (ax,) = figures.backward_step_figure(ALL_TILES.tril(), 3).axes
        check_backward(ax, ALL_TILES.tril(), [(0, 0), (1, 0), (2, 0), (1, 1)])


def check_backward(ax, visible, order):
    i, j = order[-1]
    assert rectangles(ax, figures.ORANGE) == {(j, i)}
    assert rectangles(ax, tile_loop.FORGOTTEN) == {(key, query) for query, key in order[:-1]}
    sums = {text.get_text() for text in ax.texts}
    for k in range(3):
        assert f"$dQ_{k}$ {sum(tile[0] == k for tile in order)}/{visible[k].sum()}" in sums
        for name in ("dK", "dV"):
            assert f"${name}_{k}$ {sum(tile[1] == k for tile in order)}/{visible[:, k].sum()}" in sums
    now = [patch.get_xy() for patch in ax.patches if patch.get_edgecolor() == to_rgba(figures.ORANGE)]
    assert now == [(3.5, i), (j, 3.4), (j, 4.4)]


class TestOwners:
    def test_a_row_of_tiles_makes_dq_a_column_dk_and_dv(self):
        rows, columns, one_pass = figures.owners(4).axes
        assert rectangles(rows, figures.BLUE) == {(j, 1) for j in range(4)} | {(4.7, 1)}
        own_column = {(2, i) for i in range(4)} | {(2, 4.7), (2, 5.7)}
        assert rectangles(columns, figures.GREEN) == rectangles(one_pass, figures.GREEN) == own_column
        assert rectangles(one_pass, figures.ORANGE) == {(4.7, i) for i in range(4)}
        assert not rectangles(rows, figures.ORANGE) | rectangles(columns, figures.ORANGE)

    def test_the_split_costs_seven_matmuls_and_one_pass_five(self):
        first, second, one_pass = (set(owner.matmuls) for owner in tile_loop.OWNERS)
        assert len(first) + len(second) == 7
        assert first | second == one_pass
        assert first & second == {"S", "dP"}  # what is computed twice
        for ax, owner in zip(figures.owners().axes, tile_loop.OWNERS, strict=True):
            assert any(text.get_text().startswith(f"{len(owner.matmuls)} matmuls") for text in ax.texts)


class TestSparseOwners:
    def test_a_program_owns_the_selected_tiles_of_its_row_or_column(self):
        row, column = figures.sparse_owners(MASK.bool(), rows=(2,), columns=(6,)).axes
        assert rectangles(row, figures.BLUE) == {(3, 2), (4, 2), (6, 2), (8.5, 2)}
        assert rectangles(column, figures.GREEN) == {(6, 0), (6, 2), (6, 3), (6, 4.4), (6, 5.4)}
        assert not rectangles(row, figures.GREEN) | rectangles(column, figures.BLUE)
        assert [ax.get_title() for ax in (row, column)] == [
            "$dQ_2$: key blocks 3, 4, 6", "$dK_6$ and $dV_6$: query blocks 0, 2, 3",
        ]  # fmt: skip

    def test_a_column_that_nobody_selected_owns_nothing(self):
        (ax,) = figures.sparse_owner_figure(torch.tensor([[True, False], [True, False]]), column=1).axes
        assert rectangles(ax, figures.GREEN) == {(1, 2.4), (1, 3.4)}
        assert ax.get_title().endswith("query blocks nothing")


class TestSla2Flow:
    def test_draws_the_mask_and_its_table(self):
        (ax,) = figures.sla2_flow(MASK.bool()).axes
        cells = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        ordered = sorted(cells, key=lambda cell: (-round(cell.get_y(), 6), cell.get_x()))
        found = torch.tensor([cell.get_facecolor() == to_rgba(figures.BLUE) for cell in ordered]).reshape(4, 8)
        assert torch.equal(found, MASK.bool())
        (table,) = (text.get_text() for text in ax.texts if "look-up" in text.get_text())
        assert table.splitlines()[1:] == ["queries 0: 0, 1, 6", "queries 1: 1, 2, 7", "queries 2: 3, 4, 6", "..."]

    def test_long_lists_are_cut(self):
        (ax,) = figures.sla2_flow(torch.ones(2, 40, dtype=torch.bool)).axes
        (table,) = (text.get_text() for text in ax.texts if "look-up" in text.get_text())
        assert table.splitlines()[1:] == [f"queries {i}: 0, 1, 2, 3, 4, 5, ..." for i in range(2)]


class TestTimeLine:
    @pytest.fixture(params=[(3, 3, 2), (5, 2, 1), (6, 3, 3)], ids=str)
    def sizes(self, request):
        return request.param

    def test_nobody_reads_before_ready_or_loads_before_all_have_released(self, sizes):
        tiles, warpgroups, places = sizes
        jobs = time_line.schedule(*sizes, time_line.FORWARD_STEPS)
        start = {(job.worker, job.name, job.tile): job.start for job in jobs}
        end = {(job.worker, job.name, job.tile): job.end for job in jobs}
        assert len(jobs) == len(start) == tiles * (1 + 3 * warpgroups)
        for worker, tile in itertools.product(range(1, warpgroups + 1), range(tiles)):
            assert start[worker, "S", tile] >= end[0, "load", tile]
            if tile + places < tiles:
                assert start[0, "load", tile + places] >= end[worker, "O", tile]

    def test_tensor_cores_have_one_matmul_at_a_time_and_a_worker_one_job(self, sizes):
        jobs = time_line.schedule(*sizes, time_line.FORWARD_STEPS)
        matmuls = [job for job in jobs if job.name in ("S", "O")]
        for group in (matmuls, *([job for job in jobs if job.worker == w] for w in range(sizes[1] + 1))):
            ordered = sorted(group, key=lambda job: job.start)
            assert all(one.end <= other.start for one, other in itertools.pairwise(ordered))

    def test_softmax_and_another_groups_matmul_overlap(self):
        jobs = time_line.schedule(3, 3, 2, time_line.FORWARD_STEPS)
        softmax = [job for job in jobs if job.name == "softmax"]
        matmuls = [job for job in jobs if job.name in ("S", "O")]
        assert any(a.worker != b.worker and a.start <= b.start < a.end for a in softmax for b in matmuls)

    def test_bars_and_barriers_are_those_of_the_schedule(self):
        (ax,) = figures.hopper_time_line().axes
        jobs = time_line.schedule(3, 3, 2, time_line.FORWARD_STEPS)
        bars = {(bar.get_x(), round(bar.get_y() + 0.3), bar.get_width()) for bar in ax.patches if not bar.get_hatch()}
        matmuls = {(job.start, 4, job.end - job.start) for job in jobs if job.name in ("S", "O")}
        assert bars == {(job.start, job.worker, job.end - job.start) for job in jobs} | matmuls
        ready = {job.end: f"ready {job.tile}" for job in jobs if job.name == "load"}
        released = max(job.end for job in jobs if job.name == "O" and job.tile == 0)
        barriers = {text.get_position()[0]: text.get_text() for text in ax.texts if text.get_color() == figures.RED}
        assert barriers == ready | {released: "empty 0"}

    def test_says_that_it_is_schematic(self):
        for figure in (figures.hopper_time_line(), figures.two_warps_and_a_barrier()):
            assert figure.get_suptitle().startswith("Schematic")

    def test_two_warps_take_turns_at_one_place(self):
        (ax,) = figures.two_warps_and_a_barrier(3).axes
        bars = sorted(
            (bar.get_x(), round(bar.get_y() + 0.3))
            for bar in ax.patches
            if isinstance(bar, Rectangle) and not bar.get_hatch()
        )
        assert [worker for _, worker in bars] == [0, 1, 0, 1, 0, 1]
        assert [text.get_text() for text in ax.texts if text.get_color() == figures.RED] == [
            "ready 0", "ready 1", "ready 2", "empty 0", "empty 1",
        ]  # fmt: skip


def test_a_boxs_sides_are_half_its_size_from_its_middle():
    box = Box(2, 3, 4, 1)
    assert (box.left, box.right, box.top, box.bottom) == ((0, 3), (4, 3), (2, 3.5), (2, 2.5))
