"""SageBwd as a registered PyTorch operation: autograd, torch.compile, CUDA graphs, autocast.

On Hopper, if the head size allows it: forward level 5, and backward level 5, or 6 in causal attention above a head size
of 64. Elsewhere forward level 4 and backward level 3. With granularity "block" the backward level is 2, everywhere.
All are deterministic. Saved for the backward pass, per token and head: Q^ and K^ in INT8, V and O in 16 bit, one
float32 log-sum-exp. That is 6 D + 4 bytes and the block scales; FlashAttention saves 8 D + 4. A prologue with QK-norm
saves Q and K in 16 bit as well: 4 D more.
While it runs, backward level 5 takes 4 D bytes per query token and head for its sums.
"""

import os

import torch
from torch import Tensor

from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of
from sage_kernels.common.operations import register
from sage_kernels.common.quantize import SCALE_BLOCK, Quantized, padded_head_dim, padded_length
from sage_kernels.common.recording import recorded
from sage_kernels.sagebwd.ladder import (
    best_backward_level,
    best_forward_level,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)
from sage_kernels.sagebwd.prologue import NO_PROLOGUE, run_rotate_back
from sage_ref.derivatives import gradients_once
from sage_ref.prologue import Prologue

MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 128
MAX_HEADS = 65535  # of one launch: the second axis of a CUDA grid
# Triton runs kernels on the CPU, one operation at a time. Like Triton, we look once.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_too_old(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def obstacle(query: Tensor, smooth_q: bool) -> str | None:
    """Return why these kernels cannot take this call, or None if they can."""
    dtypes = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
    if query.device.type != "cuda" and not (INTERPRETED and query.device.type == "cpu"):
        return f"the kernels need a CUDA tensor (or TRITON_INTERPRET=1), and query is on {query.device}"
    if not torch.compiler.is_compiling() and is_too_old(query.device):
        return "the kernels need a GPU of compute capability 8.0 or later"
    if query.dtype not in dtypes:
        return f"the kernels need dtype {' or '.join(map(str, dtypes))}, and query has {query.dtype}"
    if query.shape[0] * query.shape[1] > MAX_HEADS:
        return f"the kernels need at most {MAX_HEADS} heads in a batch, and query has {query.shape[:2].numel()}"
    if not MIN_HEAD_DIM <= query.shape[3] <= MAX_HEAD_DIM:
        return f"the kernels need a head size from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, and query has {query.shape[3]}"
    if smooth_q:
        return "the kernels don't smooth Q"
    return None


def forward_level(device: torch.device, head_dim: int, lengths: Tensor | None = None) -> int:
    """Return the forward level that runs there."""
    return best_forward_level(device, head_dim, portable=lengths is not None)


def backward_level(
    device: torch.device, head_dim: int, is_causal: bool, granularity: str = "row", lengths: Tensor | None = None
) -> int:
    """Return the backward level with these scales of P and dS that runs there."""
    options = {"per_block": granularity == "block", "portable": lengths is not None}
    return best_backward_level(device, head_dim, is_causal, **options)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float,
    smooth_k: bool,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    eps: float = 0.0,
    unbiased: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute O, and for the backward pass L of the smoothed scores (log2), Q^ and K^ with their scales, V's range.

    cos ... eps: those of a `Prologue`, contiguous and in float32; None: there is none, or one without a norm.
    lengths: as in `ladder.prepare_forward`; a portable level then runs everywhere.
    """
    prologue = Prologue(cos, sin, query_gain, key_gain, eps)
    options = {"scale": scale, "smooth_k": smooth_k, "unbiased": unbiased, "prologue": prologue}
    options["lengths"] = lengths

    def compute(start: Start) -> tuple[Tensor, ...]:
        level = forward_level(query.device, query.shape[3], lengths)
        inputs = prepare_forward(query, key, value, level, start, **options)
        output, log_sum_exp = run_forward(inputs, level, start, is_causal=is_causal, scale=scale)
        q_hat, k_hat = inputs.q_hat, inputs.k_hat
        return output, log_sum_exp, q_hat.values, q_hat.scale, k_hat.values, k_hat.scale, inputs.v_range

    inputs = query, key, value, cos, sin, query_gain, key_gain, lengths
    with torch.cuda.device_of(query):  # Triton launches on the current device
        return recorded(("forward", is_causal, scale, smooth_k, eps, unbiased), inputs, compute)


def fake_forward(
    query, key, value, is_causal, scale, smooth_k, cos=None, sin=None, query_gain=None, key_gain=None, eps=0.0,
    unbiased=False, lengths=None,
):  # fmt: skip
    """Return tensors like those of `forward`, without their values: for torch.compile."""

    def scales(x):
        return x.new_empty(*x.shape[:2], padded_length(x.shape[2]) // SCALE_BLOCK, dtype=torch.float32)

    def values(x):
        return x.new_empty(*x.shape[:2], padded_length(x.shape[2]), padded_head_dim(x.shape[3]), dtype=torch.int8)

    log_sum_exp = query.new_empty(*query.shape[:2], padded_length(query.shape[2]), dtype=torch.float32)
    hats = values(query), scales(query), values(key), scales(key), scales(value)
    return empty_in_layout_of(query), log_sum_exp, *hats


def backward(
    grad_output: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    q_values: Tensor,
    q_scale: Tensor,
    k_values: Tensor,
    k_scale: Tensor,
    v_range: Tensor,
    is_causal: bool,
    scale: float,
    granularity: str,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ in O's layout, dK and dV in V's.

    From the forward pass: log_sum_exp float32 [B, H, Np]; Q^ and K^, int8 [B, H or Hkv, Np, Dp], with float32 scales
    [B, H or Hkv, blocks]; v_range float32 [B, Hkv, blocks], max|V| / 127. Np, Dp: padded as in `Quantized`.
    lengths: the forward's.
    """

    def compute(start: Start) -> tuple[Tensor, ...]:
        level = backward_level(value.device, value.shape[3], is_causal, granularity, lengths)
        options = {"v_range": v_range, "is_causal": is_causal, "lengths": lengths}
        hats = {"q_hat": Quantized(q_values, None, q_scale), "k_hat": Quantized(k_values, None, k_scale)}
        # O and V have the shapes and layouts of Q and K, whose 16-bit values are not needed any more.
        tensors = grad_output, output, value, value, output, log_sum_exp
        inputs = prepare_backward(*tensors, level, start, **options, **hats)
        return run_backward(inputs, level, start, is_causal=is_causal, scale=scale)

    inputs = grad_output, value, output, log_sum_exp, q_values, q_scale, k_values, k_scale, v_range, lengths
    with torch.cuda.device_of(value):
        return recorded(("backward", is_causal, scale, granularity), inputs, compute)


