"""Notebook 14: an offset of all values, who inherits its error, two remedies, dither, bias, T*, a recommendation."""

import torch

from sage_course.check import Gap, Mistake
from sage_course.lessons import draw


def offset_share(v):
    return (v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)).mean().item()


def inherited(p, delta, exact_delta):
    return p * (exact_delta - delta)


def matching_delta(p, dp):
    return (p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)


def without_mean(do, v, o):
    mean = v.mean(-2, keepdim=True)
    dp = do @ (v - mean).mT
    delta = (do * (o - mean)).sum(-1, keepdim=True)
    return dp, delta


def thresholds(rows, columns):
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    eighth = (column + 2 * row) % 8
    part = 5 * row % 8
    return (eighth + (part + 0.5) / 8) / 8


def bias_and_error(errors):
    products = errors @ errors.mT
    count = len(errors)
    bias_square = (products.sum() - products.trace()) / (count * (count - 1))
    error_square = products.trace() / count
    return bias_square, error_square


def tokens_at_bias(noise_trace, bias_square, corpus_tokens):
    star = noise_trace / bias_square
    return star * corpus_tokens / (star + corpus_tokens)


def recommended(rows, largest_bias):
    fit = [row for row in rows if row["bias"] <= largest_bias]
    return min(fit, key=lambda row: (row["matmuls"], row["operations"]))["remedy"]


def _values() -> list[tuple]:
    return [(draw(0, 2, 16, 4) + 1.5,), (draw(1, 1, 16, 4) + 3 * draw(2, 4),)]


def _wrong_deltas() -> list[tuple]:
    p, delta = torch.softmax(draw(3, 6, 8), -1), draw(4, 6, 1)
    return [(p, delta + 0.1 * draw(5, 6, 1), delta)]


def _weights_and_dp() -> list[tuple]:
    """Return rows of P as a backward pass has them: they don't quite add up to one."""
    p = torch.softmax(draw(6, 6, 8), -1) * torch.linspace(0.9, 1.1, 6)[:, None]
    return [(p, 3 + draw(7, 6, 8))]


def _shared_values() -> list[tuple]:
    v = 2 + draw(8, 8, 4)
    return [(draw(9, 6, 4), v, torch.softmax(draw(10, 6, 8), -1) @ v)]


def _errors() -> list[tuple]:
    return [(0.5 + draw(11, 6, 10),), (draw(12, 3, 4) - 1,)]


def _rows_of_a_table() -> list[tuple]:
    table = (
        ("none", 1.0, 0.0, 0.0),
        ("expensive", 0.01, 3.0, 6.0),
        ("busy", 0.06, 0.0, 27.0),
        ("cheap", 0.05, 0.0, 1.0),
        ("least biased", 0.005, 1.0, 0.0),
        ("saves, but is biased", 0.9, -1.0, 2.0),
    )
    rows = [dict(zip(("remedy", "bias", "matmuls", "operations"), line, strict=True)) for line in table]
    return [(rows, 0.1), (rows, 0.05), (rows, 0.02), (rows, 2.0)]


