"""What may be done so that dS hurts less: options of SageBwd on whole matrices, none of which the paper has.

Without quantisation each of them changes nothing. What they lean on:

    delta           sum_j P_ij dP_ij = dO_i . O_i, so delta may come from the very P and dP that dS is made of. Their
                    errors then cancel in dP - delta, and rows of dS sum to zero.
    wide_output     the same product with O as it was before it was rounded to 16 bit.
    rounded_sum     O = P~ V / rowsum(P~). INT8 loses small entries of P~, always downwards: rowsum(P^) is what is left.
    smooth_v        V = V_sm + 1 mu_V^T moves all of row i of dP by dO_i . mu_V, and delta_i by as much: dP - delta
                    stays. Rows of P sum to one, so O = P V_sm + 1 mu_V^T.
    token_scales    dP = dO V^T sums over features: each token of dO and of V may have a scale of its own.
    key_mean        dS K = dS K_sm + rowsum(dS) mu_K^T. The second term is zero, but that of dS^ is not.
    two_terms       dS = dS^ + R, and the remainder R has a grid of its own, 254 times finer: dS K ~ dS^ K^ + R^ K^.
    rotate          dS K = (dS H)(H K) for a Hadamard matrix H = H^T = H^-1, which spreads an outlier over its tile.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.checks import check_choice, check_switches, is_number, shown
from sage_ref.quantization import block_max, spread

DELTAS = ("output", "probabilities")


class Repair(NamedTuple):
    """The defaults are SageBwd as the paper has it.

    delta: "output": rowsum(dO * O). "probabilities": rowsum(P * dP) / rowsum(P).
    wide_output: delta's O is not rounded to 16 bit.
    rounded_sum: O is divided by the sum of what is multiplied, rowsum(P^), and not by rowsum(P~).
    smooth_v: V less its mean over tokens, in O and in dP. As with K, a NaN in V then reaches every query.
    token_scales: dO and V have one scale per token where dP is quantised, not one per block.
    key_mean: dQ + c rowsum(dS^) mu_K^T, where K is smoothed.
    two_terms: share of the tiles of dS, those with the largest entries first, that get a second term.
    rotate: dS times a Hadamard matrix, along the keys of each tile for dQ, along its queries for dK.
    """

    delta: str = "output"
    wide_output: bool = False
    rounded_sum: bool = False
    smooth_v: bool = False
    token_scales: bool = False
    key_mean: bool = False
    two_terms: float = 0.0
    rotate: bool = False


def check_repair(repair: Repair) -> None:
    """TypeError or ValueError naming the option, what was expected and what came."""
    if not isinstance(repair, Repair):
        raise TypeError(f"repair: expected a Repair, got {type(repair).__name__}")
    check_choice("delta", repair.delta, DELTAS)
    check_switches(**{name: getattr(repair, name) for name, x in Repair._field_defaults.items() if x is False})
    if not is_number(repair.two_terms) or not 0 <= repair.two_terms <= 1:
        raise ValueError(f"two_terms: expected a share of the tiles, from 0 to 1, got {shown(repair.two_terms)}")


def matching_delta(p: Tensor, weighted_dp: Tensor) -> Tensor:
    """rowsum(P * dP) / rowsum(P), [..., Nq, 1]: the delta for which rows of P * (dP - delta) sum to zero.

    weighted_dp: P * dP.
    """
    return weighted_dp.sum(-1, keepdim=True) / p.sum(-1, keepdim=True)


def in_two_terms(ds: Tensor, tile: tuple[int, int], share: float, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """dS^ + R^ in a share of the tiles, dS^ in the others. rounded: to the INT8 grid."""
    first = rounded(ds)
    if share == 0:
        return first
    return first + rounded(ds - first).masked_fill(~largest_tiles(ds, tile, share), 0)


def largest_tiles(ds: Tensor, tile: tuple[int, int], share: float) -> Tensor:
    """bool like dS [..., N, M]: True in a share of each head's tiles that are not all zeros, the largest max|dS| first.

    A kernel would compare with a threshold, that of the step before.
    """
    rows, columns = (min(block, size) for block, size in zip(tile, ds.shape[-2:], strict=True))
    largest = torch.nan_to_num(block_max(ds, rows, columns), nan=0.0)
    ranked = largest.flatten(-2).sort(-1, descending=True).values  # [..., tiles]
    count = torch.ceil(share * (ranked > 0).sum(-1, keepdim=True)).long()
    threshold = ranked.gather(-1, (count - 1).clamp_min(0))[..., None]  # [..., 1, 1]
    return spread((largest >= threshold) & (largest > 0), (rows, columns), *ds.shape[-2:])


def rotate_tokens(x: Tensor, block: int) -> Tensor:
    """H x_j for each block x_j of `block` tokens of x [..., N, C]; a partial last block stays. Twice, it gives x again.

    block: a power of two.
    """
    whole = x.shape[-2] // block * block
    blocks = x[..., :whole, :].unflatten(-2, (whole // block, block))
    return torch.cat([(hadamard(block, x) @ blocks).flatten(-3, -2), x[..., whole:, :]], -2)


def hadamard(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix over sqrt(size), [size, size]: symmetric, and its own inverse. dtype and device: of `like`."""
    matrix = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
