"""The command that measures remedies: its cases, its rows, its table, and the costs beside them."""

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import repair
from sage_lab.experiments.repair import BASES, HARD_CASES, OF_EXACT, hard_case
from sage_lab.experiments.repair_cost import RANDOM_NUMBER, Cost, cost
from sage_lab.records import read_record
from sage_lab.repairs import REMEDIES, with_remedy, with_repairs
from sage_lab.training.capture import TENSORS, Capture, write_capture

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sagebwd import MATMULS, SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates


def test_hard_cases_and_costs_are_those_of_the_record():
    """Each hard case without a remedy; all costs. The record's passes are of 512 tokens, 64 features."""
    record = read_record("repair_cpu")
    assert record.provenance["cost"] == repair.cost_rows(128)
    for name in HARD_CASES:
        inputs = hard_case(name, 512)
        exact = exact_intermediates(*inputs, BASES["exact"])
        for base, settings in BASES.items():
            (recorded,) = record.select(source="hard case", case=name, base=base, remedy="none")
            found = repair.errors(inputs, exact, with_remedy(settings, "none"))
            assert found == pytest.approx({column: recorded[column] for column in found}, rel=1e-4, abs=1e-12)


def test_a_row_has_the_errors_of_its_settings_with_an_o_of_16_bit():
    inputs = hard_case("Gaussian", 40)
    rows = {(row["base"], row["remedy"]): row for row in repair.case_rows(inputs)}
    assert rows.keys() == {(base, name) for base in ("as printed", "kernels") for name in REMEDIES} | {
        ("exact", name) for name in OF_EXACT
    }
    wide = [x.double() for x in inputs]
    settings = with_remedy(BASES["kernels"], "seven, V smoothed")
    exact, found = exact_intermediates(*wide, settings), sagebwd_intermediates(*wide, settings)
    row = rows["kernels", "seven, V smoothed"]
    for name in repair.MEASURED:
        assert row[name] == relative_l2(found[name], exact[name])
    assert (row["granularity"], row["block_q"]) == ("row", 128)
    # Nothing in INT8: what O's rounding does to delta, by hand. Rows of dS no longer sum to zero, so mu_K counts.
    q, k, v, do = wide
    forward = attention_forward(q, k, v, is_causal=True)
    backward = attention_backward(do, q, k, v, forward.output.bfloat16().double(), forward.log_sum_exp, is_causal=True)
    dq = backward.grad_scores @ (k - k.mean(-2, keepdim=True)) / 8
    assert rows["exact", "none"]["dQ"] == pytest.approx(relative_l2(dq, exact["dQ"]), rel=1e-6)
    assert rows["exact", "none"]["dQ"] > 1e-4 > 1e-10 > rows["exact", "wide O"]["dQ"]
    assert rows["exact", "matching delta"]["dQ"] < 1e-10


def test_a_tile_with_one_scale_is_rounded_once():
    settings = with_repairs(SageBwdSettings.printed(), two_terms=1.0, ds_rounding="stochastic")
    assert cost(settings, 64) == Cost(2, 4 + RANDOM_NUMBER, 0)
    assert cost(with_repairs(SageBwdSettings(), exact_matmuls=MATMULS), 64).matmuls == 1  # only O and dP are counted


def test_the_command_records_every_layer_and_case(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = {0: "Gaussian", 3: "sharp scores"}
    layers = {layer: dict(zip(TENSORS, hard_case(case, 20), strict=True)) for layer, case in cases.items()}
    write_capture(tmp_path / "plain.safetensors", Capture({}, layers))
    for name, value in {"RECORDED": tmp_path, "CAPTURES": {"": "plain"}, "TOKENS": 20}.items():
        monkeypatch.setattr(repair, name, value)
    main(["repair", "--json", "repair.json"])
    record = read_record(tmp_path / "repair.json")
    cases = [("capture", "plain", 0), ("capture", "plain", 3), *(("hard case", name, None) for name in HARD_CASES)]
    per_case = 2 * len(REMEDIES) + len(OF_EXACT)
    found = [tuple(row[name] for name in ("source", "case", "layer")) for row in record.rows]
    assert found == [case for case in cases for _ in range(per_case)]
    offset = hard_case("values share an offset", 20)
    for inputs, case in ((layers[3].values(), {"layer": 3}), (offset, {"case": "values share an offset"})):
        for row, expected in zip(record.select(**case), repair.case_rows(tuple(inputs)), strict=True):
            assert {name: row[name] for name in expected} == expected
    costs = record.provenance["cost"]
    assert [row["remedy"] for row in costs] == list(REMEDIES)
    assert (record.provenance["captures"], record.provenance["seed"]) == (["plain.safetensors"], 0)
