"""Tests of 18_sparse_loop."""

import torch

from exercises.task import Call, Task

task = Task(triton=True, agree=0.001)


@task.test("block_lists", points=2, listed=True, agree="entries")
def lists(draw):
    """The numbers of a row's selected blocks come first, in ascending order; the count says how many there are."""
    selected = draw.uniform(draw.integers(3, 7), draw.integers(4, 9)) < 0.4
    selected[draw.integers(0, len(selected))] = False
    yield Call("block_lists", (selected,))


def case(draw, n_q, n_k, block_q, block_kv):
    """Draw Q, K, V and a block mask in which every row has some blocks, but not the first."""
    d = draw.choice((16, 32))
    q, k, v = (draw.normal(n, d).half() for n in (n_q, n_k, n_k))
    k[: n_k // 2] *= 0.5  # the maximum rises on the way
    v += draw.normal(1, d).half()
    selected = draw.uniform(-(-n_q // block_q), -(-n_k // block_kv)) < 0.5
    selected[:, 0] = False
    for row in selected:
        row[1 + draw.integers(0, len(row) - 1)] = True
    return q, k, v, selected


def lists_of(selected):
    """Return the lists, the last block first, with other blocks past their end, and how long they are."""
    rows = [torch.cat((row.nonzero()[:, 0].flip(0), (~row).nonzero()[:, 0])) for row in selected]
    return torch.stack(rows).int(), selected.sum(-1).int()


def tile_call(q, k, v, selected, block_q, block_kv):
    numbers, count = lists_of(selected)
    return Call("sparse_tile", (q[:block_q], k, v, numbers[0, : count[0]], block_kv))


def hidden(x, selected, block_kv):
    """Return x with NaN in the blocks that nobody has selected."""
    tokens = (~selected.any(0)).repeat_interleave(block_kv)[: len(x)]
    return torch.where(tokens[:, None], torch.nan, x)


@task.test("sparse_tile: attention over the listed blocks, and no others", points=4, agree=1e-05)
def tile(draw):
    """O_i = softmax(c q_i K^T) V over the listed keys, L_i the log of its denominator. Others are NaN: 0 NaN is NaN."""
    q, k, v, selected = case(draw, 16, 8 * draw.integers(5, 9), 16, 8)
    selected[0, 1:4] = torch.tensor([True, False, True])
    yield tile_call(q, k, v, selected, 16, 8)
    q, k, v, selected = case(draw, 16, 8 * draw.integers(4, 8), 16, 8)
    yield tile_call(q, hidden(k, selected, 8), hidden(v, selected, 8), selected, 16, 8)


@task.test("sparse_tile: a partial last block, an empty list", points=2, agree=1e-05)
def tile_ends(draw):
    """The last key block may be partial, wherever it is listed; without a block O_i = 0 and L_i = -infinity."""
    q, k, v, selected = case(draw, 16, 16 * draw.integers(2, 5) + draw.integers(1, 15), 16, 16)
    selected[:, -1] = True
    yield tile_call(q, k, v, selected, 16, 16)
    yield tile_call(q, k, v, torch.zeros_like(selected), 16, 16)


def kernel_call(q, k, v, selected, block_q, block_kv):
    outputs = torch.full(q.shape, -12345.0), torch.full(q.shape[:1], -12345.0)
    return Call("sparse_attention", (q, k, v, *lists_of(selected), block_q, block_kv, *outputs), outputs=2)


@task.test("the kernel, full blocks, reads nothing else", points=4)
def kernel(draw):
    """Check what one step does to m, l and O_i, and what is stored. Blocks that aren't listed are NaN: 0 NaN is NaN."""
    block_q, block_kv = draw.choice((16, 32)), draw.choice((16, 32))
    n_k = block_kv * draw.integers(4, 6) if block_kv == 16 else 128
    q, k, v, selected = case(draw, 3 * block_q, n_k, block_q, block_kv)
    selected[1] = ~selected[0]
    selected[1, 0], selected[1, -1] = False, True
    yield kernel_call(q, k, v, selected, block_q, block_kv)
    q, k, v, selected = case(draw, 32, 16 * draw.integers(4, 8), 16, 16)
    yield kernel_call(q, hidden(k, selected, 16), hidden(v, selected, 16), selected, 16, 16)


@task.test("the kernel, partial blocks and empty lists", points=4)
def kernel_ends(draw):
    """The last block of queries or keys may be partial: which rows exist? An empty list: O_i = 0, L_i = -infinity."""
    n_k = 16 * draw.integers(3, 6) + draw.integers(1, 15)
    for n_q in (32, 32 + draw.integers(1, 15)):
        q, k, v, selected = case(draw, n_q, n_k, 16, 16)
        selected[:, -1] = selected[:, 1] = True
        yield kernel_call(q, k, v, selected, 16, 16)
    q, k, v, selected = case(draw, 48, 16 * draw.integers(4, 6), 16, 16)
    selected[draw.integers(0, 3)] = False
    yield kernel_call(q, k, v, selected, 16, 16)
