"""Level 1: lists for the sparse branch, one matrix product for the linear branch, a second kernel to mix them.

Idea: a query block's list names the few key blocks that it visits; H_i of all query blocks is complement mask times
rows h_j (`sums.py`). What remains per query is phi(Q) H and the mix, a pass over Q and O_s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.memory import last_axis_contiguous
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.signature import FLOATS, POINTERS, SIZE, Signature, strided
from sage_kernels.common.tiles import Operand, load_tokens
from sage_kernels.sla2.forward.program import ForwardInputs, mixed_output
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from sage_kernels.sla2.sums import SUMS_DTYPE


@triton.jit(do_not_specialize=["n_q"])
def mix_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, alpha_ptr, sums_ptr, o_s_ptr, o_ptr, heads, n_q,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one head."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query, d = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DP)
    block = head * tl.cdiv(n_q, MASK_BLOCK_Q) + tile * BLOCK_Q // MASK_BLOCK_Q
    q = Operand(q_ptr + (head // heads) * q_stride_b + (head % heads) * q_stride_h, q_stride_n)
    q_i = load_tokens(q, query, n_q, D, DP, True)
    offsets = head * n_q * D + query[:, None] * D + d[None, :]
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    o_s = tl.load(o_s_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    o_i = mixed_output(o_s, tl.load(alpha_ptr + block), q_i, sums_ptr + block * DP * (DP + 1), D, DP)
    tl.store(o_ptr + offsets, o_i.to(o_ptr.dtype.element_ty), mask=inside)


def signature(dtype: torch.dtype = torch.bfloat16) -> Signature:
    """Triton's types of the parameters of `mix_program`."""
    x = POINTERS[dtype]
    tensors = {"alpha_ptr": FLOATS, "sums_ptr": POINTERS[SUMS_DTYPE], "o_s_ptr": x, "o_ptr": x}
    return strided("q", x) | tensors | {"heads": SIZE, "n_q": SIZE}


def constants(head_dim: int, launch: Launch) -> dict:
    """The constants of `mix_program`."""
    dp = padded_head_dim(head_dim)
    return {"D": head_dim, "DP": dp, "BLOCK_Q": launch.block_q, "MASK_BLOCK_Q": MASK_BLOCK_Q}


def run_mix(inputs: ForwardInputs, sparse_output: Tensor, launch: Launch) -> Tensor:
    """O [B, H, Nq, D] from O_s."""
    query = last_axis_contiguous(inputs.query)
    batch, heads, n_q, head_dim = query.shape
    output = torch.empty_like(sparse_output)
    mix_program[(triton.cdiv(n_q, launch.block_q), batch * heads)](
        query, *query.stride()[:3], inputs.alpha, inputs.sums, sparse_output, output, heads, n_q,
        **constants(head_dim, launch), num_warps=launch.num_warps,
    )  # fmt: skip
    return output
