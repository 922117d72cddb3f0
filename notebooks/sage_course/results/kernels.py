"""The tables of RESULTS.md about the kernels, from the records."""

from collections.abc import Iterable

from sage_lab.experiments.table1 import PAPER_TABLE1, TENSORS
from sage_lab.records import Row, markdown_table, read_record

BENCH, PROFILE, ACCURACY, INSTRUCTIONS = "bench_h200", "profile_h200", "accuracy_h200", "instructions_sm90"
SLA2_BENCH, SLA2_ACCURACY = "bench_sla2_h200", "accuracy_sla2_h200"
SLA2_SHAPE, SLA2_SPARSITY, SLA2_INT8_LEVEL = {"n_q": 32760}, 0.97, 3  # the paper's 1.3B video model at 480p
OURS, FLASH, CUDNN = ({"provider": name} for name in ("sage_kernels", "sdpa_flash", "sdpa_cudnn"))
HEAD_DIMS, CAUSAL = (128, 64), (False, True)
MAIN_N = 8192


def distinct(rows: Iterable[Row], name: str) -> list:
    """Return the values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


def ladder(direction: str) -> str:
    """Return the table of every level of a ladder: the kernel alone, and with quantisation, at N = 8192."""
    record = read_record(BENCH)

    def row_of(head_dim: int, causal: bool, **values) -> Row:
        return record.select(n_q=MAIN_N, direction=direction, head_dim=head_dim, causal=causal, **values)[0]

    def cells(with_quantisation: bool, **values) -> list[str]:
        found = []
        for head_dim in HEAD_DIMS:
            alone = {"scope": "kernel"} if with_quantisation else {}
            rows = [row_of(head_dim, causal, **alone, **values) for causal in CAUSAL]
            found += [f"{row['ms_median']:.2f} ({row['tops']:.0f})" for row in rows]
            found += [f"{row_of(head_dim, False, scope='op', **values)['ms_median']:.2f}" if with_quantisation else ""]
            found += [f"{rows[0]['rel_l2']:.4f}"]
        return found

    levels = sorted(distinct(record.select(scope="kernel", direction=direction), "level"))
    lines = [(level, *cells(True, level=level, **OURS)) for level in levels]
    lines += [("FlashAttention-2", *cells(False, **FLASH)), ("cuDNN", *cells(False, **CUDNN))]
    columns = ("kernel", "kernel, causal", "with quantisation", "rel. L2")
    header = (f"level, {record.timed}", *(f"D={d} {what}" for d in HEAD_DIMS for what in columns))
    described = f"Milliseconds (TOPS), N={MAIN_N}, bfloat16, batch 4, 2048 / D heads; {record.caption}."
    return f"{markdown_table(header, lines)}\n\n{described}"


def limits() -> str:
    """Return the table of every Hopper kernel's busy units, stalls, clock and power."""
    record = read_record(PROFILE)
    percent = {"tensor": "tensor cores", "exp2": "exp2", "alu": "ALU", "fma": "FMA", "issue": "issue slots", "l2": "L2"}
    percent |= {"shared": "shared memory"}
    lines = []
    for row in record.rows:
        profiled = [""] * (len(percent) + 4)  # only clock and power of a peer are known
        if row["tensor"] is not None:
            stalls = (row["stall_barrier"], row["stall_wait"], row["stall_not_selected"])
            profiled = [
                *(f"{row[name]:.0f}%" for name in percent),
                " / ".join(f"{stall:.1f}" for stall in stalls),
                f"{row['clocks'] / 1e6:.2f}",
                f"{row['shared_wavefronts'] / 1e6:.0f}",
                f"{(row['store_conflicts'] + row['load_conflicts']) / 1e6:.1f}",
            ]
        sustained = f"{row['sustained_ms']:.2f} at {row['sustained_ghz']:.2f}"
        watts = f"{row['sustained_watts']:.0f}{', capped' if row['power_capped'] else ''}"
        lines.append((f"{row['kernel']}, D={row['head_dim']}", *profiled, sustained, watts))
    counts = ("clocks, M", "wavefronts, M", "bank conflicts, M")
    header = ("kernel", *percent.values(), "stalls", *counts, "ms at GHz, in a loop", "watts")
    described = (
        "Percentages are of what a unit can do, in one launch under Nsight Compute. Stalls are the clocks per issued "
        "instruction that a warp waits at a barrier / for its last instruction / for its turn. Warps that are idle "
        "next to a loading warp wait at a barrier, too. M means millions. A wavefront is the 128 bytes that shared "
        "memory moves in one clock of a multiprocessor"
    )
    return f"{markdown_table(header, lines)}\n\n{described}. N={MAIN_N}, not causal; {record.caption}."


def instructions() -> str:
    """Return the table of instructions per score by kind, in the unmasked loop of every kernel for Hopper."""
    record = read_record(INSTRUCTIONS)
    lines = []
    for kernel, level in dict.fromkeys((row["kernel"], row["level"]) for row in record.rows):
        counts = [row["per_score"] for row in record.select(kernel=kernel, level=level, head_dim=128)]
        if counts:
            lines.append((kernel, level, *(f"{count:.2f}" for count in counts), f"{sum(counts):.1f}"))
    return markdown_table(("kernel", "level", *distinct(record.rows, "kind"), "all"), lines)


