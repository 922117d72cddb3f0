"""`python -m sage_lab full-batch`: does SageBwd fall behind if gradients have no noise, and do remedies help?

The paper says that with large batches quantisation's bias exceeds the gradient's noise, and SageBwd falls behind. Here
each batch is a whole fixed corpus, so the noise is zero and only the bias remains. Models are small, so that they can't
memorise it. Everything is float32 (TF32 off), except attention in the arms that say otherwise. The arms:

    exact       the truth: exact attention in float32
    bf16        a control: exact attention in bfloat16, what everybody trains with
    random error    a control: the truth, and in every step a new random error of 0.3% of each weight's gradient. It is
                smaller than INT8's, and no bias. Runs part for any error: only what exceeds both controls counts
    per tile    SageBwd as printed, simulated in float32: one scale per tile of 64 x 64 of P and dS. The bias of INT8
    per row     the kernels' choice, simulated in float32: one scale per row, tiles of 128 x 128. What finer scales gain
    kernels     our Triton kernels: the arm before, with attention's inputs and outputs in bfloat16
    kernels, unbiased       with the remedy that they have
    ..., K not smoothed     what K-smoothing does
    per tile: REMEDY, per row: REMEDY       what a remedy of `REMEDIES` does

Five stages, each begun when the one before it has ended. The first seed of every arm with K smoothed, with and without
QK-norm, at every learning rate; the other seeds, of arms whose gap to exact attention exceeds the controls'; remedies,
where an arm fell furthest behind; K not smoothed, at the first rate; and, where an arm fell furthest behind, smaller
batches, beside the T* that runs on the whole corpus predict (`sage_lab.training.full_batch`).

Losses that are compared are those of exact attention at an arm's weights: what it learned, not how it rounds.
"""

from __future__ import annotations  # a field may have the name of what reads it

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import torch

from sage_lab.command_line import Arguments, device, input_file, output_folder, positive_number, usual_device
from sage_lab.models.llama import LlamaConfig
from sage_lab.plan import Plan, Run, deadline, opened
from sage_lab.records import Row, markdown_table
from sage_lab.repairs import REMEDIES, UNBIASED
from sage_lab.training.corpus import read_corpus
from sage_lab.training.full_batch import CURVE, FullBatchSettings, FullBatchTraining, is_simulated
from sage_lab.training.loop import train
from sage_lab.training.pretrain import attention_facts


class Arm(NamedTuple):
    """Changes to the model's configuration and to the settings of its training."""

    changes: dict[str, Any]
    settings: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)


PER_TILE = {"attention": "sagebwd", "granularity": "block", "block_q": 64, "block_kv": 64}
PER_ROW = {"attention": "sagebwd", "granularity": "row"}
NOT_SMOOTHED = {"smooth_k": False}
IN_16_BIT = {"attention_in_bfloat16": True}
ON_KERNELS = {"attention": "sagebwd", "backend": "triton"}
SCREENED = {
    "exact": Arm({"attention": "exact"}),
    "bf16": Arm({"attention": "exact"}, IN_16_BIT),
    "random error": Arm({"attention": "exact"}, {"random_error": 0.003}),
    "per tile": Arm(PER_TILE),
    "per row": Arm(PER_ROW),
    "kernels": Arm(ON_KERNELS, IN_16_BIT),
    "kernels, unbiased": Arm(ON_KERNELS | {"remedy": UNBIASED}, IN_16_BIT),
}
UNSMOOTHED = {
    "per tile, K not smoothed": Arm(PER_TILE | NOT_SMOOTHED),
    "kernels, K not smoothed": Arm(ON_KERNELS | NOT_SMOOTHED, IN_16_BIT),
}
REPAIRED = {
    f"{base}: {remedy}": Arm(scales | {"remedy": remedy})
    for base, scales in (("per tile", PER_TILE), ("per row", PER_ROW))
    for remedy in REMEDIES
    if remedy != "none"
}
ARMS = SCREENED | UNSMOOTHED | REPAIRED
TRUTH, CONTROLS = "exact", ("bf16", "random error")


