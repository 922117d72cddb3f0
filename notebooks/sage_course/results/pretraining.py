"""Numbers from pre-training runs and gradients: losses by seed, intervals, bias against noise.

The records are those of `pretrain`, of `noise`, and of the archived `pretrain-grid`.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, mean, stdev
from typing import NamedTuple

from sage_lab.records import Record, Row, markdown_table
from scipy.special import stdtrit  # the inverse of Student's distribution

# Figure 1 of the SageBwd paper: tokens per batch -> final loss of its 325M model with QK-norm, nats per GPT-2 token.
PAPER_LOSSES = {2**18: {"exact": 2.563, "sagebwd": 2.561}, 2**21: {"exact": 2.586, "sagebwd": 2.640}}
# The kinds of runs of the archived `pretrain-grid`: attention, smoothing, granularity.
RUN_KINDS = {
    "exact": ("exact", None, None),
    "SageBwd, K smoothed": ("sagebwd", "k", None),
    "SageBwd, nothing smoothed": ("sagebwd", "none", None),
    "SageBwd, Q and K smoothed": ("sagebwd", "qk", "row"),
    "SageBwd, one scale per tile": ("sagebwd", "k", "block"),
}


def t_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t."""
    return float(stdtrit(degrees, 0.975))


class Interval(NamedTuple):
    """The mean of `count` values, its standard error, and half the width of its 95% interval (Student's t)."""

    mean: float
    error: float
    half: float
    count: int

    @property
    def words(self) -> str:
        """Relative differences in words: "+0.2% (95% interval -0.4% to +0.8%, 3 seeds)"."""
        mean, low, high = (signed(x, ".1%") for x in (self.mean, self.mean - self.half, self.mean + self.half))
        return f"{mean} (95% interval {low} to {high}, {self.count} seeds)"


def signed(x: float, form: str) -> str:
    """Return a number with its sign, which one that is rounded to zero has not."""
    text = f"{x:+{form}}"
    return text if text.strip("+-0.%") else text[1:]


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least two values, with its interval."""
    count = len(values)
    if count < 2:
        raise ValueError(f"values: expected at least 2 of them, got {count}")
    error = stdev(values) / math.sqrt(count)
    return Interval(mean(values), error, t_quantile(count - 1) * error, count)


def pretrain_runs(record: Record, kind: str, tokens_per_step: int, qk_norm: bool = True) -> dict[int, Row]:
    """Return seed -> run of one of RUN_KINDS, at the learning rate chosen for that size of batch."""
    attention, smoothing, granularity = RUN_KINDS[kind]
    rate = record.provenance["learning_rate"][str(tokens_per_step)]
    rows = record.select(
        attention=attention, smoothing=smoothing, qk_norm=qk_norm, tokens_per_step=tokens_per_step, learning_rate=rate
    )  # fmt: skip
    # A scale per tile, or not: old records have None where there is one per row.
    rows = [row for row in rows if (row["granularity"] == "block") == (granularity == "block")]
    return {row["seed"]: row for row in sorted(rows, key=lambda row: row["seed"])}


def final_losses(runs: Mapping[int, Row]) -> dict[int, float]:
    """Return seed -> final validation loss, for the runs that did not diverge."""
    return {seed: row["final_val_loss"] for seed, row in runs.items() if not row["diverged"]}


def loss_summary(runs: Mapping[int, Row]) -> str:
    """Describe final losses, as in "0.6617 (0.6592 to 0.6639, 3 seeds)"."""
    losses = list(final_losses(runs).values())
    diverged = f", {len(runs) - len(losses)} diverged" if len(losses) < len(runs) else ""
    if len(losses) < 2:
        return f"{losses[0]:.4f} (1 seed{diverged})" if losses else diverged.removeprefix(", ") or "not run"
    return f"{mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}, {len(losses)} seeds{diverged})"


def paired_differences(
    record: Record, kind: str, tokens_per_step: int, qk_norm: bool = True, *, baseline: str = "exact"
) -> dict[int, float]:
    """Return seed -> final loss of that kind minus the baseline's, which has the same first weights and batches."""
    losses, others = (final_losses(pretrain_runs(record, x, tokens_per_step, qk_norm)) for x in (kind, baseline))
    return {seed: losses[seed] - others[seed] for seed in losses if seed in others}


def relative_gaps(record: Record, tokens_per_step: int) -> list[float]:
    """Return SageBwd's final loss minus exact attention's, by seed, as a share of exact attention's mean."""
    exact = mean(final_losses(pretrain_runs(record, "exact", tokens_per_step)).values())
    return [gap / exact for gap in paired_differences(record, "SageBwd, K smoothed", tokens_per_step).values()]


