"""`python -m sage_lab pretrain`: language models that differ in their attention, and what INT8 does to their gradients.

Several values of an option make several runs, each in a process of its own, on all GPUs of this machine:

    python -m sage_lab pretrain --attention exact sagebwd unsmoothed --qk-norm no yes --seed 0 1 2 --json runs.json

If the program or a run is killed, the same command goes on where it was, bit for bit; runs that the file of --json has
are not made again, and their commands stay in its provenance. A single run trains in this process, or under torchrun in
several together (DDP).
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import torch

from sage_lab.command_line import (
    PARENT,
    Arguments,
    Failed,
    device,
    from_zero,
    input_file,
    output_folder,
    positive,
    positive_number,
    usual_device,
    zero_to_one,
)
from sage_lab.experiments.turns import in_turn, synchronized_time, time_columns
from sage_lab.models.llama import LlamaConfig
from sage_lab.plan import OutOfTime, Plan, Run, deadline, opened
from sage_lab.records import Row, markdown_table, read_record, write_record
from sage_lab.training.corpus import Corpus, read_corpus, write_corpus
from sage_lab.training.loop import train
from sage_lab.training.pretrain import Pretraining, PretrainSettings, arguments_of, parameters, result_row
from sage_lab.training.probe import ARMS
from sage_lab.training.processes import Processes, processes

SHAPE = ("layers", "width", "heads")
GPT = {"layers": 12, "width": 768, "heads": 12, "mlp": "squared_relu"}  # 101 million parameters with 20,480 tokens
MODELS = {"small": {}, "gpt": GPT}
WARMUP = 3  # steps before the timed ones
NORMS = {"no": False, "yes": True}
PASSED_ON = ("model", *SHAPE, "context", "tokens", "tokens_per_step", "tokens_per_pass", "warmup", "reports")
PASSED_ON += ("validation_sequences", "probe_sequences", "device", "folder")


@dataclass(frozen=True)
class PretrainRun(Run):
    """The choices by which a run differs from the others in its record. arm: a name of `ARMS`."""

    model: str
    arm: str
    qk_norm: bool
    learning_rate: float
    tokens_per_step: int
    context: int
    tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Pretrain(Arguments):
    """Options of the command. Several values of one make several runs."""

    corpus: Annotated[Path | None, input_file, "text, .bin, or linux-source-6.1.tar.xz; without: Python's sources"] = (
        None
    )
    model: Annotated[Literal[tuple(MODELS)], "gpt: 12 layers of 768, 101 million weights"] = "small"
    layers: Annotated[int | None, positive, "in place of the model's own"] = None
    width: Annotated[int | None, positive, "in place of the model's own"] = None
    heads: Annotated[int | None, positive, "in place of the model's own"] = None
    context: Annotated[int, positive, "tokens of a sequence"] = LlamaConfig.context
    attention: tuple[Literal[tuple(ARMS)], ...] = ("exact",)
    qk_norm: Annotated[tuple[Literal[tuple(NORMS)], ...], "normalise queries and keys"] = ("no",)
    learning_rate: Annotated[tuple[float, ...], positive_number] = (2e-3,)
    seed: Annotated[tuple[int, ...], from_zero] = (0,)
    tokens: Annotated[int, positive, "of a run"] = 2**20
    tokens_per_step: Annotated[int, positive] = 2**13
    tokens_per_pass: Annotated[int, positive, "of a forward and backward pass"] = 2**12
    warmup: Annotated[float, zero_to_one, "share of the steps"] = 0.1
    reports: Annotated[int, positive, "validation losses, probes and checkpoints of a run"] = 12
    validation_sequences: Annotated[int, positive] = 64
    probe_sequences: Annotated[int, from_zero, "on which to measure the errors of gradients; 0: never"] = 0
    same_batch: Annotated[bool, "read one batch again and again: gradients without noise"] = False
    time: Annotated[int | None, positive, "only time so many steps of each run, in turn"] = None
    folder: Annotated[Path, output_folder, "for checkpoints and logs"] = Path("runs/pretrain")
    device: Annotated[str, device] = field(default_factory=usual_device)
    minutes: Annotated[float | None, positive_number, "stop at the first report after this time"] = None

    def __post_init__(self):
        for name, number in (
            ("tokens_per_pass", self.context),
            ("tokens_per_step", self.tokens_per_pass),
            ("tokens", self.tokens_per_step),
        ):
            if getattr(self, name) % number:
                raise ValueError(f"{name}: expected a multiple of {number}, got {getattr(self, name)}")

    @property
    def steps(self) -> int:
        return self.tokens // self.tokens_per_step

    def run(self, command: str) -> None:
        runs = list(self.runs())
        if len(runs) > 1 and not self.time:
            train_all(self, runs, command)
            return
        # The models are gone before the group of processes: if theirs is its last reference, it waits for its threads
        # with the interpreter locked, and one of them may wait for the interpreter.
        with processes(self.device) as group:
            (time_here if self.time else train_here)(self, runs, group.command(command), group)

    def runs(self) -> Iterator[PretrainRun]:
        """Yield the runs of all values, those that are compared with one another one after the other."""
        for rate, seed, norm, arm in product(self.learning_rate, self.seed, self.qk_norm, self.attention):
            sizes = self.tokens_per_step, self.context, self.tokens
            yield PretrainRun(self.model, arm, NORMS[norm], rate, *sizes, seed)


def config_and_settings(options: Pretrain, run: PretrainRun, corpus: Corpus) -> tuple[LlamaConfig, PretrainSettings]:
    shape = MODELS[run.model] | {name: x for name in SHAPE if (x := getattr(options, name)) is not None}
    on_gpu = torch.device(options.device).type == "cuda"
    shape |= {"context": run.context, "backend": "auto" if on_gpu else "reference"}
    config = LlamaConfig(corpus.vocab_size, qk_norm=run.qk_norm, **shape, **ARMS[run.arm])
    settings = PretrainSettings(
        steps=options.steps,
        batch_size=run.tokens_per_step // run.context,
        micro_batch_size=options.tokens_per_pass // run.context,
        learning_rate=run.learning_rate,
        warmup_steps=round(options.warmup * options.steps),
        report_every=-(-options.steps // options.reports),
        seed=run.seed,
        validation_sequences=options.validation_sequences,
        probe_sequences=options.probe_sequences,
        same_batch=options.same_batch,
        autocast=on_gpu,
        compiled=on_gpu,
    )
    return config, settings


def train_here(options: Pretrain, runs: list[PretrainRun], command: str, group: Processes) -> None:
    """Train one model to its end, or to a checkpoint if the time is over."""
    (run,) = runs
    if group.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matmul
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    corpus = read_corpus(options.corpus)
    config, settings = config_and_settings(options, run, corpus)
    training = Pretraining(corpus, config, settings, group.device, processes=group)
    try:
        train(training, options.folder / f"{run.name}.pt", deadline(options.minutes))
    except OutOfTime as reason:
        if group.is_first:
            print(f"{reason}: the same command goes on")
        return
    if group.is_first:
        row = run.facts | result_row(training) | {"tokens": run.tokens}  # if it diverged, too: a run of this length
        outcome = row["diverged"] or f"held-out loss {row['final_val_loss']:.4f}"
        print(f"{row['steps']} steps of {run.tokens_per_step:,} tokens, {row['seconds']:.0f} s; {outcome}")
        write_record(options.json, [row], command=command, corpus=corpus.facts)


def time_here(options: Pretrain, runs: list[PretrainRun], command: str, group: Processes) -> None:
    """Time steps of all runs in one process, in turn; under torchrun in several together."""
    corpus = read_corpus(options.corpus)
    trainings = {}
    for run in runs:
        config, settings = config_and_settings(options, run, corpus)
        trainings[run] = Pretraining(corpus, config, settings, group.device, processes=group)
        for _ in range(WARMUP):
            trainings[run].advance()
    times: dict[PretrainRun, list[float]] = {run: [] for run in runs}
    for run in in_turn(runs, options.time):
        started = synchronized_time(group.device)
        trainings[run].advance()
        times[run].append(1e3 * (synchronized_time(group.device) - started))
    rows = []
    for run, training in trainings.items():
        columns = time_columns(times[run])
        columns |= {"tokens_per_second": round(1e3 * run.tokens_per_step / columns["ms_median"])}
        columns |= {"parameters": parameters(training), "devices": group.count}
        columns["protocol"] = "paired" if len(runs) > 1 else "alone"
        rows.append(run.facts | columns)
    if group.is_first:
        rates = [(run.name, row["tokens_per_second"]) for run, row in zip(runs, rows, strict=True)]
        print(markdown_table(("run", "tokens a second"), rates))
        write_record(options.json, rows, command=command, corpus=corpus.facts)


def train_all(options: Pretrain, runs: list[PretrainRun], command: str) -> None:
    """Train each model that the record lacks, and write the record after each."""
    started, is_over, corpus = time.monotonic(), deadline(options.minutes), read_corpus(options.corpus)
    on_gpu = torch.device(options.device).type == "cuda"
    devices = list(range(torch.cuda.device_count())) if on_gpu else [None]
    arguments = {run: arguments_of(*config_and_settings(options, run, corpus), corpus) for run in runs}
    before = recorded(options.json, arguments)
    facts = read_record(options.json).provenance if before else {}
    commands = [*dict.fromkeys([*facts.get("commands", [facts.get("command", command)]), command])]
    erratum = {"erratum": facts["erratum"]} if "erratum" in facts else {}
    plan = Plan("runs", [*before, *(run for run in runs if run not in before)])
    with opened(plan, options.folder, list(arguments.values()), devices, is_over) as work:
        for run, row in before.items():
            work.parts.parts[run.name] = [row]
        if not (prepared := options.folder / "corpus.safetensors").exists():
            write_corpus(corpus, prepared)

        def record(run: Run | None = None) -> None:
            work.record(options.json, command, corpus=corpus.facts, commands=commands, **erratum)

        def trained(run: PretrainRun, gpu: int | None) -> list[Row]:
            minutes = options.minutes and max(0.01, options.minutes - (time.monotonic() - started) / 60)
            rows = train_in_a_process(replace(options, minutes=minutes), run, gpu)
            if rows[0]["arguments"] != arguments[run]:
                raise Failed(f"{run.name}: expected a run with {arguments[run]}, got {rows[0]['arguments']}")
            return rows

        left = work.finish(trained, record)
        record()
    lines = []
    for run, (row,) in work.finished.items():
        error = row["probes"][-1]["errors"].get("sagebwd", "") if row["probes"] else ""  # an older record may lack it
        lines.append((run.name, row["diverged"] or round(row["final_val_loss"], 4), error))
    print(markdown_table(("run", "held-out loss", "error of SageBwd's gradient"), lines))
    if left:
        print(f"left: {', '.join(run.name for run in left)}; the same command goes on")


def recorded(path: Path | None, arguments: dict[PretrainRun, Row]) -> dict[PretrainRun, Row]:
    """Return the runs that a record has. Raises ValueError if it has one of `arguments`' runs, but made otherwise."""
    if path is None or not path.exists():
        return {}
    found = {PretrainRun.of_row(row): row for row in read_record(path).rows}
    for run, asked in arguments.items():
        # Older records lack an option.
        if run in found and {"same_batch": False} | found[run]["arguments"] != asked:
            raise ValueError(f"json: expected a file whose {run.name} was made with the same arguments, got {path}")
    return found


