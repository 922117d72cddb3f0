"""Grader of 11_triton_int8_forward."""

import functools
import math

import torch
from torch import Tensor

from exercises.grading import Draw, Grader, Guarded, Student, expect, rounding_distance
from sage_ref.attention import attention_forward
from sage_ref.quantization import quantize
from sage_ref.sagebwd import SageBwdSettings, sagebwd_forward

grader = Grader("11_triton_int8_forward", ("int8_forward",), triton=True)
grader.hint("no_launch", "No Triton kernel was launched. The kernel is the exercise: launch it from this function.")
grader.hint("grid", "Some rows of O or L were never written. Does every tile of queries have its program?")
grader.hint(
    "not_finite",
    "O or L is NaN or infinite even for a single full tile. What are l, and 2^(m - m_new) in the first tile?",
)
grader.hint(
    "one_tile", "One tile of keys: check S_ij (both scales and c), P~ = 2^(S_ij - m), s_P s_V, and the division by l."
)
grader.hint(
    "factor", "Each row of O is off by a factor: check s_P s_V, and l, the sum of the unrounded P~ that divides it."
)
grader.hint("m_start", "All scores of a row can be far below 0. Where does its running maximum m start?")
grader.hint("log2_e", "2^x is not e^x: which factor turns the one into the other, and where does it go?")
grader.hint(
    "p_scale", "Nearly right. Is P~ rounded to INT8, with one scale per row of the tile: that row's maximum / 127?"
)
grader.hint("log_sum_exp", "L is the logarithm of the sum of e^S: m and log l together, of the unrounded P~.")
grader.hint("base", "m and log2(l) count in powers of two. L is a natural logarithm.")
grader.hint(
    "rescale", "When a later tile raises the maximum, what happens to the l and the O_i that are already there?"
)
grader.hint("v_scale", "Each tile of V^ has its own scale. Is it applied before the tiles are added up?")
grader.hint(
    "padding",
    "Keys from n_k on do not exist: their score is -inf, and whatever stands in the padding counts for nothing.",
)
grader.hint("store_mask", "O or L was written past its end. Which queries of the last tile exist?")
grader.hint("causal", "Causal: query i sees the keys 0 to i, itself included.")
grader.hint("speed", "Right, but slow: does a program keep Q^_i, m, l and O_i, and read each tile of K^ and V^ once?")
grader.hint("no_visible_key", "A row may see no key of a tile: its scores there are all -inf. What is -inf minus -inf?")

MARGIN = 1 << 14  # elements around the outputs, more than any tile
NOT_WRITTEN = -12345.0
NEARLY = 0.05  # the error of a wrong rounding of P~ is below, that of any other mistake above


def outputs(n_q: int, head_dim: int) -> tuple[Tensor, Tensor]:
    return torch.full((n_q, head_dim), NOT_WRITTEN), torch.full((n_q,), NOT_WRITTEN)


class Case:
    """Quantised Q, K, V in tiles, with junk in the padding, and what the reference makes of them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, block_q: int, block_kv: int, is_causal: bool = False):
        self.n_q, self.n_k, self.is_causal, self.blocks = len(q), len(k), is_causal, (block_q, block_kv)
        hats = [quantize(x, (block, None)) for x, block in ((q, block_q), (k, block_kv), (v, block_kv))]
        self.q, self.k, self.v = (hat.dequantize().double() for hat in hats)
        self.inputs = []
        for hat, block in zip(hats, (block_q, block_kv, block_kv), strict=True):
            junk = torch.full((-len(hat.values) % block, q.shape[1]), 101, dtype=torch.int8)
            self.inputs += [torch.cat((hat.values, junk)), hat.scale[:, 0].clone()]

    def run(self, student: Student) -> tuple[Tensor, Tensor]:
        """O and L as the submission leaves them; a store outside of them fails the test."""
        output, log_sum_exp = outputs(*self.q.shape)
        _, after = student.int8_forward.in_place(
            *self.inputs, self.n_k, self.is_causal, Guarded(output, MARGIN), Guarded(log_sum_exp, MARGIN)
        )
        expect(student.launches > 0, "no_launch")
        expect(after[-2].intact and after[-1].intact, "store_mask")
        output, log_sum_exp = after[-2].tensor, after[-1].tensor
        expect((output != NOT_WRITTEN).all() and (log_sum_exp != NOT_WRITTEN).all(), "grid")
        return output, log_sum_exp

    def expected(self) -> tuple[Tensor, Tensor]:
        block_q, block_kv = self.blocks
        settings = SageBwdSettings(is_causal=self.is_causal, smooth_k=False, block_q=block_q, block_kv=block_kv)
        return sagebwd_forward(self.q, self.k, self.v, settings)[:2]

    def check(self, student: Student, hint: str, not_finite: str | None = None) -> None:
        """O and L agree with Algorithm 1; if O is nearly right, the rounding of P~ is to blame."""
        output, log_sum_exp = self.run(student)
        expected, expected_log_sum_exp = self.expected()
        # Causal masks that hide a query from itself leave the first row, and no other, without a key.
        expect(output[0].isfinite().all() or not output[1:].isfinite().all(), hint)
        expect(output.isfinite().all() and log_sum_exp.isfinite().all(), not_finite or hint)
        allowed = 1e-4 + 1e-6 * expected_log_sum_exp.abs()
        expect(((log_sum_exp - expected_log_sum_exp).abs() <= allowed).all(), hint)
        agree(output, expected, hint)


def agree(output: Tensor, expected: Tensor, hint: str) -> None:
    """P~ near a tie may round the other way in another order of operations, in a few rows."""
    expect(
        rounding_distance(output, expected) <= 1,
        "p_scale" if is_near(output, expected, NEARLY) else hint,
        found=output,
        expected=expected,
    )


def is_near(actual: Tensor, expected: Tensor, relative_l2: float) -> bool:
    return bool((actual.double() - expected).norm() <= relative_l2 * expected.norm())


def are_multiples(actual: Tensor, expected: Tensor) -> bool:
    """Each row of one is a multiple of the other's, but not the same."""
    expected = expected.to(actual.dtype)
    factor = (actual * expected).sum(1, keepdim=True) / (expected * expected).sum(1, keepdim=True)
    return rounding_distance(actual, factor * expected) <= 1 < rounding_distance(actual, expected)


