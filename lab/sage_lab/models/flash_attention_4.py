"""FlashAttention-4, the fastest 16-bit attention on Hopper and Blackwell: a peer of ours (PyPI: flash-attn-4)."""

from importlib import import_module

from torch import Tensor

PACKAGE, MODULE = "flash-attn-4", "flash_attn.cute"


def flash_attention_4(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options) -> Tensor:
    """Return O [B, H, N, D] of query [B, H, N, D], key and value [B, Hkv, N, D], all in 16 bit.

    It is given views, since it wants [B, N, H, D]. options: further arguments of its own `flash_attn_func`.
    """
    operands = (x.transpose(1, 2) for x in (query, key, value))
    found = import_module(MODULE).flash_attn_func(*operands, causal=is_causal, **options)
    output = found[0] if isinstance(found, tuple) else found  # newer versions return the log-sum-exp too
    return output.transpose(1, 2)
