"""Whether INT8 pays on GPUs that we don't have: what the cost model predicts, and what others measured and sent."""

from pathlib import Path

from sage_kernels.common.launch_tables import SAME_CODE
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_lab.bench.choose import TABLE
from sage_lab.bench.contribution import CONTRIBUTED
from sage_lab.bench.cost_model import clocks_per_score
from sage_lab.bench.ratios import PEER_NAMES
from sage_lab.records import Record, markdown_table, read_record

from sage_course.results.kernels import BENCH, MAIN_N

# The cards that a prediction is for. Others of the same compute capability (A10, L40S) multiply 16 bit at another rate.
PREDICTED = {80: "A100", 86: "GeForce RTX 30", 89: "GeForce RTX 40", 120: "GeForce RTX 50"}
# Direction -> the ladder, and the INT8 level that runs by itself where there is none of Hopper's. Level 0 has 16 bit.
PORTABLE = {"fwd": (FORWARD_LEVELS, 4), "bwd": (BACKWARD_LEVELS, 3)}
OURS = ("NVIDIA_H200_ccadb85.json",)  # made when we tried the command
COLUMNS = [(head_dim, direction) for head_dim in (128, 64) for direction in PORTABLE]
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def predicted(capability: int, head_dim: int, direction: str) -> float:
    """Predict the time of our kernels in 16 bit over that of our INT8 kernels, for a card of PREDICTED."""
    code = SAME_CODE.get(capability, capability)
    table, (levels, own) = read_record(TABLE), PORTABLE[direction]

    def clocks(level: int) -> float:
        where = {"capability": code, "level": level, "head_dim": head_dim}
        return sum(clocks_per_score(table.select(kernel=x, **where)[0]) for x in levels[level].kernels(head_dim))

    return clocks(0) / clocks(own)


def predictions() -> str:
    """Return the table of predictions by generation of GPUs, and what was measured on Hopper with the same kernels."""
    lines = []
    for capability, cards in PREDICTED.items():
        found = (predicted(capability, *column) for column in COLUMNS)
        lines.append((f"{cards} ({capability / 10})", *(f"{ratio:.2f}" for ratio in found)))
    record = read_record(BENCH)
    measured = []
    for head_dim, direction in COLUMNS:
        where = {"n_q": MAIN_N, "head_dim": head_dim, "direction": direction, "causal": False, "scope": "kernel"}
        ms = (record.select(level=level, **where)[0]["ms_median"] for level in (0, PORTABLE[direction][1]))
        measured.append(f"{next(ms) / next(ms):.2f}")
    lines.append((f"H200 (9.0): measured, {record.timed}", *measured))
    header = ("card (compute capability)", *(f"D={d} {DIRECTIONS[direction]}" for d, direction in COLUMNS))
    return f"{markdown_table(header, lines)}\n\nThe last line: {record.caption}."


def contributions(folder: Path = CONTRIBUTED) -> str:
    """Return the table of all files that were sent, beside the predictions; a sentence if others sent none."""
    records = {path.name: read_record(path) for path in sorted(folder.glob("*.json"))}
    nobody = [] if records.keys() - {*OURS} else ["Nobody else has sent a measurement yet."]
    if not records:
        return nobody[0]
    lines = [line for record in records.values() for line in _lines(record)]
    peers = list(PEER_NAMES.values())
    kernels = (f"16 bit over INT8, {words}: measured (predicted)" for words in DIRECTIONS.values())
    header = ("card", "", *kernels, *(f"{peer}'s time over ours, both passes" for peer in peers))
    described = (_described(record, "us" if name in OURS else "others, not by us") for name, record in records.items())
    return "\n\n".join([*nobody, markdown_table(header, lines), *described])


def _lines(record: Record) -> list[tuple]:
    about, lines = record.provenance, []
    is_predicted = PREDICTED.get(about["capability"], "none").removesuffix("30").rstrip("0123456789 ") in about["gpu"]
    for both in about["ratios"]:
        if both["scope"] != "autograd":
            continue
        cells = []
        for direction in PORTABLE:
            place = {name: both[name] for name in ("n_q", "head_dim", "causal")} | {"direction": direction}
            ratio = next(x["level 0"] for x in about["ratios"] if x["scope"] == "kernel" and place.items() <= x.items())
            expected = f"{predicted(about['capability'], both['head_dim'], direction):.2f}" if is_predicted else "none"
            cells.append(f"{ratio:.2f} ({expected})")
        where = f"N={both['n_q']:,}, D={both['head_dim']}{', causal' if both['causal'] else ''}"
        ratios = (f"{both[peer]:.2f}" if peer in both else "" for peer in PEER_NAMES)
        lines.append((about["gpu"], where, *cells, *ratios))
    return lines


def _described(record: Record, who: str) -> str:
    about = record.provenance
    launches = "launch settings of their own" if about["launches"] == "own" else "our launch settings"
    versions = f"driver {about['driver']}, PyTorch {about['torch']}, Triton {about['triton']}"
    return f"{about['gpu']}: measured by {who}, on {about['date'][:10]}, with {versions} and {launches}, \
commit {about['commit'][:7]}."
