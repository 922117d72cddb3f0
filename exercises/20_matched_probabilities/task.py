"""Tests of 20_matched_probabilities."""

from exercises.task import Call, Task, dequantize, quantize

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
