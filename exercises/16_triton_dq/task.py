"""Tests and mistakes of 16_triton_dq."""

import torch

from exercises.task import Call, Mistake, Task, backward_case, int8_tiles

task = Task(triton=True, agree="roundings")


def call(draw, n_q, n_k, block_q, block_kv, **sizes):
    do, q, k, v, output, log_sum_exp = backward_case(draw, n_q, n_k, block_q, block_kv, **sizes)
    tiles, delta = (*int8_tiles(q, block_q), *int8_tiles(k, block_kv)), (do * output).sum(-1).float()
    return Call("int8_dq", (*tiles, v, do, log_sum_exp, delta, torch.full(q.shape, -12345.0)), outputs=1)


@task.test("one tile of queries, one of keys", points=4)
def one_tile(draw):
    """One tile: check S_ij (both scales and c), P = e^(S - L), dP = dO V^T, dS, and s_dS s_K."""
    block_q, block_kv = draw.choice((16, 32)), draw.choice((32, 64))
    yield call(draw, block_q, block_kv, block_q, block_kv)


@task.test("several tiles of keys, each with its own scale", points=3)
def key_tiles(draw):
    """Each tile of K^ has its own scale. It is in S_ij, and in what this tile adds to dQ_i, the sum over all tiles."""
    count = draw.integers(2, 4)
    yield call(draw, 16, count * 32, 16, 32, k_sizes=draw.sizes(count, 32))


@task.test("several tiles of queries", points=2)
def query_tiles(draw):
    """Several tiles of queries: which rows and which s_Q belong to program i?"""
    block_q = draw.choice((16, 32))
    yield call(draw, 3 * block_q, 64, block_q, 64)


@task.test("partial tiles at the ends", points=3)
def ragged(draw):
    """Keys from n_k on do not exist: their P is 0. And which queries of the last tile exist?"""
    sizes = (16, 32 + draw.integers(1, 32)), (draw.integers(17, 32), 64), (draw.integers(4, 16), draw.integers(8, 32))
    for (n_q, n_k), block_q in zip(sizes, (16, 16, 32), strict=True):
        yield call(draw, n_q, n_k, block_q, draw.choice((32, 64)))


task.mistakes = (
    Mistake("tl.where(s_ds == 0, 1.0, s_ds)[:, None]", "s_ds[:, None]",
        "A row of zeros has scale 0, and 0 / 0 is NaN, which as an integer may be anything."),
    Mistake("(dp_ij - delta_i[:, None])", "dp_ij", "dS = P (dP - delta): where is delta, and which sign has it?"),
    Mistake("tl.exp(s_ij - log_sum_exp_i[:, None])", "tl.math.exp2(s_ij - log_sum_exp_i[:, None])",
        "L is a natural logarithm: P is e^(S - L). 2^x takes another x."),
    Mistake("dp_ij = tl.dot(do_i, tl.trans(v_j))", "dp_ij = tl.dot(do_i, tl.trans(v_j)).to(tl.float16).to(tl.float32)",
        "dP - delta is a small difference of large numbers. Does dP stay in float32 after the matmul?"),
    Mistake("""\
        product = tl.dot(ds_hat_ij, k_hat_j, out_dtype=tl.int32).to(tl.float32)
        dq_i += product * (s_ds * s_k)[:, None]
""", """\
        dq_i += tl.dot(ds_ij, k_hat_j.to(tl.float32) * s_k)
""", "This dQ is too good: dS isn't rounded. Which operands of dQ's matmul are integers?"),
    Mistake("tl.floor(ds_ij / tl.where(s_ds == 0, 1.0, s_ds)[:, None] + 0.5)",
        "(ds_ij / tl.where(s_ds == 0, 1.0, s_ds)[:, None])",
        "Is dS rounded to nearest? A conversion to int8 cuts off towards 0."),
    Mistake("s_ds = tl.max(tl.abs(ds_ij), 1) / 127",
        "s_ds = tl.zeros([BLOCK_Q], tl.float32) + tl.max(tl.abs(ds_ij)) / 127",
        "dS has one scale per row of the tile, that row's max|dS| / 127, not one for the whole tile."),
    Mistake("dq_i * c, mask", "dq_i, mask",
        "S has a factor c, so dQ has one too. Which of the two is missing, or there twice?"),
    Mistake("(s_ds * s_k)[:, None]", "s_ds[:, None]"),
    Mistake("dq_i += product", "dq_i = product",
        "With several tiles of keys, dQ_i is the sum of what all of them add."),
    Mistake("s_k = tl.load(k_scale_ptr + j)", "s_k = tl.load(k_scale_ptr)",
        "Each tile of K^ has its own scale. It is in S_ij, and in what this tile adds to dQ_i."),
    Mistake("s_q = tl.load(q_scale_ptr + i)", "s_q = tl.load(q_scale_ptr)"),
    Mistake("p_ij = tl.where(key[None, :] < n_k, p_ij, 0.0)", "p_ij = p_ij + 0.0",
        "Keys from n_k on do not exist: their P is 0, whatever stands in the padding of K^."),
    Mistake("dq_i * c, mask=query[:, None] < n_q)", "dq_i * c)",
        "dQ was written past its end. Which queries of the last tile exist?"),
    Mistake("(triton.cdiv(n_q, block_q),)", "(max(1, n_q // block_q),)",
        "Some rows of dQ were never written. Does every tile of queries have its program?"),
)  # fmt: skip
