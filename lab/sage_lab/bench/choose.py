"""Choice of launch settings by compiling: for every kernel and GPU, one that does not spill and should be fastest.

Every candidate of every portable kernel is compiled for a GPU that this machine need not have. A candidate that needs
more shared memory than the GPU has is left out. Of the others, those with the fewest spills in their loops over tiles
remain. A spill outside these loops runs once per program and is only recorded. Of these, the one that `cost_model`
expects to be the fastest is kept. If the model finds hardly a difference (TIE), the fewest instructions per score
decide, because what the model leaves out grows with them. For 10.0, without a data sheet, they decide alone.

Pipeline stages are not ranked in this way, because they hide latency, which is not in the model. Tiles are compared
with two stages, and with one only if all of them spill. The best tile may have three instead, if it is faster by TIE.
Kernels without such a loop (SLA2's mix and linear branch) take the fewest spills, then the first candidate.

The table, common/launch_compiled.json, is read where nothing was measured. It is written after every kernel, and
`--only` chooses for some kernels alone. 8.9 takes the launches of 8.6: our kernels' instructions are the same there,
and so are all limits. 9.0 has measured launches.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sage_kernels.common.candidates import CANDIDATES, candidates
from sage_kernels.common.launch_tables import launch_of as table_launch

from sage_lab.bench.compile import SHARED_MEMORY, Case, Selection, compile_kernel, every_case
from sage_lab.bench.cost_model import clocks_per_score, demand
from sage_lab.bench.instructions import exponentials, kind_of, scores_of, tile_loops
from sage_lab.command_line import process_pool
from sage_lab.files import only_writer
from sage_lab.records import Row, read_record, write_record

TABLE = Path(str(resources.files("sage_kernels.common") / "launch_compiled.json"))
KEY = ("capability", "kernel", "level", "head_dim")
USUAL_STAGES, FEWER_STAGES, MORE_STAGES = 2, 1, 3
TIE = 0.03  # predicted times that differ by less are equal


def counted(case: Case) -> Row:
    """Return what the compiler made of a candidate, or why it made nothing."""
    row = {name: getattr(case, name) for name in KEY} | case.launch._asdict()
    try:
        code, compiled = compile_kernel(case)
    except Exception as error:  # the compiler's own, of many kinds; the candidate is out
        return row | {"problem": f"{type(error).__name__}: {error}"[:200]}
    loops, scores = tile_loops(code), scores_of(case.launch)
    row |= {"registers": compiled.registers, "shared": compiled.shared, "spills": compiled.spills}
    row["spills_in_loops"] = sum(kind_of(instruction) == "spill" for loop in loops for instruction in loop)
    if loops := [loop for loop in loops if exponentials(loop) >= scores]:
        unmasked = min(loops, key=len)
        row |= {"instructions_per_score": round(len(unmasked) / scores, 3)} | demand(unmasked)
    return row


def choice(rows: list[Row]) -> Row | None:
    """Return the row to keep, of all candidates of one kernel; None if no candidate fits."""
    fitting = [row for row in rows if "problem" not in row and row["shared"] <= SHARED_MEMORY[row["capability"]]]
    tiles = [row for row in fitting if row["num_stages"] == USUAL_STAGES]
    if all(row["spills_in_loops"] for row in tiles):
        tiles += [row for row in fitting if row["num_stages"] == FEWER_STAGES]
    if not tiles:
        return None
    best = best_of(tiles)
    more = table_launch(best)._replace(num_stages=MORE_STAGES)
    return best_of([best, *(row for row in fitting if table_launch(row) == more)])


def best_of(rows: list[Row]) -> Row:
    """Return the row with the fewest spills in its loops, of these the fastest, of nearly equals the shortest."""
    fewest = min(row["spills_in_loops"] for row in rows)
    rest = [row for row in rows if row["spills_in_loops"] == fewest]
    longest = (1 + TIE) * min(map(clocks_per_score, rest))
    return min(
        (row for row in rest if clocks_per_score(row) <= longest),
        key=lambda row: (row["num_stages"] == MORE_STAGES, row.get("instructions_per_score", row["spills"])),
    )


@dataclass(frozen=True, kw_only=True)
class Choose(Selection):
    """Options of `choose`."""

    def run(self, command: str) -> None:
        """Choose launch settings for GPUs that needn't be there, by compiling all candidates."""
        every = {
            key_of(case): case
            for case in sorted(every_case(), key=lambda case: case.capability)
            if case.kernel in CANDIDATES and case.capability != 90 and not case.is_unbiased
        }
        path, wanted = self.json or TABLE, self.of(every.values())
        with only_writer(path), process_pool(self.workers) as pool:
            known = {tuple(row[name] for name in KEY): row for row in (read_record(path).rows if path.exists() else [])}
            for case in wanted:
                launches = candidates(case.kernel, case.level)
                best = choice(list(pool.map(counted, [case._replace(launch=launch) for launch in launches])))
                if best is None:
                    raise ValueError(f"candidates: expected one that fits {case.name}, found none")
                known[key_of(case)] = best
                write_record(path, [known[key] for key in every if key in known], command=command)
                print(f"{case.name}: {table_launch(best)}, {best['spills_in_loops']} spills in loops", flush=True)


def key_of(case: Case) -> tuple:
    """Return what tells a kernel in the table from all others."""
    return tuple(getattr(case, name) for name in KEY)
