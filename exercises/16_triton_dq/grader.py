"""Grader of 16_triton_dq."""

import math

import torch
from torch import Tensor

from exercises.grading import Draw, Grader, Guarded, Student, expect, rounding_distance, unlike
from sage_ref.quantization import quantize, quantized_matmul
from sage_ref.sagebwd import SageBwdSettings, sagebwd_backward, sagebwd_forward, tiles

grader = Grader("16_triton_dq", ("int8_dq",), triton=True)
grader.hint("no_launch", "No Triton kernel was launched. The kernel is the exercise: launch it from this function.")
grader.hint("grid", "Some rows of dQ were never written. Does every tile of queries have its program?")
grader.hint(
    "not_finite", "dQ is NaN or infinite, even for a single full tile. Is S_ij - L_i at most 0, or a little more?"
)
grader.hint("base", "L is a natural logarithm: P is e^(S - L). 2^x takes another x.")
grader.hint("no_delta", "dS = P (dP - delta): where is delta, and which sign has it?")
grader.hint("half_dp", "dP - delta is a small difference of large numbers. Does dP stay in float32 after the matmul?")
grader.hint("bypass", "This dQ is too good: dS isn't rounded. Which operands of dQ's matmul are integers?")
grader.hint("truncated", "Is dS rounded to nearest? A conversion to int8 cuts off towards 0.")
grader.hint("row_scale", "dS has one scale per row of the tile, that row's max|dS| / 127, not one for the whole tile.")
grader.hint("c", "S has a factor c, so dQ has one too. Which of the two is missing, or there twice?")
grader.hint("one_tile", "One tile: check S_ij (both scales and c), P = e^(S - L), dP = dO V^T, dS, and s_dS s_K.")
grader.hint("accumulate", "With several tiles of keys, dQ_i is the sum of what all of them add.")
grader.hint("k_scale", "Each tile of K^ has its own scale. It is in S_ij, and in what this tile adds to dQ_i.")
grader.hint("query_tiles", "Several tiles of queries: which rows and which s_Q belong to program i?")
grader.hint("padding", "Keys from n_k on do not exist: their P is 0, whatever stands in the padding of K^.")
grader.hint("store_mask", "dQ was written past its end. Which queries of the last tile exist?")

MARGIN = 1 << 14  # elements around dQ, more than any tile
NOT_WRITTEN = -12345.0


class Case:
    """Quantised Q and K in tiles, with junk in the padding, and what forward and backward pass make of them."""

    def __init__(self, draw: Draw, n_q: int, n_k: int, block_q: int, block_kv: int, key_sizes: Tensor | None = None):
        """key_sizes: how large the keys of each tile are."""
        head_dim = draw.choice((32, 64))
        q, k = 1.5 * draw.normal(n_q, head_dim), 1.5 * draw.normal(n_k, head_dim)
        if key_sizes is not None:
            k = k * key_sizes.repeat_interleave(block_kv)[:n_k, None]
        # Most of V is shared by all keys, so that dP - delta is a small difference.
        self.v = (draw.normal(n_k, head_dim) + 16 * draw.normal(1, head_dim)).half()
        self.do = (0.1 * draw.normal(n_q, head_dim)).half()
        self.block_q, self.block_kv, self.c = block_q, block_kv, 1 / math.sqrt(head_dim)
        hats = [quantize(x, (block, None)) for x, block in ((q, block_q), (k, block_kv))]
        self.q, self.k = (hat.dequantize().double() for hat in hats)
        self.settings = SageBwdSettings(smooth_k=False, block_q=block_q, block_kv=block_kv)
        self.output, self.log_sum_exp, *_ = sagebwd_forward(self.q, self.k, self.v.double(), self.settings)
        self.delta = (self.do.double() * self.output).sum(-1)
        self.inputs = []
        for hat, block in zip(hats, (block_q, block_kv), strict=True):
            junk = torch.full((-len(hat.values) % block, head_dim), 101, dtype=torch.int8)
            self.inputs += [torch.cat((hat.values, junk)), hat.scale[:, 0].clone()]
        self.inputs += [self.v, self.do, self.log_sum_exp.float(), self.delta.float()]

    def run(self, student: Student) -> Tensor:
        """dQ as the submission leaves it; a store outside of it fails the test."""
        dq = torch.full(self.q.shape, NOT_WRITTEN)
        _, after = student.int8_dq.in_place(*self.inputs, Guarded(dq, MARGIN))
        expect(student.launches > 0, "no_launch")
        expect(after[-1].intact, "store_mask")
        expect((after[-1].tensor != NOT_WRITTEN).all(), "grid")
        return after[-1].tensor

    def expected(self) -> Tensor:
        """The library's, with one scale per row."""
        tensors = self.do.double(), self.q, self.k, self.v.double(), self.output, self.log_sum_exp
        return sagebwd_backward(*tensors, self.settings)[0]

    def ds(self, *, base: float = math.e, delta: float = 1.0, half_dp: bool = False) -> Tensor:
        """dS [n_q, n_k], perhaps with a mistake; P is base^(S - L), and delta counts so often."""
        dp = self.do.double() @ self.v.double().mT
        if half_dp:
            dp = dp.float().half().double()
        s = self.q @ self.k.mT * self.c
        return base ** (s - self.log_sum_exp[:, None]) * (dp - delta * self.delta[:, None])

    def dq(self, ds: Tensor, rows: int | None = 1, wrong_rounding=None) -> Tensor:
        """c dS^ K^, tile by tile: `rows` rows of a tile of dS share a scale."""
        dq = torch.zeros_like(self.q)
        for queries in tiles(len(self.q), self.block_q):
            for keys in tiles(len(self.k), self.block_kv):
                ds_hat = quantize(ds[queries, keys], (rows, None))
                if wrong_rounding is not None:
                    ratio = ds[queries, keys] / ds_hat.scale
                    dq[queries] += self.c * (wrong_rounding(ratio) * ds_hat.scale) @ self.k[keys]
                else:
                    dq[queries] += self.c * quantized_matmul(ds_hat, quantize(self.k[keys]))
        return dq

    def check(self, student: Student, hint: str) -> None:
        found, expected = self.run(student), self.expected()
        expect(found.isfinite().all() and rounding_distance(found, expected) <= 1, hint)


