"""Grader of 18_sparse_loop."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exercises.grading import Draw, Grader, Guarded, Student, expect
from sage_ref.sla2 import BlockSettings, sparse_branch, spread_blocks
from sage_ref.tracing import relative_l2

grader = Grader(
    "18_sparse_loop",
    {"block_lists": (Tensor, Tensor), "sparse_tile": (Tensor, Tensor), "sparse_attention": None},
    triton=True,
)
grader.hint("list_form", "Two int32 tensors: the lists [Tm, Tn], and how many blocks each query block selected [Tm].")
grader.hint("count", "How many key blocks did each query block select? Some select none.")
grader.hint("lists", "The numbers of a row's selected blocks come first, in ascending order.")
grader.hint("form", "O_i is float32 [Bq, D] and L_i float32 [Bq].")
grader.hint("all_blocks", "This is attention over every key: only the listed blocks take part.")
grader.hint("zero_scores", "A block that isn't selected has P = 0, not S = 0: e^0 = 1 counts in the denominator.")
grader.hint(
    "block_average", "Each block has a softmax of its own here. The online softmax has one denominator for all."
)
grader.hint(
    "rescale", "When a later block raises the maximum, what happens to the l and the O_i that are already there?"
)
grader.hint("tile", "O_i = softmax(c q_i K^T) V over the keys of the listed blocks; L_i is the log of its denominator.")
grader.hint("log_sum_exp", "O is right and L is not: L = m + log l, both natural.")
grader.hint(
    "not_listed", "Keys or values of a block that isn't listed were read: they are NaN here. 0 times NaN is NaN."
)
grader.hint(
    "last_block",
    "The last key block may be partial, wherever it stands in the list. What do keys that don't exist add to l?",
)
grader.hint("empty", "An empty list: O_i = 0 and L_i = -infinity. What is 0 / 0?")
grader.hint("no_launch", "No Triton kernel was launched. The kernel is the exercise: launch it from this function.")
grader.hint("grid", "Some rows of O or L were never written. Does every query block have its program?")
grader.hint("look_up", "The first blocks took part, not the listed ones: a step of the loop is not the block's number.")
grader.hint("first_list", "Every query block used the list of the first. Where does the list of query block i start?")
grader.hint("past_count", "Numbers past the end of a list took part. How many are valid in row i?")
grader.hint("kernel", "Full blocks only: check what one step does to m, l and O_i, and what is stored at the end.")
grader.hint("last_queries", "The last query block is partial. Which of its rows exist?")
grader.hint("store_mask", "O or L was written past its end. Which queries of the last block exist?")

MARGIN = 1 << 14  # elements around the outputs, more than any tile
NOT_WRITTEN = -12345.0
EXACT, HALF = 1e-5, 1e-3  # relative errors allowed: sums in float32, and with P rounded to float16


class Result(NamedTuple):
    output: Tensor  # [Nq, D]
    log_sum_exp: Tensor  # [Nq]


class Case:
    """Q, K, V, a block mask and its lists, which are shuffled and hold other blocks past their end."""

    def __init__(self, draw: Draw, n_q: int, n_k: int, block_q: int, block_kv: int):
        head_dim = draw.choice((16, 32))
        self.q, self.k, self.v = (draw.normal(n, head_dim).half() for n in (n_q, n_k, n_k))
        self.k[: n_k // 2] *= 0.5  # the maximum rises on the way
        self.v += draw.normal(1, head_dim).half()
        self.settings = BlockSettings(block_q, block_kv)
        blocks = -(-n_q // block_q), -(-n_k // block_kv)
        self.selected = draw.uniform(*blocks) < 0.5
        self.selected[:, 0] = False  # nobody selects the first
        for row in self.selected:
            row[1 + draw.integers(0, blocks[1] - 1)] = True
        self.draw = draw

    def lists(self) -> tuple[Tensor, Tensor]:
        rows = []
        for row in self.selected:
            chosen, others = row.nonzero()[:, 0], (~row).nonzero()[:, 0]
            rows.append(torch.cat((chosen.flip(0), others)))  # the last block first
        return torch.stack(rows).int(), self.selected.sum(-1).int()

    def expected(self, weights: Tensor | None = None) -> Result:
        """O and L with e^S weighted by 0 and 1, or by other weights [Tm, Tn]."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        weights = self.selected if weights is None else weights
        output, log_sum_exp = sparse_branch(q, k, v, weights.double(), self.settings)
        return Result(output, log_sum_exp.squeeze(-1))

    def zero_scores(self) -> Tensor:
        """softmax(S * M) V."""
        s = self.q.double() @ self.k.double().mT / math.sqrt(self.q.shape[1])
        mask = spread_blocks(self.selected.double(), *s.shape, self.settings)
        return (s * mask).softmax(-1) @ self.v.double()

    def block_average(self) -> Tensor:
        """The mean over a row's blocks of attention over one block each."""
        total = torch.zeros_like(self.q, dtype=torch.double)
        count = spread_blocks(self.selected.double().sum(-1, keepdim=True), len(self.q), 1, self.settings)
        for j in range(self.selected.shape[1]):
            only = torch.zeros_like(self.selected)
            only[:, j] = self.selected[:, j]
            total += self.expected(only).output
        return total / count.clamp(min=1)

    def hide_blocks(self, hidden: Tensor) -> None:
        """NaN in the keys and values of key blocks where hidden [Tn] is True."""
        tokens = hidden.repeat_interleave(self.settings.block_kv)[: len(self.k)]
        self.k, self.v = (torch.where(tokens[:, None], torch.nan, x) for x in (self.k, self.v))

    def tile(self, student: Student) -> Result:
        """`sparse_tile` of the first query block."""
        block_q, block_kv = self.settings.block_q, self.settings.block_kv
        lists, count = self.lists()
        found = Result(*student.sparse_tile(self.q[:block_q], self.k, self.v, lists[0, : count[0]], block_kv))
        expect(found.output.shape == self.q[:block_q].shape and found.log_sum_exp.shape == (block_q,), "form")
        expect(found.output.dtype == found.log_sum_exp.dtype == torch.float32, "form")
        return found

    def run(self, student: Student) -> Result:
        """O and L as the kernel leaves them; a store outside of them fails the test."""
        outputs = (
            Guarded(torch.full(self.q.shape, NOT_WRITTEN), MARGIN),
            Guarded(torch.full(self.q.shape[:1], NOT_WRITTEN), MARGIN),
        )
        blocks = self.settings.block_q, self.settings.block_kv
        _, after = student.sparse_attention.in_place(self.q, self.k, self.v, *self.lists(), *blocks, *outputs)
        expect(student.launches > 0, "no_launch")
        expect(after[-2].intact and after[-1].intact, "store_mask")
        found = Result(after[-2].tensor, after[-1].tensor)
        expect((found.output != NOT_WRITTEN).all() and (found.log_sum_exp != NOT_WRITTEN).all(), "grid")
        return found


