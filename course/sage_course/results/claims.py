"""The SageBwd paper's claims about training, each with the result of our runs and a verdict by a fixed rule.

A gap between SageBwd and exact attention is supported if its 95% interval lies above zero, contradicted at our size if
the interval ends below the paper's gap at its large step, and undecided if it holds both. A claim about the paper's
large step is not tested by steps that are all smaller than its small one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sage_lab.records import Record

from sage_course.results.pretraining import (
    PAPER_LOSSES,
    Interval,
    bias_to_noise,
    final_losses,
    last_errors,
    mean_interval,
    noise_checkpoints,
    noise_of,
    paired_differences,
    pretrain_runs,
    relative_gaps,
    score_groups,
)

SUPPORTED, PARTLY, UNDECIDED = "supported", "supported in part", "cannot be decided"
CONTRADICTED, UNTESTED = "contradicted at our size", "not tested at our size"
# Tokens per step of the paper -> SageBwd's final loss over exact attention's, minus one.
PAPER_GAPS = {size: losses["sagebwd"] / losses["exact"] - 1 for size, losses in PAPER_LOSSES.items()}
LARGEST_GAP = max(PAPER_GAPS.values())


class Claim(NamedTuple):
    paper: str
    ours: str
    verdict: str


def decide(found: Interval, gap: float) -> str:
    """Decide whether a loss differs. found: the relative gap; gap: the paper's."""
    if found.mean - found.half > 0:
        return SUPPORTED
    return CONTRADICTED if found.mean + found.half < gap else UNDECIDED


def claims(runs: Record, layers: Record) -> list[Claim]:
    """Judge the four claims, (iii) in two parts. runs, layers: records of `pretrain-grid`, its --json and --traces."""
    small, large = runs.provenance["plan"]["tokens_per_step"]
    at_small, at_large = (mean_interval(relative_gaps(runs, size)) for size in (small, large))
    return [
        Claim(
            "(i) At the small step SageBwd trains as well as exact attention.",
            described(at_small),
            SUPPORTED if at_small.mean + at_small.half < LARGEST_GAP else UNDECIDED,
        ),
        most_error_prone(layers, (small, large)),
        Claim(
            f"(iii) At the large step it falls behind, by {LARGEST_GAP:.1%}.",
            described(at_large),
            decide(at_large, LARGEST_GAP) if large >= min(PAPER_LOSSES) else UNTESTED,
        ),
        divergence(runs, large),
        smoothing(runs, (small, large)),
    ]


def described(gap: Interval) -> str:
    """Describe a gap, as in "loss +0.2% (95% interval -0.4% to +0.8%, 3 seeds)"."""
    low, high = gap.mean - gap.half, gap.mean + gap.half
    return f"loss {gap.mean:+.1%} (95% interval {low:+.1%} to {high:+.1%}, {gap.count} seeds)"


def most_error_prone(layers: Record, sizes: Sequence[int]) -> Claim:
    """Judge whether dS has more error than its inputs, and whether a gradient made of it has the largest error."""
    traced = [errors for size in sizes for norm in (True, False) for errors in last_errors(layers, size, norm).values()]
    above = {name: sum(errors["dS"] > errors[name] for errors in traced) for name in ("P", "O")}
    behind = sum(max(errors, key=errors.get) in ("dQ", "dK") for errors in traced)
    ours = f"of {len(traced)} traced layers, dS arrives with more error than P in {above['P']}, than O in {above['O']}"
    holds = [count == len(traced) for count in (*above.values(), behind)]
    return Claim(
        "(ii) dS is the tensor where errors grow.",
        f"{ours}; dQ or dK, which are made of it, are worst in {behind}",
        SUPPORTED if all(holds) else PARTLY if any(holds) else CONTRADICTED,
    )


def divergence(runs: Record, large: int) -> Claim:
    rows = runs.select(attention="sagebwd", qk_norm=False, tokens_per_step=large)
    lost = sum(bool(row["diverged"]) for row in rows)
    return Claim(
        "(iii) Without QK-norm it diverges there.",
        f"{lost} of {len(rows)} runs diverged",
        SUPPORTED if lost else "not seen at our size",
    )


def smoothing(runs: Record, sizes: Sequence[int]) -> Claim:
    """Report both kinds of smoothing without a verdict: one seed of each can't be told from the scatter of seeds."""
    cells = [(size, norm) for size in sizes for norm in (True, False)]
    listed = []
    for kind, name in {"SageBwd, nothing smoothed": "nothing", "SageBwd, Q and K smoothed": "Q and K"}.items():
        pairs = (paired_differences(runs, kind, *cell, baseline="SageBwd, K smoothed") for cell in cells)
        changes = [change for pair in pairs for change in pair.values()]
        listed.append(f"{name} {min(changes):+.3f} to {max(changes):+.3f}")
    exact = [final_losses(pretrain_runs(runs, "exact", size)).values() for size in sizes]
    scatter = max(max(losses) - min(losses) for losses in exact)
    ours = f"loss less that with K smoothed: {', '.join(listed)}, one seed each; exact's seeds span {scatter:.3f}"
    return Claim("(iv) K-smoothing is needed, Q-smoothing adds nothing.", ours, UNDECIDED)


def bias_ratios(noise: Record, variant: str, tokens_per_step: int) -> list[float]:
    """Return |bias| / noise of one step in the worst layer's query and key weights, by checkpoint; 0 if none found."""
    found = []
    for rows in noise_checkpoints(noise).values():
        ratios = [bias_to_noise(noise_of(rows, group, variant), tokens_per_step) for group in score_groups(rows)]
        found.append(max((ratio for ratio in ratios if not math.isnan(ratio)), default=0.0))
    return found


def hypothesis(runs: Record, noise: Record) -> str:
    """Compare bias and noise in words: our kernels at our large step, and the paper's scales at its steps."""
    steps = [("our kernels", "per row, nearest", "our", max(runs.provenance["plan"]["tokens_per_step"]))]
    steps += [("one scale per tile, as printed,", "per block, nearest", "the paper's", size) for size in PAPER_LOSSES]
    parts = []
    for what, variant, whose, size in steps:
        ratios = bias_ratios(noise, variant, size)
        parts.append(f"{what} at {whose} {size:,} tokens per step {min(ratios):.2f} to {max(ratios):.2f}")
    where = f"in the worst layer of {len(ratios)} checkpoints"
    return f"The gradient's bias over the noise of one step (above 1 it leads), {where}: {'; '.join(parts)}."
