"""The command that measures remedies: its cases, its rows, its table, and the costs beside them."""

import json
import shutil

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import repair
from sage_lab.experiments.repair import BASES, HARD_CASES, OF_EXACT, hard_case, relative_errors, repair_table
from sage_lab.experiments.repair_cost import RANDOM_NUMBER, Cost, cost
from sage_lab.records import RECORDED, read_record
from sage_lab.repairs import REMEDIES, with_remedy, with_repairs
from sage_lab.training.capture import Capture, write_capture

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sagebwd import MATMULS, SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates


@pytest.mark.parametrize("name", HARD_CASES)
def test_a_hard_case_is_the_gaussian_one_with_one_thing_wrong(name):
    plain, found = hard_case("Gaussian", 128, 16, 0), hard_case(name, 128, 16, 0)
    changed = {which for which, x, y in zip("qkvd", plain, found, strict=True) if not torch.equal(x, y)}
    assert changed == set(
        {"Gaussian": "", "sharp scores": "qk", "outlier gradients": "d", "keys share an offset": "k"}.get(name, "v")
    )
    assert {x.dtype for x in found} == {torch.bfloat16}


def test_the_offset_moves_all_values_alike_and_outliers_one_token_in_64():
    *_, v, do = (x.double() for x in hard_case("Gaussian", 128, 16, 0))
    moved = hard_case("values share an offset", 128, 16, 0)[2].double() - v
    assert moved.std(-2).max() < 0.05 * moved.abs().max()
    assert moved[0, 0, 0].norm() == pytest.approx(8 * v.norm(dim=-1).mean().item(), rel=0.01)
    larger = hard_case("outlier gradients", 128, 16, 0)[3].double().norm(dim=-1) / do.norm(dim=-1)
    assert [n for n in range(128) if larger[0, 0, n] > 1.1] == [32, 96]


def test_a_row_has_the_errors_of_its_settings_with_an_o_of_16_bit():
    inputs = hard_case("Gaussian", 40, 16, 0)
    rows = {(row["base"], row["remedy"]): row for row in repair.case_rows(inputs, 2, 0)}
    assert rows.keys() == {(base, name) for base in ("as printed", "kernels") for name in REMEDIES} | {
        ("exact", name) for name in OF_EXACT
    }
    wide = [x.double() for x in inputs]
    settings = with_remedy(BASES["kernels"], "seven, V smoothed")
    exact, found = (
        exact_intermediates(*wide, settings),
        sagebwd_intermediates(*wide, settings),
    )
    row = rows["kernels", "seven, V smoothed"]
    for name in repair.MEASURED:
        assert row[name] == relative_l2(found[name], exact[name])
    assert (row["granularity"], row["block_q"]) == ("row", 128)
    # Nothing in INT8: what O's rounding does to delta, by hand. Rows of dS no longer sum to zero, so mu_K counts.
    q, k, v, do = wide
    forward = attention_forward(q, k, v, is_causal=True)
    backward = attention_backward(do, q, k, v, forward.output.bfloat16().double(), forward.log_sum_exp, is_causal=True)
    dq = backward.grad_scores @ (k - k.mean(-2, keepdim=True)) / 4
    assert rows["exact", "none"]["dQ"] == pytest.approx(relative_l2(dq, exact["dQ"]), rel=1e-6)
    assert rows["exact", "none"]["dQ"] > 1e-4 > 1e-10 > rows["exact", "wide O"]["dQ"]
    assert rows["exact", "matching delta"]["dQ"] < 1e-10


def test_only_stochastic_rounding_has_another_error_when_it_is_repeated():
    for row in repair.case_rows(hard_case("Gaussian", 64, 16, 0), 8, 0):
        if row["remedy"] == "stochastic":
            assert row["repeated_dQ"] < 0.9 * row["dQ"]
        else:
            assert row["repeated_dQ"] == row["dQ"]


def row_of(remedy, case, error, base="kernels", source="capture"):
    return {"source": source, "case": case, "layer": 0, "base": base, "remedy": remedy, "dQ": error}


