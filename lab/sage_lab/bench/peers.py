"""What a user could pick instead of our kernels, each called in the same way.

attention(query [B, H, N, D], key, value [B, Hkv, N, D], is_causal) -> O [B, H, N, D], differentiable. The layout is in
the strides: a peer whose own layout is [B, N, H, D] gets and returns views.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from sage_lab.bench import cudnn_fp8
from sage_lab.bench.judge import LARGEST_ERROR
from sage_lab.models import flash_attention_4 as fa4
from sage_ref.backend import why_not_importable

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class Peer(NamedTuple):
    attention: Attention
    package: str | None = None  # what must be installed beside PyTorch
    module: str | None = None
    largest_error: float = LARGEST_ERROR

    def why_missing(self) -> str | None:
        """Why it can't run here, in one line; None if its package can be imported."""
        return None if self.package is None else why_not_importable(self.package, self.module)


def sdpa(backend: SDPBackend) -> Attention:
    """PyTorch's scaled_dot_product_attention with one backend; choosing it is part of the call."""

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=grouped)

    return attention


def flex(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """FlexAttention, which PyTorch compiles for one mask and shape."""
    mask = _causal_blocks(query.shape[2], query.device) if is_causal else None
    return compiled_flex()(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


@functools.cache
def compiled_flex() -> Callable:
    torch._functorch.config.donated_buffer = False  # else its backward pass runs once, and we time it many times
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=4)
def _causal_blocks(n: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda batch, head, q, k: q >= k, None, None, n, n, device=device)


def _flash_attention_4(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return fa4.flash_attention_4(query, key, value, is_causal=is_causal)


PEERS = {
    "sdpa_flash": Peer(sdpa(SDPBackend.FLASH_ATTENTION)),
    "sdpa_cudnn": Peer(sdpa(SDPBackend.CUDNN_ATTENTION)),
    "fa4": Peer(_flash_attention_4, fa4.PACKAGE, fa4.MODULE),
    # With 3 bits after the point E4M3's own errors are up to twice as large as INT8's.
    "cudnn_fp8": Peer(cudnn_fp8.cudnn_fp8, cudnn_fp8.PACKAGE, cudnn_fp8.MODULE, 2 * LARGEST_ERROR),
    "flex": Peer(flex),
}
