"""The command `bench`: times of the public functions or of every level, or launch tables (--tune)."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import triton
from sage_kernels.common.candidates import CANDIDATES
from sage_kernels.common.launch_tables import users_table

from sage_lab.bench import dense, sparse, tuning
from sage_lab.bench.case import Measurement, Shape
from sage_lab.bench.contenders import Absent
from sage_lab.bench.peers import PEERS
from sage_lab.bench.ratios import OURS, ratio_lines
from sage_lab.bench.timing import require_gpu
from sage_lab.command_line import Failed, positive
from sage_lab.plan import FinishedParts
from sage_lab.records import Row, markdown_table, only_writer, provenance, write_record

MEASUREMENTS = {  # by --op and --levels
    ("sagebwd", False): dense.USER,
    ("sagebwd", True): dense.LADDER,
    ("sla2", False): sparse.USER,
    ("sla2", True): sparse.LADDER,
}
PRINTED = ("provider", "level", "scope", "direction", "cuda_graph", "ms_median", "host_us", "tops", "rel_l2")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    parser.add_argument("--op", choices=("sagebwd", "sla2"), default="sagebwd", help="which kernels")
    parser.add_argument("--levels", action="store_true", help="time every level and its parts")
    parser.add_argument("--tune", action="store_true", help="time launch settings for this GPU instead")
    parser.add_argument("--workers", type=positive, default=8, help="processes that compile for --tune")
    parser.add_argument("--n", type=positive, nargs="+", help="only these sequence lengths")
    parser.add_argument("--head-dim", type=positive, nargs="+", help="only these head sizes")
    parser.add_argument("--without", choices=PEERS, nargs="+", default=(), help="leave out these peers")


def bench_command(options: argparse.Namespace) -> None:
    """Time the public function and its peers in turn on this GPU; goes on where it was stopped."""
    measurement = MEASUREMENTS[options.op, options.levels]
    shapes = chosen(measurement.shapes, n=options.n, head_dim=options.head_dim)
    require_gpu()
    if options.tune:
        tune(options)
        return
    with only_writer(options.json) if options.json else nullcontext():
        rows = timed(measurement, shapes, options.json, options.command, options.without)
    timed_rows = [row for row in rows if "missing" not in row]
    print(f"\nA peer's time divided by ours, above 1 ours is faster:\n\n{markdown_table(*ratio_lines(timed_rows))}")
    if ours := [row for row in rows if "missing" in row and row["provider"].startswith(OURS)]:
        raise Failed(f"our function could not be timed in {len(ours)} cases, the first is {ours[0]}")


def chosen(shapes: Sequence[Shape], **wanted: Sequence[int] | None) -> list[Shape]:
    """Return the shapes whose fields have one of the wanted values, where some are wanted."""
    for name, values in wanted.items():
        known = sorted({getattr(shape, name) for shape in shapes})
        if unknown := sorted(set(values or ()) - set(known)):
            raise ValueError(f"{name}: expected some of {known}, got {unknown}")
    return [x for x in shapes if all(not values or getattr(x, name) in values for name, values in wanted.items())]


def timed(
    measurement: Measurement, shapes: Sequence[Shape], record: Path | None, command: str, without: Sequence[str] = ()
) -> list[Row]:
    """Return the rows of these shapes, and of who is missing. With a record, finished shapes are not measured again.

    They are kept in a file beside it, which goes once all are there. The record holds all that is finished, other
    shapes of this measurement too: a command may be stopped, or take some shapes now and the others later.
    """
    if record is None:
        return [row for shape in shapes for row in measured_rows(measurement, shape, without)]
    here = provenance(command)
    same = [here[name] for name in ("gpu", "driver", "torch", "triton", "commit")]
    finished, found = FinishedParts(record, (measurement.name, same)), []
    for shape in shapes:
        if str(shape) in finished.parts:
            print(f"\n{shape}: measured before", flush=True)
        found += finished.rows(str(shape), lambda shape=shape: measured_rows(measurement, shape, without))
        rows = [row for shape in measurement.shapes for row in finished.parts.get(str(shape), ())]
        missing = [row for row in rows if "missing" in row]
        write_record(record, [row for row in rows if "missing" not in row], command=command, seeds=[0], missing=missing)
    if all(str(shape) in finished.parts for shape in measurement.shapes):
        finished.remove()
    return found


def measured_rows(measurement: Measurement, shape: Shape, without: Sequence[str]) -> list[Row]:
    """Measure one shape and print its rows."""
    torch.manual_seed(0)  # the same tensors whatever was measured before
    print(f"\n{shape}\n\n{markdown_table(PRINTED, [])}", flush=True)
    rows, absent = [], Absent(without)
    for row in measurement.rows(shape, absent):
        rows.append(row)
        print("|", " | ".join(str(row[column]) for column in PRINTED), "|", flush=True)
    return rows + absent.rows


def tune(options: argparse.Namespace) -> None:
    """Time every candidate and write the table of this GPU, which `choose_launch` reads from then on.

    Triton's version decides what a table is worth, and the candidates what was tried: a run that was interrupted goes
    on only with the same ones.
    """
    path = options.json or users_table(torch.cuda.get_device_name(), options.op)
    with only_writer(path):
        parts = FinishedParts(path, (torch.cuda.get_device_name(), triton.__version__, CANDIDATES))
        rows = list(tuning.tuned_rows(options.op, options.workers, parts))
        write_record(path, rows, command=options.command)
        parts.remove()
    print(markdown_table(rows[0], [row.values() for row in rows]))
    print(f"launch table: {path}")
