"""Choice of launch settings by compiling: for every kernel and GPU, one that does not spill and should be fastest.

Every candidate of every portable kernel is compiled for a GPU that needn't be there. A candidate that wants more shared
memory than the GPU has is out. Of the others, those with the fewest spills in their loops over tiles stay (none, if any
has none). A spill outside these loops runs once per program and is recorded only. Then the one is kept that
`cost_model` expects to be the fastest. Where it sees hardly a difference (TIE), the fewest instructions per score
decide: what the model leaves out grows with them.

Pipeline stages are not ranked so: what they hide, latency, the model can't see. Tiles are compared with two stages, and
with one only if all of them spill; the best tile is then compiled with three as well, which must be faster by TIE.
Kernels without such a loop (SLA2's mix and linear branch) take the fewest spills, then the first candidate. Compute
capability 9.0 has measured launches: they are compiled and recorded, not chosen. 8.9 takes the launches of 8.6: our
kernels' instructions are the same there, and so are all limits.

A killed run goes on where it was. The table, common/launch_compiled.json, is read where nothing was measured; what the
kernels that it names ask of a multiprocessor is in it too, for `predict`.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path

import triton
from sage_kernels.common.candidates import DEFAULTS, Launch, candidates
from sage_kernels.common.launch_tables import SAME_CODE
from sage_kernels.common.launch_tables import launch_of as table_launch

from sage_lab.bench import instructions
from sage_lab.bench.compile import (
    SHARED_MEMORY,
    Case,
    cases,
    compile_kernel,
    hopper_of,
    launch_of,
    named,
    sla2_cases,
)
from sage_lab.bench.cost_model import TABLE, gpus, kernel_of, milliseconds
from sage_lab.bench.machine_loop import demand
from sage_lab.command_line import positive
from sage_lab.plan import FinishedParts
from sage_lab.records import Row, markdown_table, only_writer, read_record, write_record

# The GPU whose rates rank the candidates of a compute capability; of 100 none is listed: fewest spills decide.
RANKED_FOR = {80: "A100-SXM-80GB", 86: "RTX 3090", 90: "H200", 120: "RTX 5090"}
CAPABILITIES = tuple(capability for capability in SHARED_MEMORY if capability not in SAME_CODE)
STAGES = (2, 1, 3)  # in the order in which they are tried
TIE = 0.03  # predicted times that differ by less are equal


def kernels(capability: int) -> Iterator[Case]:
    """Yield every portable kernel that has candidates, causal: the longer code, which has the unmasked loop as well.

    9.0 has launches for each mask; those without one are what `predict --check` compares with measured times.
    """
    for case in (*cases((capability,)), *sla2_cases((capability,))):
        if case.kernel in DEFAULTS and hopper_of(case) is None:
            yield case._replace(is_causal=case.is_causal and capability != 90)


def counted(case: Case) -> Row:
    """Return what the compiler made of a candidate, or why it made nothing."""
    launch = launch_of(case)
    row = {name: getattr(case, name) for name in ("capability", "kernel", "level", "head_dim")} | launch._asdict()
    try:
        kernel, found = compile_kernel(case)
    except Exception as error:  # the compiler's own, of many kinds; the candidate is out
        return row | {"problem": f"{type(error).__name__}: {error}"[:200]}
    code, scores = instructions.machine_code(kernel), launch.block_q * launch.block_kv // (32 * launch.num_warps)
    in_loops = sum(instructions.kind_of(x) == "spill" for loop in instructions.tile_loops(code) for x in loop)
    row |= {"registers": found.registers, "shared": found.shared}
    row |= {"spills": found.spills, "spills_in_loops": in_loops}
    asked = demand(code, scores)
    if asked is not None:
        row |= {"instructions_per_score": round(asked.instructions / scores, 3)} | asked._asdict()
    return row


def predicted(row: Row) -> float:
    """Return milliseconds for one head of 8,192 tokens on the GPU that ranks; 0 if nothing can be said."""
    kernel, gpu = kernel_of(row), RANKED_FOR.get(row["capability"])
    return milliseconds(kernel, gpus()[gpu], 1, 8192, False) if kernel and gpu else 0.0


def fits(row: Row) -> bool:
    return "problem" not in row and row["shared"] <= SHARED_MEMORY[row["capability"]]


def best_of(rows: list[Row]) -> Row:
    """Return the row to keep, of one kernel's."""
    fitting = [row for row in rows if fits(row)]
    fewest = min(row["spills_in_loops"] for row in fitting)
    rest = [row for row in fitting if row["spills_in_loops"] == fewest]
    fastest = min(map(predicted, rest))
    equal = [row for row in rest if predicted(row) <= (1 + TIE) * fastest]
    return min(
        equal, key=lambda row: (row["num_stages"] == STAGES[-1], row.get("instructions_per_score", row["spills"]))
    )


