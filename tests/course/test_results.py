"""Verdicts and statistics on records whose answer is known; RESULTS.md and nbval compare those of real ones."""

import copy
import math
from itertools import product
from types import SimpleNamespace

import pytest
from sage_course.results import claims, full_batch
from sage_course.results.claims import CONTRADICTED, SUPPORTED, UNDECIDED
from sage_course.results.full_batch import CONTROLS, TRUTH, Training
from sage_course.results.hopper_model import busy
from sage_course.results.pretraining import (
    Interval,
    gradient_is_lost,
    judged_losses,
    paired_differences,
    pretrain_runs,
)
from sage_lab.records import Record, read_record

RUNS, LAYERS = read_record("pretrain_h200"), read_record("layers_h200")
SMALL, LARGE = RUNS.provenance["plan"]["tokens_per_step"]
K_SMOOTHED = "SageBwd, K smoothed"


def run_like(kind, seed, loss, size=LARGE, qk_norm=True):
    """Return a recorded run with a different seed and final loss; None: it diverged."""
    row = copy.deepcopy(pretrain_runs(RUNS, kind, size, qk_norm)[0])
    return row | {"seed": seed, "final_val_loss": loss, "diverged": None if loss else "the loss is not finite"}


def with_runs(*rows):
    return Record(RUNS.provenance, [*RUNS.rows, *rows])


def test_differences_are_paired_by_seed_and_skip_what_is_missing_or_diverged():
    kinds = (
        ("exact", 13, 1.0),
        (K_SMOOTHED, 13, 1.25),
        (K_SMOOTHED, 14, 1.25),
        ("exact", 15, 1.0),
        (K_SMOOTHED, 15, None),
    )
    found = paired_differences(with_runs(*(run_like(*x) for x in kinds)), K_SMOOTHED, LARGE)
    assert set(found) - set(paired_differences(RUNS, K_SMOOTHED, LARGE)) == {13}
    assert found[13] == pytest.approx(0.25)


def verdicts(runs=RUNS, layers=LAYERS):
    return [claim.verdict for claim in claims.claims(runs, layers)]


def test_a_batch_as_large_as_the_papers_small_one_does_not_test_a_claim_about_the_large_one():
    """As the rule of notebook 06b says, and the paper itself finds no gap there."""
    for size, expected in ((2**18, claims.UNTESTED), (2**19, CONTRADICTED)):
        plan = RUNS.provenance["plan"] | {"tokens_per_step": [SMALL, size]}
        rates = RUNS.provenance["learning_rate"] | {str(size): RUNS.provenance["learning_rate"][str(LARGE)]}
        rows = [row | {"tokens_per_step": size} if row["tokens_per_step"] == LARGE else row for row in RUNS.rows]
        runs = Record(RUNS.provenance | {"plan": plan, "learning_rate": rates}, rows)
        layers = [row | {"tokens_per_step": size} if row["tokens_per_step"] == LARGE else row for row in LAYERS.rows]
        assert verdicts(runs, Record(LAYERS.provenance, layers))[2] == expected


def test_a_gradient_is_lost_only_while_the_control_holds():
    def run(sagebwd, exact):
        return {"probes": [{"errors": {"sagebwd": x, "exact": y}} for x, y in zip(sagebwd, exact, strict=True)]}

    assert gradient_is_lost(run([0.1, 1.2, 1.3, 1.4], [0.1] * 4), "sagebwd")
    assert not gradient_is_lost(run([1.2, 0.9, 1.3, 1.4], [0.1] * 4), "sagebwd")
    assert not gradient_is_lost(run([1.2, 1.2, 1.3, 1.4], [0.1, 0.1, 0.6, 0.1]), "sagebwd")


def test_losses_are_judged_seed_by_seed_and_one_seed_decides_nothing():
    def runs(*of_seeds):
        rows = []
        for seed, (exact, sagebwd) in enumerate(of_seeds):
            for arm, loss in (("exact", exact), ("sagebwd", sagebwd)):
                rows.append({"arm": arm, "qk_norm": True, "seed": seed, "final_val_loss": loss})
        return judged_losses(Record({}, rows), "sagebwd", True)

    assert runs((2.0, 2.5)) == "undecided"
    assert runs((2.0, 2.1), (3.0, 3.16), (2.5, 2.62)) == "behind"
    assert runs((2.0, 2.001), (3.0, 2.999), (2.5, 2.501)) == "level"
    assert runs((2.0, 2.1), (3.0, 2.9), (2.5, 2.6)) == "undecided"


@pytest.mark.parametrize(
    ("middle", "half", "verdict"),
    [(2.0, 1.0, SUPPORTED), (0.5, 1.0, CONTRADICTED), (0.5, 3.0, UNDECIDED), (-3.0, 1.0, CONTRADICTED)],
)
def test_a_verdict_on_a_gap_follows_its_rule(middle, half, verdict):
    assert claims.decide(Interval(middle, half / 4, half, 3), 2.1) == verdict


def test_a_gap_or_scatter_at_the_small_step_is_noticed():
    assert verdicts()[0] == SUPPORTED
    for gaps in ((0.05, 0.05), (0.07, -0.07)):
        pairs = [(kind, seed, 0.66 + (gap if kind != "exact" else 0), SMALL)
                 for seed, gap in enumerate(gaps, 20) for kind in ("exact", K_SMOOTHED)]  # fmt: skip
        assert verdicts(with_runs(*(run_like(*pair) for pair in pairs)))[0] == UNDECIDED


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, claims.PARTLY), ({"O": 1e-3}, SUPPORTED), ({"P": 1.0, "O": 1.0}, CONTRADICTED),
        ({"dK": 2.0, "dQ": 1e-3, "O": 1e-3}, SUPPORTED), ({"P": 1.0}, CONTRADICTED),
    ],
)  # fmt: skip
def test_where_errors_grow(changes, verdict):
    rows = [row | {"rel_l2": changes.get(row["tensor"], row["rel_l2"])} for row in LAYERS.rows]
    assert verdicts(layers=Record(LAYERS.provenance, rows))[1] == verdict


