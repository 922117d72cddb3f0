"""The sweep behind Table 1, which setting it calls closest, and the command."""

import statistics

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import table1
from sage_lab.experiments.table1 import PAPER_TABLE1, TENSORS, table1_inputs
from sage_lab.records import read_record

from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import cosine, exact_intermediates, relative_l2, sagebwd_intermediates


def test_the_command_measures_every_setting_and_averages_over_seeds(text):
    main(["tables", "1", "--n", "32", "--seeds", "2", "--json", "table1.json"])
    assert not list(text.glob("**/*.partial"))  # what it kept meanwhile is gone
    record = read_record(text / "table1.json")
    keys = [tuple(row[name] for name in (*table1.SETTING, "sigma", "tensor")) for row in record.rows]
    assert len(set(keys)) == len(keys) == 2 * 4 * 2 * len(PAPER_TABLE1) * len(TENSORS)
    assert record.provenance["seeds"] == [0, 1]
    assert set(record.rows[0]) == set(read_record("table1_sweep").rows[0])
    (row,) = record.select(head_dim=64, block_q=32, granularity="row", sigma=3, tensor="dK")
    settings = SageBwdSettings(block_q=32, block_kv=32, granularity="row")
    errors, cosines = [], []
    for seed in (0, 1):
        tensors = table1_inputs(32, 64, 3, seed)
        exact, quantized = (f(*tensors, settings)["dK"] for f in (exact_intermediates, sagebwd_intermediates))
        errors.append(relative_l2(quantized, exact))
        cosines.append(cosine(quantized, exact))
    assert row["rel_l2"] == pytest.approx(statistics.mean(errors), abs=1e-6)
    assert row["cosine"] == pytest.approx(statistics.mean(cosines), abs=1e-6)
    assert (row["paper_cosine"], row["paper_rel_l2"]) == (0.9970, 0.0777)
