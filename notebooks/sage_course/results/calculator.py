"""The book's page on INT8 and the backward pass of FlashAttention-4: its tables, and what its calculator reads."""

import json
import math

from sage_lab.bench.cost_model import GPUS
from sage_lab.records import markdown_table, read_record

from sage_course.results.elsewhere import DIRECTIONS, PORTABLE
from sage_course.results.hopper_model import (
    ALU_RATE,
    H200,
    ISSUE_RATE,
    Rates,
    compare_levels,
    demand,
    predicted,
    programs,
)
from sage_course.results.kernels import BENCH, INSTRUCTIONS
from sage_course.results.paired import PAIRED

# The A100's 5120 bytes of the L2 cache are NVIDIA's number; of GeForce cards none is known, so the cache isn't counted.
L2_OF = {80: 5120 / 108, 86: math.inf}
CARDS = {"H200": H200} | {
    name: Rates(GPUS[capability].int8, GPUS[capability].float16, GPUS[capability].special, L2_OF[capability])
    for name, capability in (("A100", 80), ("GeForce RTX 30, 40, 50", 86))
}


def ratio(level: int, head_dim: int, direction: str, rates: Rates) -> float:
    """Predict how many times as fast as level 0, which is in 16 bit, a level is at a card's rates."""
    record = read_record(INSTRUCTIONS)
    clocks = (sum(predicted(record, each, head_dim, direction, rates).values()) for each in (0, level))
    return next(clocks) / next(clocks)


def presets() -> str:
    """Return the table of cards: their rates, and how many times as fast as 16 bit the portable INT8 levels are."""
    lines = []
    for name, rates in CARDS.items():
        cache = "not counted" if math.isinf(rates.l2) else f"{rates.l2:.1f}"
        found = (ratio(own, 128, direction, rates) for direction, (_, own) in PORTABLE.items())
        lines.append((name, rates.sixteen_bit, rates.int8, rates.exp2, cache, *(f"{x:.2f}x" for x in found)))
    passes = (f"{DIRECTIONS[direction]}, level {own}" for direction, (_, own) in PORTABLE.items())
    return markdown_table(("card", "16 bit", "INT8", "exp2", "L2 bytes", *passes), lines)


def calculator() -> str:
    """Return the calculator's place in the page, with all counts per score and the measured clocks."""
    record, bench, levels = read_record(INSTRUCTIONS), read_record(BENCH), {}
    for direction in PORTABLE:
        for (head_dim, level), found in compare_levels(bench, record, direction).items():
            rows = programs(record, level, head_dim, direction).values()
            counts = [[round(count, 4) for count in demand(each).values()] for each in rows]
            levels[f"{direction} {head_dim} {level}"] = {"programs": counts, "measured": round(found.measured, 4)}
    cards = {name: [None if math.isinf(x) else round(x, 2) for x in rates] for name, rates in CARDS.items()}
    model = json.dumps({"alu": ALU_RATE, "issue": ISSUE_RATE, "cards": cards, "levels": levels})
    for direction in PORTABLE:
        model = model.replace(f'"{direction} ', f'\n"{direction} ')
    return f"""<div class="calculator" data-model='{model}'>
The calculator runs in the web book, with scripts. The table above has its answers for three cards.
</div>"""


def backward_ratios() -> str:
    """Return the table of measured backward passes: ours and FlashAttention-4's, cuDNN's in FP8 and in bf16."""
    record, lines = read_record(PAIRED), []
    where = {"direction": "bwd", "head_dim": 128, "heads": 16, "layout": "bhnd", "cuda_graph": False}
    for n in (4096, 8192, 16384):
        for causal in (False, True):
            ms = {row["provider"]: row["ms_median"] for row in record.select(n_q=n, causal=causal, **where)}
            ours, fp8 = ms["fa4"] / ms["sage_kernels"], ms["sdpa_cudnn"] / ms["cudnn_fp8"]
            lines.append((f"{n:,}{', causal' if causal else ''}", f"{ours:.2f}x", f"{fp8:.2f}x"))
    header = ("tokens", "ours, against FlashAttention-4", "cuDNN's FP8, against cuDNN's bf16")
    return f"{markdown_table(header, lines)}\n\nThe backward pass alone, timed in turn, D=128; {record.caption}."
