"""SLA: attention split by a block mask into a softmax part and a linear part (arXiv 2509.24006).

The mask M [Tm, Tn] has one entry per block of block_q queries and block_kv keys. P = P1 + P2 with P1 = P * M: P1 holds
few blocks but most of the mass, P2 is close to low rank.

sparse branch   O_s = softmax(c Q K^T, over the keys with M = 1) V
linear branch   O_l = phi(Q_i) H_i / (phi(Q_i) Z_i)        H_i = sum_j (1 - M_ij) phi(K_j)^T V_j
                                                           Z_i = sum_j (1 - M_ij) phi(K_j)^T 1
SLA             O = O_s + Proj(O_l)

Both branches take weights in [0, 1] in place of M (SLA2's router trains through them); at 0 and 1 they are exact.
A row without a selected block has O_s = 0, a row without an unselected one O_l = 0.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_ref.attention import softmax_scale
from sage_ref.checks import check_count, check_heads, check_share
from sage_ref.shapes import working_dtype
from sage_ref.smoothing import smooth_key

FEATURE_MAPS = ("softmax", "elu+1", "relu")


@dataclass(frozen=True)
class BlockSettings:
    """block_q x block_kv: what one entry of a block mask stands for. scale: c, None means 1/sqrt(D).

    feature_map: phi of the linear branch, one of FEATURE_MAPS. quantize: the sparse branch's forward pass in INT8.
    """

    block_q: int = 128
    block_kv: int = 64
    scale: float | None = None
    feature_map: str = "softmax"
    quantize: bool = False

    def __post_init__(self):
        check_count("block_q", self.block_q)
        check_count("block_kv", self.block_kv)
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map: expected one of {FEATURE_MAPS}, got {self.feature_map!r}")


def block_count(n: int, block: int) -> int:
    """Blocks of `block` tokens in a sequence of n; the last may be partial."""
    return -(-n // block)


def into_blocks(x: Tensor, block: int) -> Tensor:
    """[..., N, D] -> [..., ceil(N / block), block, D], the last block filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % block)).unflatten(-2, (-1, block))


def block_mean(x: Tensor, block: int) -> Tensor:
    """Mean of the tokens of each block, [..., N, D] -> [..., ceil(N / block), D]; a partial block's own tokens only."""
    blocks = into_blocks(x, block)
    first = torch.arange(blocks.shape[-3], device=x.device) * block
    tokens = (x.shape[-2] - first).clamp(max=block)
    return blocks.sum(-2) / tokens[:, None]


def spread_blocks(block_weights: Tensor, n_q: int, n_k: int, settings: BlockSettings) -> Tensor:
    """The weight of every (query, key) pair: [..., Tm, Tn] -> [..., Nq, Nk]."""
    rows = block_weights.repeat_interleave(settings.block_q, -2)[..., :n_q, :]
    return rows.repeat_interleave(settings.block_kv, -1)[..., :n_k]


def selected_count(sparsity: float, key_blocks: int) -> int:
    """How many key blocks a query block selects: (1 - sparsity) of them, rounded (half to even), and at least one."""
    return max(1, round((1 - sparsity) * key_blocks))


def top_blocks(scores: Tensor, count: int) -> Tensor:
    """bool, True for the `count` largest scores of each row; among equal scores the block that comes first wins.

    scores [..., Tm, Tn]. count beyond Tn selects all. A NaN counts as larger than any number.
    """
    scores = scores + 0.0  # CUDA sorts -0 after 0
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def heuristic_scores(query: Tensor, key: Tensor, settings: BlockSettings) -> Tensor:
    """SLA's guess at where the mass is: softmax(c Qbar Kbar^T) of block means, K smoothed first. [..., Tm, Tn]."""
    q_bar = block_mean(query, settings.block_q)
    k_bar = block_mean(smooth_key(key)[0], settings.block_kv)
    return (q_bar @ k_bar.mT * softmax_scale(settings.scale, query.shape[-1])).softmax(-1)


def block_mass(query: Tensor, key: Tensor, settings: BlockSettings) -> Tensor:
    """Where the mass is: the sum of P over a block's keys, mean over its queries. [..., Tm, Tn], rows sum to 1."""
    p = (query @ key.mT * softmax_scale(settings.scale, query.shape[-1])).softmax(-1)
    per_query = into_blocks(p.mT, settings.block_kv).sum(-2).mT  # [..., Nq, Tn]
    return block_mean(per_query, settings.block_q)


def feature_map(x: Tensor, kind: str) -> Tensor:
    """phi(x) >= 0, [..., N, D] -> [..., N, D]: softmax over the features, elu(x) + 1, or relu(x)."""
    if kind == "softmax":
        return x.softmax(-1)
    return F.elu(x) + 1 if kind == "elu+1" else F.relu(x)


