"""The command `accuracy`: compare the kernels on this GPU with the reference, which simulates them.

It runs a list of awkward shapes. Backward level 5 rounds more than the reference does: P and dS to float16, parts of dQ
to integers. For SLA2 it runs the same shapes with every share of selected blocks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from torch import Tensor

import sage_ref
from sage_lab.bench.timing import require_gpu
from sage_lab.command_line import Arguments, Failed
from sage_lab.records import Row, markdown_table, write_record
from sage_lab.repairs import scales_in_a_record
from sage_ref.sagebwd.settings import GRANULARITIES, SageBwdSettings
from sage_ref.sla2 import block_count, selected_count, top_blocks
from sage_ref.tracing import relative_l2

OPERANDS, TENSORS = ("query", "key", "value"), ("O", "dQ", "dK", "dV")
SELECTED: dict[str, Callable[[int], int]] = {  # how many of a row's key blocks
    "none": lambda blocks: 0,
    "one": lambda blocks: 1,
    "50%": lambda blocks: blocks // 2,
    "97% sparse": lambda blocks: selected_count(0.97, blocks),
    "all but one": lambda blocks: blocks - 1,
    "all": lambda blocks: blocks,
}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Grid:
    """Shapes on which kernels and reference are compared, each with each."""

    head_dims: tuple[int, ...] = (32, 64, 96, 128)
    lengths: tuple[tuple[int, int], ...] = (
        *((1, 1), (3, 3), (64, 1), (113, 203), (239, 1), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048)),
    )  # of queries and keys
    heads: tuple[tuple[int, int], ...] = ((4, 4), (8, 2), (4, 1))  # of queries and keys
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    selected: tuple[str, ...] = tuple(SELECTED)  # with SLA2
    device: str = "cuda"


SAGEBWD, SLA2 = Grid(), Grid(head_dims=(64, 128))


def results(attention: Callable, operands: Tensors, grad_output: Tensor) -> Tensors:
    """Return O, dQ, dK, dV, and dalpha of attention(**operands) if alpha is an operand."""
    leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
    output = attention(**leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return dict(zip((*TENSORS, "dalpha"), (output, *gradients), strict=False))


def both(attention: Callable, operands: Tensors, grad_output: Tensor) -> list[Tensors]:
    """Return the results of the kernels and those of the reference."""
    return [results(partial(attention, backend=name), operands, grad_output) for name in ("triton", "reference")]


def drawn(
    lengths: tuple[int, int], head_dim: int, heads: tuple[int, int], dtype: str, device: str
) -> tuple[Row, Tensors, Tensor]:
    """Return the columns of a row that say which shape it is, random operands, and grad_output."""
    (n_q, n_k), (heads, kv_heads) = lengths, heads
    columns = {"n_q": n_q, "n_k": n_k, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads}
    sizes = [(2, heads, n_q), (2, kv_heads, n_k), (2, kv_heads, n_k), (2, heads, n_q)]
    tensors = [torch.randn(*size, head_dim, device=device).to(getattr(torch, dtype)) for size in sizes]
    return columns, dict(zip(OPERANDS, tensors[:3], strict=True)), tensors[3]


def errors(kernels: Tensors, reference: Tensors, n_k: int) -> dict[str, float]:
    """Return the relative L2 error of each tensor to three digits.

    With one key P is 1 and dS is 0, but for how O was rounded: then dQ and dK can't be compared.
    """
    names = [name for name in reference if n_k > 1 or name not in ("dQ", "dK")]
    return {name: float(f"{relative_l2(kernels[name], reference[name]):.3g}") for name in names}


def sagebwd_rows(grid: Grid = SAGEBWD) -> Iterator[Row]:
    """Yield the errors of `sagebwd_attention`, with all masks and granularities."""
    for lengths, head_dim, heads, is_causal, dtype, granularity in itertools.product(
        grid.lengths, grid.head_dims, grid.heads, (False, True), grid.dtypes, GRANULARITIES
    ):
        columns, *inputs = drawn(lengths, head_dim, heads, dtype, grid.device)
        options = {"is_causal": is_causal, "granularity": granularity, "enable_gqa": True}
        found = both(partial(sage_ref.sagebwd_attention, **options), *inputs)
        columns |= {"causal": is_causal, "dtype": dtype}
        yield columns | scales_in_a_record(SageBwdSettings(granularity=granularity)) | errors(*found, lengths[1])


def sla2_inputs(
    operands: Tensors, count: Callable[[int], int], quantize: bool, device: str
) -> tuple[Callable, Tensors]:
    """Return `sparse_linear_attention` for a random mask, and its operands, a random alpha with them.

    count: of the number of key blocks, how many each row selects.
    """
    query, key = operands["query"], operands["key"]
    blocks = *query.shape[:2], block_count(query.shape[2], MASK_BLOCK_Q), block_count(key.shape[2], MASK_BLOCK_KV)
    block_mask = top_blocks(torch.rand(blocks, device=device), count(blocks[3]))
    attention = partial(sage_ref.sparse_linear_attention, block_mask=block_mask, quantize=quantize)
    return attention, operands | {"alpha": torch.rand(blocks[:3], device=device)}


def sla2_rows(grid: Grid = SLA2) -> Iterator[Row]:
    """Yield the errors of `sparse_linear_attention`; nothing for a tensor whose reference is 0 exactly."""
    for lengths, head_dim, heads, selected, quantize, dtype in itertools.product(
        grid.lengths, grid.head_dims, grid.heads, grid.selected, (False, True), grid.dtypes
    ):
        columns, operands, grad_output = drawn(lengths, head_dim, heads, dtype, grid.device)
        attention, operands = sla2_inputs(operands, SELECTED[selected], quantize, grid.device)
        kernels, reference = both(attention, operands, grad_output)
        compared = {name: x for name, x in reference.items() if x.float().norm() > 1e-3 * x.numel() ** 0.5}
        columns |= {"selected": selected, "quantize": quantize, "dtype": dtype}
        yield columns | errors(kernels, compared, lengths[1])


def largest(rows: Sequence[Row]) -> dict[str, float]:
    """Return the largest error of each tensor; `Failed` if one is not finite."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name in [name for name in (*TENSORS, "dalpha") if name in row]:
            found.setdefault(name, []).append(row[name])
    if not all(map(math.isfinite, itertools.chain(*found.values()))):
        raise Failed(f"errors: expected finite ones, got {found}")
    return {name: max(values) for name, values in found.items()}


@dataclass(frozen=True, kw_only=True)
class Accuracy(Arguments):
    """Options of `accuracy`."""

    op: Annotated[Literal["sagebwd", "sla2"], "which kernels"] = "sagebwd"

    def run(self, command: str) -> None:
        """Compare the kernels with the reference on this GPU."""
        require_gpu()
        rows = list(sla2_rows() if self.op == "sla2" else sagebwd_rows())
        worst = largest(rows)
        print(f"{len(rows)} cases, largest relative L2 against the simulating reference:\n")
        print(markdown_table(worst, [worst.values()]))
        write_record(self.json, rows, command=command, seeds=[0])