def accuracy() -> str:
    """Return two tables: the kernels against the simulating reference on odd shapes, and Table 1 by the kernels."""
    record = read_record(ACCURACY)
    lines = []
    for dtype in ("float16", "bfloat16"):
        rows = record.select(table="shapes", dtype=dtype)
        lines.append((f"{dtype}, largest of {len(rows)} shapes", *largest(rows, TENSORS)))
    shapes = markdown_table(("relative L2 against the simulation", *TENSORS), lines)
    cell = "{kernel_rel_l2:.4f} / {reference_rel_l2:.4f} ({paper_rel_l2:.4f})".format
    lines = [(x, *(cell(**row) for row in record.select(table="table1", sigma=x))) for x in PAPER_TABLE1]
    table = markdown_table(("sigma", *TENSORS), lines)
    size = "N={n}, D={head_dim}".format(**record.select(table="table1")[0])
    return f"{shapes}\n\n{table}\n\nKernel / simulating reference (paper), {size}, mean of 5 seeds; {record.caption}."


def largest(rows: Iterable[Row], tensors: Iterable[str]) -> list[str]:
    """Return each tensor's largest error."""
    return [f"{max(row.get(tensor, 0.0) for row in rows):.4f}" for tensor in tensors]


def sla2() -> str:
    """Return the table of the module SLA2 in INT8 against attention over all keys, by length and sparsity."""
    record = read_record(SLA2_BENCH)
    lines = []
    for n in sorted(distinct(record.rows, "n_q")):
        for sparsity in sorted(distinct(record.select(op="sla2"), "sparsity")):
            cells = [f"{n} ({record.select(n_q=n)[0]['heads']} heads)", f"{sparsity:.0%}"]
            for direction in ("fwd", "fwd+bwd"):
                shape = {"n_q": n, "scope": "autograd", "direction": direction}
                ours = record.select(sparsity=sparsity, level=SLA2_INT8_LEVEL, **OURS, **shape)[0]["ms_median"]
                dense = (record.select(**peer, **shape)[0]["ms_median"] for peer in (FLASH, CUDNN))
                cells += [f"{ours:.2f}", *(f"{time / ours:.1f}x" for time in dense)]
            lines.append(cells)
    times = ("forward, ms", "FA-2", "cuDNN", "forward + backward, ms", "FA-2", "cuDNN")
    table = markdown_table((f"N, {record.timed}", "sparsity", *times), lines)
    return f"{table}\n\nbfloat16, batch 1, D=128; {record.caption}."


def sla2_ladder() -> str:
    """Return the table of every SLA2 level at the reference point, and FlexAttention, which has no linear branch."""
    record = read_record(SLA2_BENCH)
    shape = SLA2_SHAPE | {"direction": "fwd"}
    flash = record.select(**FLASH, **shape)[0]["ms_median"]
    shape["sparsity"] = SLA2_SPARSITY
    lines = []
    for level in sorted(distinct(record.select(scope="op", op="sla2"), "level")):
        kernel, op = (record.select(level=level, scope=scope, **OURS, **shape)[0] for scope in ("kernel", "op"))
        times = f"{kernel['ms_median']:.3f}", f"{op['ms_median']:.3f}", f"{flash / op['ms_median']:.1f}x"
        lines.append((level, *times, f"{op['rel_l2']:.4f}"))
    flex = record.select(provider="flex", part=None, **shape)[0]
    lines.append(("FlexAttention, O_s alone", f"{flex['ms_median']:.3f}", "", "", f"{flex['rel_l2']:.4f}"))
    table = markdown_table((f"level, {record.timed}", "kernel, ms", "op, ms", "op against FA-2", "rel. L2"), lines)
    size = "N={n_q}, {heads} heads, D={head_dim}".format(**record.select(op="sla2", **SLA2_SHAPE)[0])
    return f"{table}\n\n{SLA2_SPARSITY:.0%} sparsity, {size}, bfloat16; {record.caption}."


def sla2_parts() -> str:
    """Return the table of the times of the INT8 op's parts, of its backward pass, and of its peak memory."""
    record = read_record(SLA2_BENCH)
    lengths = sorted(distinct(record.rows, "n_q"))
    int8 = OURS | {"level": SLA2_INT8_LEVEL, "sparsity": SLA2_SPARSITY}

    def cells(column: str = "ms_median", scale: float = 1, digits: int = 3, **values) -> list[str]:
        return [f"{record.select(n_q=n, **values)[0][column] / scale:.{digits}f}" for n in lengths]

    parts = distinct(record.select(scope="part"), "part")
    lines = [(part, *cells(part=part, sparsity=SLA2_SPARSITY)) for part in parts]
    lines += [("the op", *cells(scope="op", **int8))]
    lines += [("backward", *cells(scope="autograd", direction="bwd", **int8))]
    memory = cells("peak_mb", 1000, 1, scope="autograd", direction="fwd+bwd", **int8)
    lines += [("peak memory, training, GB", *memory)]
    heads = [record.select(scope="op", n_q=n, **int8)[0]["heads"] for n in lengths]
    columns = (f"N={n}, {count} heads" for n, count in zip(lengths, heads, strict=True))
    table = markdown_table((f"ms, {record.timed}", *columns), lines)
    return f"{table}\n\n{SLA2_SPARSITY:.0%} sparsity, bfloat16, D=128; {record.caption}."


def sla2_accuracy() -> str:
    """Return the table of each tensor's largest error by dtype, sparse branch and share of selected blocks."""
    record = read_record(SLA2_ACCURACY)
    tensors = ("O", "dQ", "dK", "dV", "dalpha")
    lines = []
    for dtype in ("float16", "bfloat16"):
        for quantize in (False, True):
            for selected in distinct(record.rows, "selected"):
                rows = record.select(dtype=dtype, quantize=quantize, selected=selected)
                lines.append((dtype, "INT8" if quantize else "16 bit", selected, *largest(rows, tensors)))
    table = markdown_table(("dtype", "sparse branch", "blocks selected", *tensors), lines)
    return f"{table}\n\nRelative L2, largest of {len(rows)} shapes each; {record.caption}."
