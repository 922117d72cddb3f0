"""Grader of 17_triton_dk_dv."""

import math

import torch
from torch import Tensor

from exercises.grading import Draw, Grader, Guarded, Student, expect, off_ties, rounding_distance, unlike
from sage_ref.quantization import QuantizedTensor, quantize, quantized_matmul
from sage_ref.sagebwd import SageBwdSettings, sagebwd_backward, sagebwd_forward, tiles

grader = Grader("17_triton_dk_dv", ("int8_dk_dv",), triton=True)
grader.hint("no_launch", "No Triton kernel was launched. The kernel is the exercise: launch it from this function.")
grader.hint("grid", "Some rows of dK or dV were never written. Does every tile of keys have its program?")
grader.hint(
    "not_finite", "dK or dV is NaN or infinite, even for a single full tile. Is S - L at most 0, or a little more?"
)
grader.hint("swapped", "dK stands where dV belongs. In which order are the outputs stored?")
grader.hint("base", "L is a natural logarithm: P is e^(S - L). 2^x takes another x.")
grader.hint("whose_l", "The tile is transposed: L and delta belong to queries, which are its columns now.")
grader.hint("bypass", "Too good: an operand isn't rounded. Both operands of dV are integers, P and dO, and both of dK.")
grader.hint("truncated", "Are P and dS rounded to nearest? A conversion to int8 cuts off towards 0.")
grader.hint(
    "scale_axis", "dV and dK are sums over queries: a scale per query can't leave such a sum. Rows here are keys."
)
grader.hint("tile_scale", "P and dS have one scale per key, a row of the transposed tile, not one for the whole tile.")
grader.hint("constant_scale", "P has no maximum of 1 in a row here: its largest entry for a key may be far below 1.")
grader.hint("dv", "One tile: check S (both scales and c), P = e^(S - L), and s_P s_dO. dV has no factor c.")
grader.hint("no_delta", "dS = P (dP - delta): where is delta, and which sign has it?")
grader.hint("half_dp", "dP - delta is a small difference of large numbers. Does dP stay in float32 after the matmul?")
grader.hint("int8_dp", "dP is the matmul that stays in 16 bit: take dO itself for it, not its rounded form.")
grader.hint("rounded_p", "dS takes P before rounding. The rounded one is for dV.")
grader.hint("c", "S has a factor c, so dK has one too. Which of the two is missing, or there twice?")
grader.hint("dk", "If dV is right, P is. dK is c dS^T Q: check dP, dS, and s_dS s_Q.")
grader.hint("accumulate", "With several tiles of queries, dK_j and dV_j are the sums of what all of them add.")
grader.hint("query_scales", "Each tile of queries has its own s_Q and s_dO. Which belong to tile i?")
grader.hint("key_tiles", "Several tiles of keys: which rows and which s_K belong to program j?")
grader.hint(
    "padding",
    "Queries from n_q on do not exist, but Q^ and dO^ hold something there, and dK and dV are sums over queries. "
    "Which P makes them count for nothing?",
)
grader.hint("store_mask", "dK or dV was written past its end. Which keys of the last tile exist?")

MARGIN = 1 << 14  # elements around dK and dV, more than any tile
NOT_WRITTEN = -12345.0


