"""The command `bench`: times of every level and the peers, or, with --tune, the launch tables."""

import argparse

import torch
import triton

from sage_kernels.common.candidates import CANDIDATES
from sage_kernels.common.launch_tables import users_table
from sage_kernels.measure import bench, sla2_bench, sla2_tuning, tuning
from sage_kernels.measure.options import add_record, require_gpu
from sage_ref.command_line import positive
from sage_ref.records import FinishedParts, markdown_table, only_writer, write_record


def add_options(parser: argparse.ArgumentParser) -> None:
    add_record(parser)
    parser.add_argument("--op", choices=("sagebwd", "sla2"), default="sagebwd", help="which ladder")
    parser.add_argument("--tune", action="store_true", help="time launch settings instead, for this GPU")
    parser.add_argument("--workers", type=positive, default=8, help="processes that compile for --tune")
    parser.add_argument("--n", type=positive, nargs="+", help="only these sequence lengths")


def run(options: argparse.Namespace) -> None:
    """Time every level and the peers on this GPU."""
    sla2 = options.op == "sla2"
    shapes = sla2_bench.SHAPES if sla2 else bench.SHAPES
    lengths = sorted({shape.n for shape in shapes})
    if unknown := sorted(set(options.n or ()) - set(lengths)):
        raise ValueError(f"n: expected some of {lengths}, got {unknown}")
    require_gpu()
    if options.tune:
        tune(options)
        return
    columns = ("provider", "level", "scope", *(("part", "sparsity") if sla2 else ()))
    columns += ("direction", "ms_median", "tops", "rel_l2")
    rows = []
    for shape in shapes:
        if options.n and shape.n not in options.n:
            continue
        print(f"\n{shape}\n\n{markdown_table(columns, [])}")
        for row in (sla2_bench.bench_shape if sla2 else bench.bench_shape)(shape):
            rows.append(row)
            print("|", " | ".join(str(row[column]) for column in columns), "|", flush=True)
        if options.record:
            write_record(options.record, rows, command=options.command, seeds=[0])


def tune(options: argparse.Namespace) -> None:
    """Time every candidate and write the table of this GPU, which `choose_launch` reads from then on.

    Triton's version decides what a table is worth, and the candidates what was tried: a run that was interrupted goes
    on only with the same ones.
    """
    path = options.record or users_table(torch.cuda.get_device_name(), options.op)
    with only_writer(path):
        parts = FinishedParts(path, (torch.cuda.get_device_name(), triton.__version__, CANDIDATES))
        rows = list((sla2_tuning if options.op == "sla2" else tuning).rows(options.workers, parts))
        write_record(path, rows, command=options.command)
        parts.remove()
    print(markdown_table(rows[0], [row.values() for row in rows]))
    print(f"launch table: {path}")
