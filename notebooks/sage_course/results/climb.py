"""The tables of the page "Levels to climb", from the counted levels and from their times on an H200."""

from itertools import permutations
from statistics import mean

from sage_lab.climb.problems import MAIN, PROBLEMS, RECORD, TARGETS, Problem
from sage_lab.records import Record, Row, markdown_table, read_record

from sage_course.results.kernels import MAIN_N

HOPPER = 90
MEASURED, FILES = "climb_h200", "climb_files_cpu"  # two files were timed with our levels, and counted


def mask(problem: Problem) -> str:
    return "causal" if problem.is_causal else "no mask"


def at(record: Record, problem: Problem, **values) -> list[Row]:
    return record.select(head_dim=problem.head_dim, causal=problem.is_causal, **values)


def by_kernel(column: str, problem: Problem, target: int = HOPPER) -> dict[str, float]:
    """Return a column of the counted kernels, by name: our levels, and on Hopper the two files."""
    rows = [row for name in (RECORD, FILES) for row in at(read_record(name), problem, target=target)]
    return {row["name"]: row[column] for row in rows}


def measured(problem: Problem) -> dict[str, float]:
    """Return the milliseconds of all kernels on an H200 by name, the mean of both files' turns."""
    rows = at(read_record(MEASURED), problem)
    return {name: mean(row["ms_median"] for row in rows if row["name"] == name) for name in {x["name"] for x in rows}}


def order(costs: dict[str, float]) -> str:
    return ", ".join(name.removeprefix("level") for name in sorted(costs, key=costs.get))


def wrong_pairs(costs: dict[str, float], times: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs in which the first kernel is faster and costs more: Kendall's distance is their number."""
    return [(a, b) for a, b in permutations(sorted(costs), 2) if times[a] < times[b] and costs[a] > costs[b]]


def climb_levels() -> str:
    """Return our levels as `climb` counts them for Hopper, and their clocks on all GPUs."""
    record = read_record(RECORD)
    rows = sorted(record.select(target=HOPPER, head_dim=128, causal=False), key=lambda row: row["name"])
    columns = ("instructions", "tensor cores", "exp2", "conversions", "arithmetic", "moves", "memory", "spills")
    shares = {"tensor_share": "tensor cores' share of the clocks", "around_share": "preparation's share"}
    kinds = [(name, *(f"{row[name]:.2f}" for row in rows)) for name in columns]
    kinds += [(shares[name], *(f"{row[name]:.0%}" for row in rows)) for name in shares]
    header, lines = ("sm_90, D=128, no mask", *(row["name"] for row in rows)), []
    for problem in PROBLEMS:
        for row in rows:
            cells = (f"{by_kernel('clocks', problem, target)[row['name']]:.3f}" for target in TARGETS)
            lines.append((row["name"], f"D={problem.head_dim}, {mask(problem)}", *cells))
    clocks = markdown_table(("kernel", "problem", *(f"sm_{target}" for target in TARGETS)), lines)
    explained = (
        "The instructions of a thread per score: all of them, then by kind. The last two lines are shares of clocks "
        "that the cost model predicts. The next table has these clocks, of a multiprocessor per score:"
    )
    described = (
        f"N={MAIN_N}, 16 heads, float16; level 0 has FlashAttention-2's algorithm, in 16 bit. "
        f"Counted with Triton {record.provenance['triton']}."
    )
    return f"{markdown_table(header, kinds)}\n\n{explained}\n\n{clocks}\n\n{described}"


def climb_orders() -> str:
    """Return the order of all kernels by the model and as an H200 timed them, and where the two disagree on levels."""
    lines, errors = [], []
    for problem in PROBLEMS:
        times, where = measured(problem), f"D={problem.head_dim}, {mask(problem)}"
        clocks, counts = (by_kernel(column, problem) for column in ("clocks", "instructions"))
        levels = [name for name in clocks if name.startswith("level")]
        is_right = min(levels, key=times.get) == min(levels, key=clocks.get)
        cells = [order({name: times[name] for name in clocks}), order(clocks), "yes" if is_right else "no"]
        for costs in (clocks, counts):
            of_levels = wrong_pairs({name: costs[name] for name in levels}, times)
            cells.append(f"{len(of_levels)} of 10, {len(wrong_pairs(costs, times))} of 21")
        lines.append((where, *cells))
        errors += [
            f"- {where}: {a} was {times[b] / times[a] - 1:.0%} faster than {b}; the model says "
            f"{clocks[a] / clocks[b] - 1:.0%} slower"
            for a, b in wrong_pairs({name: clocks[name] for name in levels}, times)
        ]
    header = ("problem", "measured", "by the model", "fastest level right?", "wrong pairs", "by instructions alone")
    record, times = read_record(MEASURED), measured(MAIN)
    peers = ", ".join(f"{name} {times[name]:.2f} ms" for name in ("level4", "level0", "FlashAttention-2", "cuDNN"))
    described = (
        "The fastest kernel is first, and a number is a level. Two kernels are a wrong pair if the model has them the "
        "wrong way round. The first number of wrong pairs is for the levels alone, the second for all seven kernels. "
        f"Measured: N={MAIN_N}, 16 heads, batch 1, float16, with quantisation, {record.timed}; {record.caption}. "
        f"D=128 without a mask: {peers}."
    )
    wrong = "\n".join(["Where the model is wrong about our levels:", "", *errors])
    return f"{markdown_table(header, lines)}\n\n{described}\n\n{wrong}"
