"""The sweep behind Table 1, which setting it calls closest, and Table 2's rows."""

import json
import statistics

import pytest
import torch

from sage_ref.experiments import tables
from sage_ref.experiments.tables import PAPER_TABLE1, TENSORS, Table1Sweep, table1_inputs, table1_sweep, table2_rows
from sage_ref.records import Record
from sage_ref.sagebwd.whole import SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, rms, sagebwd_intermediates

SWEEP = Table1Sweep(lengths=(32,), head_dims=(8, 16), blocks=((16, 32), (8, 8)), seeds=(0, 1))


def synthetic(**factors):
    """A record of one setting per name, whose errors are the paper's times factor(sigma)."""
    rows = [
        {"n": n, "head_dim": 64, "block_q": 64, "block_kv": 64, "granularity": "row", "sigma": sigma, "tensor": tensor}
        | {"rel_l2": paper[1] * factor(sigma), "paper_rel_l2": paper[1]}
        for n, factor in factors.items()
        for sigma, papers in PAPER_TABLE1.items()
        for tensor, paper in zip(TENSORS, papers, strict=True)
    ]
    return Record({}, rows)


def test_the_closest_setting_is_the_one_whose_worst_entry_is_closest():
    record = synthetic(
        even=lambda sigma: 0.85, uneven=lambda sigma: 1.6 if sigma == 3 else 1.01, high=lambda sigma: 1.2
    )
    assert [setting["n"] for setting in tables.settings_of(record)] == ["even", "uneven", "high"]
    assert tables.closest_setting(record) == {
        "n": "even", "head_dim": 64, "block_q": 64, "block_kv": 64, "granularity": "row"
    }  # fmt: skip
    per_sigma = {sigma: setting["n"] for sigma, setting in tables.closest_setting_per_sigma(record).items()}
    assert per_sigma == {1: "uneven", 3: "even", 5: "uneven", 8: "uneven", 10: "uneven"}


@pytest.mark.parametrize(("rel_l2", "expected"), [(0.08, 0.2), (0.12, 0.2), (0.1, 0.0), (0.3, 2.0)])
def test_deviation_is_a_fraction_of_the_papers_number(rel_l2, expected):
    assert tables.deviation({"rel_l2": rel_l2, "paper_rel_l2": 0.1}) == pytest.approx(expected)


def test_inputs_have_the_deviations_of_the_table():
    q, k, v, do = table1_inputs(2048, 64, sigma=5, seed=0)
    for x, deviation in ((q, 5), (k, 5), (v, 1), (do, 1)):
        assert x.shape == (1, 1, 2048, 64)
        assert x.dtype == torch.bfloat16
        assert x.double().std().item() == pytest.approx(deviation, rel=0.02)
    assert torch.equal(q, table1_inputs(2048, 64, sigma=5, seed=0)[0])
    assert not torch.equal(q, table1_inputs(2048, 64, sigma=5, seed=1)[0])


def test_a_sweep_measures_every_setting_and_averages_over_seeds(tmp_path):
    rows = [row for found in table1_sweep(SWEEP, tmp_path / "checkpoint") for row in found]
    keys = [tuple(row[name] for name in (*tables.SETTING, "sigma", "tensor")) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * len(PAPER_TABLE1) * len(TENSORS)
    (row,) = Record({}, rows).select(head_dim=16, block_q=16, granularity="row", sigma=3, tensor="dK")
    settings = SageBwdSettings(block_q=16, block_kv=32, granularity="row")
    errors = []
    for seed in SWEEP.seeds:
        tensors = table1_inputs(32, 16, 3, seed)
        exact, quantized = exact_intermediates(*tensors, settings), sagebwd_intermediates(*tensors, settings)
        errors.append(relative_l2(quantized["dK"], exact["dK"]))
    assert row["rel_l2"] == pytest.approx(statistics.mean(errors), abs=1e-6)
    assert row["rel_l2_std"] == pytest.approx(statistics.stdev(errors), abs=1e-6)
    assert (row["paper_cosine"], row["paper_rel_l2"]) == (0.9970, 0.0777)


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    measured = []

    def rows(n, head_dim, sigma, sweep, device):
        measured.append((head_dim, sigma))
        return [{"head_dim": head_dim, "sigma": sigma}]

    monkeypatch.setattr(tables, "_table1_rows", rows)
    killed = table1_sweep(SWEEP, checkpoint)
    for _ in range(7):
        next(killed)
    killed.close()
    first = list(measured)
    assert len(first) == 7
    resumed = list(table1_sweep(SWEEP, checkpoint))
    everything = [(head_dim, sigma) for head_dim in (8, 16) for sigma in PAPER_TABLE1]
    assert measured == everything  # each once
    assert resumed == [[{"head_dim": head_dim, "sigma": sigma}] for head_dim, sigma in everything]
    list(table1_sweep(SWEEP._replace(seeds=(0, 2)), checkpoint))
    assert len(measured) == 2 * len(everything)  # other seeds are other measurements


def test_rows_of_a_checkpoint_are_those_that_were_measured(tmp_path):
    sweep = SWEEP._replace(head_dims=(8,), blocks=((16, 16),), seeds=(0,))
    first = list(table1_sweep(sweep, tmp_path / "checkpoint"))
    assert list(table1_sweep(sweep, tmp_path / "checkpoint")) == first
    json.dumps(first)
    assert first[0][0]["rel_l2_std"] is None  # one seed has no deviation


def test_table2_has_a_row_per_layer_and_intermediate(inputs):
    names = ("query", "key", "value", "grad_output")
    captures = {layer: dict(zip(names, inputs(40, 40, 16, seed=layer), strict=True)) for layer in (0, 3)}
    rows = table2_rows(captures, SageBwdSettings(is_causal=True, block_q=16))
    assert [(row["layer"], row["tensor"]) for row in rows] == [
        (layer, tensor) for layer in (0, 3) for tensor in ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")
    ]
    for row in rows:
        exact = exact_intermediates(*captures[row["layer"]].values(), SageBwdSettings(is_causal=True))
        assert row["rms"] == pytest.approx(rms(exact[row["tensor"]]), rel=1e-3)
        assert (row["rms_bound"] is not None) == (row["tensor"] == "dS")
        assert row["tensor"] != "dS" or row["rms"] <= row["rms_bound"]
    assert {(row["block_q"], row["block_kv"], row["granularity"]) for row in rows} == {(16, 128, "row")}
    assert rows[3]["paper_rel_l2"] == 0.2045
    assert rows[3]["rel_l2"] != rows[11]["rel_l2"]
    (dp,) = Record({}, rows).select(layer=0, tensor="dP")
    assert (dp["cosine"], dp["rel_l2"]) == (1.0, 0.0)


def test_the_most_error_prone_layer_is_that_of_the_largest_error_of_dq():
    rows = [
        {"layer": layer, "tensor": tensor, "rel_l2": error}
        for layer, errors in ((1, {"dQ": 0.2, "dK": 0.9}), (4, {"dQ": 0.3, "dK": 0.1}), (6, {"dQ": 0.1, "dK": 0.4}))
        for tensor, error in errors.items()
    ]
    assert tables.most_error_prone(iter(rows)) == rows[2:4]
