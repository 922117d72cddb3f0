"""Grader of 10_triton_int8_scores."""

import torch
from torch import Tensor

from exercises.grading import Grader, Guarded, Student, close, expect
from sage_ref.quantization import integer_matmul

grader = Grader("10_triton_int8_scores", ("int8_scores",), triton=True)
grader.hint("no_launch", "No Triton kernel was launched. The kernel is the exercise: launch it from this function.")
grader.hint(
    "grid", "Some entries of S were never written. Does every tile have its program, the partial ones included?"
)
grader.hint(
    "product", "With scales and c of 1, S is the integer matrix Q^ K^^T. Which rows meet which, and in which dtype?"
)
grader.hint(
    "integers", "S is nearly right, but rounded: multiply integers, and apply the scales to their exact product."
)
grader.hint("scales", "Each integer stands for s_Q times s_K. Are both in S?")
grader.hint("c", "Is S multiplied by c?")
grader.hint(
    "scale_index", "Every tile of Q^ and every tile of K^ has its own scale. Which one does program (i, j) need?"
)
grader.hint(
    "store_mask", "Entries outside of S were written, or those of the next row: which of a tile's entries exist?"
)

MARGIN = 1 << 14  # elements around S, more than any tile


class Case:
    """Q^, K^ of n_q and n_k rows in tiles, with junk in the padding, and their scales."""

    def __init__(self, draw, n_q: int, n_k: int, block_q: int, block_kv: int):
        head_dim = draw.choice((32, 64))
        self.q_hat, self.k_hat = (
            draw.integers(-127, 128, -(-n // block) * block, head_dim, dtype=torch.int8)
            for n, block in ((n_q, block_q), (n_k, block_kv))
        )
        self.q_scale, self.k_scale = (
            draw.uniform(len(x) // block, low=0.005, high=0.02)
            for x, block in ((self.q_hat, block_q), (self.k_hat, block_kv))
        )
        self.c = float(draw.uniform(1, low=0.1, high=0.5))
        self.n_q, self.n_k = n_q, n_k

    def scores(self, student: Student) -> Tensor:
        """S as the submission leaves it; a store outside of it fails the test."""
        s = torch.full((self.n_q, self.n_k), torch.nan)
        inputs = self.q_hat, self.q_scale, self.k_hat, self.k_scale, self.c
        buffer = student.int8_scores.in_place(*inputs, Guarded(s, MARGIN))[1][-1]
        expect(student.launches > 0, "no_launch")
        expect(buffer.intact, "store_mask")
        expect(not buffer.tensor.isnan().any(), "grid")
        return buffer.tensor

    def expected(self, c: float, with_s_q: bool = True, with_s_k: bool = True) -> Tensor:
        """S in float64, perhaps without one of its factors."""
        q_scale, k_scale = (
            (scale.double() if used else torch.ones_like(scale)).repeat_interleave(len(x) // len(scale))
            for x, scale, used in ((self.q_hat, self.q_scale, with_s_q), (self.k_hat, self.k_scale, with_s_k))
        )
        s = integer_matmul(self.q_hat, self.k_hat.mT) * q_scale[:, None] * k_scale * c
        return s[: self.n_q, : self.n_k]


def is_near(actual: Tensor, expected: Tensor, relative_l2: float) -> bool:
    return bool((actual.double() - expected).norm() <= relative_l2 * expected.norm())


@grader.test("the product of one tile, as integers", points=2)
def product(student, draw):
    case = Case(draw, *(16, 32) * 2)
    case.q_hat[0], case.k_hat[0], case.k_hat[1] = 127, 127, -127  # the largest products
    case.q_scale, case.k_scale, case.c = torch.ones(1), torch.ones(1), 1.0
    expect((case.scores(student) == case.expected(1.0)).all(), "product")


@grader.test("scales and c", points=3)
def scaled(student, draw):
    block_q, block_kv = draw.choice((16, 32)), draw.choice((16, 32))
    case = Case(draw, block_q, block_kv, block_q, block_kv)
    s = case.scores(student)
    expect(not is_near(s, case.expected(1.0), 1e-3), "c")
    close(
        s, case.expected(case.c), "integers" if is_near(s, case.expected(case.c), 1e-2) else "scales", relative_l2=1e-6
    )


@grader.test("each tile with its own scales", points=2)
def several_tiles(student, draw):
    block_q, block_kv = draw.choice(((16, 32), (32, 16)))
    case = Case(draw, block_q * draw.integers(2, 4), block_kv * draw.integers(2, 4), block_q, block_kv)
    close(case.scores(student), case.expected(case.c), "scale_index", relative_l2=1e-6)


@grader.test("partial tiles at the edges", points=3)
def ragged(student, draw):
    for n_q, n_k in (
        (draw.integers(33, 64), draw.integers(17, 32)),
        (32, draw.integers(1, 16)),
        (draw.integers(1, 16), 32),
    ):
        case = Case(draw, n_q, n_k, draw.choice((16, 32)), draw.choice((16, 32)))
        close(case.scores(student), case.expected(case.c), "store_mask", relative_l2=1e-6)
