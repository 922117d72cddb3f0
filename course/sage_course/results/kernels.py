"""The tables of RESULTS.md about the kernels, from the records."""

from sage_lab.experiments.table1 import PAPER_TABLE1, TENSORS
from sage_lab.records import Record, Row, markdown_table, read_record

BENCH, PROFILE, ACCURACY, INSTRUCTIONS = "bench_h200", "profile_h200", "accuracy_h200", "instructions_sm90"
SLA2_BENCH, SLA2_ACCURACY = "bench_sla2_h200", "accuracy_sla2_h200"
SLA2_SHAPE, SLA2_SPARSITY, SLA2_INT8_LEVEL = {"n_q": 32760}, 0.97, 3  # the paper's 1.3B video model at 480p
HEAD_DIMS, CAUSAL = (128, 64), (False, True)
MAIN_N = 8192


def ladder(direction: str) -> str:
    """Every level of a ladder: the kernel alone, and with quantisation, at N = 8192."""
    record = read_record(BENCH)
    lines = []
    levels = sorted({row["level"] for row in record.select(scope="kernel", direction=direction)})
    for level in levels:
        cells = [cell for head_dim in HEAD_DIMS for cell in _ladder_cells(record, direction, level, head_dim)]
        lines.append((level, *cells))
    for provider, name in (("sdpa_flash", "FlashAttention-2"), ("sdpa_cudnn", "cuDNN")):
        cells = []
        for head_dim in HEAD_DIMS:
            found = [_row(record, direction, head_dim, causal, provider=provider) for causal in CAUSAL]
            cells += [_timed(row) for row in found] + ["", f"{found[0]['rel_l2']:.4f}"]
        lines.append((name, *cells))
    columns = [
        f"D={d} {what}" for d in HEAD_DIMS for what in ("kernel", "kernel, causal", "with quantisation", "rel. L2")
    ]
    table = markdown_table((f"level, {record.timed}", *columns), lines)
    return f"{table}\n\nMilliseconds (TOPS), N={MAIN_N}, bfloat16, batch 4, 2048 / D heads; {record.caption}."


def _ladder_cells(record: Record, direction: str, level: int, head_dim: int) -> list[str]:
    kernel = [
        _row(record, direction, head_dim, causal, level=level, scope="kernel", provider="sage_kernels")
        for causal in CAUSAL
    ]
    op = _row(record, direction, head_dim, False, level=level, scope="op", provider="sage_kernels")
    return [*map(_timed, kernel), f"{op['ms_median']:.2f}", f"{kernel[0]['rel_l2']:.4f}"]


def _timed(row: Row) -> str:
    return f"{row['ms_median']:.2f} ({row['tops']:.0f})"


def _row(record: Record, direction: str, head_dim: int, causal: bool, **values) -> Row:
    return record.select(n_q=MAIN_N, direction=direction, head_dim=head_dim, causal=causal, **values)[0]


def limits() -> str:
    """Busy units, stalls, clock and power of every Hopper kernel."""
    record = read_record(PROFILE)
    percent = {"tensor": "tensor cores", "exp2": "exp2", "alu": "ALU", "fma": "FMA", "issue": "issue slots", "l2": "L2"}
    percent |= {"shared": "shared memory"}
    lines = []
    for row in record.rows:
        profiled = [""] * (len(percent) + 4)  # of a peer only clock and power are known
        if row["tensor"] is not None:
            stalls = (row["stall_barrier"], row["stall_wait"], row["stall_not_selected"])
            profiled = [
                *(f"{row[name]:.0f}%" for name in percent),
                " / ".join(f"{stall:.1f}" for stall in stalls),
                f"{row['clocks'] / 1e6:.2f}",
                f"{row['shared_wavefronts'] / 1e6:.0f}",
                f"{(row['store_conflicts'] + row['load_conflicts']) / 1e6:.1f}",
            ]
        lines.append(
            (
                f"{row['kernel']}, D={row['head_dim']}",
                *profiled,
                f"{row['sustained_ms']:.2f} at {row['sustained_ghz']:.2f}",
                f"{row['sustained_watts']:.0f}{', capped' if row['power_capped'] else ''}",
            )
        )
    counts = ("clocks, M", "wavefronts, M", "bank conflicts, M")
    header = ("kernel", *percent.values(), "stalls", *counts, "ms at GHz, in a loop", "watts")
    described = (
        "Per cent of what a unit could do, in one launch under Nsight Compute; stalls: clocks per issued instruction "
        "that a warp waits at a barrier (idle warps beside the loading one, too), for its last instruction, for a "
        "turn; M: millions; a wavefront: the 128 bytes that shared memory moves in one clock of a multiprocessor"
    )
    return f"{markdown_table(header, lines)}\n\n{described}. N={MAIN_N}, not causal; {record.caption}."


