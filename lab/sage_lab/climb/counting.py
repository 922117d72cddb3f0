"""Counted costs of a kernel per score, from its machine code for GPUs that this machine need not have.

A launch's program is compiled for a GPU as Triton's launcher would compile it. Its loops are found in the machine code;
each instruction names its line in the source, and `launches.traced` says how often that line runs. So instructions per
score are all that are executed, those for keys that a mask hides too, over the scores that are needed. A thread's
instruction counts once, as in `instructions`.

The order of kernels comes from the course's cost model: the tensor cores take turns with all the rest, and of the rest
the busiest unit sets the pace. No launch is faster than its tensors cross the memory, once each; that alone counts for
PyTorch's own operations around the launches, and for launches that prepare: those without matmuls and exponentials.
Nothing is fitted.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from sage_lab.bench.compile import assembled, launched_source
from sage_lab.bench.cost_model import GPUS, PROGRAM_BYTES, SCHEDULERS, WARP, demand
from sage_lab.bench.instructions import kind_of, spans_of_loops
from sage_lab.climb.launches import Executions, Launched
from sage_lab.climb.problems import Problem
from sage_lab.records import Row

MEMORY = r"LD(?!C|GDEPBAR|L)|ST(?!L)|UTMA|RED|ATOM"
# The columns of a table: kinds of `instructions`, taken together.
GROUPS = {
    "tensor cores": ("matmul",), "exp2": ("exp2",), "conversions": ("rounding", "conversion"),
    "arithmetic": ("arithmetic", "maximum"), "moves": ("move",), "memory": ("memory",), "spills": ("spill",),
    "rest": ("rest",),
}  # fmt: skip
UNITS = ("tensor cores", "units for exp2", "integer units", "float units", "issue slots", "lanes of shared memory")
SHARED, MOSTLY = 0.1, 0.5
LINE = r'\s*//## File "(.*)", line (\d+)'


class Part(NamedTuple):
    """A loop of a program without the loops in it, or all that is in none."""

    instructions: list[str]
    lines: list[str]  # the source's, "file:line", of each
    executions: float  # by all programs together


def group_of(instruction: str) -> str:
    kind = "memory" if re.match(MEMORY, instruction) else kind_of(instruction)
    return next(group for group, kinds in GROUPS.items() if kind in kinds)


def parts(code: str, known: Executions) -> list[Part]:
    """Return the loops of a program's machine code, disassembled with lines, and how often each is executed.

    A loop that is there twice, once with a mask and once without, counts with its shorter copy: the lines that both
    share ran as often as both together.
    """
    instructions, spans = spans_of_loops(code)
    whole = {first: max(end for start, end in spans if start == first) for first, _ in spans}
    loops = sorted(whole.items(), key=lambda span: span[1] - span[0])  # inner ones first
    lines, members = lines_of(code), defaultdict(list)
    for place in range(len(instructions)):
        members[next((span for span in loops if span[0] <= place < span[1]), None)].append(place)
    outside = members.pop(None, [])
    found = [Part([instructions[x] for x in outside], [lines[x] for x in outside], known.programs)]
    for places in sorted(members.values(), key=len):
        own = [lines[place] for place in places]
        part = Part([instructions[place] for place in places], own, executions_of(own, known))
        if not any(is_copy(part, other) for other in found[1:]):
            found.append(part)
    return found


def executions_of(lines: Sequence[str], known: Executions) -> float:
    """Return how often a loop with instructions of these lines is executed.

    Most instructions decide. But a line of a function that is called twice in the loop ran twice as often as the loop:
    if a tenth of the instructions ran half as often, or a third or a quarter, they decide.
    """
    counts = Counter(known.lines[line] for line in lines if line in known.lines)
    if not counts:
        return known.programs
    most = counts.most_common(1)[0][0]
    parts = (x for x, count in counts.items() if count >= SHARED * counts.total())
    return min(x for x in parts if x >= most / 4.2 and abs(most / x - round(most / x)) < 0.05)


def is_copy(part: Part, shorter: Part) -> bool:
    """Return whether two loops are the same one: as many matmuls, made of mostly the same lines."""
    matmuls = [sum(kind_of(x) == "matmul" for x in y.instructions) for y in (part, shorter)]
    same = set(part.lines) & set(shorter.lines)
    return matmuls[0] == matmuls[1] > 0 and len(same) > MOSTLY * len(set(shorter.lines))


def lines_of(code: str) -> list[str]:
    """Return each instruction's line in its source, "file:line", as `spans_of_loops` numbers instructions."""
    found, line = [], ""
    for text in code.splitlines():
        if named := re.match(LINE, text):
            line = f"{named[1].rpartition('/')[2]}:{named[2]}"
        elif re.match(r"\s+/\*[0-9a-f]+\*/\s+[^;]+;", text):
            found.append(line)
    return found


