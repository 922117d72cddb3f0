"""The SageBwd paper's claims about training, each with the result of our runs and a verdict by a fixed rule.

A gap between SageBwd and exact attention is supported if its 95% interval is above zero. It is contradicted at our size
if the interval ends below the paper's gap with its large batch. Otherwise it is undecided. If all of our batches are
at most as large as the paper's small one, a claim about its large batch is not tested.

The paper says "tokens per step" for the size of a batch; here it is "tokens per batch".
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sage_lab.records import Record, Row

from sage_course.results.pretraining import (
    LARGEST_GAP,
    PAPER_LOSSES,
    Compared,
    Interval,
    agreed,
    bias_to_noise,
    compared,
    final_losses,
    judged,
    mean_interval,
    noise_checkpoints,
    noise_of,
    paired_differences,
    paired_gaps,
    pretrain_runs,
    relative_gaps,
    score_groups,
    training_cells,
    training_words,
    trainings,
    words_of,
)

SUPPORTED, PARTLY, UNDECIDED = "supported", "supported in part", "cannot be decided"
CONTRADICTED, UNTESTED = "contradicted at our size", "not tested at our size"
SMALL_BATCH = "(i) With the small batch SageBwd trains as well as exact attention."
LARGE_BATCH = f"(iii) With the large batch it falls behind, by {LARGEST_GAP:.1%}."
WITHOUT_NORM = "(iii) With the large batch and without QK-norm it diverges."
SMOOTHING = "(iv) K-smoothing is needed, Q-smoothing adds nothing."
# Of the claim that an arm ends behind, by the verdict on its gaps.
WHERE_BEHIND = {"behind": SUPPORTED, "level": CONTRADICTED, "ahead": CONTRADICTED, "undecided": UNDECIDED}


class Claim(NamedTuple):
    paper: str
    ours: str
    verdict: str
    number: str = ""  # of `ours`, what the first page has; "": all of it


def decide(found: Interval, gap: float) -> str:
    """Return the verdict on a gap. found: our relative gap; gap: the paper's."""
    if found.mean - found.half > 0:
        return SUPPORTED
    return CONTRADICTED if found.mean + found.half < gap else UNDECIDED


def claims(runs: Record, captures: Record) -> list[Claim]:
    """Judge the four claims, (iii) in two parts.

    Args:
        runs: The archived record of `pretrain-grid --json`.
        captures: The record of `tables 2`.
    """
    small, large = runs.provenance["plan"]["tokens_per_step"]
    at_small, at_large = (mean_interval(relative_gaps(runs, size)) for size in (small, large))
    return [
        Claim(
            SMALL_BATCH,
            f"loss {at_small.words}",
            SUPPORTED if at_small.mean + at_small.half < LARGEST_GAP else UNDECIDED,
        ),
        most_error_prone(captures),
        Claim(
            LARGE_BATCH,
            f"loss {at_large.words}",
            decide(at_large, LARGEST_GAP) if large > min(PAPER_LOSSES) else UNTESTED,
        ),
        divergence(runs, large),
        smoothing(runs, (small, large)),
    ]