GAPS = {
    "offset_share": Gap(offset_share, _values, (
        Mistake("v.mean(-2)", "v.mean(-1)", "The mean over tokens: they are axis -2."),
        Mistake("v.mean(-2).norm(dim=-1)", "v.norm(dim=-1).mean(-1)",
                "That is 1 always. Above the line stands the length of the mean, not the mean length."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.norm(dim=-1).mean(-1) / v.mean(-2).norm(dim=-1)",
                "The other way round: 1 is the most."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)", "v.mean(-2).norm(dim=-1)",
                "As a share of the mean length of a value."),
        Mistake("v.norm(dim=-1).mean(-1)", "v.norm(dim=(-2, -1))",
                "The length of each value, then their mean: norm(dim=-1), not of the whole matrix."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.mean(-2, keepdim=True).norm(dim=-1) / v.norm(dim=-1)",
                "One ratio for each head: first the mean of the lengths, then divide."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.mean(-2).norm(dim=-1).mean() / v.norm(dim=-1).mean()",
                "One ratio for each head: the mean over heads comes last."),
        Mistake(").mean().item()", ")", "One number is wanted: the mean over heads."),
    )),
    "inherited": Gap(inherited, _wrong_deltas, (
        Mistake("exact_delta - delta", "delta - exact_delta",
                "dS = P (dP - delta): where delta is too large dS is too small."),
        Mistake("p * (exact_delta - delta)", "exact_delta - delta", "P multiplies it."),
        Mistake("p * (exact_delta - delta)", "-p * delta", "That is delta's whole part of dS, not its error."),
        Mistake("p * (exact_delta - delta)", "p * (exact_delta - delta).abs()", "With its sign."),
        Mistake("p * (exact_delta - delta)", "p @ (exact_delta - delta)",
                "Entry by entry, not a matmul: all of a row of P times that row's number."),
    )),
    "matching_delta": Gap(matching_delta, _weights_and_dp, (
        Mistake(" / p.sum(-1, keepdim=True)", "",
                "Rows of this P don't quite add up to one: divide by what they add up to."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "dp.mean(-1, keepdim=True)",
                "A mean with the weights P."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "(p * dp).sum(-1) / p.sum(-1)",
                "[queries, 1] is wanted, so that it can be subtracted from dP: keepdim=True."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)",
                "(p * dp).sum(-2, keepdim=True) / p.sum(-2, keepdim=True)",
                "One delta for each query: sum over keys, the last axis."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "(p * dp).mean(-1, keepdim=True)",
                "`mean` divides by the number of keys. Divide by what the weights add up to."),
    )),
    "without_mean": Gap(without_mean, _shared_values, (
        Mistake("v.mean(-2, keepdim=True)", "v.mean(-1, keepdim=True)", "The mean over tokens: they are axis -2."),
        Mistake("o - mean", "o", "O moves, too: rows of P add up to one, so it loses the same mean."),
        Mistake("(v - mean)", "v", "dP is that of V less its mean."),
        Mistake("o - mean", "o - o.mean(-2, keepdim=True)", "The mean of V, not that of O."),
        Mistake("v.mean(-2, keepdim=True)", "v.mean()", "One mean for each feature: a vector."),
        Mistake("o - mean", "o + mean", "O less the mean: dP - delta must stay what it was."),
        Mistake(".sum(-1, keepdim=True)", ".sum(-1)", "delta has the shape [queries, 1]: keepdim=True."),
        Mistake("return dp, delta", "return delta, dp", "dP comes first."),
        Mistake(".mT", "", "Every query with every key: V transposed."),
    )),
    "thresholds": Gap(thresholds, lambda: [(8, 8), (5, 24)], (
        Mistake("column + 2 * row", "column",
                "Then a whole column has the same eighth: each row moves them on, by two."),
        Mistake("column + 2 * row", "column + row",
                "Then a diagonal steps by two eighths, and meets four of them: 2 row."),
        Mistake("5 * row % 8", "0 * row", "All rows would share eight thresholds: 5 row mod 8 divides each eighth."),
        Mistake("(part + 0.5) / 8", "part / 8",
                "In the middle of its part: half a part is missing, so that no threshold is 0."),
        Mistake("(eighth + (part + 0.5) / 8) / 8", "eighth + (part + 0.5) / 8", "Between 0 and 1: eight eighths."),
        Mistake("(column + 2 * row) % 8", "column + 2 * row", "There are eight eighths, over and over: mod 8."),
        Mistake("(eighth + (part + 0.5) / 8) / 8", "(part + (eighth + 0.5) / 8) / 8",
                "The other way round: the eighth is the coarse one, part divides it."),
        Mistake("column + 2 * row", "row + 2 * column",
                "i is the row, j the column: along a row the eighth moves on by one, down a column by two."),
        Mistake("(column + 2 * row) % 8", "column + 2 * row % 8", "% comes before +: brackets round j + 2i."),
        Mistake("5 * row % 8", "5 * (row % 8)", "That goes up to 35. The part is one of eight: (5i) mod 8."),
        Mistake("5 * row % 8", "5 * column % 8", "The part depends on the row i alone."),
    )),
    "bias_and_error": Gap(bias_and_error, _errors, (
        Mistake("(products.sum() - products.trace()) / (count * (count - 1))", "errors.mean(0).square().sum()",
                "The square of the mean holds a part of the noise, too: leave out a row with itself."),
        Mistake("(products.sum() - products.trace())", "products.sum()",
                "A row with itself has its noise squared: leave out the trace."),
        Mistake("(count * (count - 1))", "count**2", "Without the diagonal there are count (count - 1) products."),
        Mistake("(products.sum() - products.trace())", "products.triu(1).sum()",
                "count (count - 1) counts each pair twice: so must the sum, or divide by half as many."),
        Mistake("products.trace() / count", "products.trace()", "The mean over samples."),
        Mistake("bias_square, error_square\n", "error_square, bias_square\n", "The bias comes first."),
        Mistake("products.trace() / count", "errors.square().mean()",
                "The squared length of one error: the sum over its numbers, the mean over samples."),
        Mistake("products.trace() / count", "errors.var(0).sum()", "The length of the whole error: subtract no mean."),
    )),
    "tokens_at_bias": Gap(tokens_at_bias, lambda: [(400.0, 1e-4, 2.0**18), (400.0, 1e-2, 2.0**12)], (
        Mistake("star * corpus_tokens / (star + corpus_tokens)", "star",
                "That is for text without end. Noise (1/T - 1/corpus) meets the bias already at a smaller T."),
        Mistake("noise_trace / bias_square", "bias_square / noise_trace", "More noise, later crossing."),
        Mistake("star * corpus_tokens / (star + corpus_tokens)", "min(star, corpus_tokens)",
                "Not the smaller of the two: solve 1/T = 1/T* + 1/corpus for T."),
        Mistake("star * corpus_tokens / (star + corpus_tokens)", "1 / star + 1 / corpus_tokens",
                "That is 1/T. Turn it round."),
        Mistake("star * corpus_tokens / (star + corpus_tokens)", "star + corpus_tokens",
                "1/T = 1/T* + 1/corpus: the reciprocals are added."),
        Mistake("(star + corpus_tokens)", "(corpus_tokens - star)", "1/T is the sum of the two, not a difference."),
    )),
    "recommended": Gap(recommended, _rows_of_a_table, (
        Mistake('(row["matmuls"], row["operations"])', 'row["bias"]',
                "Of those whose bias is small enough, the cheapest: not the smallest bias."),
        Mistake('row["bias"] <= largest_bias', "True", "First leave out those whose bias is too large."),
        Mistake("<= largest_bias", "< largest_bias", "largest_bias itself is allowed."),
        Mistake('(row["matmuls"], row["operations"])', 'row["matmuls"]',
                "Several have as many matmuls: then operations decide."),
        Mistake('["remedy"]', "", "Its name is wanted, not the whole row."),
        Mistake("min(", "max(", "The cheapest, not the most expensive."),
        Mistake('(row["matmuls"], row["operations"])', '(row["operations"], row["matmuls"])',
                "A matmul costs far more than an operation: compare matmuls first."),
    )),
}  # fmt: skip
