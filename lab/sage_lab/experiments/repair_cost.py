"""The cost of a remedy in a kernel, counted from the algorithm; its time can only be measured on a GPU."""

import math
from typing import NamedTuple

import torch

from sage_lab.repairs import RepairedSettings

# Philox-4x32 with ten rounds, of ten instructions each, gives four numbers; scaling and adding one is two more.
RANDOM_NUMBER = 27
# From the integers of S to P: convert, scale, subtract L, exp2; then add P dP and P to the row's sums.
PROBABILITY_AND_SUMS = 6
ROUND_REMAINDER = 4  # subtract what was rounded, max|.|, scale, round


class Cost(NamedTuple):
    """The additional cost of both passes with a remedy; negative numbers are savings.

    matmuls: of a tile, in INT8 products of the size of [block_q, D] with [D, block_kv]; one in 16 bit counts as two.
        SageBwd's forward pass has two, its backward pass six.
    operations: on each entry of a tile, outside the matmuls.
    bytes_per_token: of one head, to and from memory, each tensor read once and written once.
    """

    matmuls: float = 0.0
    operations: float = 0.0
    bytes_per_token: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(x + y for x, y in zip(self, other, strict=True)))


def cost(settings: RepairedSettings, head_dim: int) -> Cost:
    """Count the additions of `settings` to SageBwd with the same granularity. Inputs have 16 bit."""
    dp_in_int8 = "dP" not in settings.exact_matmuls
    roundings = 2 if settings.granularity == "row" else 1  # of dS
    total = Cost()
    if dp_in_int8:  # dO^ and V^ exist already, for dV and for O
        total += Cost(matmuls=-1, operations=2, bytes_per_token=-2 * head_dim)
    if "O" in settings.exact_matmuls:  # V is read in 16 bit
        total += Cost(matmuls=1, bytes_per_token=head_dim)
    if settings.matching_delta:  # S and dP of whole rows before the loop; delta no longer reads O and dO
        operands = 2 * head_dim + (2 if dp_in_int8 else 4) * head_dim
        total += Cost(2 if dp_in_int8 else 3, PROBABILITY_AND_SUMS, operands - 4 * head_dim)
    if settings.output_dtype == torch.float64:  # written and read in 32 bit
        total += Cost(bytes_per_token=4 * head_dim)
    if settings.rounded_sum:  # a second row sum: L needs that of P~
        total += Cost(operations=1)
    if settings.smooth_v:  # V is read once more, for its mean. With dP in 16 bit the backward pass need not know of it
        total += Cost(bytes_per_token=2 * head_dim)
    if settings.token_scales:  # a scale per row and per column instead of one; dO and V are rounded once more
        total += Cost(operations=1, bytes_per_token=2 * head_dim + 8)
    if settings.key_mean:  # a row sum
        total += Cost(operations=1)
    if settings.p_rounding == "ordered":  # add a number that the thread keeps
        total += Cost(operations=1)
    if settings.ds_rounding == "stochastic":
        total += Cost(operations=RANDOM_NUMBER * roundings)
    if settings.two_terms:  # R K and R^T Q
        total += Cost(2 * settings.two_terms, ROUND_REMAINDER * roundings * settings.two_terms)
    if settings.rotate:  # butterflies along both axes; H K and H Q in INT8 are written and read
        butterflies = math.log2(settings.block_q) + math.log2(settings.block_kv)
        total += Cost(operations=butterflies, bytes_per_token=4 * head_dim)
    return total
