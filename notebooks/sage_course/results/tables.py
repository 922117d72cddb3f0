"""Tables about the papers' own tables, about training, and about one sequence on many GPUs, from the records."""

import itertools

from sage_lab.experiments.pretrain import MODELS
from sage_lab.experiments.table1 import PAPER_TABLE1, TENSORS, closest_setting, deviation
from sage_lab.experiments.table2 import PAPER_TABLE2, most_error_prone
from sage_lab.records import markdown_table, read_record

from sage_course.results.claims import captured, claims, gpt_claims, gpts_of, hypothesis, without_noise
from sage_course.results.pretraining import (
    GPT,
    PAPER_LOSSES,
    SAME_BATCH,
    TIMES,
    gaps_table,
    gpt_table,
    loss_summary,
    pretrain_runs,
    speed_table,
    step_times,
    timed_model,
)

TABLE1, TABLE2 = "table1_sweep", "table2_captures"
PRETRAIN, NOISE, PRETRAIN_SPEED = "pretrain_h200", "noise_h200", "pretrain_speed_h200"
CONTEXT_PARALLEL = "context_parallel_h100"
ULYSSES = {
    "exact": "exact (PyTorch's pick)",
    "sagebwd": "SageBwd",
    "sla2_stage_1": "SLA2, stage 1",
    "sla2": "SLA2, stage 2",
    "none": "none: the exchange alone",
}
MAIN_KINDS = {"exact": "exact", "SageBwd, K smoothed": "SageBwd"}


def table1() -> str:
    """Return the paper's Table 1 with ours at the closest setting of the sweep."""
    record = read_record(TABLE1)
    best = closest_setting(record)
    lines = []
    for sigma in PAPER_TABLE1:
        rows = record.select(sigma=sigma, **best)
        cells = [f"{row['rel_l2']:.4f} ({row['paper_rel_l2']:.4f})" for row in rows]
        lines.append((sigma, *cells, f"{max(map(deviation, rows)):.0%}"))
    header = ("sigma", *TENSORS, "largest deviation")
    setting = "N={n}, D={head_dim}, tiles {block_q}x{block_kv}, one scale per {granularity} of P and dS".format(**best)
    return f"{markdown_table(header, lines)}\n\n{setting}; mean of {len(record.provenance['seeds'])} seeds."


def table2() -> str:
    """Return the paper's Table 2 with ours on the most error-prone layer of both committed captures."""
    record = read_record(TABLE2)
    lines = []
    for qk_norm in (True, False):
        rows = most_error_prone(record.select(qk_norm=qk_norm))
        name = f"{'with' if qk_norm else 'without'} QK-norm, layer {rows[0]['layer']}"
        lines.append((name, *(f"{row['cosine']:.4f} / {row['rel_l2']:.4f}" for row in rows)))
    printed = (f"{cosine:.4f} / {rel_l2:.4f}" for cosine, rel_l2 in PAPER_TABLE2.values())
    lines.append(("paper, with QK-norm, layer 11", *printed))
    after = sorted({"step {step:,} of {steps:,}".format(**x["run"]) for x in record.provenance["captures"]})
    table = markdown_table(("cosine / relative L2", *PAPER_TABLE2), lines)
    return f"{table}\n\nOurs: {captured(record)}; after {' and '.join(after)}."


def pretraining() -> str:
    """Return the final losses of the pre-training runs with the paper's, and the verdicts on its claims."""
    runs = read_record(PRETRAIN)
    sizes = runs.provenance["plan"]["tokens_per_step"]
    lines = []
    for qk_norm, (kind, name) in itertools.product((True, False), MAIN_KINDS.items()):
        cells = [loss_summary(pretrain_runs(runs, kind, size, qk_norm)) for size in sizes]
        lines.append((f"{name}, {'QK-norm' if qk_norm else 'no QK-norm'}", *cells))
    for attention, name in (("exact", "exact"), ("sagebwd", "SageBwd")):
        cells = (f"{losses[attention]:.3f} at {size:,}" for size, losses in PAPER_LOSSES.items())
        lines.append((f"the paper's {name}, QK-norm", *cells))
    losses = markdown_table(("final validation loss", *(f"{size:,} tokens per batch" for size in sizes)), lines)
    header = ("the paper says", "our runs", "verdict")
    judged = *claims(runs, read_record(TABLE2)), without_noise(read_record(SAME_BATCH))
    verdicts = markdown_table(header, [claim[:3] for claim in judged])
    gpts = markdown_table(header, [claim[:3] for claim in gpt_claims(read_record(GPT))])
    verdicts += f"\n\nBy our {gpts_of(read_record(GPT))}:\n\n{gpts}"
    bias = hypothesis(runs, read_record(NOISE))
    model = "{layers} layers of width {width}, context {context}".format(**runs.provenance["plan"])
    data = f"{runs.provenance['plan']['tokens'] / 1e6:.0f}M bytes of Python sources"
    return f"{losses}\n\nMean, range and seeds; {model}, {data} per run; {runs.caption}.\n\n{verdicts}\n\n{bias}"