def draw_case(
    draw: Draw, n_q: int, n_k: int, block_q: int, block_kv: int, is_causal=False, ramp=0.0, head_dim: int | None = None
) -> Case:
    """ramp: how much the scores grow from the first key to the last, roughly."""
    head_dim = head_dim or draw.choice((32, 64))
    q, k, v = draw.normal(n_q, head_dim), draw.normal(n_k, head_dim), draw.normal(n_k, head_dim)
    rising = torch.linspace(-ramp, ramp, n_k)[:, None] / math.sqrt(head_dim)
    return Case(q + ramp / 2, k + rising, v, block_q, block_kv, is_causal)


@grader.test("one tile of keys", points=2)
def one_tile(student, draw):
    block_kv = draw.choice((32, 64))
    case = draw_case(draw, 16 * draw.integers(1, 3), block_kv, 16, block_kv)
    output, log_sum_exp = case.run(student)
    expect(output.isfinite().all() and log_sum_exp.isfinite().all(), "not_finite")
    natural = math.log(2) / math.sqrt(case.q.shape[1])
    expect(not is_near(output, attention_forward(case.q, case.k, case.v, scale=natural).output, 0.02), "log2_e")
    expected = case.expected()[0]
    expect(not are_multiples(output, expected), "factor")
    agree(output, expected, "one_tile")


@grader.test("L, the natural logarithm of the sum")
def log_sum_exp(student, draw):
    case = draw_case(draw, 16, 32, 16, 32)
    found, expected = case.run(student)[1], case.expected()[1]
    expect(not is_near(found * math.log(2), expected, 1e-4), "base")
    expect(((found - expected).abs() <= 1e-4).all(), "log_sum_exp")


@grader.test("tiles that raise the maximum", points=2)
def rising(student, draw):
    case = draw_case(draw, 32, 32 * draw.integers(2, 5), draw.choice((16, 32)), 32, ramp=3.0)
    case.check(student, "rescale")


@grader.test("scores far below zero")
def far_below(student, draw):
    head_dim = draw.choice((32, 64))
    q, k, v = draw.normal(16, head_dim) + 6, draw.normal(64, head_dim) - 6, draw.normal(64, head_dim)
    Case(q, k, v, 16, 32).check(student, "m_start", not_finite="m_start")


@grader.test("each tile of V with its own scale")
def values(student, draw):
    head_dim, tiles = draw.choice((32, 64)), draw.integers(2, 4)
    q, k, v = draw.normal(16, head_dim), draw.normal(32 * tiles, head_dim), draw.normal(32 * tiles, head_dim)
    size = torch.tensor(4.0) ** (draw.permutation(tiles) - 1)
    Case(q, k, v * size.repeat_interleave(32)[:, None], 16, 32).check(student, "v_scale")


@grader.test("partial tiles at the ends", points=3)
def ragged(student, draw):
    for n_q, n_k in (
        (16, 32 + draw.integers(1, 32)),
        (draw.integers(17, 32), 64),
        (draw.integers(4, 16), draw.integers(1, 32)),
    ):
        draw_case(draw, n_q, n_k, draw.choice((16, 32)), draw.choice((32, 64))).check(student, "padding")


@grader.test("causal", points=3)
def causal(student, draw):
    n = draw.integers(65, 97)
    for n_q, n_k in ((n, n), (n, 40), (40, n)):
        case = draw_case(draw, n_q, n_k, draw.choice((16, 64)), 32, is_causal=True)
        case.check(student, "causal", not_finite="no_visible_key")


N_FAST, D_FAST = 8192, 64


def long_sequence(draw):
    return (*draw_case(draw, N_FAST, N_FAST, 64, 64, head_dim=D_FAST).inputs, N_FAST, False, *outputs(N_FAST, D_FAST))


@functools.cache
def level2_inputs():
    from sage_kernels.sagebwd.ladder import prepare_forward

    q, k, v = torch.randn(3, 1, 1, N_FAST, D_FAST, dtype=torch.float16, device="cuda")
    return prepare_forward(q, k, v, 2, scale=1 / math.sqrt(D_FAST), smooth_k=False)


def level2(*_):
    """What the exercise imitates: level 2 of the repository's forward ladder, on its own copies of such inputs."""
    from sage_kernels.sagebwd.ladder import run_forward

    run_forward(level2_inputs(), 2, is_causal=False, scale=1 / math.sqrt(D_FAST))


grader.speed_test("half as fast as level 2", "int8_forward", long_sequence, level2, slower=2.0, hint="speed")
