"""The INT8 forward pass of attention in Triton."""

import math

import torch  # noqa: F401, the worked value needs it
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def forward_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, o_ptr, log_sum_exp_ptr, n_q, n_k, scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program i: O_i [BLOCK_Q, D] and L_i [BLOCK_Q]. scale: what the scores are multiplied by besides s_Q and s_K."""
    i = tl.program_id(0)
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    q_hat_i = tl.load(q_ptr + query[:, None] * D + d[None, :])  # [Bq, D]
    s_q = tl.load(q_scale_ptr + i)
    ### SOLUTION: where m and l [BLOCK_Q] and O_i [BLOCK_Q, D] start, in float32
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, D], tl.float32)

    for j in range(0, tl.cdiv(n_k, BLOCK_KV)):
        key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_hat_j = tl.load(k_ptr + key[:, None] * D + d[None, :])  # [Bkv, D]
        v_hat_j = tl.load(v_ptr + key[:, None] * D + d[None, :])
        s_k, s_v = tl.load(k_scale_ptr + j), tl.load(v_scale_ptr + j)
        ### SOLUTION: S_ij and its mask, m, P~ and l, then P^ and its scale, and O_i
        s_ij = tl.dot(q_hat_i, tl.trans(k_hat_j), out_dtype=tl.int32).to(tl.float32) * (scale * s_q * s_k)
        visible = key[None, :] < n_k
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        s_ij = tl.where(visible, s_ij, -float("inf"))  # [Bq, Bkv]
        m_new = tl.maximum(m, tl.max(s_ij, 1))
        rescale = tl.math.exp2(m - m_new)
        p_ij = tl.math.exp2(s_ij - m_new[:, None])
        l = l * rescale + tl.sum(p_ij, 1)
        s_p = tl.max(p_ij, 1) / 127
        # A row without a visible key in this tile: P~ = 0 and s_P = 0.
        p_hat_ij = tl.floor(p_ij / tl.where(s_p == 0, 1.0, s_p)[:, None] + 0.5).to(tl.int8)
        product = tl.dot(p_hat_ij, v_hat_j, out_dtype=tl.int32).to(tl.float32)
        o_i = o_i * rescale[:, None] + product * (s_p * s_v)[:, None]
        m = m_new
    ### SOLUTION: divide by l, store O_i and the natural logarithm L_i of the sum
    inside = query < n_q
    tl.store(o_ptr + query[:, None] * D + d[None, :], o_i / l[:, None], mask=inside[:, None])
    tl.store(log_sum_exp_ptr + query, (m + tl.math.log2(l)) * LN_2, mask=inside)


def int8_forward(
    q_hat: Tensor, q_scale: Tensor, k_hat: Tensor, k_scale: Tensor, v_hat: Tensor, v_scale: Tensor, n_k: int,
    is_causal: bool, output: Tensor, log_sum_exp: Tensor,
) -> None:  # fmt: skip
    """Write O = softmax(c Q K^T) V into `output`, and L, the log of the softmax's denominator, into `log_sum_exp`.

    q_hat: int8 [Tm * Bq, D], k_hat, v_hat: int8 [Tn * Bkv, D]. Rows n_q, n_k and beyond are padding and hold anything.
    q_scale: float32 [Tm], k_scale, v_scale: float32 [Tn]: one scale per tile. All contiguous.
    output: float32 [n_q, D], log_sum_exp: float32 [n_q]. Bq is at least 16, Bkv and D at least 32, powers of two.
    c = 1/sqrt(D). is_causal: query i sees keys 0 to i. L_i = log sum_j e^(c q_i . k_j), the natural logarithm.

    >>> zeros, one = torch.zeros(16, 32, dtype=torch.int8), torch.ones(1)
    >>> v_hat = torch.arange(16, dtype=torch.int8)[:, None].expand(16, 32).contiguous()
    >>> o, l = torch.empty(3, 32), torch.empty(3)
    >>> int8_forward(zeros, one, zeros, one, v_hat, one, 16, True, o, l)
    >>> o[:, 0], l.exp()  # equal scores: the mean of the visible values 0, 1, 2; and how many they are
    (tensor([0.0000, 0.5000, 1.0000]), tensor([1., 2., 3.]))
    """
    n_q, head_dim = output.shape
    block_q, block_kv = len(q_hat) // len(q_scale), len(k_hat) // len(k_scale)
    ### SOLUTION: launch forward_kernel with one program per tile of queries
    forward_kernel[(triton.cdiv(n_q, block_q),)](
        q_hat, q_scale, k_hat, k_scale, v_hat, v_scale, output, log_sum_exp, n_q, n_k, LOG2_E / math.sqrt(head_dim),
        D=head_dim, BLOCK_Q=block_q, BLOCK_KV=block_kv, IS_CAUSAL=is_causal,
    )  # fmt: skip