def instructions() -> str:
    """What one score costs in the unmasked loop of every kernel for Hopper, in instructions by kind."""
    record = read_record(INSTRUCTIONS)
    kinds = list(dict.fromkeys(row["kind"] for row in record.rows))
    kernels = dict.fromkeys((row["kernel"], row["level"]) for row in record.rows)
    lines = []
    for kernel, level in kernels:
        rows = record.select(kernel=kernel, level=level, head_dim=128)
        if rows:
            total = sum(row["per_score"] for row in rows)
            lines.append((kernel, level, *(f"{row['per_score']:.2f}" for row in rows), f"{total:.1f}"))
    return markdown_table(("kernel", "level", *kinds, "all"), lines)


def accuracy() -> str:
    """The kernels against the simulating reference on awkward shapes, and Table 1 computed with the kernels."""
    record = read_record(ACCURACY)
    lines = []
    for dtype in ("float16", "bfloat16"):
        rows = record.select(table="shapes", dtype=dtype)
        worst = [max(row.get(tensor, 0.0) for row in rows) for tensor in TENSORS]
        lines.append((f"{dtype}, largest of {len(rows)} shapes", *(f"{error:.4f}" for error in worst)))
    shapes = markdown_table(("relative L2 against the simulation", *TENSORS), lines)
    lines = []
    for sigma in PAPER_TABLE1:
        rows = record.select(table="table1", sigma=sigma)
        cells = (
            f"{row['kernel_rel_l2']:.4f} / {row['reference_rel_l2']:.4f} ({row['paper_rel_l2']:.4f})" for row in rows
        )
        lines.append((sigma, *cells))
    table = markdown_table(("sigma", *TENSORS), lines)
    size = "N={n}, D={head_dim}".format(**record.select(table="table1")[0])
    return f"{shapes}\n\n{table}\n\nKernel / simulating reference (paper), {size}, mean of 5 seeds; {record.caption}."


def sla2() -> str:
    """The module SLA2 in INT8 against attention over all keys, by length and sparsity."""
    record = read_record(SLA2_BENCH)
    lines = []
    for n in sorted({row["n_q"] for row in record.rows}):
        for sparsity in sorted({row["sparsity"] for row in record.select(op="sla2")}):
            cells = [f"{n} ({record.select(n_q=n)[0]['heads']} heads)", f"{sparsity:.0%}"]
            for direction in ("fwd", "fwd+bwd"):
                shape = {"n_q": n, "scope": "autograd", "direction": direction}
                found = record.select(provider="sage_kernels", sparsity=sparsity, level=SLA2_INT8_LEVEL, **shape)[0]
                cells.append(f"{found['ms_median']:.2f}")
                for peer in ("sdpa_flash", "sdpa_cudnn"):
                    dense = record.select(provider=peer, **shape)[0]
                    cells.append(f"{dense['ms_median'] / found['ms_median']:.1f}x")
            lines.append(cells)
    times = ("forward, ms", "FA-2", "cuDNN", "forward + backward, ms", "FA-2", "cuDNN")
    header = (f"N, {record.timed}", "sparsity", *times)
    return f"{markdown_table(header, lines)}\n\nbfloat16, batch 1, D=128; {record.caption}."