def not_as(found: Tensor, wrong: Tensor, expected: Tensor, hint: str) -> None:
    unlike(found, wrong, expected, hint, within=1, distance=rounding_distance)


@grader.test("one tile of queries, one of keys", points=4)
def one_tile(student, draw):
    block_q, block_kv = draw.choice((16, 32)), draw.choice((32, 64))
    case = Case(draw, block_q, block_kv, block_q, block_kv)
    found, expected = case.run(student), case.expected()
    expect(found.isfinite().all(), "not_finite")
    ds = case.ds()
    for hint, wrong in {
        "base": case.dq(case.ds(base=2.0)),
        "no_delta": case.dq(case.ds(delta=0.0)),
        "half_dp": case.dq(case.ds(half_dp=True)),
        "bypass": case.c * ds @ case.k,
        "truncated": case.dq(ds, wrong_rounding=torch.trunc),
        "row_scale": case.dq(ds, rows=None),
    }.items():
        not_as(found, wrong, expected, hint)
    for wrong in (case.dq(case.ds(delta=-1.0)), -expected):
        not_as(found, wrong, expected, "no_delta")
    for wrong in (expected / case.c, expected * case.c):
        not_as(found, wrong, expected, "c")
    expect(rounding_distance(found, expected) <= 1, "one_tile")


@grader.test("several tiles of keys, each with its own scale", points=3)
def key_tiles(student, draw):
    count, block_kv = draw.integers(2, 4), 32
    case = Case(draw, 16, count * block_kv, 16, block_kv, key_sizes=0.5 * 2.0 ** draw.permutation(count))
    found, expected = case.run(student), case.expected()
    for keys in (slice(0, block_kv), slice((count - 1) * block_kv, None)):
        alone = torch.zeros_like(case.ds())
        alone[:, keys] = case.ds()[:, keys]
        not_as(found, case.dq(alone), expected, "accumulate")
    expect(found.isfinite().all() and rounding_distance(found, expected) <= 1, "k_scale")


@grader.test("several tiles of queries", points=2)
def query_tiles(student, draw):
    block_q = draw.choice((16, 32))
    Case(draw, 3 * block_q, 64, block_q, 64).check(student, "query_tiles")


@grader.test("partial tiles at the ends", points=3)
def ragged(student, draw):
    for n_q, n_k in (
        (16, 32 + draw.integers(1, 32)),
        (draw.integers(17, 32), 64),
        (draw.integers(4, 16), draw.integers(8, 32)),
    ):
        Case(draw, n_q, n_k, draw.choice((16, 32)), draw.choice((32, 64))).check(student, "padding")
