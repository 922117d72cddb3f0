"""Verdicts and statistics on records whose answer is known; RESULTS.md and nbval compare those of real ones."""

import copy
import math

import pytest
from sage_course.results import claims
from sage_course.results.claims import CONTRADICTED, PARTLY, SUPPORTED, UNDECIDED
from sage_course.results.hopper_model import busy
from sage_course.results.pretraining import (
    TRAINING,
    Interval,
    agreed,
    gaps_table,
    gradient_is_lost,
    highest_rate,
    judged,
    paired_differences,
    paired_gaps,
    pretrain_runs,
    signed,
)
from sage_lab.records import Record, read_record

RUNS, CAPTURES = read_record("pretrain_h200"), read_record("table2_captures")
GPTS = highest_rate(read_record("pretrain_gpt_h200"))
LARGE = max(RUNS.provenance["plan"]["tokens_per_step"])
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


def test_a_batch_as_large_as_the_papers_small_one_does_not_test_a_claim_about_the_large_one():
    """As the rule of notebook 06b says, and the paper itself finds no gap there."""
    for size, expected in ((2**18, claims.UNTESTED), (2**19, CONTRADICTED)):
        rows = [row | {"tokens_per_step": size} for row in GPTS.rows]
        assert claims.gpt_claims(Record({}, rows))[1].verdict == expected


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [((0, 0), SUPPORTED), ((0, 0.1), PARTLY), ((0.1, 0.1), CONTRADICTED), ((0.1, 9), UNDECIDED), ((9, 9), UNDECIDED)],
)
def test_as_well_asks_every_training(steps, verdict):
    """A step of 0 leaves SageBwd level. With 0.1 from seed to seed it is behind, and with 9 undecided."""
    rows = GPTS.select(qk_norm=False)
    for step, rate in zip(steps, (0.006, 0.1), strict=True):
        for row in GPTS.select(qk_norm=True):
            worse = {"final_val_loss": 9 + step * row["seed"]} if step and row["arm"] == "sagebwd" else {}
            rows = [*rows, row | worse | {"learning_rate": rate}]
    assert claims.gpt_claims(Record({}, rows))[0].verdict == verdict


def test_a_gradient_is_lost_only_while_the_control_holds():
    def run(sagebwd, exact):
        return {"probes": [{"errors": {"sagebwd": x, "exact": y}} for x, y in zip(sagebwd, exact, strict=True)]}

    assert gradient_is_lost(run([0.1, 1.2, 1.3, 1.4], [0.1] * 4), "sagebwd")
    assert not gradient_is_lost(run([1.2, 0.9, 1.3, 1.4], [0.1] * 4), "sagebwd")
    assert not gradient_is_lost(run([1.2, 1.2, 1.3, 1.4], [0.1, 0.1, 0.6, 0.1]), "sagebwd")


def runs_of(arms):
    """Return a record of arms -> training (QK-norm, rate) -> a loss per seed, on one batch; None: it diverged."""
    rows = []
    for (arm, qk_norm, rate), losses in arms.items():
        for seed, loss in enumerate(losses):
            facts = {"arm": arm, "qk_norm": qk_norm, "learning_rate": rate, "seed": seed, "diverged": loss is None}
            steps = {"step_losses": [9.0, *[loss or math.nan] * 10], "arguments": {"same_batch": True}}
            rows.append(facts | steps | {"final_val_loss": 3.0, "tokens_per_step": 8, "context": 4, "tokens": 16})
    return Record({}, rows)


EXACT, LOST = [2.0, 3.0, 2.5], [2.0, None, 2.5]


def near(middle):
    """Return losses whose gaps to EXACT have this mean, and a 95% interval of 1.242% on either side."""
    return [x * (1 + middle + shift) for x, shift in zip(EXACT, (-0.005, 0.0, 0.005), strict=True)]


