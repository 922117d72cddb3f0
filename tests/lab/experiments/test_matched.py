"""The experiment with the matched backward pass: what its rows say, and that each arm computes what its name says."""

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.matched import ARMS, Arm, mismatch
from sage_lab.records import read_record

from sage_ref.sla2 import BlockSettings


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


def test_the_command_records_gradients_and_trains_each_arm_until_it_diverges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--plan", "cpu", "--seeds", "1", "--steps", "20", "--device", "cpu", "--json", "found.json"]
    main(["matched", "--learning-rates", "0.01", "1e30", *options])
    record, recorded = read_record(tmp_path / "found.json"), read_record("matched_h100")
    names, expected = ([(x["inputs"], x["arm"]) for x in y.select(part="gradients")] for y in (record, recorded))
    assert names == expected
    small, large = ([x for x in record.rows if x.get("learning_rate") == rate] for rate in (0.01, 1e30))
    assert [(row["arm"], row["step"]) for row in small] == [(arm, step) for arm in ARMS for step in (10, 20)]
    assert not any(row["diverged"] for row in small)
    assert len({row["loss"] for row in small if row["step"] == 20}) >= 3
    assert [row["arm"] for row in large if row["diverged"]] == list(ARMS)
