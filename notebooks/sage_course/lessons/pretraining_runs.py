"""Notebook 06b: a rule for a verdict, differences by seed, and the interval that a bootstrap gives their mean."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes


def paired(losses, baseline):
    return [losses[seed] - baseline[seed] for seed in losses if seed in baseline]


def resampled_means(values, choices):
    return values[choices].mean(-1)


def interval(means):
    return torch.quantile(means, means.new_tensor([0.025, 0.975]))


def verdict(low, high, gap, tokens, no_gap_at):
    if tokens <= no_gap_at:
        return "not tested"
    if low > 0:
        return "supported"
    return "contradicted" if high < gap else "undecided"


def _losses_by_seed() -> list[tuple]:
    return [
        ({0: 0.70, 1: 0.75, 2: 0.72}, {0: 0.71, 1: 0.73, 2: 0.73}),
        ({3: 0.80, 1: 0.75, 4: 0.60}, {1: 0.73, 2: 0.90, 3: 0.78}),  # another order, and a seed that is missing
    ]


def _values_and_choices() -> list[tuple]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, generator=generator, dtype=torch.float64)
    return [
        (torch.tensor([1.0, 2.0, 6.0]), torch.tensor([[0, 0, 0], [0, 1, 2], [2, 2, 1]])),
        (values, torch.randint(6, (6, 6), generator=generator)),
    ]


def _bounds() -> list[tuple]:
    intervals = [(0.5, 3.0), (-1.0, 1.0), (-1.0, 3.0), (-3.0, -1.0), (0.5, 1.5), (-3.0, 1.0)]
    tested = [(low, high, 2.1, 2**21, 2**18) for low, high in intervals]
    return [*tested, (0.5, 3.0, 2.1, 2**17, 2**18), (-1.0, 1.0, 2.1, 2**18, 2**18)]


GAPS = with_mistakes(
    __file__,
    {
        "paired": Gap(paired, _losses_by_seed),
        "resampled_means": Gap(resampled_means, _values_and_choices),
        "interval": Gap(interval, lambda: [(torch.linspace(-1, 3, 401) ** 3,)]),
        "verdict": Gap(verdict, _bounds),
    },
)
