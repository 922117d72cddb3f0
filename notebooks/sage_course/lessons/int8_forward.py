"""Notebook 08: what each level of the INT8 forward ladder adds, in Triton; tried in the library's own program.

Needs Triton, and `teaching.triton_device()` before it is imported.
"""

import math

import torch
import triton
import triton.language as tl
from sage_kernels.common.device import triton_device
from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.tiles import (
    LOG2_INT8_MAX,
    NO_KEY,
    ROUNDER,
    ROUNDER_BITS,
    TINY,
    integer_dot,
    is_visible,
    load_padded,
    load_tokens,
    load_transposed,
    round_to_int8,
)
from sage_kernels.sagebwd.forward.program import run_forward_program
from sage_kernels.sagebwd.ladder import LOG2_E, prepare_forward

from sage_course.gaps import Gap, Mistake, source

if not torch.cuda.is_available():
    import sage_kernels.common.interpreter  # noqa: F401

HEAD_DIM = 32
SMALL = Launch(block_q=32, block_kv=64, num_warps=4, num_stages=2)  # two tiles of keys share a scale


@triton.jit
def level1(m, l, o_i, q_hat_i, s_q, query, j, k, v, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_new = tl.maximum(m, tl.maximum(tl.max(s_ij, 1), NO_KEY))
    p_ij = tl.math.exp2(s_ij - m_new[:, None])
    rescale = tl.math.exp2(m - m_new)
    l = l * rescale + tl.sum(p_ij, 1)
    v_j = load_tokens(v, key, n_k, TILE.D, TILE.DP, IS_MASKED)
    o_i = tl.dot(p_ij.to(v_j.dtype), v_j, o_i * rescale[:, None])
    return m_new, l, o_i


@triton.jit
def level2(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_ij = tl.maximum(tl.max(s_ij, 1), NO_KEY)
    m_new = tl.maximum(m, m_ij)
    rescale = tl.math.exp2(m - m_new)
    s_p = tl.math.exp2(m_ij - m_new) / 127.0
    p_ij = 127.0 * tl.math.exp2(s_ij - m_ij[:, None])
    l = l * rescale + tl.sum(p_ij, 1) * s_p
    p_hat_ij = round_to_int8(p_ij)
    vt_hat_j = load_transposed(vt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    s_v = tl.load(vt.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    o_i = o_i * rescale[:, None] + integer_dot(p_hat_ij, tl.trans(vt_hat_j)) * (s_p * s_v)[:, None]
    return m_new, l, o_i


@triton.jit
def offset_dot(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    start = tl.full([ROWS, COLUMNS], ROUNDER_BITS, tl.int32)
    return tl.dot(a, b, start, out_dtype=tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def low_byte(x):
    return (x + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def folded_softmax(s_ij, s_qk, m, l):
    s_qk += TINY
    m_ij = tl.maximum((tl.max(s_ij, 1) - ROUNDER) * s_qk, NO_KEY)
    room = tl.maximum(s_qk - 0.005, 0.0)
    t = tl.fma(s_qk, ROUNDER, m_ij - LOG2_INT8_MAX + room)
    m_ij = tl.fma(-s_qk, ROUNDER, t) + LOG2_INT8_MAX
    p_ij = tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -t[:, None]))
    m_new = tl.maximum(m, m_ij)
    rescale = tl.math.exp2(m - m_new)
    s_p = tl.math.exp2(m_ij - m_new) / 127.0
    return p_ij, s_p, m_new, l * rescale + tl.sum(p_ij, 1) * s_p, rescale


@triton.jit
def group_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


# Programs that try them


@triton.jit
def dot_program(a_ptr, b_ptr, out_ptr, DOT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    row, d = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    a, b = tl.load(a_ptr + row[:, None] * DEPTH + d[None, :]), tl.load(b_ptr + row[:, None] * DEPTH + d[None, :])
    tl.store(out_ptr + row[:, None] * ROWS + row[None, :], DOT(a, tl.trans(b), ROWS, ROWS))


@triton.jit
def byte_program(x_ptr, out_ptr, TO_BYTE: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, TO_BYTE(tl.load(x_ptr + i)))


@triton.jit
def softmax_program(s_ptr, s_qk_ptr, m_ptr, l_ptr, p_ptr, rows_ptr, SOFTMAX: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    matrix = i[:, None] * SIZE + i[None, :]
    s_ij, s_qk, m, l = tl.load(s_ptr + matrix), tl.load(s_qk_ptr + i), tl.load(m_ptr + i), tl.load(l_ptr + i)
    p_ij, s_p, m_new, l, rescale = SOFTMAX(s_ij, s_qk, m, l)
    tl.store(p_ptr + matrix, p_ij)
    tl.store(rows_ptr + i, s_p)
    tl.store(rows_ptr + SIZE + i, m_new)
    tl.store(rows_ptr + 2 * SIZE + i, l)
    tl.store(rows_ptr + 3 * SIZE + i, rescale)


@triton.jit
def group_program(x_ptr, out_ptr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    matrix = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + matrix, GROUP(tl.load(x_ptr + matrix), ROWS, COLUMNS))


def run_level(level):
    """Return run(key_tile, q, k, v) -> O, L: the library's program with this body of its loop, on a level's inputs."""

    def launch(key_tile, q, k, v):
        c = 1 / math.sqrt(q.shape[-1])
        inputs = prepare_forward(*(x.to(triton_device()) for x in (q, k, v)), level, scale=c, smooth_k=True)
        if level == 1:  # a reader may take the scale of a wrong block: numbers must be there
            scales = torch.linspace(3, 7, 256, device=triton_device())
            scales[: inputs.k_hat.scale.numel()] = inputs.k_hat.scale.flatten()
            inputs = inputs._replace(k_hat=inputs.k_hat._replace(scale=scales))
        o, log_sum_exp = run_forward_program(
            inputs, key_tile, SMALL, start_with_triton, is_causal=False, log2_scale=c * LOG2_E
        )
        return o.cpu(), log_sum_exp[..., : q.shape[2]].cpu()

    return launch


def run_dot(dot, a, b):
    a, b = a.to(triton_device()), b.to(triton_device())
    out = a.new_empty(len(a), len(b), dtype=torch.float32)
    dot_program[(1,)](a, b, out, DOT=dot, ROWS=len(a), DEPTH=a.shape[1])
    return out.cpu(), reads_bits(dot)


def run_byte(to_byte, x):
    out = torch.empty_like(x, dtype=torch.int32, device=triton_device())  # a store must not turn an int32 into int8
    byte_program[(1,)](x.to(triton_device()), out, TO_BYTE=to_byte, COUNT=len(x))
    return out.cpu(), reads_bits(to_byte)


def reads_bits(function):
    """Tell whether a function reads bits: a conversion may give the same numbers, but is what it should save."""
    return "it reads bits" if "bitcast=True" in source(function) else "it converts"


def run_softmax(softmax, s_ij, s_qk, m, l):
    arguments = [x.to(triton_device()) for x in (s_ij, s_qk, m, l)]
    p_ij, rows = torch.empty_like(arguments[0]), arguments[0].new_empty(4, len(m))
    softmax_program[(1,)](*arguments, p_ij, rows, SOFTMAX=softmax, SIZE=len(m))
    p_ij, (s_p, m_new, l, _) = p_ij.cpu(), rows.cpu()
    # Any m_new near the largest score will do, if P~ and l belong to it: compare them relative to the true one.
    shift = torch.exp2(m_new - torch.maximum(m, (s_ij.amax(1) - ROUNDER.value) * s_qk))
    largest = p_ij.amax().item()
    largest = "about 127" if 100 < largest < 127.5 else f"{largest:.4g}"
    return p_ij * (s_p * shift)[:, None], l * shift, f"the largest p_ij is {largest}"


def run_group(group, x):
    out = torch.empty_like(x, device=triton_device())
    group_program[(1,)](x.to(triton_device()), out, GROUP=group, ROWS=x.shape[0], COLUMNS=x.shape[1])
    return out.cpu()


# What they are tried on


def _attention() -> list[tuple]:
    """Return two full tiles of keys, and one that needs a mask and has larger keys and values: scales differ."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, HEAD_DIM, generator=generator) for n in (20, 140, 140))
    k[:, :, 128:] *= 1.2
    v[:, :, 128:] *= 3
    return [(q, k, v)]


def _integers() -> list[tuple]:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randint(-127, 128, (2, 32, 64), generator=generator, dtype=torch.int8)
    return [(a, b), (a, a)]


def _integer_scores() -> list[tuple]:
    """Return integer scores with scales that need no `room`, and with scales that do."""
    generator = torch.Generator().manual_seed(2)
    s_hat = torch.round(4_000 * torch.randn(32, 32, generator=generator))
    m, l = torch.linspace(-5, 40, 32), torch.linspace(1, 50, 32)
    scales = (torch.linspace(1e-3, 4e-3, 32), torch.linspace(2e-2, 4e-2, 32))
    return [(ROUNDER.value + s_hat, s_qk, m, l) for s_qk in scales]


SCORES = "integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]"
BOTH_EXP = "tl.math.exp2(m_ij - m_new) / 127.0\n    p_ij = 127.0 * tl.math.exp2(s_ij - m_ij[:, None])"
ONLY_ROUND = "p_ij is P~ / s_P already, with 127 as its largest entry: round it."
BITS = "out_dtype=tl.int32).to(tl.float32, bitcast=True)"
FOLDED = """t = tl.fma(s_qk, ROUNDER, m_ij - LOG2_INT8_MAX + room)
    m_ij = tl.fma(-s_qk, ROUNDER, t) + LOG2_INT8_MAX
    p_ij = tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -t[:, None]))"""
ROUNDED_TWICE = """t = s_qk * ROUNDER + m_ij - LOG2_INT8_MAX + room
    m_ij = t - s_qk * ROUNDER + LOG2_INT8_MAX
    p_ij = tl.math.exp2(s_ij * s_qk[:, None] - t[:, None])"""
P = "tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -t[:, None]))"
TWICE = "A product and a sum round twice: tl.fma rounds once."

GAPS = {
    "level1": Gap(level1, _attention, (
        Mistake(SCORES, SCORES.replace("s_q * s_k", "s_k + 0 * s_q"), "s_Q is missing. It also contains c log2(e)."),
        Mistake("tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)", "tl.load(k.scale)",
                "That is the scale of the first keys. Each SCALE_BLOCK tokens have their own."),
        Mistake("j * TILE.BLOCK_KV // TILE.SCALE_BLOCK", "j",
                "j counts tiles, and a tile may be smaller than the SCALE_BLOCK tokens that share a scale."),
        Mistake("j * TILE.BLOCK_KV // TILE.SCALE_BLOCK", "j * TILE.BLOCK_KV",
                "That is the number of a token. SCALE_BLOCK tokens share a scale: divide."),
        Mistake("j * TILE.BLOCK_KV // TILE.SCALE_BLOCK", "j * TILE.SCALE_BLOCK // TILE.BLOCK_KV",
                "The tile begins at token j BLOCK_KV. Divide that by the SCALE_BLOCK tokens that share a scale."),
        Mistake("j * TILE.BLOCK_KV // TILE.SCALE_BLOCK", "key // TILE.SCALE_BLOCK",
                "All keys of a tile have the same scale: load one number, for the tile's first token."),
        Mistake(SCORES, "integer_dot(q_hat_i, tl.trans(k_hat_j)) + 0 * s_q[:, None]", "Both scales are missing."),
    ), run_level(1), right=(
        ("l * rescale + tl.sum(p_ij, 1)", "tl.sum(p_ij, axis=1) + rescale * l"),
    )),
    "level2": Gap(level2, _attention, (
        Mistake("tl.math.exp2(m_ij - m_new) / 127.0", "tl.math.exp2(m_ij - m_new)", "127 steps of s_P make 1."),
        Mistake("127.0 * tl.math.exp2(s_ij - m_ij[:, None])", "127.0 * tl.math.exp2(s_ij - m_new[:, None])",
                "In P~ / s_P the new maximum cancels. The largest entry is 127 in every tile."),
        Mistake("127.0 * tl.math.exp2(s_ij", "tl.math.exp2(s_ij", "Dividing P~ by s_P brings a factor of 127."),
        Mistake("exp2(m_ij - m_new) / 127.0", "exp2(m_ij - m) / 127.0",
                "s_P belongs to the new maximum, as P~ does: m_ij - m_new."),
        Mistake("exp2(m_ij - m_new) / 127.0", "exp2(m_new - m_ij) / 127.0",
                "P~ is at most 1, so the exponent is at most 0: m_ij - m_new."),
        Mistake("127.0 * tl.math.exp2(s_ij - m_ij[:, None])", "tl.math.exp2(s_ij - m_new[:, None])",
                "That is P~. p_ij is P~ / s_P."),
        Mistake("round_to_int8(p_ij)", "round_to_int8(p_ij / s_p[:, None])", ONLY_ROUND),
        Mistake("round_to_int8(p_ij)", "round_to_int8(127.0 * p_ij)", ONLY_ROUND),
        Mistake("tl.math.exp2(m_ij - m_new) / 127.0", "tl.math.exp2(m_ij - m_ij) / 127.0",
                "1/127 fits a tile with the row's maximum. In others the largest P~ is e^(m_ij - m_new)."),
        Mistake(BOTH_EXP, BOTH_EXP.replace("exp2", "exp"), "The scores are already multiplied by log2(e): use exp2."),
        Mistake("tl.sum(p_ij, 1) * s_p", "tl.sum(p_ij, 1) / 127.0", "l is the sum of P~ relative to m_new: p_ij s_P."),
        Mistake("l = l * rescale", "l = l", "The old l belongs to the old maximum: it shrinks as O does."),
        Mistake("tl.sum(p_ij, 1) * s_p", "tl.sum(p_ij, 1)", "l is the sum of P~. p_ij is P~ / s_P."),
        Mistake("tl.sum(p_ij, 1) * s_p", "tl.sum(round_to_int8(p_ij).to(tl.float32), 1) * s_p",
                "l is the sum of P~ before rounding."),
        Mistake("round_to_int8(p_ij)", "p_ij.to(tl.int8)", "The conversion truncates: every entry becomes too small."),
        Mistake("(s_p * s_v)", "(s_p + 0 * s_v)", "V^ stands for s_V V^."),
        Mistake("(s_p * s_v)", "(s_v + 0 * s_p)", "P^ stands for s_P P^."),
        Mistake("o_i * rescale[:, None] + integer_dot(p_hat_ij, tl.trans(vt_hat_j)) * (s_p * s_v)[:, None]",
                "(o_i + integer_dot(p_hat_ij, tl.trans(vt_hat_j)) * (s_p * s_v)[:, None]) * rescale[:, None]",
                "The new part already belongs to the new maximum: only the old O shrinks."),
        Mistake("o_i = o_i * rescale[:, None]", "o_i = o_i", "O belongs to the old maximum: it shrinks as l does."),
    ), run_level(2), right=(
        ("p_ij = 127.0 * tl.math.exp2(s_ij - m_ij[:, None])", "p_ij = tl.exp2(s_ij - m_ij[:, None]) * 127.0"),
        ("l * rescale + tl.sum(p_ij, 1) * s_p", "rescale * l + s_p * tl.sum(p_ij, axis=1)"),
    )),
    "offset_dot": Gap(offset_dot, _integers, (
        Mistake("ROUNDER_BITS", "12582912",
                "That is the integer 12582912. Read as a float it is 1.8e-38: start at the float's *bits*."),
        Mistake("ROUNDER_BITS", "0", "Bits of a small integer, read as a float, are close to 0."),
        Mistake(", bitcast=True", "", "That is the conversion we want to save: read the same bits, bitcast=True."),
        Mistake(BITS, f"{BITS} - ROUNDER", "ROUNDER stays in: level 3 takes it out where that costs nothing."),
        Mistake("start, out_dtype=tl.int32", "start", "An int32 accumulator needs out_dtype=tl.int32."),
        Mistake(f"start, {BITS}", "out_dtype=tl.int32).to(tl.float32) + ROUNDER",
                "The right numbers, by a conversion: start the dot product at ROUNDER_BITS and read the bits."),
    ), run_dot, right=(
        ("tl.full([ROWS, COLUMNS], ROUNDER_BITS, tl.int32)", "tl.zeros([ROWS, COLUMNS], tl.int32) + ROUNDER_BITS"),
    )),
    "low_byte": Gap(low_byte, lambda: [(torch.linspace(-127, 127, 256),), (torch.tensor([2.5, -2.5, 3.5, 0.4] * 4),)], (
        Mistake("(x + ROUNDER)", "x", "The low bits of a float are its fraction, not its integer: add ROUNDER first."),
        Mistake("ROUNDER", "8388608.0",
                "Below 2^23 floats are 1/2 apart, and x may be negative. 1.5 * 2^23 has room on both sides."),
        Mistake(".to(tl.int8)", "",
                "That is an int32 with the bits of ROUNDER in it: .to(tl.int8) keeps the low byte."),
        Mistake(".to(tl.int8)", " & 255", "That is the low byte without a sign: .to(tl.int8)."),
        Mistake("tl.int32, bitcast=True).to(tl.int8)", "tl.int8, bitcast=True)",
                "A bitcast keeps all 32 bits: first to tl.int32. Then .to(tl.int8) keeps the low byte."),
        Mistake("(x + ROUNDER)", "(x + ROUNDER_BITS)", "Add the *number* ROUNDER to a float, not its bits."),
        Mistake(", bitcast=True", "", "The right numbers, by a conversion: read the same bits, bitcast=True."),
        Mistake("(x + ROUNDER).to(tl.int32, bitcast=True)", "((x + ROUNDER) - ROUNDER)",
                "The right numbers, by a conversion: read the same bits, bitcast=True."),
        Mistake("ROUNDER", "2 * ROUNDER", "There floats are 2 apart: every odd number is lost."),
        Mistake("(x + ROUNDER).to(tl.int32, bitcast=True)", "x", "The conversion truncates. We want to save it."),
    ), run_byte, right=(
        ("(x + ROUNDER).to(tl.int32, bitcast=True)", "tl.cast(x + ROUNDER, tl.int32, bitcast=True)"),
    )),
    "folded_softmax": Gap(folded_softmax, _integer_scores, (
        Mistake("    m_ij = tl.fma(-s_qk, ROUNDER, t) + LOG2_INT8_MAX\n", "",
                "m_ij has not moved. t was rounded, so P~ is now relative to a different maximum."),
        Mistake("tl.fma(-s_qk, ROUNDER, t) + LOG2_INT8_MAX", "m",
                "m is the largest score of the tiles before. Solve the formula of t for this tile's maximum."),
        Mistake("m_ij - LOG2_INT8_MAX + room", "m_ij + room", "p_ij is 127 e^(S - m_ij): where is log2(127)?"),
        Mistake(" + room", "", "Where scales are large, 127 may become 127.5 and wrap around: add room to t."),
        Mistake(" + room", " - room", "room makes p_ij smaller. t is subtracted, so it grows."),
        Mistake("t) + LOG2_INT8_MAX", "t) + LOG2_INT8_MAX - room",
                "m_ij must belong to the t that is used, with room in it."),
        Mistake(FOLDED, ROUNDED_TWICE, TWICE),
        Mistake(*(lines.splitlines()[1].strip() for lines in (FOLDED, ROUNDED_TWICE)), TWICE),
        Mistake(*(lines.splitlines()[2].strip() for lines in (FOLDED, ROUNDED_TWICE)), TWICE),
        Mistake("m_ij - LOG2_INT8_MAX + room", "m - LOG2_INT8_MAX + room",
                "m is the largest score of the tiles before. t needs this tile's: m_ij."),
        Mistake(P, P.replace("-t", "-m_ij"), "s_ij still contains ROUNDER, and p_ij has a factor of 127: subtract t."),
        Mistake(P, P.replace("[:, None]", ""), "s_qk and t have one number per query, a row of p_ij: [:, None]."),
    ), run_softmax, right=(
        ("m_ij - LOG2_INT8_MAX + room", "m_ij + room - LOG2_INT8_MAX"),
    )),
    "group_columns": Gap(group_columns, lambda: [(torch.arange(32 * 64, dtype=torch.int32).reshape(32, 64),)], (
        Mistake("permute(0, 1, 3, 2, 4)", "permute(0, 1, 2, 3, 4)", "Nothing has moved."),
        Mistake("permute(0, 1, 3, 2, 4)", "permute(1, 0, 2, 3, 4)",
                "Rows and groups are the first two axes, and they stay. Half and pair are axes 2 and 3."),
        Mistake("permute(0, 1, 3, 2, 4)", "permute(0, 1, 3, 4, 2)",
                "This separates the columns of a pair: 0, 8, 1, 9."),
        Mistake("permute(0, 1, 3, 2, 4)", "permute(0, 1, 4, 3, 2)",
                "This turns all three around. Only half and pair change places."),
        Mistake("permute(0, 1, 3, 2, 4)", "permute(0, 2, 1, 3, 4)", "Groups stay. Half and pair are axes 2 and 3."),
        Mistake("COLUMNS // 16, 2, 4, 2)", "COLUMNS // 16, 2, 2, 4)", "16 columns are 2 halves of 4 pairs of 2."),
        Mistake("COLUMNS // 16, 2, 4, 2)", "COLUMNS // 16, 4, 2, 2)", "16 columns are 2 halves of 4 pairs."),
        Mistake("x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)",
                "x.reshape(ROWS, 2, COLUMNS // 4, 2).permute(0, 2, 1, 3)",
                "The halves are those of each group of 16, not of the whole row."),
    ), run_group, right=(
        ("x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)",
         "tl.permute(tl.reshape(x, (ROWS, COLUMNS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))"),
    )),
}  # fmt: skip
