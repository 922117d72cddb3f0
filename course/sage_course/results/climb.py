"""The tables of the page "Levels to climb", from the counted levels and from their times on an H200."""

from itertools import permutations

from sage_lab.climb.problems import MAIN, PROBLEMS, RECORD, TARGETS, Problem
from sage_lab.records import Record, markdown_table, read_record

from sage_course.results.kernels import BENCH, FLASH, MAIN_N, OURS

HOPPER = 90


def mask(problem: Problem) -> str:
    return "causal" if problem.is_causal else "no mask"


def by_level(record: Record, column: str, problem: Problem, target: int = HOPPER) -> dict[int, float]:
    """Return a column of the counted levels, by level."""
    rows = record.select(target=target, head_dim=problem.head_dim, causal=problem.is_causal)
    return {int(row["name"].removeprefix("level")): row[column] for row in rows}


def measured(problem: Problem) -> dict[int, float]:
    """Return the milliseconds of levels 0 to 4 on an H200, quantisation included, by level."""
    shape = {"n_q": MAIN_N, "head_dim": problem.head_dim, "causal": problem.is_causal, "direction": "fwd"}
    rows = read_record(BENCH).select(scope="op", **OURS, **shape)
    return {
        row["level"]: row["ms_median"] for row in rows if row["level"] in by_level(read_record(RECORD), "clocks", MAIN)
    }


def order(costs: dict[int, float]) -> str:
    return ", ".join(map(str, sorted(costs, key=costs.get)))


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
        for level in sorted(by_level(record, "clocks", problem)):
            cells = (f"{by_level(record, 'clocks', problem, target)[level]:.3f}" for target in TARGETS)
            lines.append((f"level{level}", f"D={problem.head_dim}, {mask(problem)}", *cells))
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
    """Return the order of the levels by the model and as an H200 measured them, and where the two disagree."""
    record, lines, errors = read_record(RECORD), [], []
    for problem in PROBLEMS:
        clocks, times = by_level(record, "clocks", problem), measured(problem)
        wrong = [
            f"level {a} was {times[b] / times[a] - 1:.0%} faster than level {b}; the model says "
            f"{clocks[a] / clocks[b] - 1:.0%} slower"
            for a, b in permutations(sorted(clocks), 2)
            if times[a] < times[b] and clocks[a] > clocks[b]
        ]
        counts = order(by_level(record, "instructions", problem))
        where = f"D={problem.head_dim}, {mask(problem)}"
        lines.append((where, order(times), order(clocks), counts))
        errors += [f"- {where}: {each}" for each in wrong]
    header = ("problem", "measured", "by the model", "by instructions alone")
    bench = read_record(BENCH)
    flash = bench.select(n_q=MAIN_N, head_dim=128, causal=False, direction="fwd", **FLASH)[0]["ms_median"]
    described = (
        f"The fastest level is first. Measured: kernel and quantisation, batch 4, {bench.timed}; {bench.caption}. At "
        f"D=128 without a mask PyTorch's FlashAttention-2 took {flash:.2f} ms, and level 0 {measured(MAIN)[0]:.2f} ms."
    )
    wrong = "\n".join(["Where the model is wrong:", "", *errors]) if errors else "The model is wrong nowhere."
    return f"{markdown_table(header, lines)}\n\n{described}\n\n{wrong}"
