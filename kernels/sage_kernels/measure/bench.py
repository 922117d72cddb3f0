"""Time every level of both ladders and the peers a user could pick instead, in one process, and record it.

Peers: PyTorch's scaled_dot_product_attention with FlashAttention-2 and with cuDNN. Three scopes: "kernel" (inputs
already quantised), "op" (with smoothing, quantisation and every copy), "autograd" (the public function). A
level is timed only after its output on fresh random inputs was compared with exact attention. Sequences of LONG
tokens take the last scope alone, and FlashAttention-2 for exact attention, whose matrices would not fit.

TOPS = 4 B H Nq Nk D / seconds forward, 2.5 times that backward, half of it if causal.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_ref
from sage_kernels.sagebwd.ladder import (
    BACKWARD_LEVELS,
    FORWARD_LEVELS,
    obstacle,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)
from sage_kernels.sagebwd.ops import backward_level, forward_level
from sage_ref.attention import attention_backward, attention_forward

PEERS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
# Errors of INT8 attention on standard normal inputs are 2 to 4 per cent; ten is a broken kernel.
LARGEST_ERROR = 0.1
REPETITIONS = 5  # at least


class Shape(NamedTuple):
    batch: int
    heads: int
    n: int
    head_dim: int
    causal: bool


SHAPES = tuple(
    Shape(4, 16 * 128 // head_dim, n, head_dim, causal)
    for head_dim, n, causal in itertools.product((128, 64), (1024, 2048, 4096, 8192, 16384), (False, True))
)


LONG = (32768, 65536)
SHAPES += tuple(
    Shape(1, 16 * 128 // head_dim, n, head_dim, causal)
    for head_dim, n, causal in itertools.product((128, 64), LONG, (False, True))
)


class Timing(NamedTuple):
    ms_median: float
    ms_p20: float
    ms_p80: float
    repetitions: int


def measure(run: Callable[[], object]) -> Timing:
    """Median, 20th and 80th percentile of run() in milliseconds, over 60 ms or at least REPETITIONS repetitions."""
    run()  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - start)
    times = []
    while len(times) < REPETITIONS:
        times += triton.testing.do_bench(run, warmup=20, rep=max(60, (REPETITIONS + 1) * ms), return_mode="all")
    quantiles = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return Timing(*quantiles.tolist(), len(times))


def bench_shape(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Iterator[dict]:
    """Rows for one shape: peers, then every level of the ladders that runs here, then the registered operation."""
    size = (shape.batch, shape.heads, shape.n, shape.head_dim)
    query, key, value, grad_output = (torch.randn(size, device="cuda", dtype=dtype) for _ in range(4))
    options = {"is_causal": shape.causal, "scale": 1 / math.sqrt(shape.head_dim)}
    # One head of one sample is the judge of all.
    judge = peer_head if shape.n in LONG else exact_head
    exact = judge(query, key, value, grad_output, **options)

    def row(provider, level, scope, direction, timing, error):
        operations = 4 * math.prod(size) * shape.n / (2 if shape.causal else 1)
        operations *= {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}[direction]
        return {
            "op": "attention" if provider in PEERS else "sagebwd", "level": level, "provider": provider,
            "dtype": str(dtype).removeprefix("torch."), "batch": shape.batch, "heads": shape.heads,
            "kv_heads": shape.heads, "n_q": shape.n, "n_k": shape.n, "head_dim": shape.head_dim,
            "causal": shape.causal, "sparsity": 0.0, "scope": scope, "direction": direction,
            **{name: round(value, 5) for name, value in timing._asdict().items()},
            "tops": round(operations / timing.ms_median / 1e9, 1), "rel_l2": float(f"{error:.3g}"),
        }  # fmt: skip

    for peer, backend in PEERS.items():
        with sdpa_kernel(backend):
            yield from _autograd_rows(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal),
                (query, key, value, grad_output), exact, lambda *columns, peer=peer: row(peer, None, *columns),
            )  # fmt: skip

    best = forward_level(query.device, shape.head_dim)
    if shape.n not in LONG:
        yield from _ladder_rows(shape, (query, key, value, grad_output), exact, best, options, row)
    yield from _autograd_rows(
        lambda q, k, v: sage_ref.sagebwd_attention(q, k, v, is_causal=shape.causal, backend="triton"),
        (query, key, value, grad_output), exact,
        lambda *columns: row("sage_kernels", f"{best}/{backward_level(query.device, shape.head_dim)}", *columns),
    )  # fmt: skip


def _ladder_rows(shape, tensors, exact, best, options, row):
    """Kernels and ops of every level. best: the forward level whose results the backward levels take."""
    query, key, value, grad_output = tensors
    prepare = {"scale": options["scale"], "smooth_k": True}
    for level, chosen in enumerate(FORWARD_LEVELS):
        if obstacle(chosen, query.device, shape.head_dim) is not None:
            continue

        def op(level=level):
            return run_forward(prepare_forward(query, key, value, level, **prepare), level, **options)

        inputs = prepare_forward(query, key, value, level, **prepare)
        error = require_close(run_forward(inputs, level, **options)[0], exact[0])
        timing = measure(lambda inputs=inputs, level=level: run_forward(inputs, level, **options))
        yield row("sage_kernels", level, "kernel", "fwd", timing, error)
        yield row("sage_kernels", level, "op", "fwd", measure(op), error)

    forward_inputs = prepare_forward(query, key, value, best, **prepare)
    output, log_sum_exp = run_forward(forward_inputs, best, **options)
    exact_output, exact_log_sum_exp = run_forward(prepare_forward(query, key, value, 0, **prepare), 0, **options)
    for level, chosen in enumerate(BACKWARD_LEVELS):
        if obstacle(chosen, query.device, shape.head_dim) is not None:
            continue
        saved = (output, log_sum_exp) if chosen.int8 else (exact_output, exact_log_sum_exp)
        hats = {"q_hat": forward_inputs.q_hat, "k_hat": forward_inputs.k_hat}

        def op(level=level, saved=saved, hats=hats):
            inputs = prepare_backward(grad_output, query, key, value, *saved, level, **hats)
            return run_backward(inputs, level, **options)

        inputs = prepare_backward(grad_output, query, key, value, *saved, level, **hats)
        gradients = run_backward(inputs, level, **options)
        error = max(require_close(found, expected) for found, expected in zip(gradients, exact[1:], strict=True))
        timing = measure(lambda inputs=inputs, level=level: run_backward(inputs, level, **options))
        yield row("sage_kernels", level, "kernel", "bwd", timing, error)
        yield row("sage_kernels", level, "op", "bwd", measure(op), error)


def _autograd_rows(attention: Callable, inputs: tuple[Tensor, ...], exact: tuple[Tensor, ...], row: Callable):
    *operands, grad_output = inputs
    leaves = [x.detach().requires_grad_() for x in operands]
    output = attention(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
    error = max(require_close(found, expected) for found, expected in zip((output, *gradients), exact, strict=True))

    def backward():
        return torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

    def both():
        return torch.autograd.grad(attention(*leaves), leaves, grad_output)

    yield row("autograd", "fwd", measure(lambda: attention(*operands)), error)
    yield row("autograd", "bwd", measure(backward), error)
    yield row("autograd", "fwd+bwd", measure(both), error)


def exact_head(query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool, scale: float):
    """O, dQ, dK, dV of the first head of the first sample, in float64 where memory allows, else float32."""
    dtype = torch.float64 if query.shape[2] <= 8192 else torch.float32
    q, k, v, do = (x[:1, :1].to(dtype) for x in (query, key, value, grad_output))
    forward = attention_forward(q, k, v, is_causal=is_causal, scale=scale)
    backward = attention_backward(
        do, q, k, v, forward.output, forward.log_sum_exp, is_causal=is_causal, scale=scale
    )  # fmt: skip
    return forward.output, backward.grad_query, backward.grad_key, backward.grad_value


def peer_head(query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool, scale: float):
    """`exact_head` in 16 bit, by FlashAttention-2."""
    leaves = [x[:1, :1].detach().requires_grad_() for x in (query, key, value)]
    with sdpa_kernel(PEERS["sdpa_flash"]):
        output = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
    return tuple(x.float() for x in (output.detach(), *torch.autograd.grad(output, leaves, grad_output[:1, :1])))


def require_close(found: Tensor, exact: Tensor) -> float:
    """Relative L2 error of the first head; RuntimeError if it is too large or not finite: that must not be timed."""
    found = found[:1, :1].to(exact.dtype)
    error = ((found - exact).norm() / exact.norm()).item()
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"bench: expected a relative L2 error below {LARGEST_ERROR}, got {error}")
    return error
