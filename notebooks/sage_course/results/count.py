"""The tables of the page "What a score costs": our levels as `count` prices them, and as an H200 timed them."""

from itertools import permutations

from sage_lab.bench.count import LEVELS, MEASURED, Problem, at, mask_of
from sage_lab.bench.instructions import KINDS
from sage_lab.records import markdown_table, read_record

from sage_course.results.kernels import BENCH, MAIN_N, OURS

PROBLEMS = [Problem(MEASURED, head_dim, causal) for head_dim in (128, 64) for causal in (False, True)]


def levels() -> str:
    """Return the clocks of our levels on Hopper, and their instructions."""
    record, lines = read_record(LEVELS), []
    for problem in PROBLEMS:
        for row in at(record.rows, problem):
            cells = (f"{row[name]:.2f}" for name in ("instructions", *KINDS))
            lines.append((f"D={problem.head_dim}, {mask_of(problem)}", row["name"], f"{row['clocks']:.3f}", *cells))
    header = ("problem", "kernel", "clocks", "instructions", *KINDS)
    described = "Clocks of a multiprocessor and instructions of a thread per score, all and by kind. Counted"
    return (
        f"{markdown_table(header, lines)}\n\n{described} for sm_{MEASURED} with Triton {record.provenance['triton']}."
    )


def clocks_of(problem: Problem) -> dict[str, float]:
    """Return the clocks of our levels by name."""
    return {row["name"]: row["clocks"] for row in at(read_record(LEVELS).rows, problem)}


def orders() -> str:
    """Return the order of our levels by the rule and as they were timed, and every pair in which the two disagree."""
    record, lines, wrong = read_record(BENCH), [], []
    for problem in PROBLEMS:
        which = {"n_q": MAIN_N, "direction": "fwd", "scope": "kernel", "causal": problem.causal} | OURS
        rows = record.select(head_dim=problem.head_dim, **which)
        clocks, times = clocks_of(problem), {f"level {row['level']}": row["ms_median"] for row in rows}
        both = permutations(clocks, 2)
        pairs = [
            (a, b) for a, b in both if times[a] < times[b] and clocks[a] > clocks[b]
        ]  # a is faster, and costs more
        where = f"D={problem.head_dim}, {mask_of(problem)}"
        orders = (", ".join(name[-1] for name in sorted(clocks, key=of.get)) for of in (times, clocks))
        lines.append((where, *orders, f"{len(pairs)} of {len(clocks) * (len(clocks) - 1) // 2}"))
        for a, b in pairs:
            faster, slower = times[b] / times[a] - 1, clocks[a] / clocks[b] - 1
            wrong.append(f"- {where}: {a} was {faster:.0%} faster than {b}; the rule says {slower:.0%} slower.")
    table = markdown_table(("problem", "measured, the fastest first", "by the rule", "wrong pairs"), lines)
    described = f"Measured: the kernels {record.timed}, N={MAIN_N}, batch 4, bfloat16; {record.caption}."
    return "\n\n".join([table, described, "Where the rule is wrong:", "\n".join(wrong)])
