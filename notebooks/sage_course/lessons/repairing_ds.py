"""Notebook 14: an offset that all values share, the error that dS inherits from delta, two remedies, dither, bias."""

import torch

from sage_course.gaps import Gap, Mistake
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


GAPS = {
    "offset_share": Gap(offset_share, lambda: [(draw(0, 2, 16, 4) + 1.5,), (draw(1, 1, 16, 4) + 3 * draw(2, 4),)], (
        Mistake("v.mean(-2).norm(dim=-1)", "v.norm(dim=-1).mean(-1)",
                "That is always 1. The numerator is the length of the mean value, not the mean length."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.norm(dim=-1).mean(-1) / v.mean(-2).norm(dim=-1)",
                "The ratio is upside down: the share is 1 at most."),
        Mistake("v.norm(dim=-1).mean(-1)", "v.norm(dim=(-2, -1))",
                "Compute the length of each value with norm(dim=-1) and then their mean, not the norm of "
                "the whole matrix."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.mean(-2, keepdim=True).norm(dim=-1) / v.norm(dim=-1)",
                "Each head has one ratio: take the mean of the lengths first, then divide."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.mean(-2).norm(dim=-1).mean() / v.norm(dim=-1).mean()",
                "Each head has one ratio of its own: take the mean over heads last."),
        Mistake(").mean().item()", ")", "The result is one number, the mean over heads, as a float: .mean().item()."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)", "v.mean(-2).norm() / v.norm(dim=-1).mean()",
                "norm() without `dim` takes the heads together. Use norm(dim=-1), and one ratio per head."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)", "v.mean(-2).norm(-1) / v.norm(-1).mean(-1)",
                "The first argument of `norm` is the kind of norm. The axis has a name: norm(dim=-1)."),
        Mistake("v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)",
                "v.mean(-2).square().sum(-1) / v.square().sum(-1).mean(-1)",
                "Those are squared lengths. Take the lengths."),
    )),
    "inherited": Gap(inherited, _wrong_deltas, (
        Mistake("exact_delta - delta", "delta - exact_delta",
                "The sign is wrong. dS = P (dP - delta), so a delta that is too large makes dS too small."),
        Mistake("p * (exact_delta - delta)", "exact_delta - delta",
                "In dS = P (dP - delta), P multiplies delta and its error alike."),
        Mistake("p * (exact_delta - delta)", "p * delta",
                "That is the whole of delta, with the wrong sign. You want the part of its error."),
        Mistake("p * (exact_delta - delta)", "(exact_delta - delta).expand_as(p)",
                "In dS = P (dP - delta), P multiplies the error of delta, too."),
        Mistake("p * (exact_delta - delta)", "-p * delta",
                "That is the whole contribution of delta to dS. You want the contribution of its error."),
        Mistake("p * (exact_delta - delta)", "p @ (exact_delta - delta)",
                "This is a product entry by entry, not a matmul: each row of P is multiplied by that row's number."),
    )),
    "matching_delta": Gap(matching_delta, _weights_and_dp, (
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "dp.mean(-1, keepdim=True)",
                "The keys do not count equally: it is a weighted mean, and the weights are P."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "(p * dp).sum(-1) / p.sum(-1)",
                "The shape should be [queries, 1], so that delta can be subtracted from dP: use keepdim=True."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)",
                "(p * dp).sum(-2, keepdim=True) / p.sum(-2, keepdim=True)",
                "Each query has one delta, so sum over the keys, which are the last axis."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "(p * dp).mean(-1, keepdim=True)",
                "`mean` divides by the number of keys. Divide by the sum of the weights instead."),
        Mistake("/ p.sum(-1, keepdim=True)", "/ p.sum()",
                "Each row is divided by its own sum, not by the sum of the whole matrix."),
        Mistake("(p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)", "p @ dp.mT",
                "A matmul pairs every row with every row. Multiply entry by entry, then sum each row."),
    )),
    "without_mean": Gap(without_mean, _shared_values, (
        Mistake("o - mean", "o", "O changes too: rows of P sum to 1, so it loses the same mean."),
        Mistake("(v - mean)", "v", "Compute dP from V minus its mean."),
        Mistake("o - mean", "o - o.mean(-2, keepdim=True)", "Subtract the mean of V from O, not the mean of O."),
        Mistake("v.mean(-2, keepdim=True)", "v.mean()", "Each feature has a mean of its own, so the mean is a vector."),
    )),
    "thresholds": Gap(thresholds, lambda: [(8, 8), (5, 24)], (
        Mistake("column + 2 * row", "column",
                "Then a whole column has the same eighth. Each row shifts the eighths by two: add 2 i."),
        Mistake("column + 2 * row", "column + row",
                "Then a diagonal moves by two eighths at a time and meets only four of them. Shift by 2 i, not by i."),
        Mistake("5 * row % 8", "0 * row",
                "Then all rows share the same eight thresholds. The part (5 i) mod 8 differs from row to row."),
        Mistake("(part + 0.5) / 8", "part / 8",
                "The threshold is in the middle of its part: add 1/2 to the part."),
        Mistake("(eighth + (part + 0.5) / 8) / 8", "(part + (eighth + 0.5) / 8) / 8",
                "Eighth and part are swapped: the eighth is the coarse number, and the part subdivides it."),
        Mistake("column + 2 * row", "row + 2 * column",
                "i is the row and j is the column. Along a row the eighth grows by one, down a column by two."),
        Mistake("(column + 2 * row) % 8", "column + 2 * row % 8",
                "Python computes % before +. Put j + 2 i in brackets."),
        Mistake("5 * row % 8", "5 * (row % 8)", "That goes up to 35. The part is one of eight: (5 i) mod 8."),
        Mistake("5 * row % 8", "5 * column % 8", "The part depends on the row i alone, not on the column."),
    )),
    "bias_and_error": Gap(bias_and_error, lambda: [(0.5 + draw(11, 6, 10),), (draw(12, 3, 4) - 1,)], (
        Mistake("(products.sum() - products.trace()) / (count * (count - 1))", "errors.mean(0).square().sum()",
                "The square of the mean still contains noise. Leave out the products of a row with itself."),
        Mistake("(products.sum() - products.trace())", "products.sum()",
                "The product of a row with itself contains its squared noise: subtract the trace."),
        Mistake("(count * (count - 1))", "count**2",
                "Without the diagonal there are count (count - 1) products to average."),
        Mistake("(products.sum() - products.trace())", "products.triu(1).sum()",
                "count (count - 1) counts each pair twice, but this sum counts it once."),
        Mistake("products.trace() / count", "errors.square().mean()",
                "A squared length is the sum over the numbers of one error. Take the mean over samples alone."),
        Mistake("(products.sum() - products.trace()) / (count * (count - 1))", "errors.mean().square()",
                "|b|^2 is the squared length of a vector. Don't average over the numbers of an error.",
                (("products.trace() / count", "errors.square().mean()"),)),
        Mistake("products.trace() / count", "errors.var(0).sum()", "Use the whole error: subtract no mean."),
        Mistake(" / (count * (count - 1))", "",
                "That is a sum over pairs of different rows. Divide it by their number, count (count - 1)."),
        Mistake("products.trace() / count", "errors.norm(dim=1).mean()",
                "That is a mean length. Square the lengths first."),
        Mistake("errors @ errors.mT", "errors.mT @ errors",
                "That pairs the numbers of an error. Pair the samples: every row with every row."),
        Mistake("(products.sum() - products.trace()) / (count * (count - 1))", "errors.mean(0)",
                "That is the mean error, a vector. Its squared length is wanted, without the part that is noise."),
    )),
}  # fmt: skip
