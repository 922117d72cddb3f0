"""Results of runs on a whole fixed corpus, which are archived: gaps, their verdict, remedies.

A gap is the number of nats by which an arm ends behind exact attention, both judged by exact attention. Training is so
sensitive that any small error separates two runs. So a gap counts only if it is larger than those of two controls:
exact attention in bfloat16, and exact attention with a random error in every step.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from sage_lab.records import Record, Row
from sage_lab.records import read_record as recorded  # noqa: F401 (notebook 14 says so)

from sage_course.figures.style import BLACK, BLUE, panels
from sage_course.results.claims import CONTRADICTED, LARGEST_GAP, SUPPORTED, UNDECIDED, Claim
from sage_course.results.pretraining import Interval, mean_interval

TRUTH, CONTROLS, REMEDIED = "exact", ("bf16", "random error"), "kernels, unbiased"
BEHIND, NOT_BEHIND = "behind", "not behind"


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


class Training(NamedTuple):
    """Facts that the arms of a comparison share."""

    qk_norm: bool
    learning_rate: float
    seed: int


class Runs:
    """The runs of a record whose batches are the whole corpus, by arm and training."""

    def __init__(self, record: Record):
        self.plan, self.columns = record.provenance["plan"], record.provenance["curve"]
        whole = record.select(batch_tokens=self.plan["tokens"])
        self.rows = {(row["arm"], Training(*(row[name] for name in Training._fields))): row for row in whole}

    def screened(self) -> Iterator[tuple[str, Training]]:
        """Yield the arms to judge under every training of the first seed."""
        for qk_norm in (False, True):
            for rate in self.plan["learning_rates"]:
                for arm in self.plan["arms"]:
                    if arm not in (TRUTH, *CONTROLS):
                        yield arm, Training(qk_norm, rate, self.plan["seeds"][0])

    def has(self, arm: str, training: Training) -> bool:
        """Return whether a run is there with all that it is compared with."""
        return all((name, training) in self.rows for name in (arm, TRUTH, *CONTROLS))

    def gap(self, arm: str, training: Training) -> float:
        """Return by how many nats a run ends behind exact attention; infinite if it diverged, NaN if the truth did."""
        ours, truth = (self.rows[name, training]["final_loss"] for name in (arm, TRUTH))
        if truth is None:
            return math.nan
        return math.inf if ours is None else ours - truth

    def control(self, training: Training) -> float:
        """Return the largest |gap| of both controls, at any report of the second half."""
        column, gaps = self.columns.index("exact_loss"), [0.0]
        truth = self.rows[TRUTH, training]["curve"]
        for control in CONTROLS:
            pairs = list(zip(self.rows[control, training]["curve"], truth, strict=False))
            gaps += [abs(ours[column] - theirs[column]) for ours, theirs in pairs[len(truth) // 2 :]]
        return max(gaps)


def conditions(record: Record) -> list[Condition]:
    """Return the condition of every arm of the screening except exact attention and the controls."""
    runs, found = Runs(record), []
    margin = runs.plan["margin"]
    for arm, first in runs.screened():
        seeds = [first._replace(seed=seed) for seed in runs.plan["seeds"]]
        if trainings := [training for training in seeds if runs.has(arm, training)]:
            gaps = [runs.gap(arm, training) for training in trainings]
            control = max(map(runs.control, trainings))
            exact_loss = mean(runs.rows[TRUTH, training]["final_loss"] for training in trainings)
            verdict = verdict_of(gaps, control, margin)
            found.append(Condition(arm, *first[:2], gaps, control, margin * control, exact_loss, verdict))
    return found


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
    printed = [condition for condition in found if condition.arm != REMEDIED]
    behind = sum(condition.verdict == BEHIND for condition in printed)
    is_open = any(condition.verdict not in (BEHIND, NOT_BEHIND) for condition in printed)
    sharp = [x.counts_from_share for x in printed if x.counts_from_share < LARGEST_GAP]
    count = f"behind in {behind} of {len(printed)}"
    ours = f"each batch is the whole corpus: {count} pairs of scales and training; in "
    ours += f"{len(sharp)} of them a gap of the paper's {LARGEST_GAP:.1%} would have counted"
    if sharp:
        ours += f" (the smallest gap that counts is {min(sharp):.1%} to {max(sharp):.1%})"
    return Claim(
        "(iii) Where no noise hides the gradient's bias, it falls behind.",
        ours,
        SUPPORTED if behind else CONTRADICTED if sharp and not is_open else UNDECIDED,
        f"{count} settings: which numbers share a scale, and how the model is trained",
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


def curves(record: Record, arm: str, column: str, **training: Any) -> list[list[float]]:
    """Return a column of the curve of this arm in each training that fits, with the first seed."""
    plan, place = record.provenance["plan"], record.provenance["curve"].index(column)
    rows = record.select(arm=arm, seed=plan["seeds"][0], batch_tokens=plan["tokens"], **training)
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
    """Name a run by its attention."""
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
