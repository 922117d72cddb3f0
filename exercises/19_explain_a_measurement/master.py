"""Explain a measurement."""

import math

LENGTHS = (1024, 2048, 4096, 8192, 16384)
# Medians in ms, bfloat16; D = 128 and no mask where nothing else is said.
MEASURED_MS = {
    "forward": {
        "ours": (0.71656, 0.99488, 1.60882, 2.84979, 5.38958),
        "cudnn": (0.44264, 0.83392, 1.62286, 3.2125, 6.4137),
    },
    "forward, causal": {
        "ours": (0.6091, 0.72752, 1.01474, 1.58221, 2.7545),
        "cudnn": (0.30067, 0.50854, 0.92181, 1.74563, 3.3751),
    },
    "forward, D = 64": {
        "ours": (0.96147, 1.37318, 2.32123, 4.14864, 7.99939),
        "cudnn": (0.61232, 1.15192, 2.25654, 4.46106, 8.8307),
    },
    "both passes": {
        "ours": (2.48219, 4.016, 7.01806, 12.96352, 25.06416),
        "cudnn": (1.94458, 3.48891, 6.56456, 12.89832, 25.30915),
        "fa4": (1.81078, 3.16627, 5.84573, 11.07088, 21.90093),  # FlashAttention-4, 16 bit
    },
    "both passes, CUDA graph": {  # the same work without the host's time
        "ours": (2.48149, 4.00805, 7.03944, 12.82554, 24.63256),
        "cudnn": (1.93091, 3.45717, 6.60878, 12.86907, 25.40499),
    },
}
# Of one multiprocessor of an H200, per clock: multiply-adds of the tensor cores, instructions of the other units.
RATES = {"int8": 4096, "sixteen_bit": 2048, "exp2": 16, "alu": 64, "issue": 128}


def speed_limit(needed: int, int8: int, sixteen_bit: int, int8_speed: float) -> float:
    """How many times as fast as 16-bit attention INT8 attention can be at most, if only matmuls take time.

    needed: matmuls of the 16-bit program, all of one size. The INT8 program does `int8` of that size in INT8,
    int8_speed times as fast, and `sixteen_bit` in 16 bit; together they may be more than `needed`, if it does some
    twice.

    >>> speed_limit(7, 6, 1, 2.0)  # SageBwd: one of seven stays in 16 bit
    1.75
    """
    ### SOLUTION: time of the one over time of the other
    return needed / (int8 / int8_speed + sixteen_bit)


def quantization_bytes(batch: int, heads: int, kv_heads: int, n_q: int, n_k: int, head_dim: int, block: int) -> int:
    """Bytes that rounding Q, K and V to INT8 reads and writes.

    Q has `heads` heads of n_q tokens, K and V have kv_heads of n_k. Each is read in 16 bit, K once more before that for
    its mean over all tokens, and each is written in 8 bit. There is one float32 scale per head and `block` tokens; the
    last block may be partial. (The mean itself is left out.)

    >>> quantization_bytes(1, 1, 1, 2, 2, 4, 2)  # 8 numbers each: 8 * (3 + 5 + 3), and 3 scales
    100
    """
    ### SOLUTION: reads, writes and scales of Q, K and V
    q, k = batch * heads * n_q * head_dim, batch * kv_heads * n_k * head_dim
    scales = batch * (heads * math.ceil(n_q / block) + 2 * kv_heads * math.ceil(n_k / block))
    return q * (2 + 1) + k * (2 + 2 + 1) + k * (2 + 1) + 4 * scales


def share_of_time(bytes_moved: float, terabytes_per_second: float, ms: float) -> float:
    """The share of `ms` milliseconds that moving so many bytes takes at this rate; a terabyte is 10^12 bytes.

    >>> round(share_of_time(738_246_656, 4.8, 0.71656), 3)  # quantisation in the first number of the first row
    0.215
    """
    ### SOLUTION: time for the bytes over the time measured
    return bytes_moved / (terabytes_per_second * 1e12) * 1e3 / ms


