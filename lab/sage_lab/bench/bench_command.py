"""The command `bench`: times of what a user gets, of every level, or, with --tune, the launch tables."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch
import triton
from sage_course.results.paired import ratio_lines
from sage_kernels.common.candidates import CANDIDATES
from sage_kernels.common.launch_tables import users_table

from sage_lab.bench import bench, ladder_bench, sla2_bench, sla2_tuning, sparse_bench, tuning
from sage_lab.bench.contenders import OURS, Absent
from sage_lab.bench.options import require_gpu
from sage_lab.bench.peers import PEERS
from sage_lab.command_line import Failed, positive
from sage_lab.plan import FinishedParts
from sage_lab.records import Row, markdown_table, only_writer, provenance, write_record

# By --op and --levels. Each has SHAPES and bench_shape(shape, absent), the rows of one shape.
MEASUREMENTS = {
    ("sagebwd", False): bench,
    ("sagebwd", True): ladder_bench,
    ("sla2", False): sparse_bench,
    ("sla2", True): sla2_bench,
}
COLUMNS = ("provider", "level", "scope", "direction", "cuda_graph", "ms_median", "host_us", "tops", "rel_l2")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", choices=("sagebwd", "sla2"), default="sagebwd", help="which kernels")
    parser.add_argument("--levels", action="store_true", help="every level of the ladder and its parts")
    parser.add_argument("--tune", action="store_true", help="time launch settings instead, for this GPU")
    parser.add_argument("--workers", type=positive, default=8, help="processes that compile for --tune")
    parser.add_argument("--n", type=positive, nargs="+", help="only these sequence lengths")
    parser.add_argument("--head-dim", type=positive, nargs="+", help="only these head sizes")
    parser.add_argument("--without", choices=PEERS, nargs="+", default=(), help="leave out peers, one that crashes say")


def run(options: argparse.Namespace) -> None:
    """Time the public function and its peers in turn on this GPU; goes on where it was stopped."""
    measurement = MEASUREMENTS[options.op, options.levels]
    shapes = chosen(measurement.SHAPES, n=options.n, head_dim=options.head_dim)
    require_gpu()
    if options.tune:
        tune(options)
        return
    with only_writer(options.json) if options.json else nullcontext():
        rows = timed(measurement, shapes, options.json, options.command, options.without)
    timed_rows = [row for row in rows if "missing" not in row]
    print(f"\nTimes over ours, above 1 where ours is faster:\n\n{markdown_table(*ratio_lines(timed_rows))}")
    if ours := [row for row in rows if "missing" in row and row["provider"].startswith(OURS)]:
        raise Failed(f"ours was not timed {len(ours)} times, at first in {ours[0]}")


def chosen(shapes: Sequence, **wanted: Sequence[int] | None) -> list:
    """The shapes whose fields have one of the wanted values, where some are wanted."""
    for name, values in wanted.items():
        known = sorted({getattr(shape, name) for shape in shapes})
        if unknown := sorted(set(values or ()) - set(known)):
            raise ValueError(f"{name}: expected some of {known}, got {unknown}")
    fits = [all(not values or getattr(shape, name) in values for name, values in wanted.items()) for shape in shapes]
    return [shape for shape, fit in zip(shapes, fits, strict=True) if fit]


def timed(
    measurement: ModuleType, shapes: Sequence, record: Path | None, command: str, without: Sequence[str] = ()
) -> list[Row]:
    """Rows of these shapes, and of who is missing. With a record, finished shapes are not measured again.

    They are kept in a file beside it, which goes once all are there. The record holds all that is finished, other
    shapes of this measurement too: a command may be stopped, or take some shapes now and the others later.
    """
    finished = None
    if record:
        here = provenance(command)
        same = [here[name] for name in ("gpu", "driver", "torch", "triton", "commit")]
        finished = FinishedParts(record, (measurement.__name__, same))
    rows = {}
    for shape in shapes:
        name = str(shape)
        is_kept = finished and name in finished.parts
        print(f"\n{shape}{': measured before' if is_kept else ''}", flush=True)
        measure = _measure(measurement, shape, without)
        rows[name] = finished.rows(name, measure) if finished else measure()
        if finished:
            write_finished(measurement, finished, record, command)
    if finished and all(str(shape) in finished.parts for shape in measurement.SHAPES):
        finished.remove()
    return [row for found in rows.values() for row in found]


def _measure(measurement: ModuleType, shape: tuple, without: Sequence[str]) -> Callable[[], list[Row]]:
    def measure() -> list[Row]:
        torch.manual_seed(0)  # the same tensors whatever was measured before
        print(f"\n{markdown_table(COLUMNS, [])}")
        rows, absent = [], Absent(without)
        for row in measurement.bench_shape(shape, absent):
            rows.append(row)
            print("|", " | ".join(str(row[column]) for column in COLUMNS), "|", flush=True)
        return rows + absent.rows

    return measure


def write_finished(measurement: ModuleType, finished: FinishedParts, record: Path, command: str) -> None:
    """All finished shapes, in the measurement's order; who was missing goes to the provenance."""
    names = [str(shape) for shape in measurement.SHAPES]
    rows = [row for name in names for row in finished.parts.get(name, ())]
    missing = [row for row in rows if "missing" in row]
    write_record(record, [row for row in rows if "missing" not in row], command=command, seeds=[0], missing=missing)


def tune(options: argparse.Namespace) -> None:
    """Time every candidate and write the table of this GPU, which `choose_launch` reads from then on.

    Triton's version decides what a table is worth, and the candidates what was tried: a run that was interrupted goes
    on only with the same ones.
    """
    path = options.json or users_table(torch.cuda.get_device_name(), options.op)
    with only_writer(path):
        parts = FinishedParts(path, (torch.cuda.get_device_name(), triton.__version__, CANDIDATES))
        rows = list((sla2_tuning if options.op == "sla2" else tuning).rows(options.workers, parts))
        write_record(path, rows, command=options.command)
        parts.remove()
    print(markdown_table(rows[0], [row.values() for row in rows]))
    print(f"launch table: {path}")
