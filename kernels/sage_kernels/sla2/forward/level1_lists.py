"""Level 1: lists for the sparse branch, one matrix product for the linear branch, a second kernel to mix them.

Idea: a query block's list names the few key blocks that it visits; H_i of all query blocks is complement mask times
rows h_j (`sums.py`). What remains per query is phi(Q) H and the mix, a pass over Q and O_s.
"""

import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, last_axis_contiguous, strided
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import Operand, head_of, load_tokens, store_tokens
from sage_kernels.sla2.forward.program import ForwardInputs, mixed_output
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from sage_ref.sla2.blocks import block_count


@triton.jit(do_not_specialize=["n_q"])
def sla2_mix_program(
    q_strided, alpha_ptr, sums_ptr, o_s_ptr, o_strided, heads, n_q,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute O of BLOCK_Q queries of one head."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    query = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    block = head * tl.cdiv(n_q, MASK_BLOCK_Q) + tile * BLOCK_Q // MASK_BLOCK_Q
    q_i = load_tokens(Operand(head_of(q_strided, batch, h), q_strided.stride_n), query, n_q, D, DP, True)
    o_s = load_tokens(Operand(o_s_ptr + head * n_q * D, D), query, n_q, D, DP, True).to(tl.float32)
    o_i = mixed_output(o_s, tl.load(alpha_ptr + block), q_i, sums_ptr + block * DP * (DP + 1), D, DP)
    store_tokens(o_i, Operand(head_of(o_strided, batch, h), o_strided.stride_n), query, n_q, D, DP)


def run_mix(inputs: ForwardInputs, sparse_output: Tensor, launch: Launch, start: Start) -> Tensor:
    """Compute O [B, H, Nq, D] from O_s."""
    query = last_axis_contiguous(inputs.query)
    batch, heads, n_q, head_dim = query.shape
    output = empty_in_layout_of(inputs.query)
    arguments = (
        strided(query), inputs.alpha, inputs.sums, sparse_output, strided(output), heads, n_q,
    )  # fmt: skip
    dp = padded_head_dim(head_dim)
    constants = {"D": head_dim, "DP": dp, "BLOCK_Q": launch.block_q, "MASK_BLOCK_Q": MASK_BLOCK_Q}
    grid = (block_count(n_q, launch.block_q), batch * heads)
    start(sla2_mix_program, grid, arguments, constants, {"num_warps": launch.num_warps})
    return output
