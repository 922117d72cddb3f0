"""Notebook 12c: P in the backward pass: from 16-bit scores, from their errors, from INT8 scores, and clamped."""

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws
from sage_course.lessons.quantization_aware import BLOCK_KV, BLOCK_Q
from sage_ref.quantization import quantize, quantized_matmul


def printed(q, k, log_sum_exp, c):
    return torch.exp(c * q @ k.mT - log_sum_exp)


def row_sums(p_int8, error):
    return (p_int8 * torch.exp(error)).sum(-1)


def matched(q, k, log_sum_exp, c):
    k_mean = k.mean(-2, keepdim=True)
    q_hat = quantize(q, (BLOCK_Q, None))
    k_hat = quantize(k - k_mean, (BLOCK_KV, None))
    s_int8 = c * quantized_matmul(q_hat, k_hat.mT)
    return torch.exp(s_int8 - (log_sum_exp - c * q @ k_mean.mT))


def clamped(q, k, log_sum_exp, c):
    return torch.exp((c * q @ k.mT - log_sum_exp).clamp(max=0))


def _handed_in() -> list[tuple]:
    """Draw Q, K and an L that is not quite theirs; keys share an offset."""
    q, k = draws(0, (192, 8), (192, 8), dtype=torch.float64)
    sizes = torch.linspace(0.5, 4, 192, dtype=torch.float64)[:, None]  # so that blocks differ
    q, k, c = sizes * q, sizes * k + 1, 0.35
    tiny = 1e-7 * q, torch.where(torch.arange(192)[:, None] < BLOCK_KV, 0.0, 1e-7 * k)  # and a block of zeros
    return [(*x, torch.logsumexp(c * x[0] @ x[1].mT, -1, keepdim=True) - 1.5, c) for x in ((q, k), tiny)]


def _errors() -> list[tuple]:
    scores, error = draws(0, (5, 7), (5, 7), dtype=torch.float64)
    return [(scores.softmax(-1), error)]


