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
    shares = ("tensor_share", "around_share")
    kinds = [
        (row["name"], *(f"{row[name]:.2f}" for name in columns), *(f"{row[name]:.0%}" for name in shares))
        for row in rows
    ]
    header = ("kernel", *columns, "tensor share", "preparation")
    lines = []
    for problem in PROBLEMS:
        for level in sorted(by_level(record, "clocks", problem)):
            cells = (f"{by_level(record, 'clocks', problem, target)[level]:.3f}" for target in TARGETS)
            lines.append((f"level{level}", f"D={problem.head_dim}, {mask(problem)}", *cells))
    clocks = markdown_table(("kernel", "problem", *(f"sm_{target}" for target in TARGETS)), lines)
    described = (
        "Above: instructions of a thread per score on sm_90, D=128, no mask, and the shares of the clocks in which the "
        "tensor cores work and preparation runs. Below: clocks of a multiprocessor per score by the "
        f"cost model; N={MAIN_N}, 16 heads, float16. Level 0 stands for FlashAttention-2. Counted with Triton "
        f"{record.provenance['triton']}."
    )
    return f"{markdown_table(header, kinds)}\n\n{clocks}\n\n{described}"


def climb_orders() -> str:
    """Return the order of the levels by the model and as an H200 measured them, and where the two disagree."""
    record, lines = read_record(RECORD), []
    for problem in PROBLEMS:
        clocks, times = by_level(record, "clocks", problem), measured(problem)
        wrong = [
            f"{a} before {b}: {times[b] / times[a] - 1:.0%} faster, by the model {clocks[a] / clocks[b] - 1:.0%} slower"
            for a, b in permutations(sorted(clocks), 2)
            if times[a] < times[b] and clocks[a] > clocks[b]
        ]
        counts = order(by_level(record, "instructions", problem))
        where = f"D={problem.head_dim}, {mask(problem)}"
        lines.append((where, order(times), order(clocks), counts, "; ".join(wrong) or "nowhere"))
    header = ("problem", "measured", "by the model", "by instructions alone", "where the model is wrong")
    bench = read_record(BENCH)
    flash = bench.select(n_q=MAIN_N, head_dim=128, causal=False, direction="fwd", **FLASH)[0]["ms_median"]
    described = (
        f"Fastest first. Measured: kernel and quantisation, batch 4, {bench.timed}; {bench.caption}. PyTorch's "
        f"FlashAttention-2 took {flash:.2f} ms there, level 0 {measured(MAIN)[0]:.2f} ms."
    )
    return f"{markdown_table(header, lines)}\n\n{described}"