def same_output(found: Result, expected: Result, allowed: float) -> bool:
    error = (found.output.double() - expected.output).norm()
    return bool(error <= allowed * expected.output.norm())  # False for NaN, too


def same_log_sum_exp(found: Result, expected: Result) -> bool:
    infinite = expected.log_sum_exp.isinf()
    difference = (found.log_sum_exp.double() - expected.log_sum_exp)[~infinite]
    return bool((found.log_sum_exp[infinite] == -math.inf).all() and (difference.abs() <= 1e-4).all())


def agree(found: Result, expected: Result, allowed: float) -> bool:
    return same_output(found, expected, allowed) and same_log_sum_exp(found, expected)


def near(found: Result, wrong: Tensor, expected: Result) -> bool:
    """O is this wrong one, and the right one is another."""
    return relative_l2(found.output, wrong) <= HALF < relative_l2(expected.output, wrong)


@grader.test("block_lists", points=2)
def lists(student, draw):
    selected = draw.uniform(draw.integers(3, 7), draw.integers(4, 9)) < 0.4
    selected[draw.integers(0, len(selected))] = False
    found, count = student.block_lists(selected)
    expect(found.shape == selected.shape and count.shape == selected.shape[:1], "list_form")
    expect(found.dtype == count.dtype == torch.int32, "list_form")
    expect((count == selected.sum(-1)).all(), "count")
    for row, numbers in zip(selected, found, strict=True):
        chosen = row.nonzero()[:, 0]
        expect((numbers[: len(chosen)] == chosen).all(), "lists")


