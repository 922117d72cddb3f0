"""The command `bench`: times of the public functions or of every level, launch tables, or the L2 cache's rate."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import triton
from sage_kernels.common.candidates import CANDIDATES
from sage_kernels.common.launch_tables import users_table

from sage_lab.bench import dense, sparse, tuning
from sage_lab.bench.measure import Turn, measure
from sage_lab.bench.problem import Shape
from sage_lab.bench.rates import rate_rows
from sage_lab.bench.ratios import OURS, PEER_NAMES, pays_from, ratio_lines
from sage_lab.bench.timing import GPU, Gpu, require_gpu
from sage_lab.command_line import Arguments, Failed, positive
from sage_lab.files import only_writer
from sage_lab.plan import FinishedParts
from sage_lab.records import Row, markdown_table, provenance, write_record


class Measurement(NamedTuple):
    """Shapes, and all turns of one of them."""

    shapes: Callable[..., Iterator[Shape]]  # of lengths and head_dims
    turns: Callable[[Shape, Gpu], Iterator[Turn]]


MEASUREMENTS = {  # by --op and --levels
    ("sagebwd", False): Measurement(dense.user_shapes, dense.user_turns),
    ("sagebwd", True): Measurement(dense.ladder_shapes, dense.ladder_turns),
    ("sla2", False): Measurement(sparse.user_shapes, sparse.user_turns),
    ("sla2", True): Measurement(sparse.ladder_shapes, sparse.ladder_turns),
}
PRINTED = ("provider", "level", "scope", "direction", "cuda_graph", "ms_median", "host_us", "tops", "rel_l2")


@dataclass(frozen=True, kw_only=True)
class Bench(Arguments):
    """Options of `bench`."""

    op: Annotated[Literal["sagebwd", "sla2"], "which kernels"] = "sagebwd"
    levels: Annotated[bool, "time every level"] = False
    tune: Annotated[bool, "time launch settings for this GPU instead"] = False
    rates: Annotated[bool, "time reading from the L2 cache instead"] = False
    workers: Annotated[int, positive, "processes that compile for --tune"] = 8
    n: Annotated[tuple[int, ...], positive, "only these sequence lengths"] = ()
    head_dim: Annotated[tuple[int, ...], positive, "only these head sizes"] = ()
    without: Annotated[tuple[Literal[tuple(PEER_NAMES)], ...], "leave out these peers"] = ()

    def run(self, command: str, gpu: Gpu = GPU) -> None:
        """Time the public function and its peers in turn on this GPU; goes on where it was stopped."""
        if gpu is GPU:
            require_gpu()
        if self.tune:
            tune(self.op, self.workers, self.json, command)
            return
        if self.rates:
            rows = list(rate_rows(gpu))
            print(markdown_table(rows[0], [row.values() for row in rows]))
            write_record(self.json, rows, command=command)
            return
        with only_writer(self.json) if self.json else nullcontext():
            rows = timed(self, gpu, command)
        times = [row for row in rows if "missing" not in row]
        print(f"\nA peer's time divided by ours, above 1 ours is faster:\n\n{markdown_table(*ratio_lines(times))}")
        print(f"\nINT8 pays from so many tokens on, by head size and mask: {pays_from(times)}")
        if ours := [row for row in rows if "missing" in row and row["provider"].startswith(OURS)]:
            raise Failed(f"our function could not be timed in {len(ours)} cases, the first is {ours[0]}")

    @property
    def shapes(self) -> list[Shape]:
        """The shapes to time, by default all of the measurement."""
        chosen = {"lengths": self.n, "head_dims": self.head_dim}
        return list(self.measurement.shapes(**{name: values for name, values in chosen.items() if values}))

    @property
    def measurement(self) -> Measurement:
        """The measurement that the options name."""
        return MEASUREMENTS[self.op, self.levels]


def timed(bench: Bench, gpu: Gpu, command: str) -> list[Row]:
    """Return the rows of all turns, and of who is missing. With a record, finished turns are not measured again.

    They are kept in a file beside it, which goes once all are there. The record holds all that is finished.
    """
    here = provenance(command)
    same = [here[name] for name in ("gpu", "driver", "torch", "triton", "commit")]
    arguments = bench.op, bench.levels, bench.shapes, bench.without, same
    finished, found = FinishedParts(bench.json, arguments) if bench.json else None, []
    for shape in bench.shapes:
        print(f"\n{shape}\n\n{markdown_table(PRINTED, [])}", flush=True)
        for number, turn in enumerate(bench.measurement.turns(shape, gpu)):
            measured = partial(measured_rows, turn, bench.without)
            if finished is None:
                found += measured()
                continue
            found += finished.rows(f"{shape}, turn {number}", measured)
            missing = [row for row in found if "missing" in row]
            times = [row for row in found if "missing" not in row]
            write_record(bench.json, times, command=command, seeds=[0], missing=missing)
    if finished is not None:
        finished.remove()
    return found


def measured_rows(turn: Turn, without: Sequence[str]) -> list[Row]:
    """Measure one turn and print each row as soon as it is there."""
    rows = []
    for row in measure([turn], without):
        rows.append(row)
        if "missing" in row:
            print(f"not timed: {row['provider']}, {row['missing']}", flush=True)
        else:
            print("|", " | ".join(str(row[column]) for column in PRINTED), "|", flush=True)
    return rows


def tune(op: str, workers: int, path: Path | None, command: str) -> None:
    """Time every candidate and write the table of this GPU, which `choose_launch` reads from then on.

    Triton's version decides what a table is worth, and the candidates what was tried: a run that was interrupted goes
    on only with the same ones.
    """
    path = path or users_table(torch.cuda.get_device_name(), op)
    with only_writer(path):
        parts = FinishedParts(path, (torch.cuda.get_device_name(), triton.__version__, CANDIDATES))
        rows = list(tuning.tuned_rows(op, workers, parts))
        write_record(path, rows, command=command)
        parts.remove()
    print(markdown_table(rows[0], [row.values() for row in rows]))
    print(f"launch table: {path}")
