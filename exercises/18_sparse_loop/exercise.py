"""The sparse loop: attention over listed key blocks, in Triton.

Difficulty: medium
Importance: high
Minutes: 60

SLA2's sparse branch computes softmax attention over the key blocks that a query block has selected, 3% of them, say. A
mask of -infinity would give the same result and save nothing. What saves time is a loop over a list: for every query
block the numbers of its key blocks, and how many there are. A program loads a number j from the list, then the keys and
values of block j, and does one step of the online softmax. Nothing else is read.

First the lists, then the loop for one query block in PyTorch, then the same loop as a kernel.

Afterwards you know how a kernel skips blocks, what is different about the last block and about an empty list, and why
the order of a list doesn't matter.
"""

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
    raise NotImplementedError("block_lists: numbers of the selected blocks, to the left of each row")


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
    raise NotImplementedError("sparse_tile: for every block of the list a step of the online softmax, then O_i and L_i")


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
    raise NotImplementedError("sparse_kernel: the loop over the list of query block i, then store O_i and L_i")


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: Tensor,
    count: Tensor,
    block_q: int,
    block_kv: int,
    output: Tensor,
    log_sum_exp: Tensor,
) -> None:
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
    raise NotImplementedError("sparse_attention: launch sparse_kernel with one program per query block")