def layer_errors(captures: Record) -> dict[tuple[str, int], dict[str, float]]:
    """Return capture and layer -> tensor -> relative L2 error."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in captures.rows:
        found.setdefault((row["capture"], row["layer"]), {})[row["tensor"]] = row["rel_l2"]
    return found


def captured(captures: Record) -> str:
    """Say what was captured, and which layers were kept."""
    runs = captures.provenance["captures"]
    kept, of = (len(runs[0]["layers_kept"][name]) for name in ("kept", "captured"))
    models = f"{len(runs)} small models trained with {runs[0]['run']['attention']} attention"
    return f"{models}; of each, one head in the {kept} of its {of} layers where dQ has the largest error"


def most_error_prone(captures: Record) -> Claim:
    """Judge whether dS has more error than P and O: supported if in every layer, in part if in some.

    The error of dQ, which comes from dS, does not count: the layers were chosen by it.
    """
    layers = layer_errors(captures).values()
    above = [[errors["dS"] > errors[name] for errors in layers] for name in ("P", "O")]
    of_dq = sum(max(errors, key=errors.get) == "dQ" for errors in layers)
    ours = f"dS has more error than P in {sum(above[0])} of {len(layers)} layers, and more than O in {sum(above[1])} "
    ours += f"({captured(captures)})"
    holds = [all(of_layer) for of_layer in zip(*above, strict=True)]
    return Claim(
        "(ii) dS is the tensor where errors grow.",
        f"{ours}; dQ, computed from dS, has the largest error in {of_dq}, but the layers were chosen by this error",
        SUPPORTED if all(holds) else PARTLY if any(holds) else CONTRADICTED,
        ours,
    )


def divergence(runs: Record, large: int) -> Claim:
    rows = runs.select(attention="sagebwd", qk_norm=False, tokens_per_step=large)
    lost = sum(bool(row["diverged"]) for row in rows)
    return Claim(
        WITHOUT_NORM,
        f"{lost} of {len(rows)} runs diverged",
        SUPPORTED if lost else UNTESTED,
    )


def smoothing(runs: Record, sizes: Sequence[int]) -> Claim:
    """Report both kinds of smoothing. No verdict is possible: with one seed of each, scatter hides a difference."""
    cells = [(size, norm) for size in sizes for norm in (True, False)]
    listed, spans = [], []
    for kind in ("SageBwd, nothing smoothed", "SageBwd, Q and K smoothed"):
        pairs = (paired_differences(runs, kind, *cell, baseline="SageBwd, K smoothed") for cell in cells)
        changes = [change for pair in pairs for change in pair.values()]
        spans.append(f"{min(changes):+.3f} to {max(changes):+.3f}")
        listed.append(f"{spans[-1]} with {kind.removeprefix('SageBwd, ')}")
    exact = [final_losses(pretrain_runs(runs, "exact", size)).values() for size in sizes]
    scatter = max(max(losses) - min(losses) for losses in exact)
    ours = (
        f"loss minus that with K smoothed, one seed each: {', '.join(listed)}; exact attention's seeds differ by up to "
    )
    ours += f"{scatter:.3f}"
    return Claim(SMOOTHING, ours, UNDECIDED)


def without_noise(record: Record) -> Claim:
    """Judge claim (iii) where every batch is the same one: does the gradient's bias alone make SageBwd fall behind?

    Supported if one scale per row or one per tile is behind at every learning rate, with QK-norm or without. It is
    contradicted at our size if all four of these are level with exact attention at every rate. A remedy does not count.

    Args:
        record: Rows of `pretrain --same-batch`.
    """
    arms = ("sagebwd", "printed")
    found = [agreed(record, arm, qk_norm=qk_norm) for arm, qk_norm in itertools.product(arms, (False, True))]
    single = [judged(paired_gaps(record, arm, **training)) for arm in arms for training in trainings(record)]
    seen = len(single) - single.count("behind") - single.count("undecided")
    seeds, rates = (len({row[name] for row in record.rows}) for name in ("seed", "learning_rate"))
    agreeing = len(found) - found.count("undecided")
    number = f"behind in {single.count('behind')} of {len(single)} comparisons of {seeds} seeds each; "
    number += f"a gap of {LARGEST_GAP:.1%} is ruled out in {seen}"
    ours = (
        f"each batch is the same one: {number} (one scale per row or tile, with or without QK-norm, at {rates} "
        f"learning rates); the rates agree in {agreeing} of {len(found)} settings"
    )
    return Claim(
        "(iii) Where no noise hides the gradient's bias, it falls behind.",
        ours,
        SUPPORTED if "behind" in found else UNDECIDED if "undecided" in found else CONTRADICTED,
        number,
    )


def gpt_claims(record: Record) -> list[Claim]:
    """Judge the claims about training by the GPTs: (i), (iii) in two parts, (iv).

    "As well as" asks every training with QK-norm, a small batch and several seeds. It is supported if SageBwd is level
    or ahead in all of them, and in part if it is in some. It is contradicted if SageBwd is behind in all of them, and
    cannot be decided otherwise. "Diverges" is supported in part if a run without QK-norm does and its pair does not.
    K-smoothing is needed, or not, if all trainings with several seeds agree.
    """
    pairs = ("sagebwd", "exact"), ("unsmoothed", "sagebwd")
    everywhere, smoothed = ([x for x in compared(record) if (x.arm, x.baseline) == pair] for pair in pairs)
    with_norm, without = ([x for x in everywhere if x.training["qk_norm"] == norm] for norm in (True, False))
    few, many = ([x for x in with_norm if (x.training["tokens_per_step"] > min(PAPER_LOSSES)) == y] for y in (0, 1))
    found = {judged(x.gaps) for x in few if len(x.gaps) > 1}
    good = found & {"level", "ahead"}
    as_well = CONTRADICTED if found == {"behind"} else UNDECIDED
    if good:
        as_well = SUPPORTED if good == found else PARTLY
    words = by_rate(few, lambda x: f"loss {words_of(x.gaps)}, {judged(x.gaps)}, {off(record, x.training)}")
    large = {WHERE_BEHIND[judged(x.gaps)] for x in many}
    gaps = [gap for x in without for gap in x.gaps]
    gradients = by_rate(without, lambda x: off(record, x.training))
    losses = by_rate(smoothed, lambda x: f"{'with' if x.training['qk_norm'] else 'without'} QK-norm {words_of(x.gaps)}")
    return [
        Claim(SMALL_BATCH, f"with QK-norm, by learning rate: {words}", as_well),
        Claim(
            LARGE_BATCH,
            "; ".join(f"{training_words(x.training)}: loss {words_of(x.gaps)}, {judged(x.gaps)}" for x in many),
            large.pop() if len(large) == 1 else UNDECIDED if large else UNTESTED,
        ),
        Claim(
            WITHOUT_NORM,
            f"{gaps.count(math.inf)} of {len(gaps)} runs diverged; with several seeds, by learning rate: {gradients}",
            PARTLY if math.inf in gaps else UNTESTED,
        ),
        Claim(
            SMOOTHING,
            f"loss without it, by learning rate: {losses}",
            WHERE_BEHIND[agreed(record, "unsmoothed", "sagebwd")],
        ),
    ]


def by_rate(found: Iterable[Compared], words: Callable[[Compared], str]) -> str:
    """Say something of each training with several seeds."""
    return "; ".join(f"at {training_cells(x.training)[0]} {words(x)}" for x in found if len(x.gaps) > 1)


def off(record: Record, training: Row) -> str:
    """Say how far off gradients are at the end, SageBwd's and exact attention's, on weights that SageBwd trained."""
    errors = [row["probes"][-1]["errors"] for row in record.select(arm="sagebwd", **training)]
    ends = [f"{end(x[arm] for x in errors):.1%}" for arm in ("sagebwd", "exact") for end in (min, max)]
    return "gradients {} to {} off, exact attention's in 16 bit {} to {}".format(*ends)


def gpts_of(record: Record) -> str:
    """Say which GPTs the numbers of `gpt_claims` are of."""
    row = record.rows[0]
    size = f"{row['parameters'] / 1e6:.0f} million parameters, {row['tokens_per_step']:,} tokens per batch"
    return f"GPTs of {size}, context {row['context']:,}, {row['tokens'] / 1e6:.0f} million tokens"


def bias_ratios(noise: Record, variant: str, tokens_per_step: int) -> list[float]:
    """Return |bias| / noise of one batch in the worst layer's query and key weights, by checkpoint; 0 for no bias."""
    found = []
    for rows in noise_checkpoints(noise).values():
        ratios = [bias_to_noise(noise_of(rows, group, variant), tokens_per_step) for group in score_groups(rows)]
        found.append(max((ratio for ratio in ratios if not math.isnan(ratio)), default=0.0))
    return found


def hypothesis(runs: Record, noise: Record) -> str:
    """Compare bias and noise in words, with our large batch and the paper's batches."""
    batches = [("one scale per row", "per row, nearest", "our", max(runs.provenance["plan"]["tokens_per_step"]))]
    batches.append(("one scale per row", "per row, nearest", "the paper's", max(PAPER_LOSSES)))
    batches += [("one scale per tile", "per block, nearest", "the paper's", size) for size in PAPER_LOSSES]
    parts = []
    for what, variant, whose, size in batches:
        ratios = bias_ratios(noise, variant, size)
        parts.append(f"- {min(ratios):.2f} to {max(ratios):.2f} for {what} at {whose} {size:,} tokens per batch")
    where = f"tiles of 64 x 64, the worst layer of {len(ratios)} checkpoints"
    title = f"The gradient's bias divided by the noise of one batch, {where} (above 1 the bias is larger):"
    return "\n".join([f"{title}\n", *parts])
