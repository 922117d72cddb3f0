"""Notebook 10: block scores, Top-k, the two branches and their mix, for one head (SLA2, Algorithm 2)."""

import math
from functools import partial

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes

BLOCK_Q, BLOCK_KV = 16, 8


def block_scores(q, k, c):
    q_bar = q.unflatten(-2, (-1, BLOCK_Q)).mean(-2)
    k_bar = k.unflatten(-2, (-1, BLOCK_KV)).mean(-2)
    return torch.softmax(c * q_bar @ k_bar.mT, -1)


def top_k_mask(scores, count):
    order = scores.argsort(-1, descending=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)


def sparse_tile(q_i, k_tiles, v_tiles, selected, c):
    m, l, o = torch.full_like(q_i[:, :1], -math.inf), torch.zeros_like(q_i[:, :1]), torch.zeros_like(q_i)
    for j in selected:
        s_ij = q_i @ k_tiles[j].mT * c
        m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
        p, shrink = torch.exp(s_ij - m_new), torch.exp(m - m_new)
        l = shrink * l + p.sum(-1, keepdim=True)
        o = shrink * o + p @ v_tiles[j]
        m = m_new
    return o / l, m + torch.log(l)


def key_tile_sums(k_j, v_j):
    phi_k = torch.softmax(k_j, -1)
    return phi_k.mT @ v_j, phi_k.sum(0)


def complement_sums(mask, h, z):
    complement = (~mask).to(h.dtype)
    h_i = complement @ h.flatten(1)
    return h_i.unflatten(1, h.shape[1:]), complement @ z


def linear_tile(q_i, h_i, z_i):
    phi_q = torch.softmax(q_i, -1)
    return phi_q @ h_i / (phi_q @ z_i)[:, None]


def sparse_linear_head(q, k, v, mask, alpha, c):
    k_tiles, v_tiles = k.split(BLOCK_KV), v.split(BLOCK_KV)
    h, z = (torch.stack(x) for x in zip(*map(key_tile_sums, k_tiles, v_tiles), strict=True))
    h_i, z_i = complement_sums(mask, h, z)
    tiles = []
    for i, q_i in enumerate(q.split(BLOCK_Q)):
        selected = mask[i].nonzero().flatten()
        o_s, _ = sparse_tile(q_i, k_tiles, v_tiles, selected, c)
        o_l = linear_tile(q_i, h_i[i], z_i[i])
        tiles.append(alpha[i] * o_s + (1 - alpha[i]) * o_l)
    return torch.cat(tiles)


_draw = partial(draws, dtype=torch.float64)


def _queries_and_keys() -> list[tuple]:
    q, k = _draw(0, (2 * BLOCK_Q, 16), (6 * BLOCK_KV, 16))
    return [(3 * q, 3 * k, 0.3), (3 * q[:BLOCK_Q, :4], 3 * k[:, :4], 0.5)]


def _scores() -> list[tuple]:
    (scores,) = _draw(1, (3, 6))
    return [(scores, 2), (scores - 5, 3), (scores.softmax(-1)[None], 1)]


def _tiles() -> list[tuple]:
    q_i, k, v = _draw(2, (BLOCK_Q, 16), (6 * BLOCK_KV, 16), (6 * BLOCK_KV, 16))
    k[3 * BLOCK_KV :] *= 3  # so that later tiles hold the largest scores
    tiles = k.split(BLOCK_KV), v.split(BLOCK_KV)
    return [(q_i, *tiles, torch.tensor([1, 3, 5]), 0.25), (q_i, *tiles, torch.tensor([4]), 0.25)]


def _masks_and_sums() -> list[tuple]:
    scores, h, z = _draw(4, (3, 6), (6, 4, 4), (6, 4))
    scores[:, 0] = 9  # a block that every row selects
    mask, huge = top_k_mask(scores, 2), h.float()
    huge[0] *= 1e6  # a sum over all blocks loses the digits of the others
    return [(mask, h, z.exp()), (mask, huge, z.exp().float())]


def _one_head() -> list[tuple]:
    q, k, v = _draw(6, (2 * BLOCK_Q, 16), (6 * BLOCK_KV, 16), (6 * BLOCK_KV, 16))
    mask = top_k_mask(block_scores(q, k, 0.25), 2)
    return [(q, k, v, mask, torch.tensor([0.3, 0.6], dtype=torch.float64), 0.25)]


GAPS = with_mistakes(
    __file__,
    {
        "block_scores": Gap(block_scores, _queries_and_keys),
        "top_k_mask": Gap(top_k_mask, _scores),
        "sparse_tile": Gap(sparse_tile, _tiles),
        "key_tile_sums": Gap(key_tile_sums, lambda: [tuple(_draw(3, (BLOCK_KV, 4), (BLOCK_KV, 4)))]),
        "complement_sums": Gap(complement_sums, _masks_and_sums),
        "sparse_linear_head": Gap(sparse_linear_head, _one_head),
    },
)