def sparse_branch(
    query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, settings: BlockSettings
) -> tuple[Tensor, Tensor]:
    """O_s = P V with P_ij proportional to M e^{S_ij}, and L = log(sum_j M e^{S_ij}); differentiable in all four.

    block_weights: M in [0, 1], bool or float [..., Tm, Tn]. Returns [..., Nq, D] and [..., Nq, 1].
    A query whose weights are all 0 has O_s = 0, L = -inf and no gradient. Where some are not, a weight of 0 has the
    gradient dO . (V_j - O_s) e^{S - L} that any weight has, with e^{S - L} bounded where it would overflow.
    """
    s = query @ key.mT * softmax_scale(settings.scale, query.shape[-1])
    weight = spread_blocks(block_weights.to(s.dtype), *s.shape[-2:], settings)
    # M e^{S - m} with m = max(S + log M), and log M bounded below: then neither e^{S - m} nor a gradient can overflow.
    smallest = math.sqrt(torch.finfo(s.dtype).tiny)
    log_m_e_s = (s + weight.clamp_min(smallest).log()).masked_fill(weight == 0, -math.inf)
    m = log_m_e_s.amax(-1, keepdim=True).detach()
    p = weight * torch.exp((s - m.masked_fill(m == -math.inf, math.inf)).clamp(max=-math.log(smallest)))
    l = p.sum(-1, keepdim=True)
    l = l.masked_fill(l == 0, 1)  # no key, and m is -inf
    return p @ value / l, m + l.log()


def key_block_sums(key_features: Tensor, value: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """What key blocks add to the linear branch: h_j = phi(K_j)^T V_j [..., Tn, D, D] and z_j = phi(K_j)^T 1."""
    k_j, v_j = into_blocks(key_features, settings.block_kv), into_blocks(value, settings.block_kv)
    return k_j.mT @ v_j, k_j.sum(-2)


def weighted_sums(weights: Tensor, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """H_i = sum_j w_ij h_j and Z_i = sum_j w_ij z_j: one matmul of [Tm, Tn] with [Tn, D (D + 1)].

    Adding up the unselected blocks of each query block would read nearly every h_j Tm times; the matmul reads it once.
    """
    width = h.shape[-1]
    sums = weights @ torch.cat((h.flatten(-2), z), -1)
    return sums[..., : width * width].unflatten(-1, (width, width)), sums[..., width * width :]


def linear_branch(query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, settings: BlockSettings) -> Tensor:
    """O_l over key blocks weighted by block_weights [..., Tm, Tn] (1 - M in SLA): [..., Nq, D], differentiable."""
    h, z = key_block_sums(feature_map(key, settings.feature_map), value, settings)
    h_i, z_i = weighted_sums(block_weights.to(query.dtype), h, z)
    q_i = into_blocks(feature_map(query, settings.feature_map), settings.block_q)
    output = q_i @ h_i / divisor(q_i @ z_i[..., None])
    return output.flatten(-3, -2)[..., : query.shape[-2], :]


def divisor(weight_sum: Tensor) -> Tensor:
    """What to divide a weighted sum by: its weights' sum, and infinity where that is 0 and there is nothing to average.

    For the linear branch, 0 means that no key has a feature in common with the query. A sum so close to 0 that the
    gradients would overflow counts as 0.
    """
    limits = torch.finfo(weight_sum.dtype)
    return weight_sum.masked_fill(weight_sum < limits.tiny / limits.eps, math.inf)


class SLA(nn.Module):
    """O = O_s + Proj(O_l): SLA with its block mask from mean-pooled queries and keys.

    sparsity: share of key blocks that a query block leaves to the linear branch. skipped: share of key blocks, those
    with the lowest scores, that neither branch sees. Proj starts at zero: at first SLA is sparse attention.
    forward(query, key, value [B, H, N, D], GQA as in SLA2) -> [B, H, Nq, D]. Plain PyTorch, differentiable.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        sparsity: float = 0.9,
        skipped: float = 0.0,
        block_q: int = 128,
        block_kv: int = 64,
        feature_map: str = "softmax",
    ):
        super().__init__()
        check_count("head_dim", head_dim)
        check_count("num_heads", num_heads)
        check_share("sparsity", sparsity)
        check_share("skipped", skipped)
        if skipped > sparsity:
            raise ValueError(f"skipped: expected at most sparsity, {sparsity}, got {skipped}")
        self.head_dim, self.num_heads, self.sparsity, self.skipped = head_dim, num_heads, sparsity, skipped
        self.settings = BlockSettings(block_q, block_kv, feature_map=feature_map)
        self.proj = nn.Linear(head_dim, head_dim)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def block_masks(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(selected, linear), bool [B, H, Tm, Tn]: what each branch sees. query and key with equally many heads."""
        scores = heuristic_scores(query, key, self.settings).detach()
        key_blocks = scores.shape[-1]
        selected = top_blocks(scores, selected_count(self.sparsity, key_blocks))
        seen = top_blocks(scores, key_blocks - round(self.skipped * key_blocks))
        return selected, seen & ~selected

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = check_heads(query, key, value, self.num_heads, self.head_dim)
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = (x.to(working_dtype(x)) for x in (query, key, value))
            k, v = (x.repeat_interleave(self.num_heads // x.shape[1], 1) for x in (k, v))
            selected, linear = self.block_masks(q, k)
            o_s, _ = sparse_branch(q, k, v, selected, self.settings)
            o_l = linear_branch(q, k, v, linear, self.settings)
            repair = F.linear(o_l, self.proj.weight.to(o_l.dtype), self.proj.bias.to(o_l.dtype))
        return (o_s + repair).to(query.dtype)
