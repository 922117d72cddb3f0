"""Notebook 09b: registers, a row's maximum without shared memory, sums of integers, and banks of shared memory."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes


def held(gradients, scores, d):
    return 64 * (gradients * d + scores * 128) / 128


def row_maximum(largest):
    for away in (1, 2):
        largest = torch.maximum(largest, largest[torch.arange(32) ^ away])
    return largest


def units_per_one(largest_do, largest_v, largest_k, d):
    bound = 2 * d * largest_do * largest_v * largest_k
    return 2 ** torch.floor(30 - torch.log2(bound))


def bank(row, column):
    return 4 * ((column // 4) ^ (row % 8)) + column % 4


GAPS = with_mistakes(
    __file__,
    {
        "held": Gap(held, lambda: [(1, 2, 128), (2, 2, 64), (1, 0, 128)]),
        "row_maximum": Gap(
            row_maximum,
            lambda: [(torch.randn(32, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)],
        ),
        "units_per_one": Gap(
            units_per_one,
            lambda: [  # the last two have a bound that is a power of two
                (torch.tensor([3.0, 4.5]), torch.tensor(4.0), torch.tensor(3.9), 64),
                (torch.tensor([4.0, 3.0]), torch.tensor(4.0), torch.tensor(4.0), 64),
                (torch.tensor([2.0**-40, 3.0**-25]), torch.tensor(4.0), torch.tensor(4.0), 64),
            ],
        ),
        "bank": Gap(bank, lambda: [(torch.arange(24)[:, None], torch.arange(32))]),
    },
)
