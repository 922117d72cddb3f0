"""Notebook 09b: registers, a row's maximum without shared memory, sums of integers, and banks of shared memory."""

import torch

from sage_course.gaps import Gap, Mistake


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


EXCHANGES = """    for away in (1, 2):
        largest = torch.maximum(largest, largest[torch.arange(32) ^ away])
"""

GAPS = {
    "held": Gap(held, lambda: [(1, 2, 128), (2, 2, 64), (1, 0, 128)], (
        Mistake("scores * 128", "scores * d", "A tile of scores is [64, 128], whatever D is."),
        Mistake(" / 128", " * 4 / 128",
                "This is four times too many. A register holds a whole float32."),
        Mistake("gradients * d + scores", "gradients * d * scores", "The numbers of all matrices are added."),
        Mistake(" / 128", "", "The numbers are spread over the 128 threads of a warpgroup."),
    ), right=(
        ("64 * (gradients * d + scores * 128) / 128", "gradients * d / 2 + scores * 64"),
        ("64 * (gradients * d + scores * 128) / 128", "64 * (gradients * d + scores * 128) // 128"),
    )),
    "row_maximum": Gap(row_maximum,
        lambda: [(torch.randn(32, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)], (
        Mistake("(1, 2)", "(1,)", "Four threads share a row: one exchange reaches only two of them."),
        Mistake(EXCHANGES, "    largest = torch.maximum(torch.maximum(largest, largest[torch.arange(32) ^ 1]), "
                "largest[torch.arange(32) ^ 2])\n",
                "The second exchange must pass on what the first one found. Here thread 0 never hears of thread 3."),
        Mistake(EXCHANGES, "    largest = largest.amax().expand(32)\n", "Only four neighbours share a row."),
        Mistake("(1, 2)", "(1, 2, 4)", "Only four neighbours share a row; this mixes two rows."),
        Mistake(EXCHANGES, "    largest = largest.reshape(8, 4).amax(1)\n",
                "These are the right 8 numbers. Each of the 32 threads needs the one of its row."),
        Mistake("torch.maximum", "torch.add",
                "The largest number is wanted, not the sum: torch.maximum."),
        Mistake("(1, 2)", "(2, 4)", "The four threads of a row are 1, 2 and 3 apart, not 4."),
        Mistake("largest[torch.arange(32) ^ away]", "torch.arange(32) ^ away",
                "These are the numbers of the partners. Take what the partners have: largest[...]."),
        Mistake(" ^ away", " - away", "The partner of thread t is t XOR away, so that both exchange."),
    ), right=(
        ("torch.maximum(largest, largest[torch.arange(32) ^ away])",
         "torch.stack((largest, largest[torch.arange(32) ^ away])).amax(0)"),
    )),
    "units_per_one": Gap(units_per_one, lambda: [  # the last two have a bound that is a power of two
            (torch.tensor([3.0, 4.5]), torch.tensor(4.0), torch.tensor(3.9), 64),
            (torch.tensor([4.0, 3.0]), torch.tensor(4.0), torch.tensor(4.0), 64),
            (torch.tensor([2.0**-40, 3.0**-25]), torch.tensor(4.0), torch.tensor(4.0), 64),
        ], (
        Mistake("2 * d * ", "d * ",
                "This is twice too many. Sums of up to 2^30 must fit. dP and delta can each be D max|dO| max|V|."),
        Mistake("* largest_k\n", "* largest_k + 1e-8\n",
                "Gradients may be as small as the number that is added. `.clamp(min=1e-30)` guards against dO = 0."),
        Mistake("torch.floor", "torch.ceil", "Rounded up, a sum may exceed 2^30: round down."),
        Mistake("torch.floor", "torch.round", "Rounded up, a sum may exceed 2^30: round down."),
        Mistake("torch.floor(30 - torch.log2(bound))", "(30 - torch.log2(bound))", "A power of two: round down."),
        Mistake("2 ** torch.floor", "torch.floor", "That is the exponent: 2 to the power of it."),
        Mistake("floor(30", "floor(29", "This is half as many as fit: sums of up to 2^30."),
        Mistake("2 ** torch", "1 / 2 ** torch", "That is one unit. How many units are one?"),
        Mistake("30 - torch.log2(bound)", "torch.log2(bound) - 30", "A larger bound means fewer integers for one."),
    ), right=(
        ("2 ** torch.floor(30 - torch.log2(bound))", "torch.exp2(torch.floor(30 - torch.log2(bound)))"),
        ("2 ** torch.floor(30 - torch.log2(bound))", "2.0 ** (30 - bound.log2()).floor().double()"),
    )),
    "bank": Gap(bank, lambda: [(torch.arange(24)[:, None], torch.arange(32))], (
        Mistake(" ^ (row % 8)", "", "Without the swizzle a whole column is in one bank."),
        Mistake(" + column % 4", "", "A group takes four banks. Which of its numbers is this one?"),
        Mistake("4 * (", "(", "A place is four banks wide, one for each number of a group."),
        Mistake("4 * ((column // 4) ^ (row % 8)) + column % 4", "(column // 4) ^ (row % 8)",
                "That is a place, 0 to 7. It is four banks wide. Which of the four is it?"),
        Mistake("4 * ((column // 4) ^ (row % 8))", "4 * (column // 4) ^ (row % 8)",
                "Python computes + and * before ^: put the XOR of group and row in brackets, then multiply by 4."),
        Mistake("column // 4", "column % 8", "The numbers stand in groups of four: the group is column // 4."),
        Mistake("row % 8", "row", "From row 8 on the swizzle begins again: there are 8 places."),
        Mistake(" ^ (row % 8)", " + row % 8", "Use XOR, bit by bit. A sum leaves the 8 places."),
    ), right=(
        ("4 * ((column // 4) ^ (row % 8)) + column % 4", "(((column // 4) ^ (row & 7)) << 2) | (column & 3)"),
    )),
}  # fmt: skip
