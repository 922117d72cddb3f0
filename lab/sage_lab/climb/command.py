"""The command `climb`: check a reader's forward kernel, and place it among our levels.

On a GPU it is timed in turn with our levels and with PyTorch's FlashAttention-2. Without one, its machine code for
GPUs that are not there is counted and compared with the record of our levels; see `counting`.
"""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from sage_lab.climb.board import add, board_rows
from sage_lab.climb.child import ask
from sage_lab.climb.counting import GROUPS
from sage_lab.climb.levels import LEVELS
from sage_lab.climb.problems import HEADS, MAIN, PROBLEMS, RECORD, TARGETS, N
from sage_lab.climb.sentence import costliest
from sage_lab.command_line import Failed, input_file, output_file, positive
from sage_lab.records import RECORDED, Record, Row, markdown_table, read_record, write_record

OPTIONAL = ("really INT8", "shared heads")  # milestones that a place among the levels does not need
MEASURED = 90  # the GPU of the sentence, if it was counted: there our levels were measured, too
SHORT = {"tensor cores": "tensor", "conversions": "convert", "arithmetic": "arith"}


def source(text: str) -> str:
    """Return a level's name, or the path of a file that can be read."""
    return text if text in LEVELS else str(input_file(text))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `climb`."""
    parser.add_argument("sources", nargs="*", type=source, metavar="FILE", help="Python with attention(), or level2")
    parser.add_argument("--count", action="store_true", help="count instructions also where there is a GPU")
    parser.add_argument("--target", type=int, choices=TARGETS, nargs="+", default=TARGETS, help="GPUs to count for")
    parser.add_argument("--workers", type=positive, default=2, help="processes that compile")
    parser.add_argument("--board", type=output_file, metavar="FILE", help="also add the result to this board; show it")


def climb_command(options: argparse.Namespace) -> None:
    """Check a forward kernel and place it among our levels, by time or by its instructions."""
    if not options.sources and not options.board:
        known = f"a file with attention(q, k, v, is_causal=False), or one of {', '.join(LEVELS)}"
        raise ValueError(f"FILE: expected {known}, got none")
    if not options.sources and not options.board.exists():
        raise ValueError(f"board: expected a file of `climb FILE --board`, got {options.board}: it doesn't exist")
    shown = board_rows(options.board) if options.board else []  # refused before any work, if it is none
    on_gpu = torch.cuda.is_available()
    is_timed = on_gpu and not options.count
    rows = []
    for name in options.sources:
        check(name, on_gpu)
        found = ask("time", name, on_gpu, problems=PROBLEMS) if is_timed else counts(name, options, on_gpu)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        rows += [row | {"date": date} for row in found]
        print(timed_table(found) if is_timed else counted_tables(found), flush=True)
        write_record(options.json, rows, command=options.command)
    if options.board:
        shown = add(options.board, [row for row in rows if not row.get("peer")], options.command) if rows else shown
        print(f"\n{options.board}:\n\n{board_table(shown)}")


def check(name: str, on_gpu: bool) -> None:
    """Print the verdicts. Raises Failed if one is wrong that a place among the levels needs."""
    found = ask("check", name, on_gpu)
    lines, wrong = [], []
    for milestone, _, (kind, hint, shown, _) in found:
        lines.append((milestone, "right" if not kind else f"{kind}. {hint} {shown}".strip()))
        wrong += [milestone] if kind and milestone not in OPTIONAL else []
    print(f"\n{name}\n\n{markdown_table(('check', 'verdict'), lines)}\n", flush=True)
    if wrong:
        raise Failed(f"{name}: not placed, because it is wrong in {', '.join(wrong)}")


def counts(name: str, options: argparse.Namespace, on_gpu: bool) -> list[Row]:
    """Return a row for every target and problem."""
    shared = {"problems": PROBLEMS, "targets": options.target}
    executions = ask("trace", name, on_gpu, **(shared if name in LEVELS else shared | {"targets": [None]}))
    return ask("count", name, on_gpu, **shared, executions=executions, workers=options.workers)


def recorded() -> Record:
    """Return the record of our levels; an empty one while it is made for the first time."""
    path = RECORDED / f"{RECORD}.json"
    return read_record(path) if path.exists() else Record({}, [])


def levels_at(row: Row) -> list[Row]:
    """Return the recorded rows of our levels for the same GPU and problem, the fastest first."""
    where = {name: row[name] for name in ("target", "head_dim", "causal")}
    return sorted(recorded().select(**where), key=lambda row: row["clocks"])


def place(row: Row) -> str:
    """Return in words where a row stands among our levels."""
    if "problem" in row:
        return row["problem"]
    others = [other for other in levels_at(row) if other["name"] != row["name"]]
    if not others:
        return ""
    before = [other["name"] for other in others if other["clocks"] < row["clocks"]]
    after = f", after {before[-1]}" if before else ", before all of ours"
    return f"{len(before) + 1} of {len(others) + 1}{after}"


def counted_tables(rows: Sequence[Row]) -> str:
    """Return what was counted, with a row per GPU and problem, and the sentence on what costs most."""
    header = ("sm", "D", "mask", "clocks", "place", "all", *(SHORT.get(x, x) for x in GROUPS), "tensor share", "around")
    lines = []
    for row in rows:
        where = (row["target"], row["head_dim"], "causal" if row["causal"] else "none")
        cells = [""] * (len(header) - len(where) - 2)
        if "problem" not in row:
            cells = [f"{row['instructions']:.1f}", *(f"{row[group]:.2f}" for group in GROUPS)]
            cells += [f"{row['tensor_share']:.0%}", f"{row['around_share']:.0%}"]
        lines.append((*where, f"{row['clocks']:.3f}" if "clocks" in row else "", place(row), *cells))
    fitting = [row for row in rows if "problem" not in row and (row["head_dim"], row["causal"]) == MAIN]
    best = min(fitting, key=lambda row: row["target"] != MEASURED, default=None)
    described = (
        f"N={N}, {HEADS} heads, batch 1, float16. Clocks of a multiprocessor per score by the cost model; instructions "
        "of a thread per score, by kind; the share of the clocks in which the tensor cores work, and the share of all "
        "launches and PyTorch operations around the longest launch."
    )
    sentences = [described, costliest(best)] if best else [described]
    return "\n\n".join([markdown_table(header, lines), *sentences])


def timed_table(rows: Sequence[Row]) -> str:
    """Return times that were taken in turn, the fastest first."""
    lines = [
        (
            row["head_dim"],
            "causal" if row["causal"] else "none",
            row["name"],
            row["ms_median"],
            row["tops"],
            row["rel_l2"],
        )
        for row in sorted(rows, key=lambda row: (-row["head_dim"], row["causal"], row["ms_median"]))
    ]
    header = ("D", "mask", "kernel", "ms, timed in turn", "TOPS", "rel. L2")
    return f"{markdown_table(header, lines)}\n\nN={N}, {HEADS} heads, batch 1, float16, with all preparation."


def board_table(rows: Sequence[Row]) -> str:
    """Return the board: what was counted beside our recorded levels, and what was timed, the fastest first."""
    lines = []
    for row in rows:
        if (row["head_dim"], row["causal"]) == MAIN and "problem" not in row:
            where = f"sm_{row['target']}" if "target" in row else row["gpu"]
            cost = f"{row['clocks']:.3f} clocks a score" if "target" in row else f"{row['ms_median']} ms"
            order = row.get("clocks", row.get("ms_median"))
            lines.append((where, order, cost, row["name"], row["date"][:10]))
    for row in recorded().select(head_dim=MAIN.head_dim, causal=MAIN.is_causal):
        if any(line[0] == f"sm_{row['target']}" for line in lines) or not rows:
            cost = f"{row['clocks']:.3f} clocks a score"
            lines.append((f"sm_{row['target']}", row["clocks"], cost, f"{row['name']}, ours", row["date"][:10]))
    lines = [(where, *rest) for where, _, *rest in sorted(lines, key=lambda line: line[:2])]
    return markdown_table(("GPU", "cost at D=128, no mask", "kernel", "date"), lines)
