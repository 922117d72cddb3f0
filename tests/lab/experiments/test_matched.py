"""The experiment with the matched backward pass: what its rows say, and that each arm computes what its name says."""

from dataclasses import replace

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import matched
from sage_lab.experiments.matched import ARMS, CURES, Arm, CuredFunction, mismatch
from sage_lab.records import read_record
from torch.testing import assert_close

from sage_ref.sla2 import BlockSettings, sparse_linear_attention


def drawn(size):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 1, 2, 256, 32, generator=generator).unbind()
    return [size * q, size * k, v], do, torch.ones(1, 2, 2, 4, dtype=torch.bool), torch.ones(1, 2, 2)


def test_rows_sum_to_one_unless_the_printed_backward_pass_meets_large_scores():
    sums = {name: mismatch(*drawn(5.0), arm, BlockSettings())["largest_row_sum"] for name, arm in ARMS.items()}
    assert sums["exact"] == pytest.approx(1, abs=1e-4)
    assert sums["matched"] == pytest.approx(1, abs=1e-3)
    assert sums["printed"] > 1.5
    small, large = (mismatch(*drawn(size), Arm("printed"), BlockSettings()) for size in (1.0, 5.0))
    assert small["max_score"] * 25 == pytest.approx(large["max_score"], rel=0.05)
    assert small["error_dQ"] < 0.02 < 0.2 < large["error_dQ"]


@pytest.mark.parametrize("cure", CURES)
def test_a_cure_changes_little_at_small_scores_and_bounds_dv_at_large_ones(cure):
    for size, is_small in ((1.0, True), (8.0, False)):
        qkv, do, *rest = drawn(size)
        leaves = [x.clone().requires_grad_() for x in qkv]
        outputs = (
            CuredFunction.apply(*leaves, *rest, BlockSettings(quantize=True, backward="printed"), cure),
            sparse_linear_attention(*leaves, *rest, quantize=True, backward="printed", backend="reference"),
        )
        cured, printed = (torch.autograd.grad(output, leaves, torch.ones_like(do)) for output in outputs)
        if is_small:
            assert_close(cured, printed, atol=0.02, rtol=0.02)
        else:  # dV is the sum of P over the queries
            assert 1.2 * cured[2].sum() < printed[2].sum()
            assert cured[2].max() < 256
            if cure == "rows sum to 1":
                assert cured[2].sum(2).tolist() == [[pytest.approx([256] * 32)] * 2]


def test_the_command_records_each_arm_until_it_diverges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"frames": 1, "size": 16, "cube": (1, 4, 4), "width": 32, "block_q": 16, "block_kv": 16, "layers": 1}
    monkeypatch.setattr(matched, "MODEL", replace(matched.MODEL, backend="reference", **small))
    monkeypatch.setattr(matched, "gradient_rows", lambda device: [{"part": "gradients"}])
    for name, value in {"LENGTHS": (), "LEARNING_RATES": (0.01,), "SEEDS": 1, "STEPS": 20}.items():
        monkeypatch.setattr(matched, name, value)
    main(["matched", "--json", "found.json"])
    _, *rows = read_record(tmp_path / "found.json").rows
    assert [(row["arm"], row["step"]) for row in rows] == [(arm, step) for arm in ARMS for step in (10, 20)]
    assert not any(row["diverged"] for row in rows)
    assert len({row["loss"] for row in rows if row["step"] == 20}) >= 4  # P at most 1 may cut nothing
    monkeypatch.setattr(matched, "LEARNING_RATES", (1e30,))
    main(["matched", "--json", "diverged.json"])
    _, *rows = read_record(tmp_path / "diverged.json").rows
    assert [row["arm"] for row in rows if row["diverged"]] == list(ARMS)