def sla2_ladder() -> str:
    """Every level of the SLA2 ladder at the reference point, beside FlexAttention, which has no linear branch."""
    record = read_record(SLA2_BENCH)
    shape = SLA2_SHAPE | {"direction": "fwd"}
    flash = record.select(provider="sdpa_flash", **shape)[0]["ms_median"]
    lines = []
    levels = sorted({row["level"] for row in record.select(scope="op", op="sla2")})
    for level in levels:
        kernel, op = (
            record.select(provider="sage_kernels", level=level, scope=scope, sparsity=SLA2_SPARSITY, **shape)[0]
            for scope in ("kernel", "op")
        )
        cells = f"{kernel['ms_median']:.3f}", f"{op['ms_median']:.3f}", f"{flash / op['ms_median']:.1f}x"
        lines.append((level, *cells, f"{op['rel_l2']:.4f}"))
    flex = record.select(provider="flex", part=None, sparsity=SLA2_SPARSITY, **shape)[0]
    lines.append(("FlexAttention, O_s alone", f"{flex['ms_median']:.3f}", "", "", f"{flex['rel_l2']:.4f}"))
    header = (f"level, {record.timed}", "kernel, ms", "op, ms", "op against FA-2", "rel. L2")
    return f"{markdown_table(header, lines)}\n\n{_sla2_point(record)}."


def _sla2_point(record: Record) -> str:
    row = record.select(op="sla2", **SLA2_SHAPE)[0]
    size = f"N={row['n_q']}, {row['heads']} heads, D={row['head_dim']}"
    return f"{SLA2_SPARSITY:.0%} sparsity, {size}, bfloat16; {record.caption}"


def sla2_parts() -> str:
    """What the INT8 op spends its time on, and how long its backward takes."""
    record = read_record(SLA2_BENCH)
    lines = []
    lengths = sorted({row["n_q"] for row in record.rows})
    parts = dict.fromkeys(row["part"] for row in record.select(scope="part"))
    for part in parts:
        rows = [record.select(part=part, n_q=n, sparsity=SLA2_SPARSITY)[0] for n in lengths]
        lines.append((part, *(f"{row['ms_median']:.3f}" for row in rows)))
    int8 = {"provider": "sage_kernels", "level": SLA2_INT8_LEVEL, "sparsity": SLA2_SPARSITY}
    whole = [record.select(scope="op", n_q=n, **int8)[0] for n in lengths]
    lines.append(("the op", *(f"{row['ms_median']:.3f}" for row in whole)))
    backward = [record.select(scope="autograd", direction="bwd", n_q=n, **int8)[0] for n in lengths]
    lines.append(("backward", *(f"{row['ms_median']:.3f}" for row in backward)))
    training = [record.select(scope="autograd", direction="fwd+bwd", n_q=n, **int8)[0] for n in lengths]
    lines.append(("peak memory, training, GB", *(f"{row['peak_mb'] / 1000:.1f}" for row in training)))
    header = (f"ms, {record.timed}", *(f"N={row['n_q']}, {row['heads']} heads" for row in whole))
    return f"{markdown_table(header, lines)}\n\n{SLA2_SPARSITY:.0%} sparsity, bfloat16, D=128; {record.caption}."


def sla2_accuracy() -> str:
    """The largest error of each tensor against the reference, by dtype, sparse branch and share of selected blocks."""
    record = read_record(SLA2_ACCURACY)
    tensors = ("O", "dQ", "dK", "dV", "dalpha")
    lines = []
    for dtype in ("float16", "bfloat16"):
        for quantize in (False, True):
            for selected in dict.fromkeys(row["selected"] for row in record.rows):
                rows = record.select(dtype=dtype, quantize=quantize, selected=selected)
                worst = (max(row.get(tensor, 0.0) for row in rows) for tensor in tensors)
                lines.append((dtype, "INT8" if quantize else "16 bit", selected, *(f"{error:.4f}" for error in worst)))
    table = markdown_table(("dtype", "sparse branch", "blocks selected", *tensors), lines)
    return f"{table}\n\nRelative L2, largest of {len(rows)} shapes each; {record.caption}."