def counted(launched: Launched, known: Executions, problem: Problem, target: int) -> Row:
    """Compile one launch for a target; return what it costs per score. One that prepares is not compiled."""
    memory = launched.bytes / problem.scores / GPUS[target].memory
    if known.prepares:
        clocks = dict.fromkeys(UNITS, 0.0) | {"memory": memory}
        nothing = {"per_score": {}, "facts": {}, "line": "", "of_line": 0.0}
        return {"program": known.program, "config": launched.config, "clocks": clocks} | nothing
    names = launched.program.arg_names
    options = {name: value for name, value in launched.keywords.items() if name not in names}
    source = launched_source(launched.program, launched.arguments, launched.keywords, target)
    code, compiled = assembled(source, options, target, with_lines=True)
    most = GPUS[target].shared_memory - PROGRAM_BYTES
    if compiled.shared > most:
        raise ValueError(f"{known.program} wants {compiled.shared} bytes of shared memory, and sm_{target} has {most}")
    warps = launched.keywords.get("num_warps", 4)
    row, lines = Counter(), Counter()
    for part in parts(code, known):
        factor = warps * part.executions / problem.scores  # warps that execute it, per score
        for name, amount in demand(part.instructions).items():
            row[name] += factor * amount
        for instruction, line in zip(part.instructions, part.lines, strict=True):
            row[group_of(instruction)] += WARP * factor
            lines[line] += WARP * factor * (line in known.lines)
    line, of_line = lines.most_common(1)[0]
    return {
        "program": known.program, "config": launched.config,
        "clocks": unit_clocks(row, target) | {"memory": memory}, "per_score": {name: row[name] for name in GROUPS},
        "facts": {"registers": compiled.registers, "shared": compiled.shared, "is_16bit": row["float16"] > 0},
        "line": line if of_line else "", "of_line": of_line,
    }  # fmt: skip


def unit_clocks(row: Row, target: int) -> dict[str, float]:
    """Return the clocks of a multiprocessor's units for one score. row: of `demand`, by warps, per score."""
    gpu = GPUS[target]
    threads = (WARP * row[name] / getattr(gpu, name) for name in ("special", "integer", "float32"))
    tensor = row["int8"] / gpu.int8 + row["float16"] / gpu.float16
    values = (tensor, *threads, row["instructions"] / SCHEDULERS, row["bytes"] / gpu.bytes)
    return dict(zip(UNITS, values, strict=True))


def clocks_column(unit: str) -> str:
    """Return the name of a row's column with the clocks of a unit, for the longest launch."""
    return f"{unit}, clocks"


def clocks_of(units: dict[str, float]) -> float:
    """Return the clocks of one launch per score: the tensor cores and the busiest other unit, or its memory traffic."""
    others = (clocks for unit, clocks in units.items() if unit not in ("tensor cores", "memory"))
    return max(units["tensor cores"] + max(others), units["memory"])


def columns(name: str, problem: Problem, target: int) -> Row:
    """Return the columns that say what was counted."""
    return {"name": name, "target": target, "head_dim": problem.head_dim, "causal": problem.is_causal}


def summary(name: str, problem: Problem, target: int, launches: Sequence[Row], other_bytes: int) -> Row:
    """Return the row of a table: everything that the function did, per score."""
    around = other_bytes / problem.scores / GPUS[target].memory
    longest = max(launches, key=lambda row: clocks_of(row["clocks"]))
    total = sum(clocks_of(row["clocks"]) for row in launches) + around
    tensor = sum(row["clocks"]["tensor cores"] for row in launches)
    groups = {group: round(sum(row["per_score"].get(group, 0) for row in launches), 3) for group in GROUPS}
    units = {clocks_column(unit): round(x, 5) for unit, x in longest["clocks"].items()}
    return {
        **columns(name, problem, target), "clocks": round(total, 5), "tensor_share": round(tensor / total, 3),
        "around_share": round(1 - clocks_of(longest["clocks"]) / total, 3),
        "instructions": round(sum(groups.values()), 2), **groups, **units, "launches": len(launches),
        "program": longest["program"], "config": longest["config"], **longest["facts"],
        "line": longest["line"], "of_line": round(longest["of_line"], 2),
    }  # fmt: skip
