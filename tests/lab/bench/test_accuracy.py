"""What the command accuracy measures, on the CPU: a few shapes, by Triton's interpreter."""

import pytest

pytest.importorskip("triton")
from sage_lab.bench.accuracy import Grid, largest, sagebwd_rows, sla2_rows
from sage_lab.command_line import Failed
from sage_lab.records import read_record

SMALL = Grid(
    head_dims=(64,), lengths=((7, 1), (5, 70)), heads=((1, 1),), dtypes=("float16",), selected=("50%",), device="cpu"
)


@pytest.mark.no_gpu
@pytest.mark.parametrize(("rows_of", "record"), [(sagebwd_rows, "accuracy_h200"), (sla2_rows, "accuracy_sla2_h200")])
def test_the_kernels_are_compared_with_the_reference(rows_of, record):
    known = {tuple(row) for row in read_record(record).rows}
    for row in rows_of(SMALL):
        found = {"O", "dQ", "dK", "dV", "dalpha"} & row.keys()
        assert found >= {"O", "dV"}
        assert ("dQ" in row and "dK" in row) <= (row["n_k"] != 1)
        assert all(row[name] < 0.03 for name in found)
        assert tuple(row) in known


def test_an_error_that_is_not_finite_stops_the_command():
    rows = [{"O": 0.1, "dalpha": 0.2}, {"O": 0.3}, {"O": 0.2}]
    assert largest(rows) == {"O": 0.3, "dalpha": 0.2}
    with pytest.raises(Failed, match="errors: expected finite ones, got"):
        largest([*rows, {"O": float("nan")}])
