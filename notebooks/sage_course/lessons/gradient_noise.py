"""Notebook 06: the bias of rounding, the noise of a gradient, what batches have in common, and where the two meet."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes
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


GAPS = with_mistakes(
    __file__,
    {
        "bias_of": Gap(bias_of, _rounded_numbers),
        "noise_square": Gap(noise_square, _gradients),
        "common_square": Gap(common_square, _gradients),
        "tokens_at_bias": Gap(tokens_at_bias, lambda: [(0.04, 512, 1e-5), (2.0, 1024, 0.5)]),
    },
)
