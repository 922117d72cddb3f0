"""`python -m sage_lab pretrain-grid`: the plans of runs behind notebooks 06b and 14, on all GPUs of this machine.

Every run is a process of its own, `python -m sage_lab pretrain`, with its own checkpoint, log and result file. If the
program or a run is killed, starting it again continues where it was (`sage_lab.plan`).

For notebook 06b the learning rate of each size of batch is chosen first, with exact attention. All other runs then use
it. Notebook 14 takes the rate that was chosen there.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sage_lab.command_line import PARENT, Failed, add_corpus_option, output_file, output_folder, positive
from sage_lab.plan import Plan, Run, Work, opened
from sage_lab.records import Record, Row, markdown_table, read_record, write_record
from sage_lab.repairs import UNBIASED
from sage_lab.training.corpus import read_corpus, write_tokens

# For each smoothing of SageBwd its backend and granularity, None: the default. Only the reference smooths Q.
SMOOTHINGS = {"none": ("auto", None), "k": ("auto", None), "qk": ("reference", "row")}
# On the reference backend, and in the traces of exact attention.
REFERENCE_BLOCKS = "64x64"


@dataclass(frozen=True)
class Cell(Run):
    """One run. smoothing, backend, granularity, remedy: of SageBwd, None for exact attention; no remedy is None."""

    attention: str
    qk_norm: bool
    tokens_per_step: int
    seed: int
    learning_rate: float
    smoothing: str | None = None
    backend: str | None = None
    granularity: str | None = None
    remedy: str | None = None

    @property
    def name(self) -> str:
        remedy = self.remedy and re.sub(r"\W+", "_", self.remedy)
        norm = "norm" if self.qk_norm else "plain"
        parts = (self.attention, self.smoothing, self.backend, self.granularity, remedy, norm)
        numbers = f"{self.tokens_per_step}_lr{self.learning_rate:g}_seed{self.seed}"
        return "_".join([part for part in parts if part] + [numbers])

    @property
    def arguments(self) -> list[str]:
        """The arguments of `python -m sage_lab pretrain` that make this run."""
        numbers = {"tokens-per-step": self.tokens_per_step, "learning-rate": self.learning_rate, "seed": self.seed}
        found = ["--attention", self.attention] + [str(x) for name, x in numbers.items() for x in (f"--{name}", x)]
        found += ["--qk-norm"] * self.qk_norm
        if self.attention == "exact":
            found += ["--trace", "--backend", "reference", "--granularity", "block", "--blocks", REFERENCE_BLOCKS]
        else:
            found += ["--backend", self.backend] + (["--granularity", self.granularity] if self.granularity else [])
            found += ["--blocks", REFERENCE_BLOCKS] if self.backend == "reference" else []
            found += ["--smooth-k" if "k" in self.smoothing else "--no-smooth-k"]
            found += ["--smooth-q"] * ("q" in self.smoothing)
            found += ["--remedy", self.remedy] if self.remedy else []
        return found


@dataclass(frozen=True)
class GridPlan:
    """Notebook 06b's runs.

    The main cells are exact attention and SageBwd with K smoothed, with QK-norm, at both sizes of batch (tokens per
    batch). With the large one SageBwd also runs once with the paper's scales, one per tile of P and dS.

    tokens: of every run. tokens_per_step: small and large.
    seeds, seeds_at_large: of the main cells with the small and with the large batch. Runs with large ones scatter more
    and take less time. All other cells have the first seed.
    warmup, snapshots: shares of a run's steps; a checkpoint is kept at each snapshot.
    micro_batch: sequences of a pass, at most those of a step.
    """

    tokens: int = 2**26
    tokens_per_step: tuple[int, int] = (2**14, 2**17)
    learning_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    warmup: float = 0.1
    snapshots: tuple[float, ...] = (0.1, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)
    seeds_at_large: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    layers: int = 4
    width: int = 384
    heads: int = 3
    context: int = 1024
    micro_batch: int = 64
    reference_micro_batch: int = 16
    validation_sequences: int = 256
    autocast: bool = True

    @property
    def runs(self) -> Plan:
        """The search for the learning rates, then all other runs."""

        def others(finished: Mapping[Run, list[Row]]) -> list[Cell]:
            return self.cells(chosen_rates(self, [rows[0] for rows in finished.values()]))

        return Plan("grid", [self.search(), others])

    def search(self) -> list[Cell]:
        """Return exact attention with QK-norm at every learning rate."""
        return [
            Cell("exact", True, tokens_per_step, self.seeds[0], rate)
            for tokens_per_step in self.tokens_per_step
            for rate in self.learning_rates
        ]

    def cells(self, learning_rate: dict[int, float]) -> list[Cell]:
        """Return all other runs, the slowest first. learning_rate: of each number of tokens per batch."""
        found = []
        small, large = self.tokens_per_step
        for tokens_per_step, seeds in ((large, self.seeds_at_large), (small, self.seeds)):
            for qk_norm in (True, False):
                exact = Cell("exact", qk_norm, tokens_per_step, seeds[0], learning_rate[tokens_per_step])
                sagebwd = {
                    smoothing: exact.replace(attention="sagebwd", smoothing=smoothing, backend=backend, granularity=g)
                    for smoothing, (backend, g) in SMOOTHINGS.items()
                }
                found += [exact, *sagebwd.values()]
                if qk_norm and tokens_per_step == large:
                    found += [sagebwd["k"].replace(backend="reference", granularity="block")]
                if qk_norm:
                    found += [cell.replace(seed=seed) for cell in (exact, sagebwd["k"]) for seed in seeds[1:]]
        return sorted(found, key=lambda cell: cell.backend != "reference")


@dataclass(frozen=True)
class RepairPlan(GridPlan):
    """Notebook 14's runs: exact attention, the kernels with the printed scales, with ours, and as 14 recommends.

    All seeds run with QK-norm, and the first one without it, too. learning_rates: the one that the grid chose.
    """

    tokens: int = 500 * 2**16
    tokens_per_step: tuple[int, ...] = (2**16,)
    learning_rates: tuple[float, ...] = (2e-3,)
    seeds: tuple[int, ...] = (0, 1)

    def search(self) -> list[Cell]:
        return []

    def cells(self, learning_rate: dict[int, float]) -> list[Cell]:
        found = []
        for tokens_per_step in self.tokens_per_step:
            exact = Cell("exact", True, tokens_per_step, self.seeds[0], learning_rate[tokens_per_step])
            kernels = exact.replace(attention="sagebwd", smoothing="k", backend="triton", granularity="row")
            arms = (exact, kernels.replace(granularity="block"), kernels, kernels.replace(remedy=UNBIASED))
            found += [arm.replace(seed=seed) for seed in self.seeds for arm in arms]
            found += [arm.replace(qk_norm=False) for arm in arms]
        return found


# The same experiment for a laptop: too small to show anything, large enough to try the program.
CPU_PLAN = GridPlan(
    tokens=2**14,
    tokens_per_step=(2**9, 2**12),
    learning_rates=(1e-3, 4e-3),
    context=128,
    micro_batch=8,
    reference_micro_batch=8,
    layers=2,
    width=64,
    heads=2,
    seeds_at_large=(0, 1, 2, 3),
    validation_sequences=8,
    autocast=False,
)
PLANS = {"gpu": GridPlan(), "cpu": CPU_PLAN, "repair": RepairPlan()}


def chosen_rates(plan: GridPlan, rows: Sequence[Row]) -> dict[int, float]:
    """Return, for each number of tokens per batch, the learning rate that ended at the lowest validation loss.

    With a single rate there is nothing to choose. Raises ValueError if no run of a size has finished without diverging.
    """
    if len(plan.learning_rates) == 1:
        return dict.fromkeys(plan.tokens_per_step, plan.learning_rates[0])
    rates = {}
    for tokens_per_step in plan.tokens_per_step:
        finished = [row for row in rows if row["tokens_per_step"] == tokens_per_step]
        ended = [row for row in finished if not row["diverged"]]
        if not ended:
            outcome = f"all {len(finished)} finished runs diverged" if finished else "no run has finished"
            expected = f"one that trains with {tokens_per_step} tokens per batch"
            raise ValueError(f"learning_rates: expected {expected}, {outcome}")
        rates[tokens_per_step] = min(ended, key=lambda row: row["final_val_loss"])["learning_rate"]
    return rates


def train_in_a_process(plan: GridPlan, cell: Cell, device: int | None, folder: Path) -> None:
    """Run a cell to its result file. device: the number of a CUDA device, None for the CPU.

    Raises `Failed` with the name of the log if the process ends with an error.
    """
    result = result_file(folder, cell)
    largest = plan.reference_micro_batch if cell.backend == "reference" else plan.micro_batch
    named = {name: getattr(plan, name) for name in ("tokens", "context", "layers", "width", "heads", "warmup")}
    named |= {"validation-sequences": plan.validation_sequences, "corpus": corpus_file(folder)}
    named |= {"micro-batch": min(largest, cell.tokens_per_step // plan.context)}
    named |= {"device": "cpu" if device is None else "cuda", "checkpoint": result.with_suffix(".pt"), "json": result}
    steps = plan.tokens // cell.tokens_per_step
    command = [sys.executable, "-m", "sage_lab", "pretrain", *cell.arguments]
    command += ["--autocast" if plan.autocast else "--no-autocast"]
    command += [text for name, value in named.items() for text in (f"--{name}", str(value))]
    command += ["--snapshots", *(str(max(1, round(share * steps))) for share in plan.snapshots)]
    environment = os.environ | {PARENT: str(os.getpid())}
    environment |= {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    output = result.with_suffix(".log")
    with output.open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
    if code:
        raise Failed(f"{cell.name}: the run ended with exit status {code}, see {output}")


def result_file(folder: Path, cell: Run) -> Path:
    return folder / f"{cell.name}.json"


def corpus_file(folder: Path) -> Path:
    return folder / "corpus.bin"


def traces(records: dict[Cell, Record]) -> list[Row]:
    """Return the errors of every layer's attention over training, from the runs that traced them."""
    rows = []
    for cell, record in records.items():
        names = {"qk_norm": cell.qk_norm, "tokens_per_step": cell.tokens_per_step, "seed": cell.seed}
        rows += [names | row for row in record.provenance["traces"]]
    return rows


