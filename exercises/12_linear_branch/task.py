"""Tests of 12_linear_branch."""

from exercises.task import Call, Task

task = Task(agree=1e-05)


def case(draw, n, block_q, block_kv):
    """Draw Q, K, V of some heads and a mask that selects about 40% of the blocks, and none or all of them in no row."""
    heads, head_dim = draw.integers(2, 4), draw.choice((8, 16))
    q, k, v = (draw.normal(heads, n, head_dim) for _ in range(3))
    shape = heads, -(-n // block_q), -(-n // block_kv)
    selected = draw.uniform(*shape) < 0.4
    selected[..., 0], selected[..., -1] = True, False
    swap = draw.uniform(*shape[:2]) < 0.5
    selected[swap] = selected[swap].flip(-1)
    return q, k, v, selected, block_q, block_kv


@task.test("what each block of keys adds up to", points=3)
def sums(draw):
    """h_j is phi(K_j)^T V_j, z_j the sum of phi(K_j), per head. Where does phi go? phi of a row of zeros isn't zero."""
    block_kv = draw.choice((4, 8))
    _, k, v, *_ = case(draw, block_kv * draw.integers(3, 6), 8, block_kv)
    yield Call("key_block_sums", (k, v, block_kv))
    block_kv = draw.choice((8, 16))
    _, k, v, *_ = case(draw, block_kv * draw.integers(2, 5) + draw.integers(1, block_kv - 1), 8, block_kv)
    yield Call("key_block_sums", (k, v, block_kv))


def block_sums(k, v, block):
    """Return h and z of whole blocks."""
    phi, v = (x.unflatten(1, (-1, block)) for x in (k.softmax(-1), v))
    return phi.mT @ v, phi.sum(2)


def huge_block(draw):
    """Draw a case in which every query block has selected a block whose values are a million times as large."""
    q, k, v, selected, block_q, block_kv = case(draw, 16 * draw.integers(3, 6), 16, 8)
    huge = draw.integers(0, selected.shape[2])
    v[:, 8 * huge : 8 * (huge + 1)] *= 1e6
    selected[..., huge] = True
    selected[..., huge - 1] = False
    return q, k, v, selected, block_q, block_kv


@task.test("sums over the blocks not selected", points=3)
def complement(draw):
    """H_i and Z_i sum over the blocks not selected, and no others. What is 1e8 + 1 - 1e8 in float32?"""
    _, k, v, selected, _, block_kv = case(draw, 16 * draw.integers(2, 5), draw.choice((8, 16)), 8)
    yield Call("complement_sums", (selected, *block_sums(k, v, block_kv)))
    _, k, v, selected, _, block_kv = huge_block(draw)
    yield Call("complement_sums", (selected, *block_sums(k, v, block_kv)))


@task.test("O_l of every query", points=4)
def branch(draw):
    """O_l = phi(Q_i) H_i / (phi(Q_i) Z_i): which H_i belongs to which queries? Last blocks may be partial."""
    yield Call("linear_branch", case(draw, 16 * draw.integers(3, 6), draw.choice((8, 16)), draw.choice((4, 8))))
    for block_q, block_kv in ((16, 8), (8, 16)):
        yield Call("linear_branch", case(draw, 16 * draw.integers(2, 5) + draw.integers(1, 7), block_q, block_kv))
    yield Call("linear_branch", huge_block(draw))


@task.test("a block of queries with nothing left")
def nothing_left(draw):
    """A query block that has selected every key block has Z_i = 0, and its O_l is 0."""
    q, k, v, selected, *blocks = case(draw, 16 * draw.integers(3, 6), 16, 8)
    selected[0, draw.integers(0, selected.shape[1])] = True
    yield Call("linear_branch", (q, k, v, selected, *blocks))