def noise_checkpoints(record: Record) -> dict[str, list[Row]]:
    """Return name -> rows for every checkpoint of a noise record, in the order they were measured."""
    found: dict[str, list[Row]] = {}
    for row in record.rows:
        norm = "QK-norm" if row["qk_norm"] else "no QK-norm"
        name = "step {step}, {tokens_per_step:,} tokens per batch, {attention}, ".format(**row)
        found.setdefault(f"{name}{norm}, seed {row['seed']}", []).append(row)
    return found


def noise_of(rows: Iterable[Row], group: str, variant: str) -> Row:
    """Return the one row of a checkpoint that has this group and variant."""
    (row,) = (row for row in rows if (row["group"], row["variant"]) == (group, variant))
    return row


def bias_to_gradient(row: Row) -> float:
    """Return |b| / |G|: zero where no bias was found, NaN where no gradient was."""
    return math.sqrt(max(row["bias_square"], 0) / row["gradient_square"]) if row["gradient_square"] > 0 else math.nan


def score_groups(rows: Iterable[Row]) -> list[str]:
    """Return the groups of parameters that make Q and K, layer by layer."""
    return [group for group in dict.fromkeys(row["group"] for row in rows) if group.endswith("query and key")]


def bias_to_noise(row: Row, tokens_per_step: float) -> float:
    """Return |b| / sqrt(tr(Sigma) / T); NaN where no bias was found."""
    return math.sqrt(tokens_per_step / row["tokens_at_bias"]) if row["tokens_at_bias"] else math.nan


# The attentions of the archived `pretrain-speed`, as its record names them.
TIMED = {
    "exact": "PyTorch's pick (cuDNN)",
    "flash_attention_2": "FlashAttention-2",
    "flash_attention_4": "FlashAttention-4",
    "sagebwd_apart": "SageBwd, QK-norm and rotation separate",
    "sagebwd": "SageBwd",
}


def relative_rate(record: Record, row: Row, attention: str) -> float:
    """Return a row's tokens per second over those of another attention at the same length."""
    (other,) = record.select(attention=attention, context=row["context"])
    return row["tokens_per_second"] / other["tokens_per_second"]


def speed_table(record: Record) -> str:
    """Return what ran, its time and rate, and its rate over those of exact attention's kernels."""
    peers = [name for name in TIMED if "sagebwd" not in name]
    lines = []
    for row in record.rows:
        ratios = (f"{relative_rate(record, row, peer):.2f}" for peer in peers)
        rate = f"{row['tokens_per_second']:,}"
        lines.append((row["context"], TIMED[row["attention"]], row["ms_median"], rate, *ratios))
    header = ("N", "attention", "ms per step", "tokens/s", *(f"times as fast as {TIMED[peer]}" for peer in peers))
    return markdown_table(header, lines)


def step_times(record: Record) -> dict[int, tuple[float, float]]:
    """Return context -> ms of a training step with exact attention and with SageBwd, from `pretrain --time`."""
    ms = {(row["context"], row["arm"]): row["ms_median"] for row in record.rows}
    return {n: (ms[n, "exact"], ms[n, "sagebwd"]) for n in sorted({n for n, _ in ms})}


def timed_model(record: Record) -> str:
    """Say which model `pretrain --time` timed."""
    return f"a compiled GPT of {record.rows[0]['parameters'] / 1e6:.0f} million parameters"


# The rules for the runs of `pretrain`, written before the first of each kind: GPTs, and small models that read
# one batch again and again.
GPT, SAME_BATCH, TIMES = "pretrain_gpt_h200", "same_batch_h200", "pretrain_time_h200"
LOST, HELD, JUDGED_PROBES, LAST_STEPS = 1.0, 0.5, 3, 10
LARGEST_GAP = max(losses["sagebwd"] / losses["exact"] - 1 for losses in PAPER_LOSSES.values())
PROBED = ("exact", "sagebwd", "unsmoothed", "printed", "unbiased")  # the arms in the GPTs' record
COMPARED = (*((arm, "exact") for arm in ("sagebwd", "printed", "unbiased", "unsmoothed")), ("unsmoothed", "sagebwd"))
COMPARED += (("printed", "sagebwd"),)  # in tiles of one size: one scale per tile against one per row
TRAINING = ("qk_norm", "learning_rate", "tokens_per_step", "context", "tokens")  # only runs that share all are compared


def ending(row: Row) -> float:
    """Return the loss that a run is judged by: the held-out one, infinite if it diverged.

    Where every batch is the same one it is the mean of the last ten steps' training losses, because what is held out
    has the noise that this training leaves out.
    """
    losses = row["step_losses"][-LAST_STEPS:] if row["arguments"].get("same_batch") else [row["final_val_loss"]]
    loss = math.inf if row["diverged"] else mean(losses)
    return loss if loss < math.inf else math.inf  # NaN is no end either


