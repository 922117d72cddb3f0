"""The figures of notebooks 00 to 03, 05, 10 and 11: they draw what they say, also for other values of a slider."""

import math
import re
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import pytest
import torch
from sage_course import figures
from sage_course.figures import panels
from sage_lab.records import read_record
from torch.testing import assert_close

from sage_ref import sla2
from sage_ref.quantization import fake_quantize
from sage_ref.sla2 import BlockSettings, block_mass, soft_top_k
from sage_ref.tracing import relative_l2


@pytest.fixture(autouse=True)
def ax():
    yield panels(1)[1][0]
    plt.close("all")


@pytest.mark.parametrize("path", sorted(Path(figures.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_figure_asks_for_letters_below_9_points(path):
    sizes = re.findall(r"\b(?:fontsize|labelsize)=(\d+(?:\.\d+)?)", path.read_text())
    assert all(float(size) >= 9 for size in sizes), sizes


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_error_map_shows_every_tensor_with_its_error(ax):
    names = ("P", "O", "delta", "dQ", "dV", "dP", "dS", "dK")
    errors = {name: 0.013 * number for number, name in enumerate(names)}
    figures.error_map(ax, errors, title="letters")
    shown = [text.get_text() for text in ax.texts if text.get_text()]
    assert shown == [line for name in names for line in (name, f"{errors[name]:.1%}")]


def test_the_heatmap_writes_every_error(ax):
    figures.error_heatmap(ax, {"S": {"O": 0.1, "dQ": 0.25}, "dQ": {"O": 0.0, "dQ": 0.5}})
    assert [text.get_text() for text in ax.texts] == ["0.100", "0.250", "", "0.500"]


def test_letters_label_rows_and_columns(ax):
    text, word = "less precise attention", "attention"
    figures.show_matrix(ax, torch.rand(len(word), len(text)), title="P", x="key", y="query")
    figures.show_letters(ax, word, text)
    assert "".join(label.get_text() for label in ax.get_yticklabels()) == word
    assert "".join(label.get_text() for label in ax.get_xticklabels()) == text


def test_the_choices_of_table_1_are_averaged_over_the_record():
    record = read_record("table1_sweep")
    figure = figures.table1_choices_figure(record)
    line = next(line for line in figure.axes[3].lines if line.get_label() == "row")
    logs = [math.log(row["rel_l2"] / row["paper_rel_l2"]) for row in record.select(granularity="row", sigma=1)]
    assert line.get_ydata()[0] == pytest.approx(math.exp(mean(logs)))


def test_larger_scores_have_larger_errors():
    figure = figures.sigma_figure((1, 5))
    shown = [float(ax.get_title().rpartition("dQ ")[2]) for ax in figure.axes]
    assert shown[0] < 0.1 < shown[1]


@pytest.mark.parametrize(("outlier", "ends"), [(0.0, False), (30.0, False), (1000.0, True)])
def test_block_sizes_plots_the_error_and_where_the_model_ends(ax, outlier, ends):
    matrix, others = gaussian(256, 64), torch.ones(256, 64, dtype=torch.bool)
    others[100, 7] = False
    x = torch.where(others, matrix, outlier)
    figures.draw_block_sizes(ax, x, where=others, title="")
    measured, model = (line.get_ydata() for line in ax.lines)
    assert list(ax.lines[0].get_xdata()) == [2**i for i in range(9)]
    assert measured[6] == relative_l2(fake_quantize(x, (64, None))[others], x[others])
    assert (model[-1] > 2 * measured[-1]) == ends
    assert ends or measured == pytest.approx(model, rel=0.05)


def test_probabilities_accounts_for_every_entry_and_all_probability(ax):
    scores = 3 * gaussian(64, 1024)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    figures.draw_probabilities(ax, p, title="")
    assert sum(patch.get_height() for patch in ax.containers[0]) == pytest.approx(1, rel=1e-4)
    assert ax.patches[-1].get_xy()[:, 1].max() == pytest.approx(_largest_share(p), rel=1e-4)
    assert ax.lines[0].get_xdata()[0] == pytest.approx(1 / 254)


def _largest_share(p):
    """The most probability in one bin of the figure, six bins to a factor of ten and all below 1e-6 in the first."""
    weights = p.double() / p.double().sum(-1, keepdim=True) / len(p)
    bins = (6 * (p.double().clamp(min=1e-6).log10() + 6)).floor().clamp(0, 35).long()
    return torch.zeros(36, dtype=torch.float64).index_add_(0, bins.flatten(), weights.flatten()).max().item()


def test_sparsity():
    q, k, v = gaussian(3, 1, 2, 128, 16).double()
    settings = BlockSettings(block_q=4, block_kv=2)  # 32 x 64 blocks; the first 24 x 48 are drawn
    o, mass = torch.softmax(q @ k.mT / 4, -1) @ v, block_mass(q, k, settings)
    figure = figures.sparsity_figure(q, k, v, (0.5, 0.9), settings)
    maps = [ax for ax in figure.axes if ax.images]
    for ax, sparsity in zip(maps, (0.5, 0.9), strict=True):
        mask = sla2.top_blocks(sla2.heuristic_scores(q, k, settings), sla2.selected_count(sparsity, 64))
        held, (o_s, _) = (mass * mask).sum(-1), sla2.sparse_branch(q, k, v, mask, settings)
        mixed = sla2.mix(o_s, sla2.linear_branch(q, k, v, ~mask, settings), sla2.per_query(held, 128, settings))
        for shown in (f"{held.mean():.0%}", f"sparse {relative_l2(o_s, o):.2f}", f"mixed {relative_l2(mixed, o):.2f}"):
            assert shown in ax.get_title()
        (image,) = ax.images
        assert_close(torch.tensor(image.get_array().data), mass[0, 0, :24, :48])
        assert torch.equal(outlined(ax, 24, 48), mask[0, 0, :24, :48])


def outlined(ax, rows, columns):
    """bool [rows, columns]: the blocks inside the outlines, found by crossing vertical edges from left to right."""
    (lines,) = ax.collections
    edges = torch.zeros(rows, columns + 1, dtype=torch.int64)
    for (x, y), (x_end, y_end) in (sorted(map(tuple, segment)) for segment in lines.get_segments()):
        assert abs(x_end - x) + abs(y_end - y) == 1
        if x == x_end:
            edges[round(y + 0.5), round(x + 0.5)] += 1
    return edges.cumsum(1)[:, :-1] % 2 == 1


def test_outlines_enclose_the_selected_blocks_and_no_edge_lies_between_neighbours(ax):
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]).bool()
    figures.draw_block_mass(ax, torch.rand(4, 3), block_mask=mask, title="Title")
    assert torch.equal(outlined(ax, 4, 3), mask)
    assert len(ax.collections[0].get_segments()) == 8 + 4


def test_block_mass_without_a_mask_has_no_outlines(ax):
    figures.draw_block_mass(ax, torch.rand(4, 8), title="Title")
    assert not ax.collections


def test_block_choices_show_the_mass_first_and_then_every_choice_with_what_it_holds():
    mass = torch.rand(4, 8).softmax(-1)
    choices = {"first": torch.arange(8).expand(4, 8) < 2, "oracle": sla2.top_blocks(mass, 3)}
    figure = figures.block_choices_figure(mass, choices, title="Title")
    first, *others = (ax for ax in figure.axes if ax.images)
    assert not first.collections
    for ax, (name, mask) in zip(others, choices.items(), strict=True):
        assert ax.get_title() == f"{name}: {mass[mask].sum() / 4:.2f} of the mass"
        assert torch.equal(outlined(ax, 4, 8), mask)


def test_a_hidden_entry_has_no_colour_and_does_not_count(ax):
    matrix, hidden = torch.tensor([[1.0, -50.0], [0.0, 2.0]]), torch.tensor([[False, True], [False, False]])
    figures.show_matrix(ax, matrix, title="", x="", y="", hidden=hidden)
    (image,) = ax.images
    assert torch.equal(torch.tensor(image.get_array().mask), hidden)
    assert image.get_clim() == (0, 2)
    assert ax.patch.get_hatch()


def test_cumulative_shares_are_those_of_the_entries_and_their_weights(ax):
    x = gaussian(40, 50)
    figures.draw_cumulative(ax, {"alike": x}, title="")
    figures.draw_cumulative(ax, {"weighted": x}, weights=x.square(), title="")
    assert ax.get_ylabel() == "weighted share at most that large"
    for line, weights in zip(ax.lines, (torch.ones_like(x), x.square()), strict=True):
        for size, share in list(zip(*line.get_data(), strict=True))[::25]:
            assert weights[x.abs() <= size + 1e-9].sum() / weights.sum() == pytest.approx(share, abs=0.01)
    assert ax.get_xscale() == "log"


def test_cumulative_shows_zeros_as_the_share_that_a_line_starts_above(ax):
    figures.draw_cumulative(ax, {"half": torch.tensor([0.0, 0.0, 1.0, 2.0])}, title="")
    assert min(share for size, share in zip(*ax.lines[0].get_data(), strict=True) if size) == pytest.approx(
        0.5, abs=5e-3
    )


def test_soft_masks_are_drawn_by_rank_beside_the_hard_one():
    row, count = gaussian(128).double(), 4
    figure = figures.soft_mask_figure(row, count, (1.0, 0.01))
    for ax, tau in zip(figure.axes, (1.0, 0.01), strict=True):
        lines = {line.get_label(): line for line in ax.get_lines()}
        for name, x in (("P_c", row.softmax(-1)), ("log P_c", row.log_softmax(-1))):
            line = lines[f"SoftTop-k of {name}"]
            assert_close(torch.as_tensor(line.get_ydata()), soft_top_k(x, count, tau).sort(descending=True).values)
            assert list(line.get_xdata()) == list(range(1, 129))
        assert list(lines["hard Top-k"].get_ydata()) == [1.0] * count + [0.0] * (128 - count)
