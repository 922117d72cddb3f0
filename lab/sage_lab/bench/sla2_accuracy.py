"""How far the SLA2 kernels are from the reference on this GPU: every share of selected blocks, awkward shapes."""

import itertools
from collections.abc import Callable, Iterator

import torch
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from torch import Tensor

from sage_lab.bench.accuracy import HEADS, LENGTHS, SMALLEST_KEYS
from sage_ref import sparse_linear_attention
from sage_ref.sla2 import block_count, selected_count, top_blocks
from sage_ref.tracing import relative_l2

HEAD_DIMS = (64, 128)
TENSORS = ("O", "dQ", "dK", "dV", "dalpha")
# How many of a row's key blocks are selected.
SELECTED: dict[str, Callable[[int], int]] = {
    "none": lambda blocks: 0,
    "one": lambda blocks: 1,
    "50%": lambda blocks: blocks // 2,
    "97% sparse": lambda blocks: selected_count(0.97, blocks),
    "all but one": lambda blocks: blocks - 1,
    "all": lambda blocks: blocks,
}


def shape_rows(device: str = "cuda") -> Iterator[dict]:
    """Relative L2 of O and all gradients against the reference backend; nothing where the reference is 0 exactly."""
    for (n_q, n_k), head_dim, (heads, kv_heads), (selected, count), quantize, dtype in itertools.product(
        LENGTHS, HEAD_DIMS, HEADS, SELECTED.items(), (False, True), (torch.float16, torch.bfloat16)
    ):
        sizes = [(2, heads, n_q), (2, kv_heads, n_k), (2, kv_heads, n_k), (2, heads, n_q)]
        inputs = [torch.randn(*size, head_dim, device=device).to(dtype) for size in sizes]
        blocks = 2, heads, block_count(n_q, MASK_BLOCK_Q), block_count(n_k, MASK_BLOCK_KV)
        block_mask = top_blocks(torch.rand(blocks, device=device), count(blocks[3]))
        alpha = torch.rand(blocks[:3], device=device)
        # One key: P is 1, and what is left of dS is how O_s was rounded. Nothing to compare.
        tensors = TENSORS if n_k >= SMALLEST_KEYS else ("O", "dV", "dalpha")
        kernel, reference = (
            outputs_and_gradients(inputs, block_mask, alpha, quantize, backend) for backend in ("triton", "reference")
        )
        yield {
            "n_q": n_q, "n_k": n_k, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "selected": selected,
            "quantize": quantize, "dtype": str(dtype).removeprefix("torch."),
            **{
                name: float(f"{relative_l2(kernel[name], reference[name]):.3g}")
                for name in tensors
                if reference[name].float().norm() > 1e-3 * reference[name].numel() ** 0.5
            },
        }  # fmt: skip


def outputs_and_gradients(
    inputs: list[Tensor], block_mask: Tensor, alpha: Tensor, quantize: bool, backend: str
) -> dict[str, Tensor]:
    *operands, grad_output = inputs
    leaves = [x.detach().requires_grad_() for x in (*operands, alpha)]
    output = sparse_linear_attention(
        *leaves[:3], block_mask, leaves[3], quantize=quantize, backend=backend
    )  # fmt: skip
    return dict(zip(TENSORS, (output, *torch.autograd.grad(output, leaves, grad_output)), strict=True))


def largest(rows: list[dict]) -> list[dict]:
    """The largest error of each tensor by dtype, quantize and share of selected blocks."""
    found = []
    for dtype, quantize, selected in itertools.product(("float16", "bfloat16"), (False, True), SELECTED):
        keys = {"dtype": dtype, "quantize": quantize, "selected": selected}
        group = [row for row in rows if all(row[name] == value for name, value in keys.items())]
        found.append(keys | {name: max(row.get(name, 0.0) for row in group) for name in TENSORS})
    return found


def repeats_are_equal(times: int = 100, device: str = "cuda") -> bool:
    """True if `times` runs, forward and backward, give the same bits."""
    inputs = [torch.randn(1, 4, 3000, 128, device=device, dtype=torch.bfloat16) for _ in range(4)]
    blocks = 1, 4, block_count(3000, MASK_BLOCK_Q), block_count(3000, MASK_BLOCK_KV)
    arguments = top_blocks(torch.rand(blocks, device=device), 5), torch.rand(blocks[:3], device=device), True, "triton"
    first = outputs_and_gradients(inputs, *arguments)
    runs = (outputs_and_gradients(inputs, *arguments) for _ in range(times))
    return all(torch.equal(run[name], first[name]) for run in runs for name in TENSORS)