def paired_gaps(record: Record, arm: str, baseline: str = "exact", **training: bool | float) -> list[float]:
    """Return an arm's losses over those of another, minus one, by seed: the same first weights and batches.

    A gap is infinite where the arm diverged; where the baseline did there is none. training: columns and their values.
    Raises ValueError if these leave runs of several trainings.
    """
    rows = record.select(**training)
    if len(found := trainings(Record({}, rows))) > 1:
        raise ValueError(f"training: expected one, got {' and '.join(map(training_words, found))}")
    losses = {(row["arm"], row["seed"]): ending(row) for row in rows}
    seeds = [seed for of, seed in losses if of == arm and losses.get((baseline, seed), math.inf) < math.inf]
    return [losses[arm, seed] / losses[baseline, seed] - 1 for seed in seeds]


def judged(gaps: Sequence[float]) -> str:
    """Judge an arm by its gaps under one training, a gap per seed.

    "behind" if the 95% interval of their mean (Student's t) is above zero, or if a run diverged; "ahead" if it is below
    zero; "level" if it ends below the paper's largest gap, which would have been seen; else "undecided". A single seed
    is undecided, whatever it says.
    """
    if len(gaps) < 2:
        return "undecided"
    if math.inf in gaps:
        return "behind"
    found = mean_interval(gaps)
    if found.mean - found.half > 0:
        return "behind"
    high = found.mean + found.half
    return "ahead" if high < 0 else "level" if high < LARGEST_GAP else "undecided"


def trainings(record: Record) -> list[Row]:
    """Return the trainings that a record has of each arm, as values of the columns TRAINING."""
    found = sorted({tuple(row[name] for name in TRAINING) for row in record.rows})
    return [dict(zip(TRAINING, values, strict=True)) for values in found]


def training_cells(training: Row) -> tuple[str, str, str, str]:
    """Return learning rate, tokens per batch, context and millions of tokens; a row of a record has them, too."""
    rate, *sizes, tokens = (training[name] for name in TRAINING[1:])
    return f"{rate:g}", *(f"{size:,}" for size in sizes), f"{tokens / 1e6:.0f}"


def training_words(training: Row) -> str:
    return "learning rate {}, {} tokens per batch, context {}, {} million tokens".format(*training_cells(training))


def highest_rate(record: Record) -> Record:
    """Return the runs with the highest learning rate, at which gradients break without QK-norm."""
    return record._replace(rows=record.select(learning_rate=max(row["learning_rate"] for row in record.rows)))


def agreed(record: Record, arm: str, baseline: str = "exact", **chosen: bool | float) -> str:
    """Return the verdict that all trainings share that have several seeds and the values `chosen`; else "undecided".

    One interval in 40 is above zero by chance, and a record has a dozen. So one training alone decides nothing, and all
    of them have to say the same. ("ahead" counts as "level": both say that the paper's gap is not there.)
    """
    record = record._replace(rows=record.select(**chosen))
    found = [paired_gaps(record, arm, baseline, **training) for training in trainings(record)]
    verdicts = [judged(gaps).replace("ahead", "level") for gaps in found if len(gaps) > 1]
    return verdicts[0] if len(verdicts) > 1 and len(set(verdicts)) == 1 else "undecided"


def gradient_is_lost(row: Row, arm: str) -> bool:
    """Say whether an arm's gradient is lost on a run's weights, at each of the last three probes.

    Lost: off by more than its own length, so that no gradient at all would be nearer, while that of exact attention in
    16 bit, the control, is off by less than half.
    """
    errors = [probe["errors"] for probe in row["probes"][-JUDGED_PROBES:]]
    return all(error[arm] > LOST and error["exact"] < HELD for error in errors)


def last_probes(record: Record) -> dict[str, Row]:
    """Return "QK-norm" and "no QK-norm" -> the last probe of the GPT that was trained with SageBwd from seed 0."""
    rows = highest_rate(record).select(arm="sagebwd", seed=0)
    return {("QK-norm" if row["qk_norm"] else "no QK-norm"): row["probes"][-1] for row in rows}


