"""SageBwd as a registered PyTorch operation: autograd, torch.compile, CUDA graphs, autocast.

On Hopper, if the head size allows it: forward level 5, and backward level 5, or 6 in causal attention above a head size
of 64. Elsewhere forward level 4 and backward level 3. With granularity "block" the backward level is 2, everywhere.
All are deterministic. Saved for the backward pass, per token and head: Q^ and K^ in INT8, V and O in 16 bit, one
float32 log-sum-exp. That is 6 D + 4 bytes and the block scales; FlashAttention saves 8 D + 4. A prologue with QK-norm
saves Q and K in 16 bit as well: 4 D more.
While it runs, backward level 5 takes 4 D bytes per query token and head for its sums.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of
from sage_kernels.common.operations import register
from sage_kernels.common.quantize import SCALE_BLOCK, Quantized, empty_copies, padded_length
from sage_kernels.common.recording import recorded
from sage_kernels.sagebwd.ladder import (
    BACKWARD_LEVELS,
    FORWARD_LEVELS,
    BackwardLevel,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)
from sage_kernels.sagebwd.ladder import obstacle as level_obstacle
from sage_kernels.sagebwd.prologue import NO_PROLOGUE, run_rotate_back
from sage_ref.derivatives import gradients_once
from sage_ref.prologue import Prologue

MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 128
MAX_HEADS = 65535  # of one launch: the second axis of a CUDA grid
# Triton runs kernels on the CPU, one operation at a time. Like Triton, we look once.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def obstacle(query: Tensor, smooth_q: bool) -> str | None:
    """Return why these kernels cannot take this call, or None if they can."""
    dtypes = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
    if torch.version.hip:  # its cards call themselves "cuda" and have capabilities of their own
        return "the kernels need an NVIDIA GPU, and this PyTorch is for AMD's"
    if query.device.type != "cuda" and not (INTERPRETED and query.device.type == "cpu"):
        return f"the kernels need a CUDA tensor (or TRITON_INTERPRET=1), and query is on {query.device}"
    is_known = query.device.type == "cuda" and not torch.compiler.is_compiling()
    if is_known and torch.cuda.get_device_capability(query.device) < (8, 0):
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


@cache
def measured_lengths() -> dict[str, dict[str, int]]:
    """Return the lengths that `python -m sage_lab bench --n 512 1024 2048 4096 8192` prints at its end, by card."""
    return json.loads(Path(__file__).with_name("pays_from.json").read_text(encoding="utf-8"))


def pays_from(device: torch.device, head_dim: int, is_causal: bool) -> int:
    """Return from how many tokens on both passes were measured to take at most 5% more time than PyTorch's attention.

    0 on kinds of cards that were not measured.
    """
    major, minor = torch.cuda.get_device_capability(device)
    measured = measured_lengths().get(f"{major}.{minor}", {})
    return measured.get(f"D={64 if head_dim <= 64 else 128}{' causal' if is_causal else ''}", 0)


def forward_level(device: torch.device, head_dim: int, lengths: Tensor | None = None) -> int:
    """Return the last forward level that can run there; with lengths, of those that aren't Hopper's alone."""
    return max(
        number for number, level in FORWARD_LEVELS.items()
        if not (lengths is not None and level.hopper) and level_obstacle(level, device, head_dim) is None
    )  # fmt: skip


def backward_level(
    device: torch.device, head_dim: int, is_causal: bool, granularity: str = "row", lengths: Tensor | None = None
) -> int:
    """Return the backward level with these scales of P and dS that runs there by itself."""

    def fits(level: BackwardLevel) -> bool:
        if (lengths is not None and level.hopper) or (level.causal_alone and not is_causal):
            return False
        return level.per_block == (granularity == "block") and level_obstacle(level, device, head_dim) is None

    return max(number for number, level in BACKWARD_LEVELS.items() if fits(level))


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

    def compute(start: Start) -> tuple[Tensor, ...]:
        level = forward_level(query.device, query.shape[3], lengths)
        inputs = prepare_forward(
            query,
            key,
            value,
            level,
            start,
            scale=scale,
            smooth_k=smooth_k,
            unbiased=unbiased,
            prologue=Prologue(cos, sin, query_gain, key_gain, eps),
            lengths=lengths,
        )
        output, log_sum_exp = run_forward(inputs, level, start, is_causal=is_causal, scale=scale)
        q_hat, k_hat = inputs.q_hat, inputs.k_hat
        return output, log_sum_exp, q_hat.values, q_hat.scale, k_hat.values, k_hat.scale, inputs.v_range

    inputs = query, key, value, cos, sin, query_gain, key_gain, lengths
    return recorded(("forward", is_causal, scale, smooth_k, eps, unbiased), inputs, compute)


def fake_forward(query, key, value, *_):
    """Return tensors like those of `forward`, without their values: for torch.compile."""
    log_sum_exp = query.new_empty(*query.shape[:2], padded_length(query.shape[2]), dtype=torch.float32)
    q_hat, k_hat, v_hat = (empty_copies(x, SCALE_BLOCK) for x in (query, key, value))
    return empty_in_layout_of(query), log_sum_exp, q_hat.values, q_hat.scale, k_hat.values, k_hat.scale, v_hat.scale


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
        inputs = prepare_backward(
            grad_output,
            output,  # O and V have the shapes and layouts of Q and K, whose 16-bit values are not needed any more
            value,
            value,
            output,
            log_sum_exp,
            level,
            start,
            q_hat=Quantized(q_values, None, q_scale),
            k_hat=Quantized(k_values, None, k_scale),
            v_range=v_range,
            is_causal=is_causal,
            for_one_run=True,
            lengths=lengths,
        )
        return run_backward(inputs, level, start, is_causal=is_causal, scale=scale)

    inputs = grad_output, value, output, log_sum_exp, q_values, q_scale, k_values, k_scale, v_range, lengths
    return recorded(("backward", is_causal, scale, granularity), inputs, compute)


def fake_backward(_, value, output, *__):
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
    return list(recorded(("prologue_backward", eps), inputs, compute))


def fake_prologue_backward(grad_query, grad_key, query, key, cos, sin, query_gain, key_gain, eps):
    """Return tensors like those of `prologue_backward`, without their values."""
    gains = [] if query_gain is None else [torch.empty_like(x) for x in (query_gain, key_gain)]
    return [empty_in_layout_of(grad_query), empty_in_layout_of(grad_key), *gains]


call_forward = register("forward", forward, fake_forward)
call_backward = register("backward", backward, fake_backward)
call_prologue_backward = register("prologue_backward", prologue_backward, fake_prologue_backward)
# FlopCounterMode counts nothing for an operation that it doesn't know. As in SDPA's formulas, causality halves nothing.
flop_registry[torch.ops.sage_kernels.forward] = sdpa_flop
flop_registry[torch.ops.sage_kernels.backward] = lambda do, v, *_, **out: sdpa_backward_flop(do, do, v, v, **out)


class Options(NamedTuple):
    """The arguments of a call that are no tensors."""

    is_causal: bool
    scale: float
    smooth_k: bool
    granularity: str
    unbiased: bool
    eps: float  # of the prologue

    def forward(self, query, key, value, cos, sin, query_gain, key_gain, lengths) -> tuple[Tensor, ...]:
        """Call `forward`."""
        tensors, prologue = (query, key, value), (cos, sin, query_gain, key_gain, self.eps)
        return call_forward(*tensors, self.is_causal, self.scale, self.smooth_k, *prologue, self.unbiased, lengths)

    def backward(self, grad_output, *saved_and_lengths) -> tuple[Tensor, Tensor, Tensor]:
        """Call `backward`."""
        *saved, lengths = saved_and_lengths
        return call_backward(grad_output, *saved, self.is_causal, self.scale, self.granularity, lengths)


class SageBwdOperation(torch.autograd.Function):
    """O, whose gradients are `backward`'s, and with a prologue `prologue_backward`'s after them."""

    @staticmethod
    def forward(ctx, query, key, value, cos, sin, query_gain, key_gain, lengths, options):
        prologue = cos, sin, query_gain, key_gain
        output, *rest = options.forward(query, key, value, *prologue, lengths)
        raw = (None, None) if query_gain is None else (query, key)  # only the norm's gradient needs them
        ctx.save_for_backward(value, output, *rest, lengths, *raw, *prologue)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:  # what follows O is a constant
            return (None,) * len(ctx.needs_input_grad)
        *saved, query, key, cos, sin, query_gain, key_gain = ctx.saved_tensors
        options = ctx.options

        def compute(grad_output, *saved):
            dq, dk, dv = options.backward(grad_output, *saved)
            if cos is None:
                return dq, dk, dv
            prologue = cos, sin, query_gain, key_gain, options.eps
            dq, dk, *gains = call_prologue_backward(dq, dk, query, key, *prologue)
            return dq, dk, dv, *gains

        dq, dk, dv, *gains = gradients_once("sagebwd_attention", compute, grad_output, *saved)
        d_query_gain, d_key_gain = gains or (None, None)
        return dq, dk, dv, None, None, d_query_gain, d_key_gain, None, None


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
    *of_prologue, eps = prologue or NO_PROLOGUE
    of_prologue = (x if x is None else x.float().contiguous().resolve_neg() for x in of_prologue)
    options = Options(is_causal, scale, smooth_k, granularity, unbiased, eps)
    if not torch.is_grad_enabled():
        return options.forward(query, key, value, *of_prologue, lengths)[0]
    return SageBwdOperation.apply(query, key, value, *of_prologue, lengths, options)
