"""The command `accuracy`: the tables of `accuracy.py` and `sla2_accuracy.py`, printed and recorded."""

import argparse

from sage_lab.bench import accuracy, sla2_accuracy
from sage_lab.bench.options import require_gpu
from sage_lab.records import markdown_table, write_record


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", choices=("sagebwd", "sla2"), default="sagebwd", help="which kernels")


def run(options: argparse.Namespace) -> None:
    """Compare the kernels with the reference on this GPU."""
    require_gpu()
    measured = sla2_accuracy if options.op == "sla2" else accuracy
    rows = list(measured.shape_rows())
    worst = measured.largest(rows)
    if options.op == "sla2":
        print(f"{len(rows)} cases, largest relative L2 against the reference:\n")
        print(markdown_table(worst[0], [row.values() for row in worst]))
    else:
        print(f"{len(rows)} shapes, largest relative L2 against the simulating reference:\n")
        print(markdown_table(worst, [worst.values()]))
        table1 = list(accuracy.table1_rows())
        print("\nTable 1, relative L2 against exact attention:\n")
        columns = ("sigma", "tensor", "kernel_rel_l2", "reference_rel_l2", "paper_rel_l2")
        print(markdown_table(columns, [[row[column] for column in columns] for row in table1]))
        rows += table1
    equal = measured.repeats_are_equal()
    print(f"\n100 repeats bitwise equal: {equal}")
    if options.json:
        facts = {"seeds": [0], "repeats_bitwise_equal": equal}
        write_record(options.json, rows, command=options.command, **facts)