def fake_backward(
    grad_output, value, output, log_sum_exp, q_values, q_scale, k_values, k_scale, v_range, is_causal, scale,
    granularity, lengths=None,
):  # fmt: skip
    """Return tensors like those of `backward`, without their values."""
    return tuple(empty_in_layout_of(x) for x in (output, value, value))


def prologue_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    eps: float,
) -> list[Tensor]:
    """Compute dQ and dK of the raw tensors from `backward`'s, in their layouts; with gains theirs too, in float32.

    query and key, the raw ones, are needed with gains alone. cos ... eps: as in `forward`.
    """
    prologue = Prologue(cos, sin, query_gain, key_gain, eps)

    def compute(start: Start) -> tuple[Tensor, ...]:
        return run_rotate_back(grad_query, grad_key, query, key, prologue, start)

    inputs = grad_query, grad_key, query, key, *prologue[:4]
    with torch.cuda.device_of(grad_query):
        return list(recorded(("prologue_backward", eps), inputs, compute))


def fake_prologue_backward(grad_query, grad_key, query, key, cos, sin, query_gain, key_gain, eps):
    """Return tensors like those of `prologue_backward`, without their values."""
    gains = [] if query_gain is None else [torch.empty_like(x) for x in (query_gain, key_gain)]
    return [empty_in_layout_of(grad_query), empty_in_layout_of(grad_key), *gains]


register("forward", forward, fake_forward)
register("backward", backward, fake_backward)
register("prologue_backward", prologue_backward, fake_prologue_backward)


class SageBwdOperation(torch.autograd.Function):
    """O, whose gradients are `backward`'s, and with a prologue `prologue_backward`'s after them."""

    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale, smooth_k, granularity, unbiased, lengths, *prologue):
        arguments = query, key, value, is_causal, scale, smooth_k, *prologue, unbiased, lengths
        output, *rest = torch.ops.sage_kernels.forward.default(*arguments)
        *prologue, ctx.eps = prologue
        raw = (None, None) if prologue[-1] is None else (query, key)  # only the norm's gradient needs them
        ctx.save_for_backward(value, output, *rest, *raw, *prologue, lengths)
        ctx.options = is_causal, scale, granularity
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:  # what follows O is a constant
            return (None,) * 14  # one for each argument of forward
        *saved, query, key, cos, sin, query_gain, key_gain, lengths = ctx.saved_tensors

        def compute(grad_output, *saved):
            dq, dk, dv = torch.ops.sage_kernels.backward.default(grad_output, *saved, *ctx.options, lengths)
            if cos is None:
                return dq, dk, dv
            prologue = cos, sin, query_gain, key_gain, ctx.eps
            dq, dk, *gains = torch.ops.sage_kernels.prologue_backward.default(dq, dk, query, key, *prologue)
            return dq, dk, dv, *gains

        dq, dk, dv, *gains = gradients_once("sagebwd_attention", compute, grad_output, *saved)
        # Nothing for the options, lengths, cos and sin; then the gains', and nothing for eps.
        return dq, dk, dv, *[None] * 8, *(gains or [None] * 2), None


def sagebwd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float,
    smooth_k: bool,
    granularity: str,
    prologue: Prologue | None,
    unbiased: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute O [B, H, Nq, D] of checked arguments; `sage_ref.sagebwd_attention` is the way in.

    lengths: as in `ladder.prepare_forward`, without a prologue. Each sequence has the bits that it has alone on the
    level that runs then, up to `key_mean.LONGEST_ALIKE` tokens.
    """
    *tensors, eps = prologue or NO_PROLOGUE
    tensors = (x if x is None else x.float().contiguous() for x in tensors)
    options = is_causal, scale, smooth_k, granularity, unbiased
    return SageBwdOperation.apply(query, key, value, *options, lengths, *tensors, eps)
