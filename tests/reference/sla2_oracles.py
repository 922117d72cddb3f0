"""What the tests of SLA2's reference share: seeded tensors, and the definitions on full [Nq, Nk] matrices."""

import math

import torch
import torch.nn.functional as F
from torch.testing import assert_close

LENGTHS = [(1, 1), (16, 1), (33, 50), (64, 64)]  # Nq, Nk


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn_qkv(n_q, n_k, head_dim=8, heads=2, kv_heads=None):
    """Q, K, V [1, H, N, D]."""
    kv_shape = (1, kv_heads or heads, n_k, head_dim)
    return drawn(1, heads, n_q, head_dim), drawn(*kv_shape, seed=1), drawn(*kv_shape, seed=2)


def drawn_weights(*shape, seed=0):
    """In [0, 1)."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_weights(block_weights, n_q, n_k, block_q, block_kv):
    """The block weight of every pair of tokens, entry by entry: [..., Nq, Nk]."""
    return block_weights[..., (torch.arange(n_q) // block_q)[:, None], torch.arange(n_k) // block_kv]


def features(x, kind="softmax"):
    return {
        "softmax": x.exp() / x.exp().sum(-1, keepdim=True),
        "elu+1": torch.where(x > 0, x + 1, x.exp()),
        "relu": x * (x > 0),
    }[kind]


def averaged(weights, values):
    """weights V / rowsum(weights), and 0 for a row without any."""
    total = weights.sum(-1, keepdim=True)
    return weights @ values / torch.where(total == 0, 1, total)


def dense(q, k, v, mask, alpha, settings):
    """(O, O_s, O_l) from full matrices: softmax over selected keys, averages by common features of the others."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    seen = token_weights(mask, q.shape[-2], k.shape[-2], settings.block_q, settings.block_kv)
    c = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    s = (q @ k.mT * c).masked_fill(~seen, -math.inf)
    o_s = averaged((s - s.amax(-1, keepdim=True).clamp(min=-1e9)).exp(), v)
    o_l = averaged(features(q, settings.feature_map) @ features(k, settings.feature_map).mT * ~seen, v)
    share = alpha.repeat_interleave(settings.block_q, -1)[..., : q.shape[-2], None]
    return share * o_s + (1 - share) * o_l, o_s, o_l


def sdpa_over(q, k, v, seen, scale=None):
    """Softmax attention over the keys that a query may see, and 0 where there are none."""
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return torch.where(seen.any(-1, keepdim=True), output, 0)


def gradients_of(function, tensors, do):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves, do)


def assert_all_close(found, expected, atol):
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, atol=atol, rtol=0)
