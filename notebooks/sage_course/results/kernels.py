"""The tables of RESULTS.md about the kernels, from the records."""

import itertools
from collections.abc import Iterable

from sage_lab.experiments.table1 import TENSORS
from sage_lab.records import Record, Row, markdown_table, read_record

from sage_ref.sagebwd.settings import GRANULARITIES

BENCH, ACCURACY, INSTRUCTIONS = "ladder_h200", "accuracy_h200", "instructions_levels_cpu"
SLA2_ACCURACY = "accuracy_sla2_h200"
OURS, FLASH, CUDNN = ({"provider": name} for name in ("sage_kernels", "sdpa_flash", "sdpa_cudnn"))
HEAD_DIMS, CAUSAL, DTYPES = (128, 64), (False, True), ("float16", "bfloat16")
MAIN_N = 8192


def distinct(rows: Iterable[Row], name: str) -> list:
    """Return the values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


def ladders() -> str:
    """Return the table of every level of both ladders: the kernel alone, and with quantisation, at N = 8192."""
    record = read_record(BENCH)
    columns = ("kernel", "kernel, causal", "with quantisation", "rel. L2")
    header = (f"level, {record.timed}", *(f"D={d} {what}" for d in HEAD_DIMS for what in columns))
    lines = ladder(record, "fwd", "forward") + ladder(record, "bwd", "backward")
    described = f"Milliseconds (TOPS), N={MAIN_N}, bfloat16, batch 4, 2048 / D heads; {record.caption}."
    return f"{markdown_table(header, lines)}\n\n{described}"


def ladder(record: Record, direction: str, words: str) -> list[tuple]:
    """Return a line for each level of one pass, and for two peers."""

    def row_of(head_dim: int, causal: bool, **values) -> Row:
        return record.select(n_q=MAIN_N, direction=direction, head_dim=head_dim, causal=causal, **values)[0]

    def cells(with_quantisation: bool, **values) -> list[str]:
        found = []
        for head_dim in HEAD_DIMS:
            if not record.select(direction=direction, head_dim=head_dim, **values):
                found += [""] * 4  # a level for one head size
                continue
            alone = {"scope": "kernel"} if with_quantisation else {}
            rows = [row_of(head_dim, causal, **alone, **values) for causal in CAUSAL]
            found += [f"{row['ms_median']:.2f} ({row['tops']:.0f})" for row in rows]
            found += [f"{row_of(head_dim, False, scope='op', **values)['ms_median']:.2f}" if with_quantisation else ""]
            found += [f"{rows[0]['rel_l2']:.4f}"]
        return found

    levels = sorted(distinct(record.select(scope="kernel", direction=direction, **OURS), "level"))
    lines = [(f"{words} {level}", *cells(True, level=level, **OURS)) for level in levels]
    lines += [(f"{words}, FlashAttention-2", *cells(False, **FLASH)), (f"{words}, cuDNN", *cells(False, **CUDNN))]
    return lines


def accuracy() -> str:
    """Return the table of each tensor's largest distance to the simulating reference, of SageBwd and of SLA2."""
    tensors = (*TENSORS, "dalpha")
    dense, sparse = read_record(ACCURACY), read_record(SLA2_ACCURACY)
    lines = []
    for granularity, dtype in itertools.product(GRANULARITIES, DTYPES):
        rows = dense.select(granularity=granularity, dtype=dtype)
        scales = "tile" if granularity == "block" else granularity
        lines.append((f"SageBwd, one scale per {scales}, {dtype}", len(rows), *largest(rows, TENSORS), ""))
    for quantize, dtype in itertools.product((False, True), DTYPES):
        rows = sparse.select(dtype=dtype, quantize=quantize)
        branch = "INT8" if quantize else "16 bit"
        lines.append((f"SLA2, sparse branch in {branch}, {dtype}", len(rows), *largest(rows, tensors)))
    table = markdown_table(("largest relative L2 against the simulation", "cases", *tensors), lines)
    return f"{table}\n\nSageBwd {dense.caption}, SLA2 {sparse.caption}."


def largest(rows: Iterable[Row], tensors: Iterable[str]) -> list[str]:
    """Return each tensor's largest error."""
    return [f"{max(row.get(tensor, 0.0) for row in rows):.4f}" for tensor in tensors]
