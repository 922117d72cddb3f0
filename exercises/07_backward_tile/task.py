"""Tests of 07_backward_tile."""

from exercises.task import Call, Task, backward_case

task = Task(agree="roundings")


def inputs(draw, *sizes):
    """Draw dO, Q, K, V, O float16 and L of a forward pass with rounded Q and K."""
    *halves, output, log_sum_exp = backward_case(draw, *sizes)
    return *halves, output.half(), log_sum_exp


def first_tile(draw):
    """Draw a tile with the first half of the keys."""
    block_q, block_kv = draw.integers(32, 64), draw.integers(32, 64)
    do, q, k, v, o, l = inputs(draw, block_q, 2 * block_kv, block_q, block_kv)
    return q, k[:block_kv], v[:block_kv], do, l[:, None], (do.float() * o.float()).sum(-1, keepdim=True)


@task.test("recompute_probabilities: exp(S - L) of rounded scores", points=2)
def probabilities(draw):
    """P is off. S is c times the scaled INT8 product, P = exp(S - L)."""
    q, k, _, _, l, _ = first_tile(draw)
    yield Call("recompute_probabilities", (q, k, l))


@task.test("backward_tile: dV", points=2, parts=(2,))
@task.test("backward_tile: dQ and dK from dP in 16 bit", points=4, parts=(0, 1))
def tile(draw):
    """dV is P^T dO, dQ is c dS K, dK is c dS^T Q: both operands rounded, but dP in 16 bit. Is c in dV?"""
    yield Call("backward_tile", first_tile(draw))


@task.test("backward: all tiles, added up, the last one partial", points=5)
def full(draw):
    """Are blocks of queries cut with block_q, of keys with block_kv, also a shorter last one, each with its scale?"""
    n = draw.integers(32, 60)
    yield Call("backward", (*inputs(draw, n, n, n, n), n, n))
    block_q, block_kv = draw.choice(((32, 16), (16, 32), (32, 48)))
    yield Call("backward", (*inputs(draw, 2 * block_q, 3 * block_kv, block_q, block_kv), block_q, block_kv))
    block_q, block_kv = draw.choice(((32, 24), (24, 32)))
    n_q, n_k = 2 * block_q + draw.integers(5, 16), block_kv + draw.integers(5, 16)
    yield Call("backward", (*inputs(draw, n_q, n_k, block_q, block_kv), block_q, block_kv))