class Case:
    """Quantised Q, K and dO in tiles, with junk in the padding, and what forward and backward pass make of them."""

    def __init__(self, draw: Draw, n_q: int, n_k: int, block_q: int, block_kv: int, query_sizes: Tensor | None = None):
        """query_sizes: how large the queries of each tile are; dO is small where they are large."""
        head_dim = draw.choice((32, 64))
        q, k = 1.5 * draw.normal(n_q, head_dim), 1.5 * draw.normal(n_k, head_dim)
        do = 0.1 * draw.normal(n_q, head_dim)
        if query_sizes is not None:
            sizes = query_sizes.repeat_interleave(block_q)[:n_q, None]
            q, do = q * sizes, do / sizes
        # Most of V is shared by all keys, so that dP - delta is a small difference.
        self.v = (draw.normal(n_k, head_dim) + 16 * draw.normal(1, head_dim)).half()
        self.do = off_ties(do.half(), block_q)
        self.block_q, self.block_kv, self.c = block_q, block_kv, 1 / math.sqrt(head_dim)
        hats = [quantize(x, (block, None)) for x, block in ((q, block_q), (k, block_kv), (self.do, block_q))]
        self.q, self.k, self.do_rounded = (hat.dequantize().double() for hat in hats)
        self.settings = SageBwdSettings(smooth_k=False, block_q=block_q, block_kv=block_kv)
        self.output, self.log_sum_exp, *_ = sagebwd_forward(self.q, self.k, self.v.double(), self.settings)
        self.delta = (self.do.double() * self.output).sum(-1)
        padded = []
        for hat, block in zip(hats, (block_q, block_kv, block_q), strict=True):
            junk = torch.full((-len(hat.values) % block, head_dim), 101, dtype=torch.int8)
            padded.append((torch.cat((hat.values, junk)), hat.scale[:, 0].clone()))
        q_hat, k_hat, do_hat = padded
        rows = self.log_sum_exp.float(), self.delta.float()
        self.inputs = [*q_hat, *k_hat, self.v, self.do, *do_hat, *rows]

    def run(self, student: Student) -> tuple[Tensor, Tensor]:
        """dK and dV as the submission leaves them; a store outside of them fails the test."""
        outputs = [torch.full(self.k.shape, NOT_WRITTEN) for _ in range(2)]
        _, after = student.int8_dk_dv.in_place(*self.inputs, *(Guarded(x, MARGIN) for x in outputs))
        expect(student.launches > 0, "no_launch")
        expect(after[-2].intact and after[-1].intact, "store_mask")
        dk, dv = after[-2].tensor, after[-1].tensor
        expect((dk != NOT_WRITTEN).all() and (dv != NOT_WRITTEN).all(), "grid")
        return dk, dv

    def expected(self) -> tuple[Tensor, Tensor]:
        """The library's, with one scale per row of the results."""
        tensors = self.do.double(), self.q, self.k, self.v.double(), self.output, self.log_sum_exp
        return sagebwd_backward(*tensors, self.settings)[1:3]

    def p(self, base: float = math.e) -> Tensor:
        """base^(S - L) [n_q, n_k]."""
        return base ** (self.q @ self.k.mT * self.c - self.log_sum_exp[:, None])

    def dp(self) -> Tensor:
        return self.do.double() @ self.v.double().mT

    def summed(self, x: Tensor, other: Tensor, rounded=lambda tile: quantize(tile, (1, None))) -> Tensor:
        """X^T other [n_k, D], tile by tile; `rounded` quantises a tile of X^T, one row per key."""
        result = torch.zeros_like(self.k)
        for queries in tiles(len(self.q), self.block_q):
            for keys in tiles(len(self.k), self.block_kv):
                tile = rounded(x[queries, keys].mT)
                if isinstance(tile, QuantizedTensor):
                    result[keys] += quantized_matmul(tile, quantize(other[queries]))
                else:
                    result[keys] += tile @ other[queries]
        return result

    def check(self, student: Student, hint: str) -> None:
        for found, expected in zip(self.run(student), self.expected(), strict=True):
            expect(found.isfinite().all() and rounding_distance(found, expected) <= 1, hint)


def not_as(found: Tensor, wrong: Tensor, expected: Tensor, hint: str) -> None:
    unlike(found, wrong, expected, hint, within=1, distance=rounding_distance)


def truncated(tile: Tensor) -> Tensor:
    scale = quantize(tile, (1, None)).scale
    return (tile / scale).trunc() * scale


def a_scale_per_query(tile: Tensor) -> Tensor:
    """Rounded per column of the transposed tile, dequantised by row: what mixing up two equal block sizes gives."""
    columns = quantize(tile, (None, 1))
    return columns.values * columns.scale.mT


WRONG_ROUNDINGS = {
    "bypass": lambda tile: tile,
    "truncated": truncated,
    "scale_axis": a_scale_per_query,
    "tile_scale": lambda tile: quantize(tile),
}


def one_tile_of(draw: Draw) -> Case:
    block = draw.choice((32, 64))  # the same for queries and keys, so that mixing them up still runs
    return Case(draw, block, block, block, block)