def pretraining_gpt() -> str:
    """Return the table of the GPTs, and what happens to their gradients."""
    return gpt_table(read_record(GPT))


def pretraining_scales() -> str:
    """Return the losses with each kind of scales, trained on one batch again and again."""
    record = read_record(SAME_BATCH)
    row = record.rows[0]
    model = "{layers} layers of width {width}, context {context}".format(**row["arguments"])
    described = f"{model}, the same {row['tokens_per_step']:,} bytes in each of {row['steps']} steps; {record.caption}"
    return f"{gaps_table(record)}\n\nThe mean loss of the last ten steps; {described}."


def pretraining_speed() -> str:
    """Return the time of a training step with exact attention and with SageBwd, now and in an archived record."""
    times, record = read_record(TIMES), read_record(PRETRAIN_SPEED)
    steps = [(n, exact, ours, f"{exact / ours:.2f}") for n, (exact, ours) in step_times(times).items()]
    header = ("N", "ms per step with PyTorch's pick", "ms with SageBwd", "times as fast")
    sizes = "{layers} layers of width {width}, {heads} heads".format(**MODELS[times.rows[0]["model"]])
    step = f"A step of {times.rows[0]['tokens_per_step']:,} tokens of {timed_model(times)} ({sizes}, causal, QK-norm)"
    now = f"{markdown_table(header, steps)}\n\n{step}, SageBwd with `Prologue`, {times.timed}; {times.caption}."
    model = "{layers} layers, width {width}, {heads} heads, {tokens_per_device:,} tokens per GPU and batch"
    model += ", {tokens_per_pass:,} per pass"
    described = f"Above 1 a row is faster, {record.timed}; {model.format(**record.provenance['plan'])}, bfloat16"
    return f"{now}\n\n{speed_table(record)}\n\n{described}; {record.caption}."


def parallel() -> str:
    """Return time and memory of one long sequence that Ulysses shares among the GPUs of a host."""
    record = read_record(CONTEXT_PARALLEL)
    most = record.provenance["devices"]
    lines = []
    for n, (attention, name) in itertools.product((2**17, 2**19), ULYSSES.items()):
        rows = {row["devices"]: row for row in record.select(attention=attention, n=n)}
        last = rows[most]
        times = (f"{rows[count]['ms_median']:,.1f}" if count in rows else "" for count in (1, 2, most))
        ratio = f"{rows[1]['ms_median'] / last['ms_median']:.2f}" if 1 in rows else ""
        waits = f"{last['exchange_ms']:.1f} ms, {last['exchange_ms'] / last['ms_median']:.1%}"
        lines.append((f"{n:,}", name, *times, ratio, waits, f"{last['peak_bytes'] / 2**30:.1f}", agreement(attention)))
    header = ("N", "attention", *(f"ms, {count}" for count in ("1 GPU", "2 GPUs", f"{most} GPUs")))
    header += (f"times as fast with {most}", "of this, waits for the exchange", "GiB each", "result against 1 GPU")
    sizes = "{heads} heads of {head_dim}, no mask, bfloat16, SLA2 at {sparsity:.0%}".format(**record.provenance["plan"])
    described = f"Forward and backward of one layer, time of the slowest process, {record.timed}; {sizes}"
    return f"{markdown_table(header, lines)}\n\n{described}; {record.caption}."


def agreement(attention: str) -> str:
    """Return how far the results on most GPUs are from those on one, at the one length where they were compared."""
    record = read_record(CONTEXT_PARALLEL)
    shortest, most = min(record.provenance["plan"]["lengths"]), record.provenance["devices"]
    (row,) = record.select(attention=attention, n=shortest, devices=most)
    if "same_bits" not in row:
        return ""
    return "same bits" if row["same_bits"] else f"rel. L2 {max(row[f'rel_l2_{name}'] for name in TENSORS):.1e}"
