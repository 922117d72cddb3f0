"""Results of runs on a whole fixed corpus (`python -m sage_lab full-batch`): gaps, their verdict, remedies.

A gap is the number of nats by which an arm ends behind exact attention, both judged by exact attention. Training is so
sensitive that any small error separates two runs. So a gap counts only if it is larger than those of two controls:
exact attention in bfloat16, and exact attention with a random error in every step.
"""

import math
from collections.abc import Sequence
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from sage_lab.experiments.full_batch import (
    ARMS,
    CONTROLS,
    CURVE,
    TRUTH,
    Finished,
    FullBatchPlan,
    FullBatchRun,
    furthest_behind,
    gap,
    largest_control,
    remedy_runs,
    screening,
)
from sage_lab.records import RECORDED, Record, Row, read_record

from sage_course.figures.style import BLACK, BLUE, ORANGE, RED, panels
from sage_course.results.claims import CONTRADICTED, LARGEST_GAP, SUPPORTED, UNDECIDED, Claim
from sage_course.results.pretraining import Interval, mean_interval

BEHIND, NOT_BEHIND = "behind", "not behind"
RUN_COLORS = {"exact": BLACK, "printed": RED, "kernels": ORANGE, "unbiased": BLUE}


class Condition(NamedTuple):
    """One arm under one training, all of its seeds."""

    arm: str
    qk_norm: bool
    learning_rate: float
    gaps: list[float]  # nats, one per seed; infinite where it diverged
    control: float  # the controls' largest gap, nats
    counts_from: float  # nats, `margin` times the controls' gap: no smaller gap can be told from scatter
    exact_loss: float  # nats per byte that exact attention ends with, mean over the seeds
    verdict: str

    @property
    def counts_from_share(self) -> float:
        """Return `counts_from` as a share of exact attention's loss: the paper's nats are per token, ours per byte."""
        return self.counts_from / self.exact_loss


class Remedied(NamedTuple):
    """An arm and what it gains. gap: nats, of the seed that every remedy has; gradient_error: at the end, relative."""

    arm: str
    gap: float
    gradient_error: float


def recorded(name: str) -> Record | None:
    """Return the record of that name; None if nothing is recorded."""
    return read_record(name) if (RECORDED / f"{name}.json").exists() else None


def plan_of(record: Record) -> FullBatchPlan:
    plan = {name: tuple(x) if isinstance(x, list) else x for name, x in record.provenance["plan"].items()}
    return FullBatchPlan(**plan)


def finished_of(record: Record) -> Finished:
    return {FullBatchRun.of_row(row): row for row in record.rows}


def conditions(record: Record) -> list[Condition]:
    """Return the condition of every arm of the screening except exact attention and the controls."""
    plan, finished = plan_of(record), finished_of(record)
    found = []
    for first in screening(plan):
        if first.arm in (TRUTH, *CONTROLS):
            continue
        runs = [run for seed in plan.seeds if _with_truth(run := first.replace(seed=seed), finished)]
        if runs:
            gaps = [gap(finished, run) for run in runs]
            control = max(largest_control(finished, run) for run in runs)
            counts_from, verdict = plan.margin * control, verdict_of(gaps, control, plan.margin)
            exact_loss = mean(finished[run.replace(arm=TRUTH)]["final_loss"] for run in runs)
            kind = first.arm, first.qk_norm, first.learning_rate
            found.append(Condition(*kind, gaps, control, counts_from, exact_loss, verdict))
    return found


def _with_truth(run: FullBatchRun, finished: Finished) -> bool:
    return all(run.replace(arm=arm) in finished for arm in (run.arm, TRUTH, *CONTROLS))


def verdict_of(gaps: Sequence[float], control: float, margin: float) -> str:
    """Decide whether an arm is behind exact attention.

    It is if its 95% interval lies above the controls' gap, or if it diverged. It is not if no gap is above `margin`
    times the controls'. One seed has no interval: if its gap counts, nothing is decided.
    """
    if any(math.isinf(x) for x in gaps):
        return BEHIND
    if all(x <= margin * control for x in gaps):
        return NOT_BEHIND
    interval = _interval(gaps)
    return BEHIND if interval and interval.mean - interval.half > control else UNDECIDED


def _interval(gaps: Sequence[float]) -> Interval | None:
    finite = [x for x in gaps if math.isfinite(x)]
    return mean_interval(finite) if len(finite) > 1 else None


def claim_of(found: Sequence[Condition]) -> Claim:
    """Judge claim (iii) without noise: does bias alone make SageBwd fall behind? Arms with a remedy do not count.

    It is supported if one arm is behind. It is contradicted if none is, although the paper's gap would have counted.
    """
    printed = [condition for condition in found if "remedy" not in ARMS[condition.arm].changes]
    behind = sum(condition.verdict == BEHIND for condition in printed)
    is_open = any(condition.verdict not in (BEHIND, NOT_BEHIND) for condition in printed)
    sharp = [x.counts_from_share for x in printed if x.counts_from_share < LARGEST_GAP]
    number = f"behind in {behind} of {len(printed)} pairs of scales and training"
    ours = f"each batch is the whole corpus: {number}; in "
    ours += f"{len(sharp)} of them a gap of the paper's {LARGEST_GAP:.1%} would have counted"
    if sharp:
        ours += f" (the smallest gap that counts is {min(sharp):.1%} to {max(sharp):.1%})"
    return Claim(
        "(iii) Where no noise hides the gradient's bias, it falls behind.",
        ours,
        SUPPORTED if behind else CONTRADICTED if sharp and not is_open else UNDECIDED,
        number,
    )


