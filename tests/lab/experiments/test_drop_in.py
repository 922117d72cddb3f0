"""`drop-in`: its rows, its record, and what it says where its packages are missing."""

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import drop_in
from sage_lab.records import read_record

KINDS = {"embedding": 16, "state": 6, "gradient": 38, "loss": 20}


def counts(rows):
    return {what: sum(row["what"] == what for row in rows) for what in KINDS}


@pytest.fixture
def _installed():
    if reason := drop_in.missing():
        pytest.skip(reason)


@pytest.mark.usefixtures("_installed")
def test_the_command_measures_what_the_record_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main(["drop-in", "--length", "16", "--steps", "2", "--json", str(tmp_path / "drop_in.json")])
    rows = read_record(tmp_path / "drop_in.json").rows
    assert counts(rows) == KINDS | {"loss": 4}
    assert [row.keys() for row in rows if row["what"] != "loss"] == [
        row.keys() for row in read_record("drop_in_cpu").rows if row["what"] != "loss"
    ]
    printed = capsys.readouterr().out
    losses = {(row["attention"], row["step"]): row["loss"] for row in rows if row["what"] == "loss"}
    for step in (1, 2):
        exact, ours = losses["sdpa", step], losses["sagebwd", step]
        assert 0 < abs(ours - exact) < 0.1 * exact
        assert f"| {step} | {exact:.4f} | {ours:.4f} |" in printed
    assert all(0.99 < row["cosine"] < 1 - 1e-7 for row in rows if row["what"] == "embedding")
    assert all(1e-4 < row["rel_l2"] < 0.5 for row in rows if row["what"] in ("state", "gradient"))


@pytest.mark.usefixtures("_installed")
def test_texts_must_be_long_enough():
    with pytest.raises(ValueError, match=r"^length: expected at most \d+, half of the text of \w+, got 300$"):
        drop_in.passages(300)


def test_the_record_has_every_measurement():
    record = read_record("drop_in_cpu")
    assert counts(record.rows) == KINDS
    assert set(record.provenance["packages"]) == set(drop_in.PACKAGES)


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(drop_in, "why_not_importable", lambda package, module: "no" if module == "accelerate" else None)
    with pytest.raises(SystemExit) as stop:
        main(["drop-in"])
    assert stop.value.code == 1
    assert "accelerate: expected it to be installed (pip install 'sage-ref[transformers]')" in capsys.readouterr().err
