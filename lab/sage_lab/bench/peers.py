"""Attention that a user could choose instead of our kernels, each called in the same way.

attention(query [B, H, N, D], key [B, Hkv, N, D], value like key, is_causal) -> O [B, H, N, D], differentiable. The
layout is in the strides: a peer whose own layout is [B, N, H, D] gets and returns views.

sparse(block_mask, block_kv, n) -> an attention of query, key and value: softmax over the selected blocks, no linear
branch. block_mask: bool [B, H, Tm, Tn], True where a block of 128 queries sees a block of block_kv keys. Every selected
block is full. Blocks of 64 keys have a forward pass only, since both backward passes need blocks of 128.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from sage_lab.bench import cudnn_fp8
from sage_lab.bench.judge import LARGEST_ERROR
from sage_lab.models import flash_attention_4 as fa4
from sage_ref.backend import why_not_importable

PEER_BLOCK_KV = 128  # keys of a block in the backward passes

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
SparseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """Somebody else's attention, and the package that it needs."""

    attention: Attention
    package: str | None = None  # what must be installed beside PyTorch
    module: str | None = None
    largest_error: float = LARGEST_ERROR
    sparse: Callable[[Tensor, int, int], SparseAttention] | None = None

    def required(self) -> "Peer":
        """Return this peer; ImportError says in one line why its package can't be imported."""
        if self.package is not None and (reason := why_not_importable(self.package, self.module)):
            raise ImportError(reason)
        return self


def sdpa(backend: SDPBackend) -> Attention:
    """Return PyTorch's scaled_dot_product_attention with one backend; choosing it is part of the call."""

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=grouped)

    return attention


def flex(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Call FlexAttention, which PyTorch compiles for one mask and shape."""
    mask = _causal_blocks(query.shape[2], query.device) if is_causal else None
    return compiled_flex()(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


@functools.cache
def compiled_flex() -> Callable:
    """Return FlexAttention, compiled."""
    torch._functorch.config.donated_buffer = False  # else its backward pass runs once, and we time it many times
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=4)
def _causal_blocks(n: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda batch, head, q, k: q >= k, None, None, n, n, device=device)


def block_lists(block_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row selects, int32 [B, H, rows], and which, ascending, int32 [B, H, rows, columns].

    What follows the selected blocks in a list is not read.
    """
    counts = block_mask.sum(-1, dtype=torch.int32)
    order = block_mask.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts.contiguous(), order.contiguous()  # of a transposed mask, too


def flex_sparse(block_mask: Tensor, block_kv: int, n: int) -> SparseAttention:
    """Return FlexAttention for a block mask."""
    counts, order = block_lists(block_mask)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=(MASK_BLOCK_Q, block_kv),
        seq_lengths=(n, n),
    )  # fmt: skip
    return lambda query, key, value: compiled_flex()(query, key, value, block_mask=mask)


def fa4_sparse(block_mask: Tensor, block_kv: int, n: int) -> SparseAttention:
    """Return FlashAttention-4 for a block mask.

    It reads two lists: the key blocks of every query block, and, backward, the query blocks of every key block. It
    checks the last block of a list for the end of the sequence, so they must ascend.
    """
    lists_type = import_module(f"{fa4.MODULE}.block_sparsity").BlockSparseTensorsTorch

    def tensors(mask: Tensor):
        counts, order = block_lists(mask)
        partial_blocks = {"mask_block_cnt": torch.zeros_like(counts), "mask_block_idx": torch.zeros_like(order)}
        size = {"block_size": (MASK_BLOCK_Q, block_kv)}
        return lists_type(**partial_blocks, full_block_cnt=counts, full_block_idx=order, **size)

    options = {"block_sparse_tensors": tensors(block_mask)}
    if block_kv == PEER_BLOCK_KV:
        options["block_sparse_tensors_bwd"] = tensors(block_mask.mT)
    return lambda query, key, value: fa4.flash_attention_4(query, key, value, is_causal=False, **options)


PEERS = {
    "sdpa_flash": Peer(sdpa(SDPBackend.FLASH_ATTENTION)),
    "sdpa_cudnn": Peer(sdpa(SDPBackend.CUDNN_ATTENTION)),
    "fa4": Peer(
        lambda query, key, value, is_causal: fa4.flash_attention_4(query, key, value, is_causal=is_causal),
        fa4.PACKAGE, fa4.MODULE, sparse=fa4_sparse,
    ),
    # With 3 bits after the point E4M3's own errors are up to twice as large as INT8's.
    "cudnn_fp8": Peer(cudnn_fp8.cudnn_fp8, cudnn_fp8.PACKAGE, cudnn_fp8.MODULE, 2 * LARGEST_ERROR),
    "flex": Peer(flex, sparse=flex_sparse),
}  # fmt: skip