def measured_on(records: Collection[Record]) -> dict[str, Any]:
    """Return the provenance that runs have in common, all values where they differ, and the date of the last one."""
    found: dict[str, Any] = {}
    for name in ("gpu", "driver", "cpu", "python", "torch", "triton", "commit"):
        values = sorted({record.provenance[name] for record in records}, key=str)
        found[name] = values[0] if len(values) == 1 else values
    return found | {"date": max(record.provenance["date"] for record in records)}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_corpus_option(parser)
    parser.add_argument("--plan", choices=PLANS, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the finished runs")
    parser.add_argument("--folder", type=output_folder, default="runs/grid", help="for checkpoints, logs and results")
    parser.add_argument("--runs-per-gpu", type=positive, default=3, help="runs that share a GPU")
    parser.add_argument(
        "--traces", type=output_file, metavar="FILE", help="also write the errors of every layer over training"
    )


def pretrain_grid_command(options: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    if options.plan != "cpu" and not (on_gpu or options.report_only):
        raise ValueError(f"plan: expected cpu, as this machine has no CUDA device, got {options.plan}")
    plan, folder = PLANS[options.plan], options.folder
    devices = list(range(torch.cuda.device_count())) * options.runs_per_gpu if on_gpu else [None]

    def trained(cell: Cell, device: int | None) -> list[Row]:
        train_in_a_process(plan, cell, device, folder)
        return read_record(result_file(folder, cell)).rows

    given = plan.runs, folder, plan, devices
    with nullcontext(Work(*given)) if options.report_only else opened(*given) as work:
        # A run's result file is there a moment before its rows are kept.
        while found := [cell for cell in work.left if result_file(folder, cell).exists()]:
            work.parts.parts |= {cell.name: read_record(result_file(folder, cell)).rows for cell in found}
        if not options.report_only:
            if not corpus_file(folder).exists():
                write_tokens(read_corpus(options.corpus).tokens.numpy(), corpus_file(folder))
            work.finish(trained)
    report(options, plan, work)


def report(options: argparse.Namespace, plan: GridPlan, work: Work) -> None:
    """Print the table of the finished runs, and write the records that were asked for."""
    records = {cell: read_record(result_file(work.folder, cell)) for cell in work.finished}
    searched = plan.search()
    if not records or any(cell not in records for cell in searched):
        raise ValueError(f"folder: expected one with chosen learning rates, got {work.folder}")
    rates = chosen_rates(plan, [records[cell].rows[0] for cell in searched])
    rows, unfinished = work.rows, [cell.name for cell in work.left]
    losses = [(cell.name, work.finished[cell][0]["final_val_loss"]) for cell in records]
    print(markdown_table(("run", "final validation loss"), losses))
    if unfinished:
        print(f"unfinished: {', '.join(unfinished)}")
    facts = {"plan": asdict(plan), "learning_rate": rates, "unfinished": unfinished}
    if options.json:
        first = next(iter(records.values())).provenance
        facts |= {"corpus": first["corpus"], "arguments": first["arguments"]}
        write_record(options.json, rows, command=options.command, **facts, **measured_on(records.values()))
    if options.traces:
        exact = [cell for cell in plan.cells(rates) if cell.attention == "exact" and cell.seed == plan.seeds[0]]
        traced = {cell: records[cell] for cell in exact if cell in records}
        write_record(options.traces, traces(traced), command=options.command, **facts, **measured_on(traced.values()))