def test_relative_errors_are_geometric_means_over_cases():
    rows = [row_of("none", "a", 0.1), row_of("none", "b", 0.2), row_of("two terms", "a", 0.05)]
    rows += [row_of("two terms", "b", 0.4), row_of("none", "a", 9.0, base="as printed")]
    found = relative_errors(rows, "dQ", base="kernels", source="capture")
    assert found == pytest.approx({"none": 1.0, "two terms": 1.0})
    assert relative_errors(rows, "dQ", base="kernels", case="a") == pytest.approx({"none": 1.0, "two terms": 0.5})


COSTS = {  # of a head of 128
    "none": Cost(),
    "matching delta": Cost(3, 6, 256),  # Q^ and K^ 256, dO and V 512, less O and dO 512
    "V smoothed": Cost(0, 0, 256),
    "rounded sum": Cost(0, 1, 0),
    "stochastic": Cost(0, 2 * RANDOM_NUMBER, 0),
    "two terms in 10% of tiles": Cost(0.2, 0.8, 0),
    "rotated": Cost(0, 14, 512),
    "seven": Cost(-1, 2, -256),
    "seven, matching delta": Cost(1, 8, -256),  # dO^ and V^ 256 where it was 512
    "ordered P, V smoothed": Cost(0, 1, 256),
    "O in 16 bit": Cost(1, 0, 128),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_those_counted_by_hand(name):
    assert cost(with_remedy(SageBwdSettings(), name), 128) == pytest.approx(COSTS[name])


def test_a_tile_with_one_scale_is_rounded_once():
    settings = with_repairs(SageBwdSettings.printed(), two_terms=1.0, ds_rounding="stochastic")
    assert cost(settings, 64) == Cost(2, 4 + RANDOM_NUMBER, 0)
    assert cost(with_repairs(SageBwdSettings(), exact_matmuls=MATMULS), 64).matmuls == 1  # only O and dP are counted


def test_a_capture_of_something_else_is_refused(tmp_path, capsys):
    write_capture(tmp_path / "video.safetensors", Capture({"model": {}}, {0: {"query": torch.zeros(1, 1, 1, 1)}}))
    with pytest.raises(SystemExit):
        main(["repair", "--capture", str(tmp_path / "video.safetensors"), "--json", str(tmp_path / "r.json")])
    assert "capture: expected a file of `python -m sage_lab capture`, got " in capsys.readouterr().err


def test_the_command_records_every_case_and_goes_on_after_a_kill(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "repair --tokens 20 --head-dim 8 --draws 2 --json repair.json --capture".split()  # noqa: SIM905
    shutil.copy(RECORDED / "capture_plain_h200.safetensors", "plain.safetensors")
    calls, rows_of = [], repair.case_rows

    def counted(inputs, draws, seed):
        calls.append(inputs[0].shape)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return rows_of([x[..., :20, :8] for x in inputs], draws, seed)

    monkeypatch.setattr(repair, "case_rows", counted)
    with pytest.raises(SystemExit):
        main([*line, "plain.safetensors"])
    assert not (tmp_path / "repair.json").exists()
    main([*line, "plain.safetensors"])
    assert len(calls) == 5 + (3 + len(HARD_CASES) - 4)
    record = read_record(tmp_path / "repair.json")
    per_case = 2 * len(REMEDIES) + len(OF_EXACT)
    assert len(record.rows) == (3 + len(HARD_CASES)) * per_case
    assert [row["layer"] for row in record.rows[::per_case]] == [0, 1, 2] + [None] * len(HARD_CASES)
    assert {row["source"] for row in record.rows} == {"capture", "hard case"}
    assert record.provenance["captures"] == ["plain.safetensors"]
    costs = record.provenance["cost"]
    assert [row["remedy"] for row in costs] == list(REMEDIES)
    assert {row["ms"] for row in costs} == {None}
    header, lines = repair_table(record.rows, costs)
    shown = capsys.readouterr().out
    assert all(" | ".join(map(str, line)) in shown for line in (header, *lines))
    assert [line[0] for line in lines] == list(REMEDIES)
    assert set(lines[0][1:10]) == {"1.00"}
    assert json.loads((tmp_path / "repair.json").read_text())["provenance"]["seed"] == 0
    assert list(tmp_path.glob("**/*.partial")) == []
