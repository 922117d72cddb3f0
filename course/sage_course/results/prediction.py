"""Tables about GPUs that we don't have, from the records of `python -m sage_lab predict` and `choose`.

Nothing here was timed, so every table says that it is a prediction or a compiler's output.
"""

from importlib import resources
from pathlib import Path

from sage_lab.records import Record, Row, markdown_table, read_record

PREDICTED, BEFORE = "predicted", "launch_defaults"
PEER, INT8 = "FlashAttention-2", "INT8"
HEAD_DIMS, DIRECTIONS = (64, 128), {"fwd": "forward", "fwd+bwd": "forward + backward"}
CAPABILITIES = {80: "8.0", 86: "8.6 and 8.9", 120: "12.0"}


def origin(record: Record) -> str:
    """Describe where a record that nobody measured comes from."""
    facts = record.provenance
    return f"compiled by Triton {facts['triton']}, {facts['date'][:10]}, commit {facts['commit'][:7]}"


def part_of(record: Record, name: str) -> Record:
    """Return the rows of one part, "prediction", "H200" or "published": each part has columns of its own."""
    return record._replace(rows=record.select(part=name))


def _row(record: Record, gpu: str, level: str, direction: str, head_dim: int) -> Row:
    shape = {"scope": "op", "causal": False, "head_dim": head_dim}
    (row,) = record.select(gpu=gpu, level=level, direction=direction, **shape)
    return row


def _gpus(record: Record) -> list[str]:
    return list(dict.fromkeys(row["gpu"] for row in record.rows))


def gains() -> str:
    """Return the table of how much faster than FlashAttention-2 INT8 should be, by GPU."""
    record = part_of(read_record(PREDICTED), "prediction")
    columns = [(direction, head_dim) for direction in DIRECTIONS for head_dim in HEAD_DIMS]
    lines = []
    for gpu in _gpus(record):
        times = [[_row(record, gpu, who, *column)["ms_predicted"] for who in (PEER, INT8)] for column in columns]
        lines.append((gpu, *(f"{peer / int8:.2f}" for peer, int8 in times)))
    header = ("predicted, not measured", *(f"{DIRECTIONS[direction]}, D={d}" for direction, d in columns))
    described = "Times as fast as FlashAttention-2, 8,192 tokens, no mask, quantisation included"
    return f"{markdown_table(header, lines)}\n\n{described}; Hopper without its own levels; {origin(record)}."


def predicted() -> str:
    """Return the table of TOPS of FlashAttention-2 and of INT8, by GPU and head size."""
    record = part_of(read_record(PREDICTED), "prediction")
    lines = []
    for gpu in _gpus(record):
        for head_dim in HEAD_DIMS:
            rows = [_row(record, gpu, who, x, head_dim) for x in DIRECTIONS for who in (PEER, INT8)]
            cells = [f"{row['tops_predicted']:.0f} ({row['ms_predicted']:.2f} ms)" for row in rows]
            lines.append((gpu, head_dim, *cells))
    header = ("predicted, not measured", "D", *(f"{who}, {x}" for x in DIRECTIONS.values() for who in (PEER, INT8)))
    described = "TOPS, 8,192 tokens, no mask, batch 4, 2048 / D heads, quantisation included"
    return f"{markdown_table(header, lines)}\n\n{described}; Hopper without its own levels; {origin(record)}."


def predicted_check() -> str:
    """Return two tables, predicted over measured: level by level on the H200, and times that others published."""
    record = read_record(PREDICTED)
    ours = part_of(record, "H200")
    lines = []
    for direction, name in (("fwd", "forward"), ("bwd", "backward")):
        for level in sorted({row["level"] for row in ours.select(direction=direction)}):
            rows = [row for d in HEAD_DIMS for row in ours.select(direction=direction, level=level, head_dim=d)]
            cell = "{ms_predicted:.2f} / {ms_measured:.2f} = {predicted_over_measured:.2f}".format
            lines.append((f"{name} {level}", *(cell(**row) for row in rows)))
    header = ("H200, ms, predicted / measured", *(f"D={d}" for d in HEAD_DIMS))
    others = [
        (x["gpu"], x["what"], x["head_dim"], "causal" if x["causal"] else "no mask", x["predicted"], x["published"],
         x["source"])
        for x in record.select(part="published")
    ]  # fmt: skip
    other_header = ("GPU", "what", "D", "mask", "predicted", "published", "source")
    return f"{markdown_table(header, lines)}\n\n{markdown_table(other_header, others)}"


def spills() -> str:
    """Return the table of spills in the loops over tiles, with the default launches and with those of `choose`."""
    table = resources.files("sage_kernels.common") / "launch_compiled.json"
    before, after = read_record(BEFORE), read_record(Path(str(table)))
    columns = [(capability, head_dim) for capability in CAPABILITIES for head_dim in HEAD_DIMS]
    names = list(dict.fromkeys((row["kernel"], row["level"]) for row in before.rows))
    lines = []
    for kernel, level in names:
        cells = []
        for capability, head_dim in columns:
            case = {"kernel": kernel, "level": level, "capability": capability, "head_dim": head_dim}
            found = [record.select(**case) for record in (before, after)]
            cells.append(" → ".join(str(rows[0]["spills_in_loops"]) for rows in found) if all(found) else "")
        if any(cell not in ("", "0 → 0") for cell in cells):
            lines.append((f"{kernel}, level {level}", *cells))
    header = ("in loops, before → after", *(f"{CAPABILITIES[capability]}, D={d}" for capability, d in columns))
    return f"{markdown_table(header, lines)}\n\nKernels without any are left out; {origin(after)}."
