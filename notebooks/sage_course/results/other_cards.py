"""The book's page on INT8 and the backward pass of FlashAttention-4: its tables."""

import math

from sage_lab.bench.cost_model import GPUS
from sage_lab.records import markdown_table, read_record

from sage_course.results.elsewhere import DIRECTIONS, PORTABLE
from sage_course.results.hopper_model import (
    H200,
    Rates,
    predicted,
)
from sage_course.results.kernels import INSTRUCTIONS
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
