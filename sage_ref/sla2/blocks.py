"""Blocks of queries and of keys, and the block mask M [Tm, Tn]: one entry per block_q queries and block_kv keys.

Between tokens and blocks (`into_blocks`, `from_blocks`, `block_mean`, `spread_blocks`, `per_query`), how many blocks a
row keeps (`selected_count`), and two scores of blocks: where the softmax's mass is (`block_mass`), and SLA's guess from
block means (`heuristic_scores`).

Scores [Nq, Nk] exist for some blocks of queries at a time (`query_parts`), so memory grows with N and not with its
square.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sage_ref.attention import softmax_scale
from sage_ref.checks import check_choice, check_count, check_scale, check_switches
from sage_ref.shapes import block_that_fits
from sage_ref.smoothing import smooth_key

FEATURE_MAPS = ("softmax", "elu+1", "relu")
BACKWARDS = ("matched", "printed")
PART_SCORES = 1 << 22  # scores that exist at a time: 16 MB in float32


@dataclass(frozen=True)
class BlockSettings:
    """Blocks of block_q x block_kv tokens, each one entry of a block mask, and what SLA2 computes in them.

    Args:
        block_q, block_kv: Queries and keys of a block.
        scale: c; None means 1/sqrt(D).
        feature_map: phi of the linear branch, one of `FEATURE_MAPS`.
        quantize: Run the sparse branch's forward pass in INT8.
        backward: Where the backward pass of a quantised forward pass gets P from: "matched", from the forward's INT8
            scores, so that rows of P sum to 1; "printed", from 16-bit scores, as Algorithm 3 has it (erratum).

    Raises:
        TypeError, ValueError: A field does not fit; the message names it.
    """

    block_q: int = 128
    block_kv: int = 64
    scale: float | None = None
    feature_map: str = "softmax"
    quantize: bool = False
    backward: str = "matched"

    def __post_init__(self):
        check_count("block_q", self.block_q)
        check_count("block_kv", self.block_kv)
        check_scale(self.scale)
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_switches(quantize=self.quantize)
        check_choice("backward", self.backward, BACKWARDS)

    @property
    def matched(self) -> bool:
        """Return whether the backward pass multiplies the forward's INT8 operands for its scores."""
        return self.quantize and self.backward == "matched"


def block_count(n: int, block: int) -> int:
    """Return the number of blocks of `block` tokens in a sequence of n; the last may be partial."""
    return -(-n // block)


def into_blocks(x: Tensor, block: int) -> Tensor:
    """Cut [..., N, D] into [..., ceil(N / block), block, D], with zeros at the end; block is N at most."""
    block = block_that_fits(block, x.shape[-2])
    x = F.pad(x, (0, 0, 0, -x.shape[-2] % block))
    return x.reshape(*x.shape[:-2], -1, block, x.shape[-1])  # unflatten has no rule for batches of gradients


def from_blocks(blocks: Tensor, n: int) -> Tensor:
    """Reverse `into_blocks`: [..., ceil(N / block), block, D] -> [..., N, D]."""
    return blocks.reshape(*blocks.shape[:-3], -1, blocks.shape[-1])[..., :n, :]


def block_mean(x: Tensor, block: int) -> Tensor:
    """Return the mean of each block's own tokens, [..., N, D] -> [..., ceil(N / block), D]."""
    blocks = into_blocks(x, block)
    first = torch.arange(blocks.shape[-3], device=x.device) * block
    tokens = (x.shape[-2] - first).clamp(max=block)
    return blocks.sum(-2) / tokens[:, None]


def router_means(query: Tensor, key: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """Return what every router sees: Qbar [..., Tm, D] and Kbar [..., Tn, D], block means of Q and of smoothed K."""
    return block_mean(query, settings.block_q), block_mean(smooth_key(key)[0], settings.block_kv)


def spread_blocks(block_weights: Tensor, n_q: int, n_k: int, settings: BlockSettings) -> Tensor:
    """Return the weight of every (query, key) pair: [..., Tm, Tn] -> [..., Nq, Nk]."""
    by_query = block_weights.repeat_interleave(block_that_fits(settings.block_q, n_q), -2)[..., :n_q, :]
    return by_query.repeat_interleave(block_that_fits(settings.block_kv, n_k), -1)[..., :n_k]


def per_query(alpha: Tensor, n_q: int, settings: BlockSettings) -> Tensor:
    """Return alpha of each query's block: [..., Tm] -> [..., Nq, 1]."""
    return alpha.repeat_interleave(block_that_fits(settings.block_q, n_q), -1)[..., :n_q, None]


def query_parts(query: Tensor, key: Tensor, settings: BlockSettings) -> list[tuple[slice, slice]]:
    """Return consecutive parts of the queries, with at most PART_SCORES scores each, or one block of queries.

    query [..., Nq, D], key [..., Nk, D]. Each part is a slice of tokens and the same part as a slice of blocks.
    """
    n_q, row = query.shape[-2], query[..., 0, 0].numel() * key.shape[-2]
    if torch.compiler.is_exporting() or n_q * row <= PART_SCORES:
        return [(slice(None), slice(None))]
    block = block_that_fits(settings.block_q, n_q)
    blocks = max(1, PART_SCORES // (row * block))
    firsts = range(0, block_count(n_q, block), blocks)
    return [(slice(i * block, (i + blocks) * block), slice(i, i + blocks)) for i in firsts]


def by_parts(compute: Callable[..., tuple[Tensor, ...]], parts: list, tokens: tuple, blocks: tuple) -> list[Tensor]:
    """Compute something for the queries of each part, and join the results along the queries or their blocks.

    compute takes the part's share of `tokens`, tensors [..., Nq, X], then that of `blocks`, tensors [..., Tm, X].
    """
    if len(parts) == 1:
        return list(compute(*tokens, *blocks))
    found = [compute(*(x[..., i, :] for x in tokens), *(x[..., b, :] for x in blocks)) for i, b in parts]
    return [torch.cat(x, -2) for x in zip(*found, strict=True)]


def by_parts_again(
    compute: Callable[..., tuple[Tensor, ...]], parts: list, tokens: tuple, blocks: tuple
) -> list[Tensor]:
    """Compute `by_parts`, and each of several parts once more in the backward pass, so that nothing of it is kept."""
    if len(parts) > 1 and torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    return by_parts(compute, parts, tokens, blocks)


def selected_count(sparsity: float, key_blocks: int) -> int:
    """Return how many key blocks a query block selects: (1 - sparsity) of them, half rounded to even, at least one."""
    return max(1, round((1 - sparsity) * key_blocks))


def heuristic_scores(query: Tensor, key: Tensor, settings: BlockSettings) -> Tensor:
    """Guess where the mass is, as SLA does: softmax(c Qbar Kbar^T) of block means, K smoothed first, [..., Tm, Tn]."""
    q_bar, k_bar = router_means(query, key, settings)
    return (q_bar @ k_bar.mT * softmax_scale(settings.scale, query.shape[-1])).softmax(-1)


def block_mass(query: Tensor, key: Tensor, settings: BlockSettings) -> Tensor:
    """Return the mass of P by block, summed over keys, mean over queries: [..., Tm, Tn], rows sum to 1."""

    def mass(q_i: Tensor) -> tuple[Tensor]:
        p = (q_i @ key.mT * softmax_scale(settings.scale, query.shape[-1])).softmax(-1)
        by_query = into_blocks(p.mT, settings.block_kv).sum(-2).mT  # [..., queries, Tn]
        return (block_mean(by_query, settings.block_q),)

    return by_parts(mass, query_parts(query, key, settings), (query,), ())[0]