@grader.test("dV, one tile of keys, one of queries", points=3)
def dv_of_one_tile(student, draw):
    case = one_tile_of(draw)
    (dk, dv), (expected_dk, expected) = case.run(student), case.expected()
    expect(dk.isfinite().all() and dv.isfinite().all(), "not_finite")
    not_as(dv, expected_dk, expected, "swapped")
    p, do = case.p(), case.do_rounded
    not_as(dv, case.summed(case.p(base=2.0), do), expected, "base")
    whose_l = torch.exp(case.q @ case.k.mT * case.c - case.log_sum_exp[None, :])
    not_as(dv, case.summed(whose_l, do), expected, "whose_l")
    for wrong in (
        p.mT @ case.do.double(),
        case.summed(p, case.do.double(), lambda tile: quantize(tile, (1, None)).dequantize()),
    ):
        not_as(dv, wrong, expected, "bypass")
    for hint, rounded in WRONG_ROUNDINGS.items():
        not_as(dv, case.summed(p, do, rounded), expected, hint)
    not_as(dv, case.summed(p, do, lambda tile: (tile * 127).round() / 127), expected, "constant_scale")
    expect(rounding_distance(dv, expected) <= 1, "dv")


@grader.test("dK, one tile of keys, one of queries", points=4)
def dk_of_one_tile(student, draw):
    case = one_tile_of(draw)
    dk, expected = case.run(student)[0], case.expected()[0]
    expect(dk.isfinite().all(), "not_finite")
    p, dp, delta = case.p(), case.dp(), case.delta[:, None]
    rounded_p = quantize(p.mT, (1, None)).dequantize().mT
    for hint, ds in {
        "no_delta": p * dp,
        "whose_l": p * (dp - case.delta[None, :]),
        "half_dp": p * (dp.float().half() - delta),
        "rounded_p": rounded_p * (dp - delta),
    }.items():
        not_as(dk, case.c * case.summed(ds, case.q), expected, hint)
    for do in (case.do_rounded, case.do_rounded.half().double()):
        not_as(dk, case.c * case.summed(p * (do @ case.v.double().mT - delta), case.q), expected, "int8_dp")
    for wrong in (case.c * case.summed(p * (dp + delta), case.q), -expected):
        not_as(dk, wrong, expected, "no_delta")
    for hint, rounded in WRONG_ROUNDINGS.items():
        not_as(dk, case.c * case.summed(p * (dp - delta), case.q, rounded), expected, hint)
    for wrong in (expected / case.c, expected * case.c):
        not_as(dk, wrong, expected, "c")
    expect(rounding_distance(dk, expected) <= 1, "dk")


@grader.test("several tiles of queries, each with its own scales", points=3)
def query_tiles(student, draw):
    count, block_q = draw.integers(2, 4), 32
    case = Case(draw, count * block_q, 32, block_q, 32, query_sizes=0.5 * 2.0 ** draw.permutation(count))
    found, expected = case.run(student), case.expected()
    p, ds = case.p(), case.p() * (case.dp() - case.delta[:, None])
    for queries in (slice(0, block_q), slice((count - 1) * block_q, None)):
        kept = torch.zeros(len(case.q), 1, dtype=torch.float64)
        kept[queries] = 1
        alone = case.c * case.summed(kept * ds, case.q), case.summed(kept * p, case.do_rounded)
        for x, wrong, right in zip(found, alone, expected, strict=True):
            not_as(x, wrong, right, "accumulate")
    for x, right in zip(found, expected, strict=True):
        expect(x.isfinite().all() and rounding_distance(x, right) <= 1, "query_scales")


@grader.test("several tiles of keys")
def key_tiles(student, draw):
    block_kv = draw.choice((32, 64))
    Case(draw, 64, 2 * block_kv, 64, block_kv).check(student, "key_tiles")


@grader.test("partial tiles at the ends", points=3)
def ragged(student, draw):
    for n_q, n_k in (
        (32 + draw.integers(1, 32), 32),
        (64, draw.integers(33, 64)),
        (draw.integers(8, 32), draw.integers(8, 32)),
    ):
        Case(draw, n_q, n_k, draw.choice((32, 64)), draw.choice((32, 64))).check(student, "padding")