GAPS = {
    "printed": Gap(printed, _handed_in, (
        Mistake("torch.exp(c * q @ k.mT - log_sum_exp)", "torch.softmax(c * q @ k.mT, -1)",
                "A kernel sees one tile of the row, so it can't take a softmax. It has L: P = exp(S - L)."),
        Mistake("torch.exp(c * q @ k.mT - log_sum_exp)", "torch.exp(c * q @ k.mT) - log_sum_exp",
                "L belongs into the exponent: P = exp(S - L)."),
        Mistake("c * q @ k.mT - log_sum_exp", "c * (q @ k.mT - log_sum_exp)", "L contains c already."),
        Mistake("torch.exp(c * q @ k.mT - log_sum_exp)", "torch.exp(c * q @ k.mT) / log_sum_exp",
                "L is the logarithm of the sum: exp(S) / exp(L) = exp(S - L)."),
        Mistake("c * q @ k.mT - log_sum_exp", "c * q @ k.mT - log_sum_exp.mT",
                "Each query has its own L: log_sum_exp is a column [..., Nq, 1] already."),
        Mistake("torch.exp(c * q @ k.mT - log_sum_exp)", "torch.exp(c * q @ k.mT - log_sum_exp).sum(-1)",
                "That is the row sums. Return P itself; the next cell sums it."),
    ), right=(
        ("c * q @ k.mT", "q @ (c * k).mT"),
        ("c * q @ k.mT", "c * torch.einsum('...qd,...kd->...qk', q, k)"),
    )),
    "row_sums": Gap(row_sums, _errors, (
        Mistake("torch.exp(error)", "torch.exp(-error)",
                "The sign: error = S - S_int8, so exp(S - L) = exp(S_int8 - L) exp(error)."),
        Mistake("torch.exp(error)", "(1 + error)", "True for small errors only. The factor is exp(error)."),
        Mistake("(p_int8 * torch.exp(error))", "(p_int8 + torch.exp(error))",
                "exp(a + b) = exp(a) exp(b): the factor multiplies P."),
        Mistake("p_int8 * torch.exp(error)", "torch.exp(error)",
                "That counts all keys alike. Each key's factor has the weight that the forward pass gave it."),
        Mistake("(p_int8 * torch.exp(error)).sum(-1)", "torch.exp(error.sum(-1))",
                "The sum of exponentials isn't the exponential of the sum. And each key has the weight P."),
        Mistake(".sum(-1)", ".sum(-2)", "A row of P belongs to a query: sum over the keys, the last axis."),
        Mistake(".sum(-1)", "", "That is P as printed. Sum over the keys."),
        Mistake("(p_int8 * torch.exp(error)).sum(-1)", "torch.exp((p_int8 * error).sum(-1))",
                "That is exp of the mean error. You need the mean of exp(error)."),
    ), right=(
        ("(p_int8 * torch.exp(error)).sum(-1)", "torch.einsum('...k,...k->...', p_int8, error.exp())"),
        ("torch.exp(error)", "error.double().exp()"),
    )),
    "matched": Gap(matched, _handed_in, (
        Mistake("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp",
                "L belongs to the scores before smoothing, which took c Q mean(K) from each: take it from L, too."),
        Mistake("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp + c * q @ k_mean.mT",
                "The sign: smoothing made every score smaller by c Q mean(K), so L gets smaller, too."),
        Mistake("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp - c * q_hat.dequantize() @ k_mean.mT",
                "The forward pass added c Q mean(K) to L with Q itself, not with the rounded Q."),
        Mistake("quantize(k - k_mean,", "quantize(k,", "The forward pass smoothed K before it rounded: K - mean(K)."),
        Mistake("quantize(k - k_mean,", "quantize(k,",
                "The keys must be those that the forward pass multiplied: smoothed, then rounded.",
                (("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp"),)),
        Mistake("c * quantized_matmul(q_hat, k_hat.mT)", "quantized_matmul(q_hat, k_hat.mT)",
                "c is missing, in S and in c Q mean(K).",
                (("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp - q @ k_mean.mT"),)),
        Mistake("k - k_mean, (BLOCK_KV", "k - k_mean, (BLOCK_Q", "A block of keys has BLOCK_KV rows, as before."),
        Mistake("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp - k_mean",
                "L is changed by a score, c Q mean(K): multiply the mean key by Q and c."),
        Mistake("c * quantized_matmul(q_hat, k_hat.mT)", "c * q_hat @ k_hat.mT",
                "Integers with scales are multiplied by quantized_matmul(q_hat, k_hat.mT)."),
        Mistake("c * quantized_matmul(q_hat, k_hat.mT)", "c * q @ k.mT",
                "These are 16-bit scores again. Multiply the integers and their scales.",
                (("log_sum_exp - c * q @ k_mean.mT", "log_sum_exp"),)),
        Mistake("c * quantized_matmul(q_hat, k_hat.mT)", "c * q @ (k - k_mean).mT",
                "These are 16-bit scores again. Multiply the integers and their scales."),
        Mistake("c * quantized_matmul(q_hat, k_hat.mT)", "c * q_hat.values.double() @ k_hat.values.double().mT",
                "The scales are missing: quantized_matmul(q_hat, k_hat.mT) multiplies by both."),
        Mistake("torch.exp(s_int8 - (log_sum_exp - c * q @ k_mean.mT))", "torch.softmax(s_int8, -1)",
                "The right numbers, by a softmax that a kernel can't take: use L, without the mean key's share."),
    ), right=(
        ("c * quantized_matmul(q_hat, k_hat.mT)", "quantized_matmul(q_hat, k_hat.mT) * c"),
        ("s_int8 - (log_sum_exp - c * q @ k_mean.mT)", "s_int8 - log_sum_exp + q @ k_mean.mT * c"),
    )),
    "clamped": Gap(clamped, _handed_in, (
        Mistake("torch.exp((c * q @ k.mT - log_sum_exp).clamp(max=0))",
                "torch.exp(c * q @ k.mT - log_sum_exp) / torch.exp(c * q @ k.mT - log_sum_exp).sum(-1, keepdim=True)",
                "That makes rows sum to 1, but a kernel would need the sum before its first tile: exercise 2."),
        Mistake(".clamp(max=0)", "", "Nothing is clamped yet: no entry of P may be above 1."),
        Mistake(".clamp(max=0)", ".clamp(max=1)", "exp(0) = 1: the exponent may be 0 at most. Or clamp P itself at 1."),
        Mistake("log_sum_exp).clamp(max=0))", "log_sum_exp)).clamp(max=0)",
                "max=0 is the bound of the exponent, S - L. P itself is at most 1."),
        Mistake("- log_sum_exp).clamp(max=0)", "- log_sum_exp.clamp(max=0))", "Clamp the difference S - L, not L."),
        Mistake(".clamp(max=0)", ".clamp(min=0)", "The other side: P may be at most 1."),
        Mistake("(c * q @ k.mT - log_sum_exp).clamp(max=0)", "(c * q @ k.mT).clamp(max=0) - log_sum_exp",
                "Clamp the difference S - L, not S."),
        Mistake("torch.exp((c * q @ k.mT - log_sum_exp).clamp(max=0))",
                "torch.exp(c * q @ k.mT - log_sum_exp) / torch.exp(c * q @ k.mT - log_sum_exp).amax(-1, keepdim=True)",
                "That scales each row. Clamp each entry at 1."),
    ), right=(
        ("(c * q @ k.mT - log_sum_exp).clamp(max=0)", "c * q @ k.mT - log_sum_exp).clamp(max=1"),
        ("c * q @ k.mT", "q @ k.mT * c"),
    )),
}  # fmt: skip
