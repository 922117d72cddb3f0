"""`python -m sage_kernels bench|accuracy|profile|compile|instructions`: time, check, or compile the kernels."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from sage_ref.records import markdown_table, replaced, write_record

HERE = Path(__file__).parent
COMPILE_RECORD = HERE / "measure" / "compile_record.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sage_kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    bench_parser = commands.add_parser("bench", help="time every level and the peers on this GPU")
    bench_parser.add_argument("--record", "--json", type=Path, metavar="FILE", help="write the rows to FILE")
    bench_parser.add_argument("--op", choices=("sagebwd", "sla2"), default="sagebwd", help="which ladder")
    bench_parser.add_argument("--tune", action="store_true", help="time launch settings instead; rewrites the table")
    bench_parser.add_argument("--workers", type=int, default=8, help="processes that compile for --tune")
    bench_parser.add_argument("--n", type=int, nargs="+", help="only these sequence lengths")
    bench_parser.set_defaults(run=bench)
    accuracy_parser = commands.add_parser("accuracy", help="compare the kernels with the reference on this GPU")
    accuracy_parser.add_argument("--op", choices=("sagebwd", "sla2"), default="sagebwd", help="which kernels")
    accuracy_parser.add_argument("--record", "--json", type=Path, metavar="FILE", help="write the rows to FILE")
    accuracy_parser.set_defaults(run=accuracy)
    profile_parser = commands.add_parser("profile", help="what limits the Hopper kernels; needs Nsight Compute")
    profile_parser.add_argument("--record", "--json", type=Path, metavar="FILE", help="write the rows to FILE")
    profile_parser.set_defaults(run=profile)
    compile_parser = commands.add_parser("compile", help="compile every level for sm_80 to sm_120 and check the result")
    compile_parser.add_argument("--capability", type=int, nargs="+", help="only these, for example 90")
    compile_parser.add_argument("--update", action="store_true", help="record the spills found as the new limit")
    compile_parser.add_argument("--json", type=Path, metavar="FILE")
    compile_parser.add_argument("--workers", type=int, default=2)
    compile_parser.set_defaults(run=compile_levels)
    instructions_parser = commands.add_parser("instructions", help="count what the loop of every level executes")
    instructions_parser.add_argument("--record", "--json", type=Path, metavar="FILE", help="write the rows to FILE")
    instructions_parser.set_defaults(run=instructions)
    options = parser.parse_args(arguments)
    options.command = "python -m sage_kernels " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    options.run(options)


def bench(options: argparse.Namespace) -> None:
    from sage_kernels.measure import bench, sla2_bench, sla2_tuning, tuning

    require_gpu()
    if options.tune:
        sla2 = options.op == "sla2"
        rows = list((sla2_tuning if sla2 else tuning).rows(options.workers))
        print(markdown_table(rows[0], [row.values() for row in rows]))
        table = HERE / "common" / ("launch_hopper_sla2.json" if sla2 else "launch_hopper.json")
        write_record(options.record or table, rows, command=options.command)
        return
    shapes, bench_shape = bench.SHAPES, bench.bench_shape
    columns = ("provider", "level", "scope", "direction", "ms_median", "tops", "rel_l2")
    if options.op == "sla2":
        shapes, bench_shape = sla2_bench.SHAPES, sla2_bench.bench_shape
        columns = (*columns[:3], "part", "sparsity", *columns[3:])
    rows = []
    for shape in shapes:
        if options.n and shape.n not in options.n:
            continue
        print(f"\n{shape}\n\n{markdown_table(columns, [])}")
        for row in bench_shape(shape):
            rows.append(row)
            print("|", " | ".join(str(row[column]) for column in columns), "|", flush=True)
        if options.record:
            write_record(options.record, rows, command=options.command, seeds=[0])


def accuracy(options: argparse.Namespace) -> None:
    from sage_kernels.measure import accuracy, sla2_accuracy

    require_gpu()
    if options.op == "sla2":
        accuracy = sla2_accuracy
        rows = list(accuracy.shape_rows())
        worst = accuracy.largest(rows)
        print(f"{len(rows)} cases, largest relative L2 against the reference:\n")
        print(markdown_table(worst[0], [row.values() for row in worst]))
    else:
        rows = list(accuracy.shape_rows())
        worst = accuracy.largest(rows)
        print(f"{len(rows)} shapes, largest relative L2 against the simulating reference:\n")
        print(markdown_table(worst, [worst.values()]))
        table1 = list(accuracy.table1_rows())
        print("\nTable 1, relative L2 against exact attention:\n")
        columns = ("sigma", "tensor", "kernel_rel_l2", "reference_rel_l2", "paper_rel_l2")
        print(markdown_table(columns, [[row[column] for column in columns] for row in table1]))
        rows += table1
    equal = accuracy.repeats_are_equal()
    print(f"\n100 repeats bitwise equal: {equal}")
    if options.record:
        facts = {"seeds": [0], "repeats_bitwise_equal": equal}
        write_record(options.record, rows, command=options.command, **facts)


def profile(options: argparse.Namespace) -> None:
    from sage_kernels.measure import profile

    require_gpu()
    rows = list(profile.rows())
    print(markdown_table(rows[0], [row.values() for row in rows]))
    if options.record:
        write_record(options.record, rows, command=options.command)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none (recorded results are in notebooks/recorded)")
    torch.manual_seed(0)


def compile_levels(options: argparse.Namespace) -> None:
    from sage_kernels.measure import compile

    every = [*compile.cases(), *compile.sla2_cases()]
    wanted = [case for case in every if not options.capability or case.capability in options.capability]
    recorded = json.loads(COMPILE_RECORD.read_text()) if COMPILE_RECORD.exists() else {}
    rows, complaints = [], []
    for case, compiled in compile.compile_all(wanted, options.workers):
        name = f"sm_{case.capability} {case.name}"
        complaint = compile.complaint(case, compiled, 10**6 if options.update else recorded.get(name, 0))
        rows.append({"kernel": name} | compiled._asdict())
        recorded[name] = compiled.spills
        if complaint:
            complaints.append(f"{name}: {complaint}")
    print(markdown_table(rows[0], [row.values() for row in rows]))
    if options.json:
        write_record(options.json, rows, command=options.command)
    if options.update:
        with replaced(COMPILE_RECORD) as temporary:
            temporary.write_text(json.dumps(recorded, indent=1) + "\n")
    if complaints:
        sys.exit("compile: " + "\ncompile: ".join(complaints))
    print(f"{len(rows)} kernels compiled; none spills more than recorded, every INT8 level uses INT8 tensor cores.")


def instructions(options: argparse.Namespace) -> None:
    from sage_kernels.measure import instructions

    rows = list(instructions.rows())
    print(markdown_table(rows[0], [row.values() for row in rows]))
    if options.record:
        write_record(options.record, rows, command=options.command)


if __name__ == "__main__":
    main()