@pytest.mark.parametrize(
    ("exact", "losses", "verdict"),
    [
        (EXACT, near(0.0125), "behind"), (EXACT, near(-0.0125), "ahead"), (EXACT, near(0.008), "level"),
        (EXACT, near(0.0124), "undecided"), (EXACT, near(0.009), "undecided"), (EXACT, EXACT[:1], "undecided"),
        (EXACT, near(-0.01), "level"), (EXACT, [2.0, math.nan, 2.5], "behind"), (EXACT, LOST, "behind"),
        (LOST, near(0.0125), "undecided"), (LOST, LOST, "level"),
    ],
)  # fmt: skip
def test_losses_are_judged_seed_by_seed(exact, losses, verdict):
    record = runs_of({("exact", True, 0.1): exact, ("printed", True, 0.1): losses})
    assert judged(paired_gaps(record, "printed")) == verdict
    assert agreed(record, "printed") == "undecided"  # one training alone


@pytest.mark.parametrize("name", TRAINING)
def test_runs_that_were_trained_otherwise_are_not_compared(name):
    rows = runs_of({("exact", True, 0.1): [2.0], ("printed", True, 0.1): [3.0]}).rows
    record = Record({}, [*rows, rows[1] | {name: 0}])
    expected = "| printed against exact | yes | 0.1 | 8 | 4 | 0 | +50.0% (1 seed, which decides nothing) | undecided |"
    assert gaps_table(record).splitlines()[2:] == [expected]
    with pytest.raises(ValueError, match="training: expected one"):
        paired_gaps(record, "printed")


@pytest.mark.parametrize(
    ("second", "claim"),
    [
        ({}, CONTRADICTED), ({0.1: LOST}, UNDECIDED), ({0.1: LOST, 0.2: near(0.02), 0.3: LOST}, SUPPORTED),
        ({0.1: near(-0.02)}, CONTRADICTED), ({0.1: near(0.01)}, UNDECIDED),
    ],
)  # fmt: skip
def test_a_claim_needs_all_rates(second, claim):
    """With everything else level, and a remedy that is lost, one scale per tile without QK-norm decides.

    0.3 is a rate at which there is nothing to compare with.
    """
    arms = {(arm, norm, rate): EXACT for arm in ("exact", "sagebwd", "printed", "unbiased")
            for norm in (False, True) for rate in (0.1, 0.2)}  # fmt: skip
    changed = {("printed", False, rate): losses for rate, losses in second.items()} | {("unbiased", True, 0.1): LOST}
    assert claims.without_noise(runs_of(arms | changed)).verdict == claim


@pytest.mark.parametrize(
    ("middle", "half", "verdict"),
    [(2.0, 1.0, SUPPORTED), (0.5, 1.0, CONTRADICTED), (0.5, 3.0, UNDECIDED), (-3.0, 1.0, CONTRADICTED)],
)
def test_a_verdict_on_a_gap_follows_its_rule(middle, half, verdict):
    assert claims.decide(Interval(middle, half / 4, half, 3), 2.1) == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, claims.PARTLY), ({"O": 1e-3}, SUPPORTED), ({"O": 1.0}, CONTRADICTED), ({"P": 1.0, "O": 1.0}, CONTRADICTED),
        ({"dK": 2.0, "dQ": 1e-3, "O": 1e-3}, SUPPORTED), ({"P": 1.0}, CONTRADICTED),
    ],
)  # fmt: skip
def test_where_errors_grow(changes, verdict):
    rows = [row | {"rel_l2": changes.get(row["tensor"], row["rel_l2"])} for row in CAPTURES.rows]
    assert claims.most_error_prone(Record(CAPTURES.provenance, rows)).verdict == verdict


def test_what_is_rounded_to_zero_has_no_sign():
    assert [signed(x, ".1%") for x in (-0.0004, 0.0004, -0.1, 0.001)] == ["0.0%", "0.0%", "-10.0%", "+0.1%"]


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
