"""Block-sparse attention of others for a given block mask: softmax over the selected blocks, no linear branch.

block_mask: bool [B, H, Tm, Tn], True where a block of 128 queries sees a block of keys. Blocks of 64 keys: forward
only, since the backward passes of both need blocks of 128. Every selected block is full: no mask inside.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from sage_lab.bench.peers import compiled_flex
from sage_lab.models import flash_attention_4 as fa4

PEER_BLOCK_KV = 128  # keys of a block in the backward passes

SparseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Lists(NamedTuple):
    """Of every row of a block mask: how many blocks it selects, and which, ascending; the rest follows."""

    counts: Tensor  # int32 [B, H, rows]
    order: Tensor  # int32 [B, H, rows, columns]


def lists_of(block_mask: Tensor) -> Lists:
    counts = block_mask.sum(-1, dtype=torch.int32)
    order = block_mask.int().argsort(dim=-1, descending=True, stable=True).int()
    return Lists(counts.contiguous(), order.contiguous())  # of a transposed mask, too


def flex_sparse(block_mask: Tensor, block_kv: int, n: int) -> SparseAttention:
    counts, order = lists_of(block_mask)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=(MASK_BLOCK_Q, block_kv),
        seq_lengths=(n, n),
    )  # fmt: skip
    return lambda query, key, value: compiled_flex()(query, key, value, block_mask=mask)


def fa4_sparse(block_mask: Tensor, block_kv: int, n: int) -> SparseAttention:
    """FlashAttention-4 reads two lists: of the key blocks of a query block, and, backward, of the query blocks of a key
    block. A list's last block is the one it checks for the end of the sequence: they must ascend.
    """
    lists_type = import_module(f"{fa4.MODULE}.block_sparsity").BlockSparseTensorsTorch

    def tensors(mask: Tensor):
        counts, order = lists_of(mask)
        names = {"mask_block_cnt": torch.zeros_like(counts), "mask_block_idx": torch.zeros_like(order)}
        return lists_type(**names, full_block_cnt=counts, full_block_idx=order, block_size=(MASK_BLOCK_Q, block_kv))

    options = {"block_sparse_tensors": tensors(block_mask)}
    if block_kv == PEER_BLOCK_KV:
        options["block_sparse_tensors_bwd"] = tensors(block_mask.mT)
    return lambda query, key, value: fa4.flash_attention_4(query, key, value, is_causal=False, **options)


SPARSE_PEERS = {"flex": flex_sparse, "fa4": fa4_sparse}
