"""The widgets of the notebooks: a control moves what is drawn, and so does a function that computes something else."""

import numpy
import pytest
import torch
from sage_course.figures import widgets
from sage_course.lessons import (
    attention,
    int8_quantization,
    matched_backward,
    pretraining_runs,
    repairing_ds,
    sagebwd_forward,
    sla2_kernels,
    smoothing,
    sparse_linear,
    start_here,
)
from sage_course.results.hopper_model import programs
from sage_lab.records import read_record

from sage_ref.quantization import fake_quantize

MATMULS = ("S", "O", "S_backward", "dV", "dP", "dQ", "dK")
VALUES = torch.tensor([0.5, -1.0, 0.3, 0.0, 2.0, -0.4, 1.0, 0.2])


def drawn(live):
    """All numbers in a figure: heights of bars, points of lines, pixels of images."""
    found = []
    for axes in live.figure.axes:
        found += [[bar.get_height(), bar.get_width()] for bar in axes.patches if hasattr(bar, "get_height")]
        found += [numpy.ravel(line.get_ydata()) for line in axes.lines]
        found += [numpy.ravel(image.get_array()) for image in axes.images]
        found += [[*text.get_position(), float(text.get_text())] for text in axes.texts if text.get_text().isdigit()]
    return numpy.concatenate([numpy.asarray(x, dtype=float) for x in found])


def title(live):
    return live.figure.get_suptitle()


def errors(exact_matmuls):
    return {"dQ": 0.01 * (7 - len(exact_matmuls)), "dK": 0.02 * ("dP" not in exact_matmuls)}


def exact_scores(q, k):
    return q @ k.mT / 8


def inputs(size):
    q, k, v, do = (torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    return size * q, size * k, v, do


def forward(q, k, v):
    """No O, and L of the scores in INT8, as SLA2's forward pass has it."""
    k_mean = k.mean(-2, keepdim=True)
    q_hat = fake_quantize(q, (matched_backward.BLOCK_Q, None))
    k_hat = fake_quantize(k - k_mean, (matched_backward.BLOCK_KV, None))
    return None, torch.logsumexp((q_hat @ k_hat.mT + q @ k_mean.mT) / 8, -1)


def levels():
    instructions = read_record("instructions_sm90")
    return {level: next(iter(programs(instructions, level, 128).values())) for level in (0, 4)}


def blocks(form=sparse_linear.sparse_linear_head):
    return widgets.paint_blocks(form, sparse_linear.BLOCK_Q, sparse_linear.BLOCK_KV)


def seeds(interval=pretraining_runs.interval):
    return widgets.seeds_one_by_one(VALUES, 2.1, pretraining_runs.resampled_means, interval)


def rows(form=matched_backward.matched):
    return widgets.row_sums_of({"printed": matched_backward.printed, "matched": form}, forward, inputs, 0.125)


ALL = ((True,) * 4,) * 4
# By notebook: the widget with the right function, a control and a value for it, the widget with another function.
CASES = {
    "00": (
        lambda: widgets.sentence(start_here.int8_scores), "text", "a cab", lambda: widgets.sentence(exact_scores),
    ),
    "01": (
        lambda: widgets.one_score(attention.through_the_softmax), "score", 5,
        lambda: widgets.one_score(lambda p, dp: p * dp),
    ),
    "02": (
        lambda: widgets.quantizer_bench(int8_quantization.psi_of_blocks), "outlier", 20,
        lambda: widgets.quantizer_bench(lambda x, block: int8_quantization.psi_of_blocks(x / 2, block)),
    ),
    "03": (
        lambda: widgets.shared_offset(smoothing.smooth_key), "removed", 8,
        lambda: widgets.shared_offset(lambda k: (k, 0 * k[:1])),
    ),
    "04": (
        lambda: widgets.tile_loop(sagebwd_forward.forward_tile), "turn", 8,
        lambda: widgets.tile_loop(lambda s, s_v, v_hat, m, l, o: (m * 0, l + 1, o)),
    ),
    "05b": (
        lambda: widgets.switchboard(errors, MATMULS), "dP", True,
        lambda: widgets.switchboard(lambda exact_matmuls: {"dQ": 1.0}, MATMULS),
    ),
    "06b": (seeds, "seeds", 8, lambda: seeds(lambda means: torch.stack([means.min() - 1, means.max() + 1]))),
    "08": (
        lambda: widgets.instruction_prices(levels()), "arithmetic", 0,
        lambda: widgets.instruction_prices({4: levels()[0]}),
    ),
    "10": (blocks, "mask", ALL, lambda: blocks(lambda q, k, v, mask, alpha, c: 0 * q)),
    "12": (
        lambda: widgets.lists_and_bytes(sla2_kernels.bytes_read), "mask", ((True,) * 6,) * 6,
        lambda: widgets.lists_and_bytes(lambda selected, *_: (1, 2, selected)),
    ),
    "12c": (rows, "size", 8, lambda: rows(matched_backward.printed)),
    "14": (
        lambda: widgets.dither_bench(repairing_ds.thresholds), "hundredths", 75,
        lambda: widgets.dither_bench(lambda rows, columns: torch.zeros(rows, columns)),
    ),
}  # fmt: skip


def same(a, b):
    return a.shape == b.shape and numpy.allclose(a, b, equal_nan=True)


@pytest.mark.parametrize("number", CASES)
def test_a_control_moves_what_is_drawn(number):
    make, control, value, _ = CASES[number]
    shown = make()
    before = drawn(shown), title(shown)
    shown.controls[control].value = value
    assert shown.complaint.value == ""
    assert not same(drawn(shown), before[0]) or title(shown) != before[1]


@pytest.mark.parametrize("number", CASES)
def test_a_different_function_of_the_reader_draws_something_else(number):
    make, _, _, different = CASES[number]
    assert not same(drawn(make()), drawn(different())) or title(make()) != title(different())


def test_what_the_widgets_teach_holds_in_their_data():
    """An offset removed by hand, all blocks painted, m edited, matching row sums: the numbers that a reader meets."""
    offset = widgets.shared_offset(smoothing.smooth_key)
    offset.controls["removed"].value = 8  # what all keys share
    as_it_is, by_hand, smoothed = [bar.get_height() for bar in offset.figure.axes[1].patches]
    assert max(by_hand, smoothed) < as_it_is / 2
    painted = blocks()
    painted.controls["mask"].value = ALL
    assert "75% of the blocks" in title(painted)  # the last of each row is left to the linear branch
    assert all(0.5 < bar.get_height() < 1 for bar in painted.figure.axes[1].patches)
    loop = widgets.tile_loop(sagebwd_forward.forward_tile)
    loop.controls["m_at_start"].value = "4"  # too large an m changes no result by more than rounding
    assert float(title(loop).rpartition(" ")[2]) < 0.05
    sums = rows()
    sums.controls["size"].value = 6
    printed, matched = [numpy.abs(axes.lines[0].get_ydata() - 1).max() for axes in sums.figure.axes]
    assert matched < 0.01 < 0.1 < printed
    dither = widgets.dither_bench(repairing_ds.thresholds)
    dither.controls["hundredths"].value = 30
    nearest, ordered = (float(part.split()[-1]) for part in title(dither).partition(": ")[2].split(", "))
    assert nearest == -0.3
    assert abs(ordered) < 0.02
