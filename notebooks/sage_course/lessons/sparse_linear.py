"""Notebook 10: block scores, Top-k, the two branches and their mix, for one head (SLA2, Algorithm 2)."""

import math
from functools import partial

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws

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


def mass_held(l_selected, l_all):
    return torch.exp(l_selected - l_all)


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


def _log_sums() -> list[tuple]:
    l_all, share = torch.tensor([[2.0], [-1.0], [120.0]]), torch.tensor([[0.5], [0.25], [0.9]])
    return [(l_all + share.log(), l_all)]


def _masks_and_sums() -> list[tuple]:
    scores, h, z = _draw(4, (3, 6), (6, 4, 4), (6, 4))
    scores[:, 0] = 9  # a block that every row selects
    mask, huge = top_k_mask(scores, 2), h.float()
    huge[0] *= 1e6  # a sum over all blocks loses the digits of the others
    return [(mask, h, z.exp()), (mask, huge, z.exp().float())]


def _query_tile() -> list[tuple]:
    q_i, k, v = _draw(5, (BLOCK_Q, 4), (BLOCK_KV, 4), (BLOCK_KV, 4))
    return [(q_i, *key_tile_sums(k, v))]


def _one_head() -> list[tuple]:
    q, k, v = _draw(6, (2 * BLOCK_Q, 16), (6 * BLOCK_KV, 16), (6 * BLOCK_KV, 16))
    mask = top_k_mask(block_scores(q, k, 0.25), 2)
    return [(q, k, v, mask, torch.tensor([0.3, 0.6], dtype=torch.float64), 0.25)]