CONTROL = 0.001  # nats, of "bf16"; the second control has less
COLUMNS = ["step", "exact_loss", "gradient_error"]
ARMS = (TRUTH, *CONTROLS, "per tile", "per row", "kernels", "kernels, unbiased")
REMEDIES = ("two terms", "V smoothed")
PLAN = {"tokens": 2**18, "learning_rates": [0.1], "seeds": [0, 1, 2], "margin": 2.0, "arms": ARMS, "remedies": REMEDIES}
WHERE = {"plan": PLAN, "curve": COLUMNS, "gpu": "a GPU", "commit": "0123456789", "date": "2026-01-01"}


def record_of(behind):
    """Return runs of all arms and remedies. behind(run): nats above exact attention at the end; None: it diverged."""
    rows, controls = [], {TRUTH: 0.0, CONTROLS[0]: CONTROL, CONTROLS[1]: CONTROL / 2}
    remedies = [f"{base}: {remedy}" for base in ("per tile", "per row") for remedy in REMEDIES]
    for arm, qk_norm, seed in product((*ARMS, *remedies), (False, True), PLAN["seeds"]):
        run = {"arm": arm, **Training(qk_norm, 0.1, seed)._asdict(), "batch_tokens": PLAN["tokens"]}
        more = controls[arm] if arm in controls else behind(SimpleNamespace(**run))
        loss = None if more is None else 2.0 + more
        curve = [[step, loss or math.nan, 0.02] for step in range(4)]
        rows.append(run | {"final_loss": loss, "curve": curve})
    return Record(WHERE, rows)


def is_printed(run):
    return run.arm == "per tile" and not run.qk_norm


def behind_at_full_size(run):
    """Let the printed method without QK-norm end 10 to 12 thousandths behind, and one of its remedies hardly."""
    if run.arm == "per tile: V smoothed":
        return 0.0005
    return 0.010 + 0.001 * run.seed if is_printed(run) or run.arm.startswith("per tile:") else 0.0


def test_an_arm_is_behind_and_its_remedies_are_found():
    record = record_of(behind_at_full_size)
    found = full_batch.conditions(record)
    (behind,) = (x for x in found if x.verdict == full_batch.BEHIND)
    assert (behind.arm, behind.qk_norm, behind.gaps) == ("per tile", False, pytest.approx([0.010, 0.011, 0.012]))
    assert full_batch.claim_of(found).verdict == SUPPORTED
    assert [row.arm for row in full_batch.remedied(record)] == [
        "per tile: V smoothed",
        "per tile",
        "per tile: two terms",
    ]
    some = Record(WHERE, [row for row in record.rows if row["arm"] in ("per tile", TRUTH, *CONTROLS)])
    assert {x.arm for x in full_batch.conditions(some)} == {"per tile"}  # the screening is not complete
    assert full_batch.remedied(some) == []


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([0.0021, 0.0019, 0.0015], full_batch.BEHIND), ([0.0021, 0.0019, 0.0005], UNDECIDED),
        ([0.0019, 0.0015, -0.1], full_batch.NOT_BEHIND), ([0.010, -0.008, 0.012], UNDECIDED),
        ([0.010], UNDECIDED), ([0.0, math.inf], full_batch.BEHIND),
    ],
)  # fmt: skip
def test_a_gap_counts_where_its_interval_is_above_the_controls(gaps, verdict):
    assert full_batch.verdict_of(gaps, CONTROL, margin=2.0) == verdict


@pytest.mark.parametrize(
    ("behind", "verdict"),
    [
        (lambda run: 1.5 * CONTROL, CONTRADICTED),
        (lambda run: [0.010, -0.008, 0.012][run.seed] if is_printed(run) else 0.0, UNDECIDED),
        (lambda run: None if is_printed(run) else 0.0, SUPPORTED),
        (lambda run: None if run.arm == "kernels, unbiased" else 0.0, CONTRADICTED),  # a remedy does not count
    ],
)
def test_what_arms_behind_say_of_the_claim(behind, verdict):
    assert full_batch.claim_of(full_batch.conditions(record_of(behind))).verdict == verdict


@pytest.mark.parametrize("d", [64, 128])
def test_counting_agrees_with_the_profiler(d):
    """Per cent of a program's time that each unit is busy: by the model, from its instructions, and as measured."""
    instructions, scores = read_record("instructions_sm90"), 4 * 2048 // d * 8192**2
    for row in read_record("profile_h200").select(head_dim=d):
        if row["tensor"] is not None:  # cuDNN's kernels have no counts
            level = {"forward": 5, "dqdkdv": 5, "dqdkdv_wide": 5, "dkdv_pairs": 6}.get(row["kernel"], 4)
            rows = instructions.select(kernel=row["kernel"], level=level, head_dim=d)
            counted = busy(rows, row["profiled_ms"], row["profiled_ghz"], scores)
            for unit in ("tensor", "exp2", "issue"):
                assert counted[unit] == pytest.approx(row[unit], abs=6), (row["kernel"], unit)
