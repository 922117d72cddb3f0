"""Tests and mistakes of 17_triton_dk_dv."""

import torch

from exercises.task import Call, Mistake, Task, backward_case, int8_tiles

task = Task(triton=True, agree="roundings")


def call(draw, n_q, n_k, block_q, block_kv, **sizes):
    do, q, k, v, output, log_sum_exp = backward_case(draw, n_q, n_k, block_q, block_kv, **sizes)
    tiles = *int8_tiles(q, block_q), *int8_tiles(k, block_kv), v, do, *int8_tiles(do, block_q)
    outputs = (do * output).sum(-1).float(), torch.full(k.shape, -12345.0), torch.full(k.shape, -12345.0)
    return Call("int8_dk_dv", (*tiles, log_sum_exp, *outputs), outputs=2)


@task.test("dV, one tile of keys, one of queries", points=3, parts=(1,))
@task.test("dK, one tile of keys, one of queries", points=4, parts=(0,))
def one_tile(draw):
    """Check S (both scales and c), P = e^(S - L), s_P s_dO; dP, dS and s_dS s_Q. dK has a factor c, dV none."""
    block = draw.choice((32, 64))  # the same for queries and keys, so that mixing them up still runs
    yield call(draw, block, block, block, block)


@task.test("several tiles of queries, each with its own scales", points=3)
def query_tiles(draw):
    """Each tile of queries has its own s_Q and s_dO, and dK_j and dV_j are the sums of what all of them add."""
    count = draw.integers(3, 5)
    sizes = draw.sizes(count, 32)
    do_sizes = torch.where(torch.arange(len(sizes))[:, None] < 32, 0, 1 / sizes)  # the first tile has no gradient
    yield call(draw, count * 32, 32, 32, 32, q_sizes=sizes, do_sizes=do_sizes)


@task.test("several tiles of keys")
def key_tiles(draw):
    """Several tiles of keys: which rows and which s_K belong to program j?"""
    block_kv = draw.choice((32, 64))
    yield call(draw, 64, 2 * block_kv, 64, block_kv)


@task.test("partial tiles at the ends", points=3)
def ragged(draw):
    """Queries from n_q on don't exist: which P makes them count for nothing? Which keys of the last tile exist?"""
    sizes = (32 + draw.integers(1, 32), 32), (64, draw.integers(33, 64)), (draw.integers(8, 32), draw.integers(8, 32))
    for n_q, n_k in sizes:
        yield call(draw, n_q, n_k, draw.choice((32, 64)), draw.choice((32, 64)))


task.mistakes = (
    Mistake("x / tl.where(s == 0, 1.0, s)[:, None]", "x / s[:, None]",
        "A row of zeros has scale 0, and 0 / 0 is NaN, which as an integer may be anything."),
    Mistake("s = tl.max(tl.abs(x), 1) / 127", "s = tl.max(tl.abs(x), 0) / 127",
        "dV and dK are sums over queries: a scale per query can't leave such a sum. Rows here are keys.",
        (("tl.floor(x / tl.where(s == 0, 1.0, s)[:, None] + 0.5)",
          "tl.floor(x / tl.where(s == 0, 1.0, s)[None, :] + 0.5)"),)),
    Mistake("s = tl.max(tl.abs(x), 1) / 127", "s = tl.zeros_like(tl.max(x, 1)) + tl.max(tl.abs(x)) / 127",
        "P and dS have one scale per key, a row of the transposed tile, not one for the whole tile."),
    Mistake("pt_hat_ij, s_p = round_rows(pt_ij)",
        "pt_hat_ij, s_p = tl.floor(pt_ij * 127 + 0.5).to(tl.int8), tl.zeros([BLOCK_KV], tl.float32) + 1 / 127",
        "P has no maximum of 1 in a row here: its largest entry for a key may be far below 1."),
    Mistake("tl.floor(x / tl.where(s == 0, 1.0, s)[:, None] + 0.5)", "(x / tl.where(s == 0, 1.0, s)[:, None])",
        "Are P and dS rounded to nearest? A conversion to int8 cuts off towards 0."),
    Mistake("log_sum_exp_i[None, :]", "log_sum_exp_i[:, None]",
        "The tile is transposed: L and delta belong to queries, which are its columns now."),
    Mistake("tl.exp(st_ij", "tl.math.exp2(st_ij", "L is a natural logarithm: P is e^(S - L). 2^x takes another x."),
    Mistake("dv_j += tl.dot(pt_hat_ij, do_hat_i, out_dtype=tl.int32).to(tl.float32) * (s_p * s_do)[:, None]",
        "dv_j += tl.dot(pt_hat_ij.to(tl.float32), do_i.to(tl.float32)) * s_p[:, None]",
        "Too good: an operand isn't rounded. Both operands of dV are integers, P and dO, and both of dK."),
    Mistake("dv_j, mask=exists", "dv_j * c, mask=exists",
        "One tile: check S (both scales and c), P = e^(S - L), and s_P s_dO. dV has no factor c."),
    Mistake("tl.dot(v_j, tl.trans(do_i))", "tl.dot(v_j, tl.trans((do_hat_i.to(tl.float32) * s_do).to(tl.float16)))",
        "dP is the matmul that stays in 16 bit: take dO itself for it, not its rounded form."),
    Mistake("tl.dot(v_j, tl.trans(do_i))", "tl.dot(v_j, tl.trans(do_i)).to(tl.float16).to(tl.float32)",
        "dP - delta is a small difference of large numbers. Does dP stay in float32 after the matmul?"),
    Mistake("dst_ij = pt_ij * (", "dst_ij = pt_hat_ij.to(tl.float32) * s_p[:, None] * (",
        "dS takes P before rounding. The rounded one is for dV."),
    Mistake("(dpt_ij - delta_i[None, :])", "dpt_ij", "dS = P (dP - delta): where is delta, and which sign has it?"),
    Mistake("(dpt_ij - delta_i[None, :])", "(dpt_ij - delta_i[:, None])",
        "The tile is transposed: L and delta belong to queries, which are its columns now."),
    Mistake("dk_j * c, mask=exists", "dk_j, mask=exists",
        "S has a factor c, so dK has one too. Which of the two is missing, or there twice?"),
    Mistake("dk_j += tl.dot", "dk_j = tl.dot",
        "With several tiles of queries, dK_j and dV_j are the sums of what all of them add.",
        (("dv_j += tl.dot", "dv_j = tl.dot"),)),
    Mistake("tl.load(do_scale_ptr + i)", "tl.load(do_scale_ptr)",
        "Each tile of queries has its own s_Q and s_dO. Which belong to tile i?"),
    Mistake("tl.load(k_scale_ptr + j)", "tl.load(k_scale_ptr)"),
    Mistake('st_ij = tl.where(query[None, :] < n_q, st_ij, -float("inf"))', "st_ij = st_ij + 0.0",
        "Queries from n_q on do not exist, but Q^ and dO^ hold something there. Which P makes them count for nothing?"),
    Mistake("dv_j, mask=exists", "dv_j", "dK or dV was written past its end. Which keys of the last tile exist?",
        (("dk_j * c, mask=exists", "dk_j * c"),)),
    Mistake("log_sum_exp, delta, dk, dv, len(do)", "log_sum_exp, delta, dv, dk, len(do)",
        "dK stands where dV belongs. In which order are the outputs stored?"),
)  # fmt: skip
