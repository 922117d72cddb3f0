"""The command `bench`: times of the public functions or of every level, a file to send, or launch tables (--tune)."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import triton
from sage_kernels.common.candidates import CANDIDATES
from sage_kernels.common.launch_tables import users_table

from sage_lab.bench import contribution, dense, sparse, tuning
from sage_lab.bench.accuracy import sagebwd_rows
from sage_lab.bench.case import Measurement, Shape
from sage_lab.bench.contenders import Absent
from sage_lab.bench.peers import PEERS
from sage_lab.bench.ratios import OURS, ratio_lines
from sage_lab.bench.timing import require_gpu
from sage_lab.command_line import Failed, input_file, positive, positive_number
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
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--tune", action="store_true", help="time launch settings for this GPU instead")
    parser.add_argument("--workers", type=positive, default=8, help="processes that compile for --tune")
    modes.add_argument("--contribute", action="store_true", help="time the main points, into a file that you can send")
    modes.add_argument(
        "--check-contribution", type=input_file, nargs="+", metavar="FILE", help="say what is wrong with such files"
    )
    parser.add_argument(
        "--peak", type=positive_number, nargs=2, metavar="TOPS",
        help="rates of a card that --contribute doesn't know, by its data sheet: INT8, and 16 bit with sums in float32",
    )  # fmt: skip
    parser.add_argument("--n", type=positive, nargs="+", help="only these sequence lengths")
    parser.add_argument("--head-dim", type=positive, nargs="+", help="only these head sizes")
    parser.add_argument("--without", choices=PEERS, nargs="+", default=(), help="leave out these peers")


def bench_command(options: argparse.Namespace) -> None:
    """Time the public function and its peers in turn on this GPU; goes on where it was stopped."""
    if options.check_contribution:
        check_contributions(options.check_contribution)
        return
    if options.contribute:
        contribute(options)
        return
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


def contribute(options: argparse.Namespace) -> None:
    """Time the main points, compare the kernels with the reference, and write both into a file for a pull request."""
    require_gpu()
    major, minor = torch.cuda.get_device_capability()
    about = provenance(options.command)
    is_own = any(users_table(about["gpu"], operation).exists() for operation in ("sagebwd", "sla2"))
    facts = {"capability": 10 * major + minor, "peak": options.peak, "launches": "own" if is_own else "packaged"}
    if wrong := contribution.broken(contribution.ABOUT, {"provenance": about | facts}):
        raise Failed("; ".join(wrong))
    name = contribution.file_name(about["gpu"], about["commit"])
    path = options.json or contribution.CONTRIBUTED / name
    if path.name != name:
        raise ValueError(f"json: expected a file called {name}, got {path}")
    measurement = dense.CONTRIBUTION
    with only_writer(path):
        found = timed(measurement, measurement.shapes, path, options.command, options.without)
        rows = [row for row in found if "missing" not in row]
        facts["missing"] = [row for row in found if "missing" in row]
        facts["checks"] = list(sagebwd_rows(**contribution.CHECKED))
        facts["ratios"] = contribution.ratios_of(rows)
        write_record(path, rows, command=options.command, seeds=[0], **facts)
    check_contributions([path])
    print("Send it as a pull request that adds this file: see CONTRIBUTING.md.")


def check_contributions(paths: Sequence[Path]) -> None:
    """Print what is wrong with contributed files. Raises `Failed` if anything is."""
    found = {path: contribution.file_complaints(path) for path in paths}
    for path, complaints in found.items():
        print("\n".join([f"{path}: {'nothing wrong' if not complaints else 'refused'}", *complaints]))
    if refused := sum(map(bool, found.values())):
        raise Failed(f"contributions: expected files that keep all rules, got {refused} of {len(found)} that don't")


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