@grader.test("sparse_tile: attention over the listed blocks", points=3)
def tile(student, draw):
    block_q, block_kv = draw.choice((16, 32)), draw.choice((8, 16))
    case = Case(draw, block_q, block_kv * draw.integers(4, 8), block_q, block_kv)
    case.selected[:, -1] = case.selected[:, 1] = True  # of different size
    found, expected = case.tile(student), case.expected()
    expect(not near(found, case.expected(torch.ones_like(case.selected)).output, expected), "all_blocks")
    expect(not near(found, case.zero_scores(), expected), "zero_scores")
    expect(not near(found, case.block_average(), expected), "block_average")
    single = [
        case.expected(torch.eye(case.selected.shape[1])[None, j]) for j in case.selected[0].nonzero()[:, 0].tolist()
    ]
    # The list goes from the last block to the first. Without rescaling, each block adds with its maximum so far.
    expect(not near(found, without_rescaling(case, single[::-1]), expected), "rescale")
    expect(same_output(found, expected, EXACT), "tile")
    expect(same_log_sum_exp(found, expected), "log_sum_exp")


def without_rescaling(case: Case, single: list[Result]) -> Tensor:
    """O if l and O_i keep what they hold when m rises; single: O and L of every listed block alone, in the order."""
    s = case.q.double() @ case.k.double().mT / math.sqrt(case.q.shape[1])
    block_kv = case.settings.block_kv
    m = torch.full((len(s),), -math.inf, dtype=torch.double)
    total, l = torch.zeros_like(case.q, dtype=torch.double), torch.zeros_like(m)
    for result, j in zip(single, case.lists()[0][0].tolist(), strict=False):
        m = torch.maximum(m, s[:, j * block_kv : (j + 1) * block_kv].amax(-1))
        share = torch.exp(result.log_sum_exp - m)
        total, l = total + share[:, None] * result.output, l + share
    return total / l[:, None]


@grader.test("sparse_tile: nothing else is read")
def tile_reads(student, draw):
    case = Case(draw, 16, 8 * draw.integers(4, 8), 16, 8)
    expected = case.expected()
    case.hide_blocks(~case.selected[0])
    found = case.tile(student)
    expect(agree(found, expected, EXACT), "not_listed")


@grader.test("sparse_tile: a partial last block, an empty list", points=2)
def tile_ends(student, draw):
    case = Case(draw, 16, 16 * draw.integers(2, 5) + draw.integers(1, 15), 16, 16)
    case.selected[:, -1] = True
    expect(agree(case.tile(student), case.expected(), EXACT), "last_block")
    case.selected[:] = False
    expect(agree(case.tile(student), case.expected(), EXACT), "empty")


@grader.test("the kernel, full blocks", points=3)
def kernel(student, draw):
    block_q, block_kv = draw.choice((16, 32)), draw.choice((16, 32))
    case = Case(draw, 3 * block_q, block_kv * draw.integers(4, 6) if block_kv == 16 else 128, block_q, block_kv)
    case.selected[1] = ~case.selected[0]
    case.selected[1, 0], case.selected[1, -1] = False, True
    found, expected = case.run(student), case.expected()
    lists, count = case.lists()
    ones = torch.ones_like(case.selected)
    expect(not near(found, case.expected(ones).output, expected), "past_count")
    steps = torch.arange(case.selected.shape[1])[None, :] < count[:, None]
    expect(not near(found, case.expected(steps).output, expected), "look_up")
    expect(not near(found, case.expected(case.selected[:1].expand_as(ones)).output, expected), "first_list")
    first = torch.zeros_like(ones)
    for i, listed in enumerate(count.tolist()):
        first[i, lists[0, :listed].long()] = True
    expect(not near(found, case.expected(first).output, expected), "first_list")
    expect(same_output(found, expected, HALF), "kernel")
    expect(same_log_sum_exp(found, expected), "log_sum_exp")


@grader.test("the kernel reads nothing else")
def kernel_reads(student, draw):
    case = Case(draw, 32, 16 * draw.integers(4, 8), 16, 16)
    expected = case.expected()
    case.hide_blocks(~case.selected.any(0))
    found = case.run(student)
    expect(agree(found, expected, HALF), "not_listed")


@grader.test("the kernel, partial blocks at the ends", points=3)
def kernel_ends(student, draw):
    n_k = 16 * draw.integers(3, 6) + draw.integers(1, 15)
    for n_q, hint in ((32, "last_block"), (32 + draw.integers(1, 15), "last_queries")):
        case = Case(draw, n_q, n_k, 16, 16)
        case.selected[:, -1] = case.selected[:, 1] = True
        expect(agree(case.run(student), case.expected(), HALF), hint)


@grader.test("the kernel, an empty list")
def kernel_empty(student, draw):
    case = Case(draw, 48, 16 * draw.integers(4, 6), 16, 16)
    case.selected[draw.integers(0, 3)] = False
    expect(agree(case.run(student), case.expected(), HALF), "empty")
