"""The sweep behind Table 1, which setting it calls closest, and the command."""

import statistics

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import table1
from sage_lab.experiments.table1 import PAPER_TABLE1, TENSORS, Table1Sweep, table1_inputs, table1_rows, table1_runs
from sage_lab.records import Record, read_record

from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates

TABLE1 = ["table1", "--n", "32", "--head-dim", "16", "--blocks", "16x16", "8x16", "--seeds", "2", "--json"]
SWEEP = Table1Sweep(lengths=(32,), head_dims=(8, 16), blocks=((16, 32), (8, 8)), seeds=(0, 1))


SETTING = {"head_dim": 64, "block_q": 64, "block_kv": 64, "granularity": "row"}


def synthetic(**factors):
    """A record of one setting per name, whose errors are the paper's times factor(sigma)."""
    rows = [
        {"n": n, **SETTING, "sigma": sigma, "tensor": tensor}
        | {"rel_l2": paper[1] * factor(sigma), "paper_rel_l2": paper[1]}
        for n, factor in factors.items()
        for sigma, papers in PAPER_TABLE1.items()
        for tensor, paper in zip(TENSORS, papers, strict=True)
    ]
    return Record({}, rows)


def test_the_closest_setting_is_the_one_whose_worst_entry_is_closest():
    record = synthetic(even=lambda x: 0.85, uneven=lambda x: 1.6 if x == 3 else 1.01, high=lambda x: 1.2)
    assert [setting["n"] for setting in table1.settings_of(record)] == ["even", "uneven", "high"]
    assert table1.closest_setting(record) == {"n": "even", **SETTING}
    per_sigma = {sigma: setting["n"] for sigma, setting in table1.closest_setting_per_sigma(record).items()}
    assert per_sigma == {1: "uneven", 3: "even", 5: "uneven", 8: "uneven", 10: "uneven"}


@pytest.mark.parametrize(("rel_l2", "expected"), [(0.08, 0.2), (0.12, 0.2), (0.1, 0.0), (0.3, 2.0)])
def test_deviation_is_a_fraction_of_the_papers_number(rel_l2, expected):
    assert table1.deviation({"rel_l2": rel_l2, "paper_rel_l2": 0.1}) == pytest.approx(expected)


def test_inputs_have_the_deviations_of_the_table():
    q, k, v, do = table1_inputs(2048, 64, sigma=5, seed=0)
    for x, deviation in ((q, 5), (k, 5), (v, 1), (do, 1)):
        assert x.shape == (1, 1, 2048, 64)
        assert x.dtype == torch.bfloat16
        assert x.double().std().item() == pytest.approx(deviation, rel=0.02)
    assert torch.equal(q, table1_inputs(2048, 64, sigma=5, seed=0)[0])
    assert not torch.equal(q, table1_inputs(2048, 64, sigma=5, seed=1)[0])


def test_a_sweep_measures_every_setting_and_averages_over_seeds():
    rows = [row for run in table1_runs(SWEEP) for row in table1_rows(run, SWEEP)]
    keys = [tuple(row[name] for name in (*table1.SETTING, "sigma", "tensor")) for row in rows]
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
    one_seed = table1_rows(table1_runs(SWEEP)[0], SWEEP._replace(seeds=(0,)))
    assert one_seed[0]["rel_l2_std"] is None  # one seed has no deviation


def test_the_command_prints_a_table_and_records_where_it_comes_from(tmp_path, capsys):
    main([*TABLE1, str(tmp_path / "table1.json")])
    assert [path.name for path in tmp_path.iterdir()] == ["table1.json"]  # what it kept to go on from is gone
    printed, record = capsys.readouterr().out, read_record(tmp_path / "table1.json")
    assert len(record.rows) == 2 * 2 * len(PAPER_TABLE1) * len(TENSORS)
    facts = record.provenance
    assert facts["command"] == f"python -m sage_lab {' '.join(TABLE1)} table1.json"
    assert (facts["seeds"], facts["torch"]) == ([0, 1], torch.__version__)
    best = table1.closest_setting(record)
    assert f"Closest to the paper over all rows: {table1.describe(best)}" in printed
    for row in record.select(**best):
        assert f"{row['rel_l2']:.4f} (paper {row['paper_rel_l2']:.4f})" in printed