def of_layers(record: Record, arm: str) -> dict[str, list[tuple[float, float]]]:
    """Return "QK-norm" and "no QK-norm" -> (largest score, error of dQ) of every layer at every probe after the first.

    The error is that of one layer's attention alone: what enters it is exact.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in highest_rate(record).select(arm="sagebwd", seed=0):
        for probe in row["probes"][1:]:
            points = zip(probe["largest_score"], probe["attention"][arm]["dQ"], strict=True)
            found.setdefault("QK-norm" if row["qk_norm"] else "no QK-norm", []).extend(points)
    return found


def gpt_table(record: Record) -> str:
    """Return what is known of every GPT: its loss, its scores, and how far off its gradient is with each attention."""
    lines: dict[str, list[tuple]] = {}
    for row in sorted(record.rows, key=lambda row: [row[name] for name in (*TRAINING[1:], "qk_norm", "arm", "seed")]):
        last = row["probes"][-1]
        errors = [f"{x:.3g}" if (x := last["errors"].get(arm)) else "" for arm in PROBED]
        in_a_layer = [last["attention"].get(arm) for arm in ("exact", "sagebwd", "between")]
        in_a_layer = [f"{max(x['dQ']):.2g}" if x else "" for x in in_a_layer]
        name = f"{row['arm']}, {'QK-norm' if row['qk_norm'] else 'no QK-norm'}, seed {row['seed']}"
        loss = "diverged" if row["diverged"] else f"{row['final_val_loss']:.4f}"
        cells = name, loss, f"{max(last['largest_score']):,.0f}", *errors, *in_a_layer
        lines.setdefault(training_words(row), []).append(cells)
    header = ("trained with", "held-out loss", "largest score", "exact in 16 bit", "SageBwd", "no K-smoothing")
    header += ("one scale per tile", "unbiased", "exact, one layer", "SageBwd, one layer", "kernels against PyTorch")
    tables = "\n\n".join(f"With {words}:\n\n{markdown_table(header, cells)}" for words, cells in lines.items())
    described = (
        f"{record.rows[0]['parameters'] / 1e6:.0f} million parameters, trained on Linux's sources. From the fourth "
        "column on: |g - exact| / |exact| at the end, of the whole model's gradient on 4,096 held-out tokens, then of "
        "dQ in the worst layer by itself, and last between SageBwd's kernels and its PyTorch reference. What is empty "
        'had been measured without K-smoothing by mistake, and was removed; "unbiased" was not measured in the older '
        f"runs. {record.caption[0].upper()}{record.caption[1:]}."
    )
    scales = f"With QK-norm, errors of the whole model's gradient at the end:\n\n{scales_table(record)}"
    return f"{tables}\n\n{described}\n\n{scales}\n\n{gaps_table(record)}"


def scales_table(record: Record) -> str:
    """Return a table of the gradient's error with one scale per tile and with "unbiased", over SageBwd's.

    A line per training with QK-norm, at its end: the range over all GPTs whose weights were measured so.
    """
    lines = []
    for training in trainings(record):
        if training["qk_norm"]:
            errors = [row["probes"][-1]["errors"] for row in record.select(**training)]
            ratios = [[x[arm] / x["sagebwd"] for x in errors if arm in x] for arm in ("printed", "unbiased")]
            spans = [f"{min(found):.2f} to {max(found):.2f} ({len(found)} GPTs)" for found in ratios]
            lines.append((*training_cells(training), *spans))
    header = ("learning rate", "tokens per batch", "context", "million tokens")
    return markdown_table((*header, "one scale per tile, over SageBwd's", 'with "unbiased", over SageBwd\'s'), lines)


class Compared(NamedTuple):
    """An arm against another under one training, a gap per seed."""

    arm: str
    baseline: str
    training: Row
    gaps: list[float]

    @property
    def cells(self) -> tuple[str, ...]:
        """Who is compared, with QK-norm or without, and `training_cells`."""
        norm = "yes" if self.training["qk_norm"] else "no"
        return f"{self.arm} against {self.baseline}", norm, *training_cells(self.training)


def compared(record: Record) -> list[Compared]:
    """Return all pairs of arms of COMPARED by training, if a record has them."""
    pairs = itertools.product(COMPARED, trainings(record))
    found = [(*arms, training, paired_gaps(record, *arms, **training)) for arms, training in pairs]
    return [Compared(*line) for line in found if line[-1]]


def gaps_table(record: Record) -> str:
    """Return a table of the arms' losses by training: each minus exact attention's, and with one another."""
    lines = [(*line.cells, words_of(line.gaps), judged(line.gaps)) for line in compared(record)]
    header = ("loss", "QK-norm", "learning rate", "tokens per batch", "context", "million tokens")
    return markdown_table((*header, "difference", "verdict"), lines)


def words_of(gaps: Sequence[float]) -> str:
    """Describe at least one gap."""
    if lost := sum(map(math.isinf, gaps)):
        return f"{lost} of {len(gaps)} diverged"
    return mean_interval(gaps).words if len(gaps) > 1 else f"{signed(gaps[0], '.1%')} (1 seed, which decides nothing)"


def relative_errors(rows: Sequence[Row], tensor: str, **chosen: str) -> dict[str, float]:
    """Return each remedy's error divided by that without one: the geometric mean over the cases `chosen`."""
    rows = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    without = {(row["case"], row["layer"]): row[tensor] for row in rows if row["remedy"] == "none"}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["remedy"], []).append(row[tensor] / without[row["case"], row["layer"]])
    return {remedy: geometric_mean(found) for remedy, found in ratios.items()}