def train_in_a_process(options: Pretrain, run: PretrainRun, gpu: int | None) -> list[Row]:
    """Train a run in a process of its own. gpu: the number of a CUDA device, None for the CPU.

    Raises `OutOfTime`, or `Failed` with the name of the log if the process ends with an error.
    """
    result, log = (options.folder / f"{run.name}.{suffix}" for suffix in ("json", "log"))
    chosen = {name: getattr(options, name) for name in PASSED_ON if getattr(options, name) is not None}
    chosen |= {"attention": run.arm, "qk_norm": "yes" if run.qk_norm else "no", "learning_rate": run.learning_rate}
    chosen |= {"seed": run.seed, "json": result, "corpus": options.folder / "corpus.safetensors"}
    command = [sys.executable, "-m", "sage_lab", "pretrain"]
    command += [text for name, x in chosen.items() for text in (f"--{name.replace('_', '-')}", str(x))]
    command += ["--same-batch"] if options.same_batch else []
    command += ["--minutes", str(options.minutes)] if options.minutes else []
    environment = os.environ | {PARENT: str(os.getpid())}
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    with log.open("a") as output:
        code = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False).returncode
    if code:
        raise Failed(f"{run.name}: the run ended with exit status {code}, see {log}")
    if not result.exists():
        raise OutOfTime(f"{run.name}: see {log}")
    record = read_record(result)
    return [record.rows[0] | {"gpu": record.provenance["gpu"], "commit": record.provenance["commit"]}]
