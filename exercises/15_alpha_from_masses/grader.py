"""Grader of 15_alpha_from_masses."""

from torch import Tensor

from exercises.grading import Draw, Grader, close, expect
from sage_ref import sla2
from sage_ref.attention import attention_forward

grader = Grader(
    "15_alpha_from_masses", dict.fromkeys(("selected_mass", "sparse_attention", "mix", "initial_alpha_logit"), Tensor)
)
grader.hint(
    "mass",
    "alpha is a share of softmax(c Q K^T) over all keys, c = 1/sqrt(D), row by row: not of their number.",
)
grader.hint("renormalise", "The weights of O_s sum to 1 over the selected keys: P1 V has to be divided by alpha.")
grader.hint("minus_infinity", "A score that is masked out is -inf, not 0: e^0 is a weight like any other.")
grader.hint(
    "sparse", "O_s is attention with c = 1/sqrt(D) over the keys of the selected blocks, each head with its own mask."
)
grader.hint(
    "mix", "alpha O_s + (1 - alpha) O_rest has to be full attention. Which of the two gets alpha, and along which axis?"
)
grader.hint(
    "nothing_selected",
    "A query block that selects nothing has alpha = 0 and O_s = 0. What is the softmax of -inf alone?",
)
grader.hint("overflow", "Scores can be in the hundreds, and e^100 is infinite in float32: subtract the row's maximum.")
grader.hint("logit_last", "First the mean of the masses, then its logit: the mean of logits is another number.")
grader.hint("logit", "alpha = sigmoid(logit), the mean of the masses over the queries of each block and head.")
grader.hint("ragged", "The last block may hold fewer queries: is its mean a mean over those that exist?")
grader.hint("finite", "A mass of 0 or 1 has an infinite logit. Keep alpha in [1e-4, 1 - 1e-4].")

TOLERANCE = 1e-5


class Case:
    """Q, K, V of some heads and a mask with something selected, and something not, in every row."""

    def __init__(self, draw: Draw, std: float = 1.5):
        self.block_q, self.block_kv = draw.choice(((8, 4), (16, 8), (4, 8)))
        n = 16 * draw.integers(2, 4) + draw.integers(1, 16)
        self.q, self.k, self.v = (draw.normal(draw_heads, n, 16) for draw_heads in (draw.integers(2, 4),) * 3)
        self.q, self.k = self.q * std, self.k * std
        shape = len(self.q), sla2.block_count(n, self.block_q), sla2.block_count(n, self.block_kv)
        self.selected = draw.uniform(*shape) < 0.4
        self.selected[..., 0], self.selected[..., 1] = True, False

    @property
    def mask(self) -> tuple[Tensor, int, int]:
        return self.selected, self.block_q, self.block_kv

    def p(self) -> tuple[Tensor, Tensor]:
        """P in float64 and the mask of every pair, [H, N, N]."""
        s = attention_forward(self.q.double(), self.k.double(), self.v.double()).scores
        n = s.shape[-1]
        return s.softmax(-1), sla2.spread_blocks(self.selected, n, n, sla2.BlockSettings(self.block_q, self.block_kv))

    def mass(self) -> Tensor:
        p, mask = self.p()
        return (p * mask).sum(-1)

    def sparse(self) -> Tensor:
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        return sla2.sparse_branch(q, k, v, self.selected, sla2.BlockSettings(self.block_q, self.block_kv))[0]

    def zeros_for_masked(self) -> Tensor:
        """softmax(S * M) V, with or without its weights on masked keys: O_s as printed."""
        _, mask = self.p()
        s = attention_forward(self.q.double(), self.k.double(), self.v.double()).scores
        return (s * mask).softmax(-1) @ self.v.double()


def is_near(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual.double() - expected).norm() <= 1e-3 * expected.norm())


@grader.test("the mass of the selected blocks", points=2)
def mass(student, draw):
    case = Case(draw)
    close(student.selected_mass(case.q, case.k, *case.mask), case.mass(), "mass", relative_l2=TOLERANCE)


@grader.test("attention over the selected blocks", points=2)
def sparse(student, draw):
    case = Case(draw)
    found, (p, mask) = student.sparse_attention(case.q, case.k, case.v, *case.mask), case.p()
    expect(not is_near(found, case.zeros_for_masked()), "minus_infinity")
    expect(not is_near(found, (p * mask) @ case.v.double()), "renormalise")
    close(found, case.sparse(), "sparse", relative_l2=TOLERANCE)


@grader.test("both branches together are full attention", points=2)
def mix(student, draw):
    case = Case(draw)
    o_s, alpha = case.sparse(), case.mass()
    case.selected = ~case.selected
    rest = case.sparse()
    full = attention_forward(case.q.double(), case.k.double(), case.v.double()).output
    close(student.mix(o_s.float(), rest.float(), alpha.float()), full, "mix", relative_l2=TOLERANCE)


@grader.test("blocks that select nothing, or everything")
def extremes(student, draw):
    case = Case(draw)
    case.selected[0, 0], case.selected[1, 1] = False, True
    found = student.sparse_attention(case.q, case.k, case.v, *case.mask)
    close(found, case.sparse(), "nothing_selected", relative_l2=TOLERANCE)
    close(student.selected_mass(case.q, case.k, *case.mask), case.mass(), "nothing_selected", relative_l2=TOLERANCE)


@grader.test("large scores")
def large(student, draw):
    case = Case(draw, std=12.0)
    close(student.selected_mass(case.q, case.k, *case.mask), case.mass(), "overflow", relative_l2=1e-3)
    found = student.sparse_attention(case.q, case.k, case.v, *case.mask)
    close(found, case.sparse(), "overflow", relative_l2=1e-3)


@grader.test("where alpha starts", points=2)
def initial(student, draw):
    block_q = draw.choice((4, 8))
    masses = draw.uniform(draw.integers(2, 4), block_q * draw.integers(2, 5), low=0.02, high=0.98)
    found = student.initial_alpha_logit(masses, block_q)
    blocks = masses.double().unflatten(1, (-1, block_q))
    expect(not is_near(found, blocks.logit().mean(-1)), "logit_last")
    close(found, blocks.mean(-1).logit(), "logit", relative_l2=TOLERANCE)


@grader.test("a last block with fewer queries, and masses of 0 and 1", points=2)
def initial_edges(student, draw):
    block_q = draw.choice((8, 16))
    masses = draw.uniform(2, block_q * 2 + draw.integers(1, block_q), low=0.02, high=0.98)
    expected = sla2.block_mean(masses.double()[..., None], block_q)[..., 0].logit()
    close(student.initial_alpha_logit(masses, block_q), expected, "ragged", relative_l2=TOLERANCE)
    masses[0, :block_q], masses[1, :block_q] = 0.0, 1.0
    expected = sla2.block_mean(masses.double()[..., None], block_q)[..., 0].logit(eps=1e-4)
    close(student.initial_alpha_logit(masses, block_q), expected, "finite", relative_l2=1e-3)
