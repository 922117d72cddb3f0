"""The sparse loop: attention over listed key blocks, in Triton."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


def block_lists(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The key blocks that each query block has selected, in ascending order, and how many there are.

    selected: bool [Tm, Tn] -> lists: int32 [Tm, Tn], count: int32 [Tm]. lists[i, : count[i]] are numbers of key blocks;
    what stands after them doesn't matter, as nobody reads it.

    >>> lists, count = block_lists(torch.tensor([[False, True, True], [False, False, False]]))
    >>> count, lists[0, :2]
    (tensor([2, 0], dtype=torch.int32), tensor([1, 2], dtype=torch.int32))
    """
    ### SOLUTION: numbers of the selected blocks, to the left of each row
    lists = torch.argsort((~selected).int(), dim=-1, stable=True)
    return lists.int(), selected.sum(-1).int()


def sparse_tile(q_i: Tensor, key: Tensor, value: Tensor, blocks: Tensor, block_kv: int) -> tuple[Tensor, Tensor]:
    """O_i and L_i of one query block, by the online softmax over the key blocks in `blocks`, one after the other.

    q_i: float16 [Bq, D], key, value: float16 [n_k, D], blocks: int32 [count], in any order.
    -> O_i float32 [Bq, D] = softmax(c q_i K^T) V over the keys of these blocks, L_i float32 [Bq], the natural logarithm
    of the softmax's denominator. c = 1/sqrt(D); sums in float32. The last key block may be partial. Without any block
    O_i = 0 and L_i = -infinity. Keys and values of other blocks must not be read: they may be NaN.

    >>> value = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]]).half()  # blocks of 2: the last holds one key
    >>> o, l = sparse_tile(torch.zeros(1, 1).half(), torch.zeros(5, 1).half(), value, torch.tensor([2, 0]), 2)
    >>> o, l.exp()  # equal scores: the mean of 5, 1 and 2; three keys
    (tensor([[2.6667]]), tensor([3.]))
    """
    q_i, n_k = q_i.float(), len(key)
    m = torch.full((len(q_i), 1), -math.inf, device=q_i.device)
    l = torch.zeros_like(m)
    o_i = torch.zeros_like(q_i)
    ### SOLUTION: for every block of the list a step of the online softmax, then O_i and L_i
    for j in blocks.tolist():
        rows = slice(j * block_kv, min((j + 1) * block_kv, n_k))
        s_ij = q_i @ key[rows].float().mT / math.sqrt(q_i.shape[1])
        m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
        rescale, p_ij = torch.exp(m - m_new), torch.exp(s_ij - m_new)
        l = l * rescale + p_ij.sum(-1, keepdim=True)
        o_i = o_i * rescale + p_ij @ value[rows].float()
        m = m_new
    return o_i / torch.where(l == 0, 1, l), (m + torch.log(l)).squeeze(-1)


@triton.jit
def sparse_kernel(
    q_ptr, k_ptr, v_ptr, lists_ptr, count_ptr, o_ptr, log_sum_exp_ptr, n_q, n_k, width, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Program i: O_i [BLOCK_Q, D] and L_i [BLOCK_Q]. width: how many numbers a row of the lists has room for."""
    i = tl.program_id(0)
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    q_i = tl.load(q_ptr + query[:, None] * D + d[None, :], mask=query[:, None] < n_q, other=0.0)  # [Bq, D], float16
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, D], tl.float32)
    ### SOLUTION: the loop over the list of query block i, then store O_i and L_i
    for step in range(0, tl.load(count_ptr + i)):
        j = tl.load(lists_ptr + i * width + step)
        key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        exists = key[:, None] < n_k
        k_j = tl.load(k_ptr + key[:, None] * D + d[None, :], mask=exists, other=0.0)  # [Bkv, D]
        v_j = tl.load(v_ptr + key[:, None] * D + d[None, :], mask=exists, other=0.0)
        s_ij = tl.where(key[None, :] < n_k, tl.dot(q_i, tl.trans(k_j)) * c, -float("inf"))  # [Bq, Bkv]
        m_new = tl.maximum(m, tl.max(s_ij, 1))
        rescale = tl.exp(m - m_new)
        p_ij = tl.exp(s_ij - m_new[:, None])
        l = l * rescale + tl.sum(p_ij, 1)
        o_i = o_i * rescale[:, None] + tl.dot(p_ij.to(tl.float16), v_j)
        m = m_new
    divisor = tl.where(l == 0, 1.0, l)  # an empty list: O_i = 0, and m is -infinity
    tl.store(o_ptr + query[:, None] * D + d[None, :], o_i / divisor[:, None], mask=query[:, None] < n_q)
    tl.store(log_sum_exp_ptr + query, m + tl.log(divisor), mask=query < n_q)


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, lists: Tensor, count: Tensor, block_q: int, block_kv: int,
    output: Tensor, log_sum_exp: Tensor,
) -> None:  # fmt: skip
    """Write O and L of every query block into `output` and `log_sum_exp`: `sparse_tile` for each, in one kernel.

    query: float16 [n_q, D], key, value: float16 [n_k, D]. lists: int32 [Tm, width], each row in any order, and
    count: int32 [Tm], as `block_lists` makes them. output: float32 [n_q, D], log_sum_exp: float32 [n_q].
    All contiguous. Blocks and D are at least 16, powers of two. The last block of either side may be partial.

    >>> value = torch.arange(33.0).half()[:, None].expand(33, 16).contiguous()
    >>> query, key = torch.zeros(20, 16).half(), torch.zeros(33, 16).half()
    >>> lists, count = torch.tensor([[2, 1], [0, 0]]).int(), torch.tensor([1, 0]).int()
    >>> o, l = torch.empty(20, 16), torch.empty(20)
    >>> sparse_attention(query, key, value, lists, count, 16, 16, o, l)
    >>> o[:, 0].unique(), l.unique()  # block 2 holds one key, of value 32; the second list is empty
    (tensor([ 0., 32.]), tensor([-inf, 0.]))
    """
    n_q, head_dim = query.shape
    ### SOLUTION: launch sparse_kernel with one program per query block
    sparse_kernel[(triton.cdiv(n_q, block_q),)](
        query, key, value, lists, count, output, log_sum_exp, n_q, len(key), lists.shape[1], 1 / math.sqrt(head_dim),
        D=head_dim, BLOCK_Q=block_q, BLOCK_KV=block_kv,
    )  # fmt: skip
