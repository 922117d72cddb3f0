"""Grader of 12_linear_branch."""

from torch import Tensor

from exercises.grading import Draw, Grader, close, expect
from sage_ref import sla2

grader = Grader(
    "12_linear_branch",
    {"key_block_sums": (Tensor, Tensor), "complement_sums": (Tensor, Tensor), "linear_branch": Tensor},
)
grader.hint(
    "sums", "h_j is phi(K_j)^T V_j and z_j the sum of phi(K_j) over the keys of block j, per head. Where does phi go?"
)
grader.hint("padding", "phi of a row of zeros is not zero. What does a key that doesn't exist add to z_j?")
grader.hint("complement", "H_i and Z_i sum over the blocks that query block i has not selected, and over no others.")
grader.hint("normaliser", "The weights of O_l sum to 1: Z_i runs over the same blocks as H_i.")
grader.hint("branch", "O_l = phi(Q_i) H_i / (phi(Q_i) Z_i): which H_i belongs to which queries?")
grader.hint(
    "ragged",
    "The last block of queries may hold fewer than block_q of them, the last block of keys fewer than block_kv.",
)
grader.hint("nothing_left", "A query block that has selected every key block has Z_i = 0, and its O_l is 0.")
grader.hint(
    "cancellation",
    "A block with huge values that is selected must not show in H_i or O_l. What is 1e8 + 1 - 1e8 in float32?",
)

TOLERANCE = 1e-5


class Case:
    """Q, K, V of some heads and a mask that selects about 40% of the blocks, and none or all of them in no row."""

    def __init__(self, draw: Draw, n: int, block_q: int, block_kv: int):
        self.heads, head_dim = draw.integers(2, 4), draw.choice((8, 16))
        self.q, self.k, self.v = (draw.normal(self.heads, n, head_dim) for _ in range(3))
        self.block_q, self.block_kv = block_q, block_kv
        shape = self.heads, sla2.block_count(n, block_q), sla2.block_count(n, block_kv)
        self.selected = draw.uniform(*shape) < 0.4
        self.selected[..., 0], self.selected[..., -1] = True, False
        swap = draw.uniform(*shape[:2]) < 0.5
        self.selected[swap] = self.selected[swap].flip(-1)

    @property
    def arguments(self) -> tuple:
        return self.q, self.k, self.v, self.selected, self.block_q, self.block_kv

    def sums(self) -> tuple[Tensor, Tensor]:
        settings = sla2.BlockSettings(self.block_q, self.block_kv)
        return sla2.key_block_sums(self.k.double().softmax(-1), self.v.double(), settings)

    def expected(self) -> Tensor:
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        return sla2.linear_branch(q, k, v, ~self.selected, sla2.BlockSettings(self.block_q, self.block_kv))

    def divided_by_all(self) -> Tensor:
        """O_l with the Z of every block."""
        h, z = self.sums()
        h_i, _ = sla2.weighted_sums((~self.selected).double(), h, z)
        q_i = sla2.into_blocks(self.q.double().softmax(-1), self.block_q)
        o_l = q_i @ h_i / (q_i @ z.sum(1)[:, None, :, None])
        return o_l.flatten(1, 2)[:, : self.q.shape[1]]


def case_with_a_huge_block(draw: Draw) -> Case:
    """Every query block has selected a block whose values are a million times as large."""
    case = Case(draw, 16 * draw.integers(3, 6), 16, 8)
    huge = draw.integers(0, case.selected.shape[2])
    case.v[:, 8 * huge : 8 * (huge + 1)] *= 1e6
    case.selected[..., huge] = True
    case.selected[..., huge - 1] = False
    return case


def is_near(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual.double() - expected).norm() <= 1e-3 * expected.norm())


@grader.test("what each block of keys adds up to", points=2)
def sums(student, draw):
    block_kv = draw.choice((4, 8))
    case = Case(draw, block_kv * draw.integers(3, 6), 8, block_kv)
    for found, expected in zip(student.key_block_sums(case.k, case.v, block_kv), case.sums(), strict=True):
        close(found, expected, "sums", relative_l2=TOLERANCE)


@grader.test("a last block with fewer keys")
def padding(student, draw):
    block_kv = draw.choice((8, 16))
    case = Case(draw, block_kv * draw.integers(2, 5) + draw.integers(1, block_kv - 1), 8, block_kv)
    for found, expected in zip(student.key_block_sums(case.k, case.v, block_kv), case.sums(), strict=True):
        close(found, expected, "padding", relative_l2=TOLERANCE)


@grader.test("sums over the blocks not selected", points=2)
def complement(student, draw):
    case = Case(draw, 8 * draw.integers(4, 9), draw.choice((8, 16)), 8)
    h, z = (x.float() for x in case.sums())
    expected = sla2.weighted_sums((~case.selected).double(), h.double(), z.double())
    for found, right in zip(student.complement_sums(case.selected, h, z), expected, strict=True):
        close(found, right, "complement", relative_l2=TOLERANCE)


@grader.test("sums beside a selected block with huge values")
def cancellation_of_sums(student, draw):
    case = case_with_a_huge_block(draw)
    h, z = (x.float() for x in case.sums())
    expected = sla2.weighted_sums((~case.selected).double(), h.double(), z.double())
    for found, right in zip(student.complement_sums(case.selected, h, z), expected, strict=True):
        close(found, right, "cancellation", relative_l2=TOLERANCE)


@grader.test("O_l of every query", points=2)
def branch(student, draw):
    case = Case(draw, 16 * draw.integers(3, 6), draw.choice((8, 16)), draw.choice((4, 8)))
    found = student.linear_branch(*case.arguments)
    expect(not is_near(found, case.divided_by_all()), "normaliser")
    close(found, case.expected(), "branch", relative_l2=TOLERANCE)


@grader.test("lengths that are no multiple of a block")
def ragged(student, draw):
    for block_q, block_kv in ((16, 8), (8, 16)):
        case = Case(draw, 16 * draw.integers(2, 5) + draw.integers(1, 7), block_q, block_kv)
        close(student.linear_branch(*case.arguments), case.expected(), "ragged", relative_l2=TOLERANCE)


@grader.test("a block of queries with nothing left")
def nothing_left(student, draw):
    case = Case(draw, 16 * draw.integers(3, 6), 16, 8)
    full = draw.integers(0, case.selected.shape[1])
    case.selected[0, full] = True
    found = student.linear_branch(*case.arguments)
    close(found, case.expected(), "nothing_left", relative_l2=TOLERANCE)


@grader.test("O_l beside a selected block with huge values")
def cancellation(student, draw):
    case = case_with_a_huge_block(draw)
    close(student.linear_branch(*case.arguments), case.expected(), "cancellation", relative_l2=TOLERANCE)
