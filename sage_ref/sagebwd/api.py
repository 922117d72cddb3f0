"""`sagebwd_attention`: check the arguments, choose a backend, call it."""

from dataclasses import replace

import torch
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.backend import chosen_kernels, sagebwd_kernels
from sage_ref.checks import Fitting, checked_attention, kind_of, plain, shown
from sage_ref.prologue import Prologue, RoundedGradient, checked_prologue
from sage_ref.sagebwd.settings import Options, SageBwdSettings
from sage_ref.sagebwd.whole import SageBwdFunction
from sage_ref.shapes import repeat_heads

FITTING = Fitting()  # by kind of call, the kernels that compute it


def sagebwd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    smooth_k: bool = True,
    smooth_q: bool = False,
    granularity: str = "row",
    unbiased: bool = False,
    prologue: Prologue | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention for training with six of its seven matmuls in INT8 (SageBwd, arXiv 2603.02170).

    O = softmax(c Q K^T) V with Q, K, P, V quantised in the forward pass (Algorithm 1) and P, dO, dS, Q, K in the
    backward pass (Algorithm 2); dP = dO V^T stays in 16 bit. It is called like
    `torch.nn.functional.scaled_dot_product_attention`, without a mask and dropout. Under autocast it casts query, key
    and value as SDPA does: all but float64, to the autocast dtype.

    Both backends quantise alike: in blocks of 128 tokens, and P and dS in tiles of 128 x 128. The paper gives no tile
    sizes; `sage_ref.sagebwd` has its algorithms as printed, and every other choice in `SageBwdSettings`.

    NaN and infinity: a block shares its scale, so a NaN in a query gives NaN in that query's block, and a NaN in a
    value gives NaN in every query block that reads it. With smooth_k a NaN in a key reaches every query of its
    (batch, key head), since the mean does; without, every query that sees a key of its block. With unbiased a NaN in a
    value does the same as one in a key with smooth_k. Other heads and batches are never affected.

    Magnitudes: sums are in float32, for float64 in float64. On the reference float16 of any size and other dtypes up to
    1e15 don't overflow. A result that its dtype can't hold is infinite, as O may be within 1% of the dtype's largest
    number. A block of numbers below 1.5e-36 counts as zeros. INT8 is off by up to 1/254 of a block's largest number:
    where scores exceed about 100 it may prefer a different key (`QKNorm` keeps them small). Where c max|q| max|k|
    exceeds 30,000 the kernels' O is NaN, and just below that a row is off by up to a tenth, or a third if unbiased; on
    Hopper GPUs, with head sizes above 32, O is NaN from 1e6 on.

    A training loop of small models with one GPU per process should run the backward pass in its own thread, by `with
    torch.autograd.set_multithreading_enabled(False):` around `loss.backward()`: it is written in Python, and waking
    autograd's thread for it costs about 0.2 ms a call.

    Derivatives: O is differentiable once in query, key, value and a prologue's gains. torch.compile takes it whole.
    torch.func.grad, vjp, jacrev and torch.vmap work on the reference, outside of torch.compile.

    Args:
        query: [B, H, Nq, D], float16, bfloat16, float32 or float64. Tensors are dense: not sparse, nested or on the
            meta device. A subclass of Tensor gives the same subclass.
        key, value: [B, Hkv, Nk, D] in the dtype of query.
        attn_mask, dropout_p: None and 0, as SDPA's callers write them.
        is_causal: Query i sees keys 0..i, also when Nq != Nk.
        scale: c; None means 1/sqrt(D).
        enable_gqa: Allow Hkv < H. H must be a multiple of Hkv, and groups of H/Hkv heads share keys and values.
        smooth_k, smooth_q: Subtract the mean key of the sequence, the mean query of each block, before quantising.
        granularity: Which entries of a tile of P and of dS share a scale in the backward pass. "row": one row of the
            matmul's result, a query for dQ and a key for dK and dV. "block": the whole tile, as the paper prints it.
        unbiased: Smooth V as K is, and round P by ordered dither in O = P V (see `quantize`). The errors of an O then
            even out over the keys, so delta = rowsum(dO * O), and with it dS, is off by less.
        prologue: QK-norm and rotary positions, applied to query and key first (see `Prologue`); D is then even. The
            kernels do it in float32 while they read query and key, so z, the tensor that is quantised, is never
            rounded to the dtype of query; its gradient is, before it goes back through rotation and norm.
        backend: "reference" (PyTorch, any device), "triton", or "auto": triton where it can run, else on a CPU the
            reference, with one warning that says why, and on a GPU a ValueError.

    Returns:
        O, [B, H, Nq, D] in the dtype of query. On the reference it is contiguous; the kernels' has its heads last in
        memory if query has. So flatten it by `reshape`, not `view`, or call SDPA inside `with sage_ref.sdpa():`.

    Raises:
        TypeError, ValueError: An argument does not fit, or is in forward mode (torch.func.jvp); the message names it,
            what was expected and what it got.
        RuntimeError: A second derivative is taken.
    """
    if attn_mask is not None:
        got = f"got {type(attn_mask).__name__}"
        raise ValueError(f"attn_mask: expected None (`with sage_ref.sdpa():` takes padding, packed documents), {got}")
    if dropout_p:
        raise ValueError(f"dropout_p: expected 0, since SageBwd drops no probabilities, got {shown(dropout_p)}")
    options = Options(smooth_k, smooth_q, granularity, unbiased, backend)
    kind = None if prologue else kind_of((query, key, value), (*options, is_causal, scale, enable_gqa))
    kernels = FITTING.get(kind)
    if kernels is None:
        query, key, value = checked_attention(query, key, value, enable_gqa)
        options.check(scale, is_causal=is_causal, enable_gqa=enable_gqa)
        options, is_causal, scale = Options(*map(plain, options)), plain(is_causal), plain(scale)
        if prologue is not None:
            prologue = checked_prologue(prologue, query, key)
        if torch.compiler.is_compiling():  # one tensor in two places is one input there, and would get one gradient
            key, value = key.view_as(key), value.view_as(value)
        kernels = chosen_kernels(backend, sagebwd_kernels, query, options.smooth_q)
        if kernels is None:
            return reference_attention(query, key, value, options.settings(is_causal, scale), prologue)
        FITTING.add(kind, kernels)
    return kernels.sagebwd_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        scale=softmax_scale(scale, query.shape[3]),
        smooth_k=options.smooth_k,
        granularity=granularity,
        unbiased=options.unbiased,
        prologue=prologue,
    )


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
