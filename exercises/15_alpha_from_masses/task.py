"""Tests of 15_alpha_from_masses."""

from exercises.task import Call, Task

task = Task(agree=1e-05)


def case(draw, std=1.5):
    """Draw Q, K, V of some heads, and a mask with something selected, and something not, in every row."""
    block_q, block_kv = draw.choice(((8, 4), (16, 8), (4, 8)))
    heads, n = draw.integers(2, 4), 16 * draw.integers(2, 4) + draw.integers(1, 16)
    q, k, v = (size * draw.normal(heads, n, 16) for size in (std, std, 1))
    selected = draw.uniform(heads, -(-n // block_q), -(-n // block_kv)) < 0.4
    selected[..., 0], selected[..., 1] = True, False
    return q, k, v, selected, block_q, block_kv


@task.test("the mass of the selected blocks", points=2)
def mass(draw, **options):
    """alpha is a share of softmax(c Q K^T) over all keys, c = 1/sqrt(D), row by row: not of their number."""
    q, k, _, *mask = case(draw, **options)
    yield Call("selected_mass", (q, k, *mask))


@task.test("attention over the selected blocks", points=2)
def sparse(draw, **options):
    """O_s is attention with c = 1/sqrt(D) over the keys of the selected blocks, each head with its own mask."""
    yield Call("sparse_attention", case(draw, **options))


@task.test("both branches together are full attention", points=2)
def mix(draw):
    """alpha O_s + (1 - alpha) O_rest has to be full attention. Which of the two gets alpha, and along which axis?"""
    shape = draw.integers(2, 4), draw.integers(20, 40), 16
    yield Call("mix", (draw.normal(*shape), draw.normal(*shape), draw.uniform(*shape[:2])))


@task.test("blocks that select nothing, or everything")
def extremes(draw):
    """A query block that selects nothing has alpha = 0 and O_s = 0. What is the softmax of -inf alone?"""
    q, k, v, selected, *blocks = case(draw)
    selected[0, 0], selected[1, 1] = False, True
    yield Call("sparse_attention", (q, k, v, selected, *blocks))
    yield Call("selected_mass", (q, k, selected, *blocks))


@task.test("large scores", agree=0.001)
def large(draw):
    """Scores can be in the hundreds, and e^100 is infinite in float32: subtract the row's maximum."""
    yield from mass(draw, std=12.0)
    yield from sparse(draw, std=12.0)


@task.test("where alpha starts", points=2)
def initial(draw):
    """alpha = sigmoid(logit), the mean of the masses over the queries of each block and head."""
    block_q = draw.choice((4, 8))
    masses = draw.uniform(draw.integers(2, 4), block_q * draw.integers(2, 5), low=0.02, high=0.98)
    yield Call("initial_alpha_logit", (masses, block_q))


@task.test("a last block with fewer queries, and masses of 0 and 1", points=2, agree=0.001)
def initial_edges(draw):
    """The last block may hold fewer queries, and a mass of 0 or 1 has an infinite logit. Keep inside."""
    block_q = draw.choice((8, 16))
    masses = draw.uniform(2, block_q * 2 + draw.integers(1, block_q), low=0.02, high=0.98)
    yield Call("initial_alpha_logit", (masses, block_q))
    masses = masses.clone()
    masses[0, :block_q], masses[1, :block_q] = 0.0, 1.0
    yield Call("initial_alpha_logit", (masses, block_q))
