"""The command accuracy on the CPU: a few shapes, by Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")
from sage_lab.__main__ import main
from sage_lab.bench import accuracy
from sage_lab.command_line import Failed
from sage_lab.records import RECORDED, read_record


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured(*arguments) -> the record of the command, of two shapes."""
    for name, defaults in (("sagebwd_rows", ()), ("table1_rows", (32, 32, 1)), ("sla2_rows", ())):
        monkeypatch.setattr(getattr(accuracy, name), "__defaults__", (*defaults, "cpu"))
    monkeypatch.setattr(accuracy, "LENGTHS", ((7, 1), (5, 70)))
    monkeypatch.setattr(accuracy, "HEADS", ((1, 1),))
    monkeypatch.setattr(accuracy, "DTYPES", ("float16",))
    monkeypatch.setattr(accuracy, "HEAD_DIMS", {"sagebwd": (32,), "sla2": (64,)})
    monkeypatch.setattr(accuracy, "SELECTED", {"50%": accuracy.SELECTED["50%"]})
    drawn = accuracy.table1_inputs
    monkeypatch.setattr(accuracy, "table1_inputs", lambda *x: [tensor.half() for tensor in drawn(*x)])
    monkeypatch.setattr(accuracy, "require_gpu", lambda: None)

    def run(*arguments):
        main(["accuracy", "--json", str(tmp_path / "x.json"), *arguments])
        return read_record(tmp_path / "x.json")

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter")
@pytest.mark.parametrize("op", ["sagebwd", "sla2"])
def test_the_kernels_are_compared_with_the_reference(measured, op):
    record = measured("--op", op)
    committed = read_record(RECORDED / f"accuracy{'_sla2' * (op == 'sla2')}_h200.json")
    for row in record.rows:
        found = {"O", "dQ", "dK", "dV", "dalpha"} & row.keys()
        assert found or row["kernel_rel_l2"] == pytest.approx(row["reference_rel_l2"], rel=0.03)
        assert ("dQ" in row and "dK" in row) <= (row.get("n_k") != 1)
        assert all(row[name] < 0.03 for name in found)
    known = {tuple(row) for row in committed.rows}
    added = {"block_q", "block_kv", "granularity"}  # since the record was made
    assert {tuple(name for name in row if name not in added) for row in record.rows} <= known


def test_an_error_that_is_not_finite_stops_the_command():
    rows = [{"O": 0.1, "dalpha": 0.2}, {"O": 0.3}, {"O": 0.2}]
    assert accuracy.largest(rows) == {"O": 0.3, "dalpha": 0.2}
    with pytest.raises(Failed, match="errors: expected finite ones, got"):
        accuracy.largest([*rows, {"O": float("nan")}])
