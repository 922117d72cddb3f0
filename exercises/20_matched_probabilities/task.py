"""Tests and mistakes of 20_matched_probabilities."""

from exercises.task import Call, Mistake, Task, dequantize, quantize

task = Task(agree=1e-4)


def case(draw, size=1.5):
    """Draw what the forward pass leaves for one block of queries: integers, scales, Q, mean(K), its L, the block."""
    d, block = draw.choice((16, 32, 64)), draw.choice((16, 32))
    n_q, n_k = draw.integers(20, 40), block * draw.integers(2, 4) + draw.integers(1, block)
    query, key = (size * draw.normal(n, d) for n in (n_q, n_k))
    key = key + size * draw.normal(1, d)  # shared by all keys
    key_mean = key.mean(0, keepdim=True)
    (q_hat, s_q), (k_hat, s_k) = quantize(query, n_q), quantize(key - key_mean, block)
    scores = dequantize(q_hat, s_q, n_q) @ dequantize(k_hat, s_k, block).mT + query.double() @ key_mean.double().mT
    log_sum_exp = (scores * d**-0.5).logsumexp(-1, keepdim=True).float()
    return q_hat, s_q[0], k_hat, s_k, query, key_mean, log_sum_exp, block


@task.test("P of a tile", points=3)
def tile(draw, size=1.5):
    """P = exp(S - L): S from the integers, both scales and c; L without the mean key's share, c Q mean(K)."""
    q_hat, s_q, k_hat, s_k, *rest, block = case(draw, size)
    j = draw.integers(0, len(s_k))
    yield Call("matched_tile", (q_hat, s_q, k_hat[j * block : (j + 1) * block], s_k[j], *rest))


@task.test("P of a tile with scores in the hundreds", points=2, agree=0.01)
def large(draw):
    """With large scores exp(S) and exp(L) are infinite in float32. Subtract before you take the exponential."""
    yield from tile(draw, size=8.0)


@task.test("row sums over all tiles", points=3)
def sums(draw):
    """Add up the rows of every tile, the last one too, each with its own scale. An L that doesn't fit shows in them."""
    *given, log_sum_exp, block = case(draw)
    yield Call("row_sums", (*given, log_sum_exp, block))
    yield Call("row_sums", (*given, log_sum_exp + draw.normal(*log_sum_exp.shape), block))


task.mistakes = (
    Mistake("log_sum_exp - c * query @ key_mean.mT", "log_sum_exp",
        "L belongs to scores that still have the mean key's share. K^ is smoothed: take c Q mean(K) from L, too."),
    Mistake("(q_hat.int() @ k_hat.int().mT).float()", "(q_hat @ k_hat.mT).float()",
        "The product of two int8 tensors is int8 again and wraps around at 127. Convert first."),
    Mistake("log_sum_exp - c * query @ key_mean.mT", "log_sum_exp + c * query @ key_mean.mT",
        "The sign: the forward pass added c Q mean(K) to L, so subtract it."),
    Mistake("log_sum_exp - c * query @ key_mean.mT", "log_sum_exp - query @ key_mean.mT",
        "c is missing in the mean key's share: c Q mean(K)."),
    Mistake("log_sum_exp - c * query @ key_mean.mT", "log_sum_exp - c * s_q * q_hat.float() @ key_mean.mT",
        "The forward pass added c Q mean(K) with the unquantised Q. Take away exactly that."),
    Mistake("(s_q * s_k * c)", "(s_q * s_k)", "c is missing in S: s_q s_k c times the integers."),
    Mistake("torch.exp(s_ij - l_i)", "torch.softmax(s_ij, -1)",
        "A tile doesn't hold the whole row, so its softmax isn't P. L knows the whole row."),
    Mistake("torch.exp(s_ij - l_i)", "torch.exp(s_ij) / torch.exp(l_i)"),
    Mistake("total += tile", "total = tile", "Each tile adds to the sum: += instead of =."),
    Mistake("k_hat[start : start + block], s_k[j]", "k_hat[start : start + block], s_k[0]",
        "Each tile of keys has its own scale: s_k[j]."),
)  # fmt: skip
