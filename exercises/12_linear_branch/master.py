"""The linear branch over the unselected blocks, by one matmul."""

import torch
import torch.nn.functional as F
from torch import Tensor


def block_count(n: int, block: int) -> int:
    """Blocks of `block` tokens in a sequence of n; the last may be partial."""
    return -(-n // block)


def feature_map(x: Tensor) -> Tensor:
    """phi(x): softmax over the features, [..., N, D] -> [..., N, D]."""
    return x.softmax(-1)


def key_block_sums(key: Tensor, value: Tensor, block_kv: int) -> tuple[Tensor, Tensor]:
    """h_j = phi(K_j)^T V_j [H, Tn, D, D] and z_j = phi(K_j)^T 1 [H, Tn, D] of every block of block_kv keys.

    key, value [H, N, D]. The last block may be partial: keys that don't exist add nothing.

    >>> h, z = key_block_sums(torch.zeros(1, 3, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]), 2)
    >>> h[0, :, 0]  # phi = [0.5, 0.5] of every key
    tensor([[2.0000, 3.0000],
            [2.5000, 3.0000]])
    >>> z[0]
    tensor([[1.0000, 1.0000],
            [0.5000, 0.5000]])
    """
    ### SOLUTION: phi(K_j)^T V_j and the sum of phi(K_j) over the keys of each block
    missing = -key.shape[1] % block_kv
    k_phi, v = (F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, block_kv)) for x in (feature_map(key), value))
    return k_phi.mT @ v, k_phi.sum(2)


def complement_sums(selected: Tensor, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """H_i = sum of h_j and Z_i = sum of z_j over the blocks j that query block i has not selected.

    selected: bool [H, Tm, Tn], h [H, Tn, D, D], z [H, Tn, D] -> [H, Tm, D, D] and [H, Tm, D].

    >>> h, z = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1), torch.ones(1, 3, 1)
    >>> big_h, big_z = complement_sums(torch.tensor([[[False, True, False], [True, True, True]]]), h, z)
    >>> big_h.flatten(), big_z.flatten()
    (tensor([101.,   0.]), tensor([2., 0.]))
    """
    ### SOLUTION: one matmul of 1 - M with h and z, flattened
    weights = (~selected).to(h.dtype)
    return (weights @ h.flatten(2)).unflatten(2, h.shape[2:]), weights @ z


def linear_branch(query: Tensor, key: Tensor, value: Tensor, selected: Tensor, block_q: int, block_kv: int) -> Tensor:
    """O_l [H, N, D]: linear attention of every query over the blocks that its query block has not selected.

    query, key, value [H, N, D]; selected: bool [H, ceil(N / block_q), ceil(N / block_kv)].
    A query block that has selected everything has nothing left: its O_l is 0.

    >>> value = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    >>> selected = torch.tensor([[[True, False], [True, True]]])
    >>> linear_branch(torch.zeros(1, 4, 1), torch.zeros(1, 4, 1), value, selected, 2, 2).flatten()
    tensor([3.5000, 3.5000, 0.0000, 0.0000])
    """
    ### SOLUTION: phi(Q_i) H_i / (phi(Q_i) Z_i) for every block of queries
    n = query.shape[1]
    h_i, z_i = complement_sums(selected, *key_block_sums(key, value, block_kv))
    q_i = F.pad(feature_map(query), (0, 0, 0, -n % block_q)).unflatten(1, (-1, block_q))  # [H, Tm, Bq, D]
    weight_sum = q_i @ z_i[..., None]
    o_l = q_i @ h_i / torch.where(weight_sum == 0, 1, weight_sum)
    return o_l.flatten(1, 2)[:, :n]
