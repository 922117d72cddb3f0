"""Table 2's rows, the layer that it shows, and the command."""

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import table2
from sage_lab.experiments.table2 import MEASURES, PAPER_TABLE2, table2_rows
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import Capture, read_capture, write_capture

from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import INTERMEDIATES


@pytest.mark.parametrize("norm", table2.CAPTURES)
def test_the_record_is_that_of_the_committed_captures(norm):
    layers = read_capture(RECORDED / f"{table2.CAPTURES[norm]}.safetensors").layers
    rows = table2_rows(layers, SageBwdSettings.printed(is_causal=True))
    recorded = read_record("table2_captures").select(qk_norm=norm == "QK-norm")
    for row, expected in zip(rows, recorded, strict=True):
        assert (row["layer"], row["tensor"]) == (expected["layer"], expected["tensor"])
        assert [row[name] for name in MEASURES] == pytest.approx([expected[name] for name in MEASURES], rel=0.02)


def test_the_most_error_prone_layer_is_that_of_the_largest_error_of_dq():
    rows = [
        {"layer": layer, "tensor": tensor, "rel_l2": error}
        for layer, errors in ((1, {"dQ": 0.2, "dK": 0.9}), (4, {"dQ": 0.3, "dK": 0.1}), (6, {"dQ": 0.1, "dK": 0.4}))
        for tensor, error in errors.items()
    ]
    assert table2.most_error_prone(iter(rows)) == rows[2:4]


def test_table2_shows_the_worst_layer_of_each_capture(text, checkpoint, capsys):
    where = "--corpus text.txt --device cpu"
    main(["capture", "run.pt", "--layers", "0", "2", "--heads", "1", "--out", "some.safetensors", *where.split()])
    options = "--context 16 --layers 2 --width 32 --heads 4 --tokens 32 --tokens-per-step 32 --micro-batch 2 --qk-norm"
    kept = "--no-autocast --checkpoint norm.pt --validation-sequences 2"
    main(["pretrain", *options.split(), *kept.split(), *where.split()])
    main(["capture", "norm.pt", "--layers", "0", "1", "--out", "norm.safetensors", *where.split()])
    capsys.readouterr()
    main(["table2", "--capture", "norm.safetensors", "some.safetensors", "--granularity", "row", "--json", "t.json"])
    shown = capsys.readouterr().out
    record = read_record(text / "t.json")
    settings = SageBwdSettings.printed(is_causal=True, granularity="row")
    files = {"norm": True, "some": False}
    expected = [
        {"capture": name, "qk_norm": qk_norm} | row
        for name, qk_norm in files.items()
        for row in table2_rows(read_capture(text / f"{name}.safetensors").layers, settings)
    ]
    assert record.rows == expected
    assert [facts["file"] for facts in record.provenance["captures"]] == ["norm.safetensors", "some.safetensors"]
    assert [facts["run"]["qk_norm"] for facts in record.provenance["captures"]] == [True, False]
    header, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")
    )
    worst = {name: max(record.select(capture=name, tensor="dQ"), key=lambda row: row["rel_l2"]) for name in files}
    titles = [f"{name}, layer {row['layer']}: cosine" for name, row in worst.items()]
    assert header == ["tensor", titles[0], "relative L2", "RMS", titles[1], "relative L2", "RMS", "paper: cosine",
                      "relative L2"]  # fmt: skip
    assert [line[0] for line in lines] == list(INTERMEDIATES)
    for line in lines:
        rows = [record.select(capture=name, layer=row["layer"], tensor=line[0])[0] for name, row in worst.items()]
        cells = [f"{row[name]:{digits}}" for row in rows for name, digits in MEASURES.items()]
        assert line[1:] == [*cells, *(f"{x:.4f}" for x in PAPER_TABLE2[line[0]])]


def test_table2_refuses_a_capture_of_something_else(tmp_path, capsys):
    write_capture(tmp_path / "video.safetensors", Capture({"model": {}}, {0: {"query": torch.zeros(1, 1, 1, 1)}}))
    with pytest.raises(SystemExit):
        main(["table2", "--capture", str(tmp_path / "video.safetensors")])
    assert "capture: expected a file of `python -m sage_lab capture`, got " in capsys.readouterr().err
