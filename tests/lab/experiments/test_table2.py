"""Table 2's record, and the layer that is shown."""

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import table2
from sage_lab.records import read_record


def test_the_command_makes_the_record_of_the_committed_captures(tmp_path):
    main(["table2", "--json", str(tmp_path / "table2.json")])
    found, recorded = read_record(tmp_path / "table2.json"), read_record("table2_captures")
    assert found.provenance["captures"] == recorded.provenance["captures"]
    measures = ("cosine", "rel_l2", "rms")
    for row, expected in zip(found.rows, recorded.rows, strict=True):
        assert [row[name] for name in measures] == pytest.approx([expected[name] for name in measures], rel=0.02)
        assert {k: x for k, x in expected.items() if k not in (*measures, "rms_bound")}.items() <= row.items()


def test_the_most_error_prone_layer_is_that_of_the_largest_error_of_dq():
    rows = [
        {"layer": layer, "tensor": tensor, "rel_l2": error}
        for layer, errors in ((1, {"dQ": 0.2, "dK": 0.9}), (4, {"dQ": 0.3, "dK": 0.1}), (6, {"dQ": 0.1, "dK": 0.4}))
        for tensor, error in errors.items()
    ]
    assert table2.most_error_prone(iter(rows)) == rows[2:4]
