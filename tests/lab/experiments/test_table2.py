"""Table 2's rows, the layer that it shows, and the command."""

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import table2
from sage_lab.experiments.table2 import MEASURES, PAPER_TABLE2, table2_rows
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import TENSORS, Capture, read_capture, write_capture

from sage_ref.sagebwd.settings import SageBwdSettings


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


def test_the_command_measures_all_layers_of_all_captures_and_shows_the_worst(text, capsys):
    expected = []
    for name, qk_norm in (("norm", True), ("some", False)):
        layers = {layer: dict(zip(TENSORS, torch.randn(4, 1, 1, 16, 8).bfloat16(), strict=True)) for layer in (0, 2)}
        write_capture(text / f"{name}.safetensors", Capture({"run": {"qk_norm": qk_norm}}, layers))
        found = table2_rows(layers, SageBwdSettings.printed(is_causal=True))
        expected += [{"capture": name, "qk_norm": qk_norm} | row for row in found]
    main(["table2", "--capture", "norm.safetensors", "some.safetensors", "--json", "t.json"])
    record, shown = read_record(text / "t.json"), capsys.readouterr().out
    assert record.rows == expected
    assert [facts["file"] for facts in record.provenance["captures"]] == ["norm.safetensors", "some.safetensors"]
    worst = [table2.most_error_prone(record.select(capture=name, tensor="dQ"))[0] for name in ("norm", "some")]
    cells = [f"{row[name]:{digits}}" for row in worst for name, digits in MEASURES.items()]
    cells += [f"{x:.4f}" for x in PAPER_TABLE2["dQ"]]
    assert f"| dQ | {' | '.join(cells)} |" in shown


def test_table2_refuses_a_capture_of_something_else(tmp_path, capsys):
    write_capture(tmp_path / "video.safetensors", Capture({"model": {}}, {0: {"query": torch.zeros(1, 1, 1, 1)}}))
    with pytest.raises(SystemExit):
        main(["table2", "--capture", str(tmp_path / "video.safetensors")])
    assert "capture: expected a file of `python -m sage_lab capture`, got " in capsys.readouterr().err
