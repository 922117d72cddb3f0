"""Verdicts: the claims of the SLA2 paper, and our own, that the rows support.

Two arms are paired twice: they train on equal videos, seed by seed, and are judged on equal (video, noise, t). The
bootstrap draws seeds and videos with replacement, 10,000 times. Both are samples, and all seeds are judged on the same
videos, so they are drawn independently. The interval holds 95% of the means. A claim is supported if the whole interval
is above 0, contradicted if all of it is below, and otherwise not decided. One seed shows no scatter between seeds and
decides nothing: its interval draws videos alone.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sage_lab.records import Row, markdown_table

DRAWS = 10_000
LOSS = "loss_by_video"
SUPPORTED, CONTRADICTED, NOT_DECIDED = "supported", "contradicted", "not decided"


class Claim(NamedTuple):
    """A claim that `better` has the lower loss.

    paper: the VisionReward of (better, worse) in the paper, or None where it reports none.
    """

    words: str
    better: str
    worse: str
    paper: tuple[float, float] | None = None


_DATA = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
CLAIMS = [Claim(**facts) for facts in _DATA["claim"]]


class Difference(NamedTuple):
    """The gain of the better arm: its mean, and the interval that holds 95% of the bootstrap's means."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        if self.seeds == 1:
            return NOT_DECIDED
        return SUPPORTED if self.low > 0 else CONTRADICTED if self.high < 0 else NOT_DECIDED


def bootstrap(differences: np.ndarray, draws: int = DRAWS) -> Difference:
    """Bootstrap differences [seeds, videos], which are positive where the better arm is better.

    The random numbers are fixed. Raises ValueError if there is nothing to draw from.
    """
    if differences.ndim != 2 or 0 in differences.shape:
        raise ValueError(f"differences: expected [seeds, videos], none of size zero, got {differences.shape}")
    seeds, videos = differences.shape
    rng = np.random.default_rng(0)
    # How often each is drawn, as weights: [draws, seeds] and [draws, videos].
    of_seeds, of_videos = (rng.multinomial(n, np.full(n, 1 / n), size=draws) / n for n in (seeds, videos))
    low, high = np.quantile(((of_seeds @ differences) * of_videos).sum(1), (0.025, 0.975))
    return Difference(float(differences.mean()), float(low), float(high), seeds)


def paired(rows: Sequence[Row], better: str, worse: str) -> np.ndarray | None:
    """Return the loss that `better` saves by seed and video, for the seeds that have both arms; None if no seed has."""
    by_seed = [
        {row["seed"]: row[LOSS] for row in rows if row["arm"] == arm and row.get(LOSS)} for arm in (better, worse)
    ]
    common = sorted(by_seed[0].keys() & by_seed[1].keys())
    return np.array([np.subtract(by_seed[1][seed], by_seed[0][seed]) for seed in common]) if common else None


def verdict_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a row per claim that the rows have both arms of. An arm that diverged loses."""
    arms, diverged = {x["arm"] for x in rows}, {x["arm"] for x in rows if x.get("diverged")}
    found = []
    for claim in CLAIMS:
        both = {claim.better, claim.worse}
        row = {"claim": claim.words, "better": claim.better, "worse": claim.worse, "paper": claim.paper}
        if both & diverged and both <= arms:
            verdict = NOT_DECIDED if both <= diverged else CONTRADICTED if claim.better in diverged else SUPPORTED
            found.append(row | {"verdict": f"{verdict}: {' and '.join(sorted(both & diverged))} diverged"})
        elif (saved := paired(rows, claim.better, claim.worse)) is not None:
            difference = bootstrap(saved)
            found.append(row | difference._asdict() | {"verdict": difference.verdict})
    return found


def verdict_table(found: Sequence[Row]) -> str:
    """Return a table of verdicts, with differences in thousandths of the loss."""
    lines = []
    for row in found:
        numbers = ("mean", "low", "high")
        cells = [f"{1000 * row[name]:+.3f}" for name in numbers] if "mean" in row else ["-"] * 3
        paper = "{:.4f} against {:.4f}".format(*row["paper"]) if row["paper"] else ""
        lines.append((row["claim"], cells[0], f"{cells[1]} to {cells[2]}", row.get("seeds", ""), row["verdict"], paper))
    header = ("claim", "loss it saves, 1/1000", "95% interval", "seeds", "verdict", "VisionReward in the paper")
    return markdown_table(header, lines)


COLUMNS = {  # heading: (name in a row, format)
    "loss": ("loss", "{:.5f}"),
    "attention's error": ("attention_error", "{:.3f}"),
}


def arm_table(rows: Sequence[Row]) -> str:
    """Return a table with a line per arm: means over its seeds."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found = [row for row in rows if row["arm"] == arm]
        lines.append((arm, len(found), *(mean_cell(found, *column) for column in COLUMNS.values())))
    return markdown_table(("arm", "seeds", *COLUMNS), lines)


def mean_cell(rows: Sequence[Row], name: str, form: str) -> str:
    """Return the mean of the rows' numbers, or lists of numbers, `name`; "-" if no row has one."""
    values = [np.mean(row[name]) for row in rows if row.get(name) is not None]
    return form.format(np.mean(values)) if values else "-"