GAPS = {
    "block_scores": Gap(block_scores, _queries_and_keys, (
        Mistake("q.unflatten(-2, (-1, BLOCK_Q))", "q.unflatten(-2, (BLOCK_Q, -1))", "A block has neighbouring tokens."),
        Mistake("c * ", "c * BLOCK_Q * BLOCK_KV * ", "Take the means of queries and keys, not their sums."),
        Mistake("c * q_bar @ k_bar.mT",
                "c * q.unflatten(-2, (-1, BLOCK_Q)).amax(-2) @ k.unflatten(-2, (-1, BLOCK_KV)).amax(-2).mT",
                "A block is pooled by its mean, not by its maximum."),
        Mistake("k_bar.mT, -1)", "k_bar.mT, -2)", "A row, one block of queries, must sum to one."),
        Mistake("torch.softmax(c * q_bar @ k_bar.mT, -1)",
                "torch.softmax(c * q @ k.mT, -1).unflatten(-1, (-1, BLOCK_KV)).sum(-1)"
                ".unflatten(-2, (-1, BLOCK_Q)).mean(-2)",
                "These are the masses themselves, from all of P. Guess them: pool first."),
        Mistake("c * q_bar @ k_bar.mT", "q_bar @ k_bar.mT / c", "c = 1 / sqrt(D) is a factor already: multiply by it."),
        Mistake("BLOCK_Q)).mean(-2)", "BLOCK_Q)).mean(-1)", "That is a mean over features. The tokens are axis -2.",
                (("BLOCK_KV)).mean(-2)", "BLOCK_KV)).mean(-1)"),)),
        Mistake("BLOCK_Q)).mean(-2)", "BLOCK_Q)).mean(-3)", "That is a mean over blocks. Their tokens are axis -2.",
                (("BLOCK_KV)).mean(-2)", "BLOCK_KV)).mean(-3)"),)),
        Mistake("k_bar = k.unflatten(-2, (-1, BLOCK_KV))", "k_bar = k.unflatten(-2, (-1, BLOCK_Q))",
                "A block of keys has BLOCK_KV rows."),
    ), right=(
        ("q.unflatten(-2, (-1, BLOCK_Q)).mean(-2)",
         "torch.stack([rows.mean(-2) for rows in q.split(BLOCK_Q, -2)], -2)"),
        ("c * q_bar @ k_bar.mT", "q_bar @ k_bar.mT * c"),
    )),
    "top_k_mask": Gap(top_k_mask, _scores, (
        Mistake(", descending=True", "", "These are the smallest ones: argsort counts upwards."),
        Mistake("argsort(-1", "argsort(-2", "Every row, one block of queries, chooses for itself."),
        Mistake(":count]", ": count + 1]", "That is one block too many."),
        Mistake("[..., :count]", "[..., count:]", "These are all others. The first `count` of the order are wanted."),
        Mistake("scores.argsort(-1, descending=True)", "scores.sort(-1, descending=True)",
                "`sort` and `topk` return values and places. `argsort` returns the places alone."),
        Mistake("[..., :count]", "[...]", "That is every block. The first `count` of the order are wanted."),
        Mistake("[..., :count]", "[:count]", "That cuts the first axis. The blocks of keys are the last one."),
        Mistake("[..., :count]", "[:, :count]", "With heads that cuts the wrong axis: the last one is [..., :count]."),
        Mistake("[..., :count]", "[..., count]", "That is one block for each row. A slice, :count, takes the first."),
        Mistake("descending=True)", "descending=True).argsort(-1)",
                "These are ranks. Sort once, and take the indices."),
        Mistake("torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)",
                "scores > scores.mean(-1, keepdim=True)",
                "Each row must select exactly `count` blocks."),
    ), right=(
        ("scores.argsort(-1, descending=True)", "(-scores).argsort(-1)"),
        ("scores.argsort(-1, descending=True)", "scores.topk(count, -1).indices"),
    )),
    "sparse_tile": Gap(sparse_tile, _tiles, (
        Mistake("in selected", "in range(len(k_tiles))", "That is every tile: full attention."),
        Mistake("in selected", "in range(len(selected))", "The table says which tiles; you took the first ones."),
        Mistake("l = shrink * l", "l = l", "The old sum belongs to the old maximum: it must shrink."),
        Mistake("o = shrink * o", "o = o", "O belongs to the old maximum: it shrinks as l does."),
        Mistake("shrink * l + p.sum(-1, keepdim=True)", "shrink * (l + p.sum(-1, keepdim=True))",
                "Only what is old shrinks: p belongs to the new maximum already.",
                (("shrink * o + p @ v_tiles[j]", "shrink * (o + p @ v_tiles[j])"),)),
        Mistake("shrink * o + p @ v_tiles[j]", "(shrink * o + p @ v_tiles[j]) / l",
                "Divide by l once, after the loop: here O is divided again and again.",
                (("return o / l", "return o"),)),
        Mistake("m + torch.log(l)", "m * torch.log(l)", "The logarithm of a product is a sum: m + log l."),
        Mistake("m + torch.log(l)", "l", "That is the sum itself, of e^(s - m). L is a logarithm, and m is missing."),
        Mistake("m + torch.log(l)", "torch.log(m) + torch.log(l)", "L = log(e^m l): m is a logarithm already."),
        Mistake("m + torch.log(l)", "torch.log(m + l)", "L = log(e^m l), which is m + log l."),
    ), right=(
        ("shrink * l + p.sum(-1, keepdim=True)", "p.sum(-1, keepdim=True).add_(l * shrink)"),
        ("s_ij = q_i @ k_tiles[j].mT * c", "s_ij = (c * q_i) @ k_tiles[j].mT"),
    )),
    "mass_held": Gap(mass_held, _log_sums, (
        Mistake("l_selected - l_all", "l_all - l_selected",
                "That is above one. Which sum is the part, and which is the whole?"),
        Mistake("torch.exp", "1 - torch.exp", "That is the mass of the others, 1 - alpha."),
        Mistake("torch.exp(l_selected - l_all)", "torch.sigmoid(l_selected - l_all)",
                "That divides by the sum of both. The whole contains the part already."),
        Mistake("torch.exp(l_selected - l_all)", "torch.exp(l_selected / l_all)",
                "exp(a) / exp(b) is exp(a - b): subtract the logarithms."),
        Mistake("torch.exp(l_selected - l_all)", "torch.exp(l_selected) - torch.exp(l_all)",
                "alpha is the quotient of the two sums, not their difference."),
        Mistake("torch.exp(l_selected - l_all)", "l_selected / l_all", "L is the logarithm of a sum."),
        Mistake("torch.exp(l_selected - l_all)", "torch.exp(l_selected) / torch.exp(l_all)",
                "Right on paper, but e^120 is infinite in float32: subtract first."),
    ), right=(
        ("torch.exp(l_selected - l_all)", "(l_selected - l_all).exp_()"),
        ("l_selected - l_all", "l_selected.double() - l_all"),
    )),
    "key_tile_sums": Gap(key_tile_sums, lambda: [tuple(_draw(3, (BLOCK_KV, 4), (BLOCK_KV, 4)))], (
        Mistake("k_j, -1)", "k_j, 0)", "phi works on the features of one token; your softmax runs over tokens."),
        Mistake("torch.softmax(k_j, -1)", "torch.exp(k_j)",
                "phi is a softmax: e^x, divided by its sum over the features."),
        Mistake("torch.softmax(k_j, -1)", "torch.relu(k_j)", "Here phi is a softmax. Exercise 2 tries relu."),
        Mistake("phi_k.sum(0)", "v_j.sum(0)", "V has no part in z_j: it sums phi(K_j)."),
        Mistake("phi_k.sum(0)", "phi_k.mean(0)", "z_j is a sum over the keys, as h_j is. You have a mean."),
        Mistake("phi_k.mT @ v_j", "v_j.mT @ phi_k", "That is h_j transposed."),
    ), right=(
        ("phi_k.mT @ v_j", "torch.einsum('kd,ke->de', phi_k, v_j)"),
        ("phi_k.sum(0)", "phi_k.double().sum(0)"),
    )),
    "complement_sums": Gap(complement_sums, _masks_and_sums, (
        Mistake("(~mask)", "mask", "These are the selected blocks. The linear branch takes the others."),
        Mistake("(~mask)", "torch.ones_like(mask)", "That is every block. The selected ones would count twice."),
        Mistake("complement @ h.flatten(1)", "h.flatten(1).sum(0) - mask.to(h.dtype) @ h.flatten(1)",
                "All blocks minus the selected ones: right on paper, but in float32 large numbers cancel."),
        Mistake("h.flatten(1)", "h", "A matmul takes the last two axes: make each h_j one row, h.flatten(1)."),
        Mistake("(~mask)", "(1 - mask)", "PyTorch does not subtract bools. ~mask inverts them."),
        Mistake("complement @ z", "z.sum(0).expand(len(mask), -1)", "Z_i, too, leaves out the selected blocks."),
        Mistake("(~mask).to(h.dtype)", "(~mask) / (~mask).sum(-1, keepdim=True).to(h.dtype)",
                "That is a mean. It would cancel in O_l, but H_i and Z_i are sums."),
    ), right=(
        ("(~mask).to(h.dtype)", "1 - mask.to(h.dtype)"),
        ("complement @ z", "torch.einsum('ij,jd->id', complement, z)"),
    )),
    "linear_tile": Gap(linear_tile, _query_tile, (
        Mistake("q_i, -1)", "q_i, 0)", "phi works on the features of one token; your softmax runs over tokens."),
        Mistake("phi_q @ h_i / (phi_q @ z_i)[:, None]", "phi_q @ (h_i / z_i[:, None])",
                "A quotient of sums is not a sum of quotients: divide last, by phi(Q_i) Z_i."),
        Mistake("(phi_q @ z_i)[:, None]", "(phi_q * z_i)", "Sum over the features: one number per query."),
        Mistake("(phi_q @ z_i)[:, None]", "z_i", "Z_i has a number per feature. Multiply it with phi(Q_i) first."),
        Mistake("(phi_q @ z_i)[:, None]", "z_i.sum()", "Each query has its own sum of weights: phi(Q_i) Z_i."),
    ), right=(
        ("phi_q @ h_i / (phi_q @ z_i)[:, None]", "(phi_q / (phi_q @ z_i)[:, None]) @ h_i"),
        ("(phi_q @ z_i)[:, None]", "(phi_q * z_i).sum(-1, keepdim=True)"),
    )),
    "sparse_linear_head": Gap(sparse_linear_head, _one_head, (
        Mistake("mask[i].nonzero().flatten()", "mask[i]",
                "The row holds True and False. The loop wants block numbers."),
        Mistake("h_i[i], z_i[i]", "h[i], z[i]", "h_j belongs to one block of keys. This block of queries has H_i."),
        Mistake("h_i[i], z_i[i]", "h_i, z_i", "These are all query blocks' sums. This one has h_i[i], z_i[i]."),
        Mistake("mask[i].nonzero()", "mask[:, i].nonzero()", "Row i of the mask is query block i, not column i."),
        Mistake("nonzero().flatten()", "nonzero()[0]", "[0] keeps one block. `flatten()` makes a list of all of them."),
        Mistake("alpha[i] * o_s + (1 - alpha[i])", "(1 - alpha[i]) * o_s + alpha[i]", "alpha is the weight of O_s."),
        Mistake("alpha[i] * o_s + (1 - alpha[i])", "alpha * o_s + (1 - alpha)", "This block of queries has alpha[i]."),
        Mistake("alpha[i] * o_s", "o_s", "That is nearer to SLA. Here O_s has the weight alpha."),
        Mistake("h_i[i], z_i[i]", "h.sum(0), z.sum(0)", "Each block of queries has its own H_i and Z_i."),
    ), right=(
        ("alpha[i] * o_s + (1 - alpha[i]) * o_l", "o_l + alpha[i] * (o_s - o_l)"),
    )),
}  # fmt: skip
