"""`sagebwd_attention`: check the arguments, choose a backend, call it."""

from dataclasses import replace

import torch
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.backend import chosen_kernels, sagebwd_kernels
from sage_ref.checks import checked_attention
from sage_ref.prologue import Prologue, RoundedGradient, checked_prologue
from sage_ref.sagebwd.settings import Options, SageBwdSettings
from sage_ref.sagebwd.whole import SageBwdFunction
from sage_ref.shapes import repeat_heads


def sagebwd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    smooth_k: bool = True,
    smooth_q: bool = False,
    granularity: str = "row",
    unbiased: bool = False,
    prologue: Prologue | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention for training with six of its seven matmuls in INT8 (SageBwd, Algorithms 1 and 2).

    O = softmax(c Q K^T) V with Q, K, P, V quantised in the forward pass and P, dO, dS, Q, K in the backward pass;
    dP = dO V^T stays in 16 bit. Called like `torch.nn.functional.scaled_dot_product_attention`.

    query: [B, H, Nq, D]; key, value: [B, Hkv, Nk, D]; float16, bfloat16, float32 or float64, all alike.
    is_causal: query i sees keys 0..i, also when Nq != Nk.
    scale: c; None means 1/sqrt(D).
    enable_gqa: allow Hkv < H; H must be a multiple of Hkv, and heads in groups of H/Hkv share keys and values.
    smooth_k, smooth_q: subtract the mean key of the sequence, the mean query of each block, before quantising.
    granularity: which entries of a tile of P and of dS share a scale in the backward pass. "row": one row of the
        matmul's result, a query for dQ and a key for dK and dV. "block": the whole tile, as the paper prints it.
    unbiased: smooth V as K is, and round P by ordered dither in O = P V (see `quantize`). The errors of an O then even
        out over the keys, so delta = rowsum(dO * O), and with it dS, is off by less.
    prologue: QK-norm and rotary positions, applied to query and key first (see `Prologue`; D is even then). The kernels
        do it in float32 while they read query and key to quantise them, so z, what is quantised, is never rounded to
        the dtype of query; its gradient is, before it goes back through rotation and norm.
    backend: "reference" (PyTorch, any device), "triton", or "auto": triton where it can run, else reference,
        with one warning that says why.

    Both backends quantise alike: in blocks of 128 tokens, and P and dS in tiles of 128 x 128. The paper gives no tile
    sizes; `sage_ref.sagebwd` has its algorithms as printed, and every other choice in `SageBwdSettings`.

    Returns O, [B, H, Nq, D] in the dtype of query. Differentiable once in query, key, value and a prologue's gains.
    Under autocast, query, key and value are cast as SDPA's are: all but float64, to the autocast dtype.

    NaN and infinity: a scale is shared by a block, so a NaN in a query gives NaN in that query's block, and a NaN in
    a value NaN in every query block that reads it. With smooth_k a NaN in a key reaches every query of its
    (batch, key head), since the mean does; without, every query that sees a key of its block. With unbiased a NaN in a
    value does as one in a key with smooth_k. Other heads and batches never notice.

    Magnitudes: sums are in float32, in float64 for float64. On the reference float16 of any size and other dtypes up to
    1e15 don't overflow; a result that its dtype can't hold is infinite, as O may be within 1% of the dtype's largest
    number. A block of numbers below 1.5e-36 counts as zeros. INT8 is off by up to 1/254 of a block's largest number:
    where scores exceed about 100 it may prefer another key (`QKNorm` keeps them small). Where c max|q| max|k| exceeds
    30,000 the kernels' O is NaN, and just below that a row is off by up to a tenth, a third if unbiased; on Hopper
    GPUs, with head sizes above 32, O is NaN from 1e6 on.

    torch.compile takes it whole. torch.func.grad, vjp, jacrev and torch.vmap work on the reference, which "auto" takes
    there. Forward mode (torch.func.jvp) is a ValueError, a second derivative a RuntimeError when it is taken.

    Tensors are dense: not sparse, nested or on the meta device. A subclass of Tensor gives the same subclass.
    Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    query, key, value = checked_attention(query, key, value, enable_gqa)
    options = Options(smooth_k, smooth_q, granularity, unbiased, backend)
    options.check(scale, is_causal=is_causal, enable_gqa=enable_gqa)
    if prologue is not None:
        prologue = checked_prologue(prologue, query, key)
    kernels = chosen_kernels(backend, sagebwd_kernels, query, smooth_q)
    if kernels is None:
        return reference_attention(query, key, value, options.settings(is_causal, scale), prologue)
    choice = {"smooth_k": smooth_k, "granularity": granularity, "unbiased": unbiased, "prologue": prologue}
    c = softmax_scale(scale, query.shape[3])
    return kernels.sagebwd_attention(query, key, value, is_causal=is_causal, scale=c, **choice)


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings, prologue: Prologue | None = None
) -> Tensor:
    """Compute `sagebwd_attention` on the reference backend, with every setting open. Arguments are not checked.

    As in the kernels, the Q and K that a prologue returns stay in the working dtype. Their gradients and O are rounded
    to the dtype of query.
    """
    dtype = query.dtype
    if prologue is not None:
        settings = replace(settings, output_dtype=settings.output_dtype or dtype)
        with torch.autocast(query.device.type, enabled=False):
            query, key = (RoundedGradient.apply(z, dtype) for z in prologue.applied(query, key))
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    output, _ = SageBwdFunction.apply(query, key, value, settings)
    return output.to(dtype)