def chosen(asked: list[Case], parts: FinishedParts, workers: int) -> Iterator[Row]:
    """Yield the best candidate's row of every one of these kernels, all for one compute capability."""
    tried: dict[Case, list[Row]] = {case: [] for case in asked}

    def compile_stages(wanted: Iterable[tuple[Case, list[Launch]]]) -> None:
        jobs = [case._replace(launch=launch) for case, launches in wanted for launch in launches]
        for job, row in zip(jobs, compiled(jobs, parts, workers), strict=True):
            tried[job._replace(launch=None)].append(row)

    def with_stages(case: Case, stages: int) -> list[Launch]:
        return [launch for launch in candidates(case.kernel, case.level) if launch.num_stages == stages]

    if asked[0].capability == 90:
        compile_stages((case, [launch_of(case)]) for case in tried)
    else:
        usual, fewer, more = STAGES
        compile_stages((case, with_stages(case, usual)) for case in tried)
        spilling = [case for case, rows in tried.items() if not any(fits(x) and not x["spills_in_loops"] for x in rows)]
        compile_stages((case, with_stages(case, fewer)) for case in spilling)
        best = {case: table_launch(best_of(rows)) for case, rows in tried.items() if any(map(fits, rows))}
        compile_stages(
            (case, [x for x in with_stages(case, more) if x._replace(num_stages=launch.num_stages) == launch])
            for case, launch in best.items() if launch.num_stages == usual
        )  # fmt: skip
    for case, rows in tried.items():
        if not any(map(fits, rows)):
            raise ValueError(f"candidates: expected one that fits {named(case)}, found none")
        yield best_of(rows)


def compiled(jobs: list[Case], parts: FinishedParts, workers: int) -> list[Row]:
    """Return `counted` of every job, each kept as soon as it is there."""
    missing = [job for job in jobs if str(tuple(job)) not in parts.parts]
    with ProcessPoolExecutor(workers) as pool:
        for i, (job, row) in enumerate(zip(missing, pool.map(counted, missing), strict=True), 1):
            parts.rows(str(tuple(job)), lambda row=row: [row])
            print(f"{i} of {len(missing)}: sm_{job.capability} {job.name} {job.launch}", file=sys.stderr, flush=True)
    return [parts.parts[str(tuple(job))][0] for job in jobs]


def sources() -> str:
    """Return a digest of the kernels' sources: once they change, what an earlier run compiled is worth nothing."""
    files = sorted(Path(str(resources.files("sage_kernels"))).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def wanted(options: argparse.Namespace) -> list[Case]:
    """Return the kernels that were asked for."""
    every = [case for capability in options.capability for case in kernels(capability)]
    found = [case for case in every if (options.only or "") in named(case)]
    if not found:
        raise ValueError(f"only: expected a part of a name such as {named(every[0])!r}, got {options.only!r}")
    return found


def table(path: Path, asked: list[Case], options: argparse.Namespace, parts: FinishedParts) -> list[Row]:
    """Return the rows of the kernels that were asked for, and those of others that the table had."""
    if options.defaults:
        return compiled([x._replace(launch=DEFAULTS[x.kernel]) for x in asked], parts, options.workers)
    rows = {key_of(row): row for row in (read_record(path).rows if path.exists() else [])}
    for capability in options.capability:
        if mine := [case for case in asked if case.capability == capability]:
            rows |= {key_of(row): row for row in chosen(mine, parts, options.workers)}
    return sorted(rows.values(), key=lambda row: row["capability"])


def key_of(row: Row) -> tuple:
    return tuple(row[name] for name in ("capability", "kernel", "level", "head_dim"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    parser.add_argument("--only", metavar="TEXT", help="only names with this in them, as 'forward level 4'")
    parser.add_argument("--defaults", action="store_true", help="compile DEFAULTS alone: what was before choosing")
    parser.add_argument("--workers", type=positive, default=2, help="processes")


def choose_command(options: argparse.Namespace) -> None:
    """Choose launch settings for GPUs that needn't be there, by compiling all candidates."""
    path = options.json or TABLE
    if options.defaults and path == TABLE:
        raise ValueError("json: expected a different file than the table for --defaults, got none")
    asked = wanted(options)
    with only_writer(path):
        parts = FinishedParts(path, (triton.__version__, sources()))
        rows = table(path, asked, options, parts)
        write_record(path, rows, command=options.command)
        parts.remove()
    header = ("capability", "kernel", "level", "head_dim", *Launch._fields, "registers", "spills", "spills_in_loops")
    print(markdown_table(header, [[row[name] for name in header] for row in rows]))
    spilling = [row for row in rows if row["spills_in_loops"]]
    print(f"{len(rows)} kernels; {len(spilling)} spill in a loop.")
