"""Notebook 06: the bias of rounding, the noise of a gradient, what batches have in common, and where the two meet."""

import torch

from sage_course.gaps import Gap, Mistake
from sage_ref.quantization import fake_quantize


def bias_of(x, rounded):
    return (rounded - x).mean(0)


def noise_square(gradients):
    return gradients.var(0).sum()


def common_square(vectors):
    products = vectors @ vectors.mT
    count = len(vectors)
    return (products.sum() - products.trace()) / (count * (count - 1))


def tokens_at_bias(noise, tokens, bias):
    return tokens * noise / bias


def _rounded_numbers() -> list[tuple]:
    x = torch.exp(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).double())
    return [(x, fake_quantize(3 * x, (1, None)) / 3), (x[:5, :3], x[:5, :3].round())]


def _gradients() -> list[tuple]:
    generator = torch.Generator().manual_seed(1)
    noisy = [torch.randn(count, 50, generator=generator) + offset for count, offset in ((16, 2), (2, 2), (5, 0))]
    return [(x.double(),) for x in noisy]


GAPS = {
    "bias_of": Gap(bias_of, _rounded_numbers, (
        Mistake("(rounded - x)", "(rounded - x).abs()",
                "That is the size of the error. A bias may cancel: keep the sign."),
        Mistake(".mean(0)", ".mean(-1)", "One bias per number: average over the tokens, the first dimension."),
        Mistake(".mean(0)", ".sum(0)", "A mean does not grow with the number of tokens; a sum does."),
        Mistake(".mean(0)", ".square().mean(0).sqrt()", "That is the size of the error. Keep its sign."),
        Mistake(".mean(0)", "", "Those are the errors of all tokens. The bias is their mean."),
    ), right=(
        ("(rounded - x)", "(rounded.double() - x)"),
        ("(rounded - x).mean(0)", "-(x - rounded).sum(0) / len(x)"),
    )),
    "noise_square": Gap(noise_square, _gradients, (
        Mistake(".var(0)", ".var(0, correction=0)",
                "Divide by m - 1, not by m: the mean was taken from the same batches. (var does so by default.)"),
        Mistake(".var(0)", ".square().mean(0)",
                "That is the square of the whole gradient. The noise is the deviation from the mean."),
        Mistake(".sum()", ".mean()", "The square of a length is the sum over all parameters, not their mean."),
        Mistake(".var(0)", ".var(1)", "Batches are compared with one another: dimension 0."),
        Mistake(".var(0)", ".std(0)", "Over the parameters, variances add up and standard deviations do not: use var."),
        Mistake(".var(0).sum()", ".var()", "First the variance of each parameter, over the batches; then their sum."),
        Mistake(".var(0)", ".sub(gradients.mean(0)).square()",
                "That is a sum over the batches. Divide by their number minus one."),
        Mistake(".sum()", ".sum() / len(gradients)",
                "That is the noise of the mean of all batches. Return the noise of one batch."),
        Mistake(".var(0).sum()", ".norm(dim=1).var()",
                "Two gradients of one length may point in different directions. Take the variance of every entry."),
        Mistake(".var(0).sum()", ".sum(1).var()",
                "Deviations of different parameters cancel in that sum. Take the variance of every entry first."),
    ), right=(
        ("gradients.var(0).sum()", "(gradients - gradients.mean(0)).square().sum() / (len(gradients) - 1)"),
        ("gradients.var(0).sum()", "gradients.double().var(0).sum().item()"),
    )),
    "common_square": Gap(common_square, _gradients, (
        Mistake("(products.sum() - products.trace()) / (count * (count - 1))", "products.mean()",
                "That is the square of the mean vector. Leave out the products of a vector with itself."),
        Mistake("(products.sum() - products.trace()) / (count * (count - 1))", "products.trace() / count",
                "Those are the products of each vector with itself. Take those of two different ones."),
        Mistake("(count * (count - 1))", "count**2",
                "How many pairs of different vectors are there? Not count squared."),
        Mistake("products.sum() - products.trace()", "products.sum()",
                "The diagonal holds the products of a vector with itself. Leave it out."),
        Mistake("(products.sum() - products.trace())", "products.triu(1).sum()",
                "Above the diagonal every pair stands once: there are count (count - 1) / 2."),
        Mistake("(count * (count - 1))", "count",
                "Each of the `count` rows of the table has count - 1 products of different vectors."),
        Mistake("(count * (count - 1))", "(count - 1) ** 2",
                "Each of the `count` rows of the table has count - 1 products of different vectors."),
    ), right=(
        ("products.sum() - products.trace()", "vectors.sum(0).square().sum() - vectors.square().sum()"),
        ("vectors @ vectors.mT", "torch.einsum('id,jd->ij', vectors, vectors).double()"),
    )),
    "tokens_at_bias": Gap(tokens_at_bias, lambda: [(0.04, 512, 1e-5), (2.0, 1024, 0.5)], (
        Mistake("tokens * noise / bias", "noise / (tokens * bias)",
                "tr Sigma = T E|n|^2: the noise of one token is larger."),
        Mistake("tokens * noise / bias", "tokens * bias / noise", "Upside down: a smaller bias is reached later."),
        Mistake("tokens * noise / bias", "tokens * (noise / bias) ** 0.5",
                "Both are squares of lengths already, and the square of the noise falls as 1/T."),
        Mistake("tokens * noise / bias", "tokens * (noise / bias) ** 2",
                "noise and bias are squares already: no second square."),
    ), right=(
        ("tokens * noise / bias", "noise / bias * tokens"),
        ("tokens * noise / bias", "torch.as_tensor(tokens * noise / bias)"),
    )),
}  # fmt: skip
