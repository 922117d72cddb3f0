"""How far the kernels are from the reference, which simulates them, and both from exact attention, on this GPU.

Two tables: a list of awkward shapes (kernels against reference), and the paper's Table 1 computed with the kernels,
beside the reference's and the paper's. Backward level 5 rounds more than the reference does: P and dS to float16, parts
of dQ to integers.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import sage_ref
from sage_lab.experiments.table1 import PAPER_TABLE1, TENSORS, table1_inputs
from sage_lab.repairs import scales_in_a_record
from sage_ref.sagebwd.settings import GRANULARITIES, SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2

LENGTHS = ((1, 1), (3, 3), (64, 1), (113, 203), (239, 1), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048))
HEAD_DIMS = (32, 64, 96, 128)
HEADS = ((4, 4), (8, 2), (4, 1))  # query heads, key heads
# One key: P is 1 and dS is 0, exactly. Nothing to compare.
SMALLEST_KEYS = 2


def outputs_and_gradients(attention, inputs: list[Tensor]) -> dict[str, Tensor]:
    """O, dQ, dK, dV of attention(query, key, value) given [query, key, value, grad_output]."""
    *operands, grad_output = inputs
    leaves = [x.detach().requires_grad_() for x in operands]
    output = attention(*leaves)
    return dict(zip(TENSORS, (output, *torch.autograd.grad(output, leaves, grad_output)), strict=True))


def both(inputs: list[Tensor], **options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(kernels', reference's) O, dQ, dK, dV of `sagebwd_attention` with these options."""
    attention = partial(sage_ref.sagebwd_attention, enable_gqa=True, **options)
    kernel, reference = (partial(attention, backend=backend) for backend in ("triton", "reference"))
    return outputs_and_gradients(kernel, inputs), outputs_and_gradients(reference, inputs)


def shape_rows(device: str = "cuda") -> Iterator[dict]:
    """Relative L2 of the kernels' O, dQ, dK, dV against the reference's: all shapes, both dtypes and granularities."""
    for (n_q, n_k), head_dim, (heads, kv_heads), is_causal, dtype, granularity in itertools.product(
        LENGTHS, HEAD_DIMS, HEADS, (False, True), (torch.float16, torch.bfloat16), GRANULARITIES
    ):
        sizes = [(2, heads, n_q), (2, kv_heads, n_k), (2, kv_heads, n_k), (2, heads, n_q)]
        inputs = [torch.randn(*size, head_dim, device=device).to(dtype) for size in sizes]
        kernel, reference = both(inputs, is_causal=is_causal, granularity=granularity)
        tensors = TENSORS if n_k >= SMALLEST_KEYS else ("O", "dV")
        yield {
            "table": "shapes", "n_q": n_q, "n_k": n_k, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads,
            "causal": is_causal, "dtype": str(dtype).removeprefix("torch."),
            **scales_in_a_record(SageBwdSettings(granularity=granularity)),
            **{name: float(f"{relative_l2(kernel[name], reference[name]):.3g}") for name in tensors},
        }  # fmt: skip


def table1_rows(n: int = 2048, head_dim: int = 128, seeds: int = 5, device: str = "cuda") -> Iterator[dict]:
    """Table 1 with the kernels: relative L2 against exact attention, mean over seeds, beside the reference's."""
    for sigma, printed in PAPER_TABLE1.items():
        errors = {name: [0.0, 0.0] for name in TENSORS}
        for seed in range(seeds):
            inputs = table1_inputs(n, head_dim, sigma, seed, device)
            exact = exact_intermediates(*inputs, SageBwdSettings())
            for which, found in enumerate(both(inputs)):
                for name in TENSORS:
                    errors[name][which] += relative_l2(found[name], exact[name]) / seeds
        for (name, (kernel, reference)), (_, paper) in zip(errors.items(), printed, strict=True):
            yield {
                "table": "table1", "sigma": sigma, "tensor": name, "n": n, "head_dim": head_dim,
                **scales_in_a_record(SageBwdSettings()),
                "kernel_rel_l2": round(kernel, 6), "reference_rel_l2": round(reference, 6), "paper_rel_l2": paper,
            }  # fmt: skip


def repeats_are_equal(times: int = 100, device: str = "cuda") -> bool:
    """True if `times` runs give the same bits."""
    inputs = [torch.randn(2, 4, 1000, 128, device=device, dtype=torch.bfloat16) for _ in range(4)]

    def attention(q, k, v):
        return sage_ref.sagebwd_attention(q, k, v, is_causal=True, backend="triton")

    first = outputs_and_gradients(attention, inputs)
    runs = (outputs_and_gradients(attention, inputs) for _ in range(times))
    return all(torch.equal(run[name], first[name]) for run in runs for name in TENSORS)


def largest(rows: list[dict]) -> dict[str, float]:
    """The largest error of each tensor over the rows of `shape_rows`."""
    found = {name: max(row.get(name, 0.0) for row in rows) for name in TENSORS}
    if any(math.isnan(value) for value in found.values()):
        raise RuntimeError("accuracy: expected finite errors, got NaN")
    return found