def gaps_figure(found: Sequence[Condition], *, title: str) -> Figure:
    """Draw a row per condition and a dot per seed; grey: gaps that do not count. A diverged run has no dot."""
    figure, (ax,) = panels(1, width=7.4, height=1.2 + 0.32 * len(found), title=title)
    for y, condition in enumerate(found):
        counts = 1000 * condition.counts_from
        ax.barh(y, 2 * counts, left=-counts, color="0.85", height=0.8)
        dots = [1000 * x for x in condition.gaps if math.isfinite(x)]
        ax.plot(dots, [y] * len(dots), "o", color=BLUE, markersize=6)
    names = [f"{x.arm}, {'QK-norm' if x.qk_norm else 'plain'}, rate {x.learning_rate:g}" for x in found]
    ax.set_yticks(range(len(found)), names, fontsize=9)
    ax.axvline(0, color=BLACK, linewidth=0.8)
    ax.set(xlabel="final loss minus exact attention's, in thousandths of a nat (grey: too small to count)")
    ax.invert_yaxis()
    return figure


def _worst(plan: FullBatchPlan, finished: Finished) -> FullBatchRun | None:
    """Return the run that is furthest behind; None as long as the screening is not complete."""
    complete = all(run in finished for run in screening(plan))
    return furthest_behind(plan, finished) if complete else None


def remedied(record: Record) -> list[Remedied]:
    """Return the arm that is furthest behind and its remedies, the smallest gap first; empty if no arm is behind."""
    plan, finished = plan_of(record), finished_of(record)
    worst = _worst(plan, finished)
    if worst is None:
        return []
    runs = [worst, *(run for run in remedy_runs(plan, finished) if run in finished)]
    rows = [Remedied(run.arm, gap(finished, run), _last_error(finished[run])) for run in runs]
    return sorted(rows, key=lambda row: row.gap)


def _last_error(row: Row) -> float:
    return row["curve"][-1][CURVE.index("gradient_error")]


def curves(record: Record, arm: str, column: str, **training: Any) -> list[list[float]]:
    """Return a column of the curve of this arm in each training that fits, with the first seed."""
    plan, place = plan_of(record), CURVE.index(column)
    rows = record.select(arm=arm, seed=plan.seeds[0], batch_tokens=plan.tokens, **training)
    return [[line[place] for line in row["curve"]] for row in rows]


def bias_shares(record: Record, arms: Sequence[str], learning_rate: float) -> dict[str, dict[str, float]]:
    """Return |bias| / |gradient| of each arm without and with QK-norm: the median of the second half, first seed."""
    return {
        arm: {
            name: median(curve[len(curve) // 2 :])
            for name, qk_norm in (("plain", False), ("QK-norm", True))
            for curve in curves(record, arm, "gradient_error", learning_rate=learning_rate, qk_norm=qk_norm)
        }
        for arm in arms
    }


def pretraining_figure(record: Record, *, title: str) -> Figure:
    """Draw the second half of the validation losses, a panel per seed; rows of `pretrain-grid --plan repair`."""
    starts = sorted({(row["qk_norm"], row["seed"]) for row in record.rows}, key=lambda start: (not start[0], start[1]))
    figure, axes = panels(len(starts), width=3.2, height=3.4, sharey=True, title=title)
    for ax, (qk_norm, seed) in zip(axes, starts, strict=True):
        for row in record.select(qk_norm=qk_norm, seed=seed):
            curve = row["curve"][len(row["curve"]) // 2 :]
            tokens, losses = [x / 1e6 for x, _ in curve], [x for _, x in curve]
            ax.plot(tokens, losses, color=RUN_COLORS[run_name(row)], label=run_name(row))
        ax.set(xlabel="millions of tokens", title=f"{'QK-norm' if qk_norm else 'no QK-norm'}, seed {seed}")
    axes[0].set_ylabel("validation loss, nats")
    axes[0].legend(fontsize=9)
    return figure


def pretraining_gaps(record: Record) -> list[tuple[str, bool, int, float]]:
    """Return (run, QK-norm, seed, final loss minus exact attention's with the same seed), infinite if it diverged."""
    exact = {(row["qk_norm"], row["seed"]): row for row in record.rows if row["attention"] == "exact"}
    found = []
    for row in record.rows:
        truth = exact.get((row["qk_norm"], row["seed"]))
        if truth and row is not truth and not truth["diverged"]:
            behind = math.inf if row["diverged"] else row["final_val_loss"] - truth["final_val_loss"]
            found.append((run_name(row), row["qk_norm"], row["seed"], behind))
    return found


def run_name(row: Row) -> str:
    """Name a run as RUN_COLORS does."""
    if row["attention"] == "exact":
        return "exact"
    if row["remedy"] != "none":
        return "unbiased"
    return "printed" if row["granularity"] == "block" else "kernels"


def relative_errors(rows: Sequence[Row], tensor: str, **chosen: str) -> dict[str, float]:
    """Return each remedy's error divided by that without one: the geometric mean over the cases `chosen`."""
    rows = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    without = {(row["case"], row["layer"]): row[tensor] for row in rows if row["remedy"] == "none"}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["remedy"], []).append(row[tensor] / without[row["case"], row["layer"]])
    return {remedy: geometric_mean(found) for remedy, found in ratios.items()}