@dataclass(frozen=True)
class FullBatchRun(Run):
    """One training. batch_tokens: tokens per batch."""

    arm: str
    qk_norm: bool
    learning_rate: float
    seed: int
    batch_tokens: int


@dataclass(frozen=True)
class FullBatchPlan:
    """The experiment. tokens: of the corpus. seeds: the first one screens.

    learning_rates: where scores should become sharpest first; with the last, runs that differ little stay together.
    unsmoothed: arms without K-smoothing. margin: how many times the controls' gap an arm's must be to count. remedies:
    to try on the scales of the arm that is furthest behind. halvings: of the batch, in the last stage.
    reports: of a run.
    """

    tokens: int = 2**18
    context: int = 1024
    layers: int = 3
    width: int = 64
    heads: int = 1
    steps: int = 200
    warmup: float = 0.1
    learning_rates: tuple[float, ...] = (1e-2, 3e-3, 1e-3)
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] = tuple(SCREENED)
    unsmoothed: tuple[str, ...] = tuple(UNSMOOTHED)
    remedies: tuple[str, ...] = (
        "V smoothed",
        "O in 16 bit",
        "matching delta",
        UNBIASED,
        "seven, ordered P, V smoothed, token scales",
    )
    halvings: int = 3
    margin: float = 2.0
    reports: int = 16
    micro_batch: int = 32
    validation_sequences: int = 32

    def __post_init__(self):
        if self.tokens % (self.context << self.halvings):
            sequences = f"whole sequences of {self.context} after {self.halvings} halvings"
            raise ValueError(f"tokens: expected {sequences}, got {self.tokens}")

    def run(self, arm: str, qk_norm: bool, learning_rate: float, seed: int) -> FullBatchRun:
        return FullBatchRun(arm, qk_norm, learning_rate, seed, self.tokens)

    @property
    def runs(self) -> Plan:
        def after(stage: Callable) -> Callable:
            return lambda finished: stage(self, {run: rows[0] for run, rows in finished.items()})

        stages = (other_seeds, remedy_runs, not_smoothed, smaller_batches)
        return Plan("full_batch", [screening(self), *map(after, stages)])

    def config(self, run: FullBatchRun, vocabulary: int) -> LlamaConfig:
        shape = {name: getattr(self, name) for name in ("context", "layers", "width", "heads")}
        choice = {"backend": "reference", "fused_prologue": False, "qk_norm": run.qk_norm} | ARMS[run.arm].changes
        return LlamaConfig(vocabulary, **shape, **choice)

    def settings(self, run: FullBatchRun, compile: bool) -> FullBatchSettings:
        return FullBatchSettings(
            steps=self.steps,
            batch_size=run.batch_tokens // self.context,
            learning_rate=run.learning_rate,
            warmup_steps=round(self.warmup * self.steps),
            report_every=-(-self.steps // self.reports),
            seed=run.seed,
            sequences=self.tokens // self.context,
            micro_batch_size=min(self.micro_batch, run.batch_tokens // self.context),
            validation_sequences=self.validation_sequences,
            compile=compile,
            **ARMS[run.arm].settings,
        )


# Too small to show anything, large enough to try the program. The kernels are not for a CPU.
CPU_PLAN = FullBatchPlan(
    tokens=2**12,
    context=64,
    layers=2,
    width=32,
    steps=20,
    seeds=(0, 1),
    arms=tuple(name for name in SCREENED if not name.startswith("kernels")),
    unsmoothed=("per tile, K not smoothed",),
    halvings=2,
    reports=4,
    micro_batch=8,
    validation_sequences=8,
)
PLANS = {"gpu": FullBatchPlan(), "cpu": CPU_PLAN}
Finished = dict[FullBatchRun, Row]


def planned(plan: FullBatchPlan, finished: Finished) -> list[FullBatchRun]:
    """Return all runs that are known to be needed, in the order of what they decide."""
    return plan.runs.known({run: [row] for run, row in finished.items()})


def screening(plan: FullBatchPlan) -> list[FullBatchRun]:
    return first_seed(plan, plan.arms)


def first_seed(plan: FullBatchPlan, arms: Sequence[str]) -> list[FullBatchRun]:
    """Return the arms with the first seed. Without QK-norm and at the first learning rate, scores are sharpest."""
    conditions = [(norm, rate) for norm in (False, True) for rate in plan.learning_rates]
    return [plan.run(arm, *condition, plan.seeds[0]) for condition in conditions for arm in arms]


def gap(finished: Finished, run: FullBatchRun) -> float:
    """Return by how many nats a run ends behind exact attention; infinite if it diverged, NaN if the truth did."""
    ours, truth = (finished[x]["final_loss"] for x in (run, run.replace(arm=TRUTH)))
    if truth is None:
        return math.nan
    return math.inf if ours is None else ours - truth


def largest_control(finished: Finished, run: FullBatchRun) -> float:
    """Return the largest |gap| of both controls under this run's conditions, at any report of the second half."""
    column, truth = CURVE.index("exact_loss"), finished[run.replace(arm=TRUTH)]["curve"]
    gaps = [
        abs(ours[column] - theirs[column])
        for control in CONTROLS
        for ours, theirs in list(zip(finished[run.replace(arm=control)]["curve"], truth, strict=False))[
            len(truth) // 2 :
        ]
    ]
    return max(gaps, default=0.0)


def excess(finished: Finished, run: FullBatchRun) -> float:
    """Return |gap| over the controls'."""
    return abs(gap(finished, run)) / max(largest_control(finished, run), 1e-12)


def deviating(plan: FullBatchPlan, finished: Finished) -> list[FullBatchRun]:
    """Return the runs of the screening whose gap counts, the largest excess first."""
    found = [(excess(finished, run), run) for run in screening(plan) if run.arm not in (TRUTH, *CONTROLS)]
    return [run for ratio, run in sorted(found, key=lambda pair: -pair[0]) if ratio > plan.margin]


def other_seeds(plan: FullBatchPlan, finished: Finished) -> list[FullBatchRun]:
    return [
        run.replace(arm=arm, seed=seed)
        for run in deviating(plan, finished)
        for seed in plan.seeds[1:]
        for arm in (TRUTH, *CONTROLS, run.arm)
    ]


def furthest_behind(plan: FullBatchPlan, finished: Finished) -> FullBatchRun | None:
    """Return the run that is furthest behind exact attention, if any gap counts."""
    worse = [run for run in deviating(plan, finished) if gap(finished, run) > 0]
    return max(worse, key=lambda run: gap(finished, run), default=None)


def remedy_runs(plan: FullBatchPlan, finished: Finished) -> list[FullBatchRun]:
    worst = furthest_behind(plan, finished)
    if worst is None:
        return []
    base = "per tile" if worst.arm == "per tile" else "per row"  # which the kernels have, too
    return [worst.replace(arm=f"{base}: {remedy}") for remedy in plan.remedies]


def not_smoothed(plan: FullBatchPlan, finished: Finished) -> list[FullBatchRun]:
    return [run for run in first_seed(plan, plan.unsmoothed) if run.learning_rate == plan.learning_rates[0]]


def smaller_batches(plan: FullBatchPlan, finished: Finished) -> list[FullBatchRun]:
    worst = furthest_behind(plan, finished)
    if worst is None:
        return []
    sizes = [plan.tokens >> halving for halving in range(1, plan.halvings + 1)]
    return [worst.replace(arm=arm, batch_tokens=size) for size in sizes for arm in (TRUTH, *CONTROLS, worst.arm)]


def tokens_at_bias(curve: Sequence[Sequence[float | None]]) -> float | None:
    """Return T*, the median over the second half of a run's reports; None where there is no bias or a single pass."""
    bias, noise = CURVE.index("bias_square"), CURVE.index("noise_trace")
    found = [row[noise] / row[bias] for row in curve[len(curve) // 2 :] if row[bias] and row[noise] is not None]
    return median(found) if found else None


def result_row(run: FullBatchRun, training: FullBatchTraining) -> Row:
    """Return a run's row."""
    config, curve = training.config, training.curve
    last = None if training.diverged else training.losses[-1]
    return {
        **run.facts,
        **attention_facts(config),
        "compiled": training.settings.compile and is_simulated(config),
        "parameters": sum(x.numel() for x in training.model.parameters()),
        "steps": training.step,
        "final_loss": last and last["exact_loss"],
        "final_val_loss": last and last["validation_loss"],
        "tokens_at_bias": tokens_at_bias(curve),
        "diverged": training.diverged,
        "seconds": round(training.seconds, 2),
        "curve": curve,
    }


def full_batch_table(finished: Finished) -> str:
    """Return a table of the finished runs: what each ended with, and its gap to exact attention in millinats."""
    error, lines = CURVE.index("gradient_error"), []
    for run, row in finished.items():
        behind = f"{1000 * gap(finished, run):+.2f}" if run.replace(arm=TRUTH) in finished else "-"
        loss = row["diverged"] or f"{row['final_loss']:.5f}"
        lines.append((run.name, loss, behind, f"{row['curve'][-1][error]:.2%}", f"{row['tokens_at_bias'] or 0:.2g}"))
    return markdown_table(("run", "loss", "gap, mnat", "gradient error", "T*"), lines)


def on_a_gpu() -> bool:
    return usual_device() != "cpu"


@dataclass(frozen=True, kw_only=True)
class FullBatch(Arguments):
    """Train every run of the plan that is known to be needed; a rerun continues."""

    corpus: Annotated[Path | None, input_file, "text, or a .bin file of uint16 tokens"] = None
    plan: Literal["gpu", "cpu"] = field(default_factory=lambda: "gpu" if on_a_gpu() else "cpu")
    minutes: Annotated[float | None, positive_number, "stop at the first report after this time"] = None
    compile: Annotated[bool, "compile the reference"] = field(default_factory=on_a_gpu)
    folder: Annotated[Path, output_folder, "for rows and checkpoints"] = Path("runs/full_batch")
    device: Annotated[str, device] = field(default_factory=usual_device)

    def __post_init__(self):
        if self.plan == "gpu" and not self.device.startswith("cuda"):
            raise ValueError(f"plan: expected cpu on device {self.device}, got gpu")

    def run(self, command: str) -> None:
        plan, corpus = PLANS[self.plan], read_corpus(self.corpus)
        torch.set_float32_matmul_precision("highest")
        if self.compile:
            torch._dynamo.config.recompile_limit = 64  # one program for each kind of arm
        facts = {"corpus": corpus.facts, "plan": asdict(plan), "curve": CURVE, "compile": self.compile}

        def trained(run: FullBatchRun, device: str) -> list[Row]:
            training = FullBatchTraining(
                corpus, plan.config(run, corpus.vocab_size), plan.settings(run, self.compile), device
            )
            train(training, work.checkpoint(run), is_over=work.is_over)
            return [result_row(run, training)]

        def write(*_) -> None:
            if work.rows:
                work.record(self.json, command, **facts)

        arguments = plan, corpus.sha256, self.device
        with opened(plan.runs, self.folder, arguments, [self.device], deadline(self.minutes)) as work:
            left = work.finish(trained, write)
            write()
        print(full_batch_table({run: rows[0] for run, rows in work.finished.items()}))
        if left:
            print(f"\n{len(left)} known runs are unfinished, the next is {left[0].name}; the same command continues")