def line(n_1: int, ms_1: float, n_2: int, ms_2: float) -> tuple[float, float]:
    """(fixed, per_key) of the line fixed + per_key N through two measured times; ms, and ms per key.

    With a fixed number of tokens, work per token (reading, rounding, launching) is the same at every N, and work per
    score grows with N.

    >>> fixed, per_key = line(2048, 0.99488, 8192, 2.84979)
    >>> round(fixed, 3), round(fixed + per_key * 16384, 2)  # measured: 5.39
    (0.377, 5.32)
    """
    ### SOLUTION: slope, then what is left at N = 0
    per_key = (ms_2 - ms_1) / (n_2 - n_1)
    return ms_1 - per_key * n_1, per_key


def break_even(ours: tuple[float, float], theirs: tuple[float, float]) -> float:
    """The N from which on we are faster for good, of two results (fixed, per_key) of `line`.

    0 if we are faster at every N > 0; infinity if there is no such N, also if we are faster at first and then fall
    behind.

    >>> break_even((4.0, 1.0), (1.0, 2.0)), break_even((1.0, 2.0), (4.0, 1.0))
    (3.0, inf)
    """
    ### SOLUTION: where the lines cross, and what it means if they don't
    (our_fixed, our_slope), (their_fixed, their_slope) = ours, theirs
    if our_slope >= their_slope:
        return 0.0 if our_slope == their_slope and our_fixed < their_fixed else math.inf
    return max(0.0, (our_fixed - their_fixed) / (their_slope - our_slope))


def causal_ms(ours: tuple[float, float], n: int, block_q: int, block_kv: int) -> float:
    """Predicted time of N = n tokens with a causal mask, from (fixed, per_key) of `line` without one.

    A program computes whole tiles of block_q x block_kv scores. It skips a tile if no query of it sees a key of it
    (query i sees the keys 0 to i). The last tiles may be partial; they count as whole ones.

    >>> causal_ms((1.0, 0.5), 4, 1, 2)  # 6 of 8 tiles are visited
    2.5
    """
    ### SOLUTION: the share of the tiles that is visited, and what of the time it applies to
    fixed, per_key = ours
    visited = sum((min((i + 1) * block_q, n) - 1) // block_kv + 1 for i in range(math.ceil(n / block_q)))
    return fixed + per_key * n * visited / (math.ceil(n / block_q) * math.ceil(n / block_kv))


def clocks_per_score(
    head_dim: int, int8: int, sixteen_bit: int, counts: dict[str, float], rates: dict[str, float]
) -> dict[str, float]:
    """Clocks of a multiprocessor that each unit needs for one score: "tensor", "exp2", "alu" and "issue".

    int8, sixteen_bit: matmuls of each kind; one takes head_dim multiply-adds per score. counts: instructions per score,
    "exp2", "alu" (conversions, maxima, moves) and "issue" (all). rates: per clock, like RATES.

    >>> clocks_per_score(128, 2, 0, {"exp2": 1, "alu": 2, "issue": 8}, RATES)
    {'tensor': 0.0625, 'exp2': 0.0625, 'alu': 0.03125, 'issue': 0.0625}
    """
    ### SOLUTION: work over rate, unit by unit
    tensor = head_dim * (int8 / rates["int8"] + sixteen_bit / rates["sixteen_bit"])
    return {"tensor": tensor} | {unit: counts[unit] / rates[unit] for unit in ("exp2", "alu", "issue")}


def answers() -> dict[str, str]:
    """{"why_short": letter, "why_not_twice": letter, ...}: for each question of README.md, the right reason."""
    ### SOLUTION: a letter for each question
    return {"why_short": "c", "why_not_twice": "a", "why_causal": "d", "why_d64": "b", "which_claim": "c"}
