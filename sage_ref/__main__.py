"""`python -m sage_ref COMMAND`: info, table1, table2, readme, and what trains (sage_ref/experiments/commands.py)."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from sage_ref.command_line import positive, tile_size
from sage_ref.experiments import commands as training
from sage_ref.records import RECORDED, Record, markdown_table, provenance, read_record, replaced, write_record
from sage_ref.sagebwd.api import triton_obstacle

MEASURES = {"cosine": ".4f", "rel_l2": ".4f", "rms": ".1e"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sage_ref", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, add_options, description in COMMANDS:
        command = commands.add_parser(name, help=description, description=description)
        add_options(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
        command.set_defaults(run=run)
    options = parser.parse_args(arguments)
    options.command = "python -m sage_ref " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    options.run(options)


def info(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = provenance(options.command)
    example = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device)
    facts["backend chosen by auto"] = f"reference, because {o}" if (o := triton_obstacle(example)) else "triton"
    print(markdown_table(("what", "here"), facts.items()))
    if options.json:
        with replaced(options.json) as temporary:
            temporary.write_text(json.dumps(facts, indent=1) + "\n")


def table1(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from sage_ref.experiments import tables

    sweep = tables.Table1Sweep(options.n, options.head_dim, options.blocks, options.granularity, range(options.seeds))
    checkpoint = (options.json or Path("runs/table1.json")).with_suffix(".partial")
    total = len(sweep.lengths) * len(sweep.head_dims) * len(tables.PAPER_TABLE1)
    rows = [row for found in tqdm(tables.table1_sweep(sweep, checkpoint, options.device), total=total) for row in found]
    record = Record({}, rows)
    best = tables.closest_setting(record)
    print(f"Closest to the paper over all rows: {describe(best)}")
    header = ("sigma", *tables.TENSORS, "largest deviation", "closest setting for this row")
    lines = []
    for sigma, setting in tables.closest_setting_per_sigma(record).items():
        found = record.select(sigma=sigma, **best)
        cells = [f"{row['rel_l2']:.4f} (paper {row['paper_rel_l2']:.4f})" for row in found]
        lines.append((sigma, *cells, f"{max(map(tables.deviation, found)):.0%}", describe(setting)))
    print("\nRelative L2 error at that setting, mean over seeds:\n\n" + markdown_table(header, lines))
    if options.json:
        write_record(options.json, rows, command=options.command, seeds=list(sweep.seeds))
    checkpoint.unlink()


def describe(setting: dict) -> str:
    return "N={n} D={head_dim} tiles {block_q}x{block_kv}, scales per {granularity}".format(**setting)


def table2(options: argparse.Namespace) -> None:
    from sage_ref.experiments import tables
    from sage_ref.sagebwd.settings import SageBwdSettings
    from sage_ref.training.capture import read_capture

    settings = SageBwdSettings.printed(is_causal=True, granularity=options.granularity)
    header, columns, rows, facts = ["tensor"], [list(tables.PAPER_TABLE2)], [], []
    for path in options.capture:
        capture = read_capture(path)
        if "run" not in capture.provenance:
            raise SystemExit(f"capture: expected a file of `python -m sage_ref capture`, got {path}")
        model = {"capture": path.stem, "qk_norm": capture.provenance["run"]["qk_norm"]}
        found = [model | row for row in tables.table2_rows(capture.layers, settings)]
        worst = tables.most_error_prone(found)
        header += [f"{path.stem}, layer {worst[0]['layer']}: cosine", "relative L2", "RMS"]
        columns += [[f"{row[name]:{digits}}" for row in worst] for name, digits in MEASURES.items()]
        rows, facts = rows + found, [*facts, {"file": path.name} | capture.provenance]
    header += ["paper: cosine", "relative L2"]
    columns += [[f"{x:.4f}" for x in column] for column in zip(*tables.PAPER_TABLE2.values(), strict=True)]
    print("Of each capture the layer with the largest error of dQ; --json writes all layers.\n")
    print(markdown_table(header, list(zip(*columns, strict=True))))
    if options.json:
        write_record(options.json, rows, command=options.command, captures=facts)


def readme(options: argparse.Namespace) -> None:
    from sage_ref.course.figures import overview_figure
    from sage_ref.course.readme import BENCH, OVERVIEW, TABLE2, rewrite

    OVERVIEW.parent.mkdir(exist_ok=True)
    overview_figure(read_record(TABLE2), read_record(BENCH)).savefig(OVERVIEW, dpi=130)
    changed = [str(path) for path in rewrite()]
    print(markdown_table(("rewritten",), [[path] for path in changed] or [["nothing: all up to date"]]))
    if options.json:
        with replaced(options.json) as temporary:
            temporary.write_text(json.dumps(changed) + "\n")


def add_table1_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.experiments.tables import Table1Sweep

    default = Table1Sweep()
    parser.add_argument("--n", type=positive, nargs="+", default=default.lengths, help="sequence lengths")
    parser.add_argument("--head-dim", type=positive, nargs="+", default=default.head_dims)
    parser.add_argument("--blocks", type=tile_size, nargs="+", default=default.blocks, metavar="BQxBKV")
    parser.add_argument("--granularity", nargs="+", default=default.granularities, choices=("block", "row"))
    parser.add_argument("--seeds", type=positive, default=len(default.seeds), help="number of seeds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_table2_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.experiments.tables import CAPTURES

    recorded = [RECORDED / f"{name}.safetensors" for name in CAPTURES.values()]
    parser.add_argument("--capture", type=Path, nargs="+", default=recorded, metavar="FILE", help="of `capture`")
    parser.add_argument("--granularity", default="block", choices=("block", "row"))


COMMANDS = (
    ("info", info, lambda parser: None, "this machine, the versions, and the backend that 'auto' would choose"),
    ("table1", table1, add_table1_options, "the paper's Table 1, swept over what it leaves open"),
    ("table2", table2, add_table2_options, "the paper's Table 2 on captured activations"),
    ("readme", readme, lambda parser: None, "write the READMEs' measured tables and figure from the records"),
    *training.COMMANDS,
)

if __name__ == "__main__":
    main()
