"""Table 2's record, and the layer that is shown."""

import pytest
from sage_lab.__main__ import main
from sage_lab.records import read_record


def test_the_command_makes_the_record_of_the_committed_captures(tmp_path):
    main(["tables", "2", "--json", str(tmp_path / "table2.json")])
    found, recorded = read_record(tmp_path / "table2.json"), read_record("table2_captures")
    assert found.provenance["captures"] == recorded.provenance["captures"]
    measures = ("cosine", "rel_l2", "rms")
    for row, expected in zip(found.rows, recorded.rows, strict=True):
        assert [row[name] for name in measures] == pytest.approx([expected[name] for name in measures], rel=0.02)
        assert {k: x for k, x in expected.items() if k not in (*measures, "rms_bound")}.items() <= row.items()
