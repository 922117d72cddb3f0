"""Integer matmul with scales."""

import torch
from torch import Tensor


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """A B in whole numbers, exactly, for every K up to 100,000.

    a int8 [M, K], b int8 [K, N] -> int32 [M, N].

    >>> a = torch.tensor([[127, 127]], dtype=torch.int8)
    >>> integer_matmul(a, a.mT).tolist()  # 127 * 127 + 127 * 127
    [[32258]]
    """
    ### SOLUTION: multiply in a type that holds every sum
    return a.int() @ b.int()


def scaled_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, block: int) -> Tensor:
    """(s_a A^)(s_b B^), with one scale per `block` rows of A^ and one per `block` columns of B^. Here K stays whole.

    a int8 [M, K], a_scale float32 [ceil(M / block)]
    b int8 [K, N], b_scale float32 [ceil(N / block)]
    -> float32 [M, N]. The last block of rows or of columns may be partial.

    Each scale is constant along K, so it can wait until the integers are summed. An entry whose integer sum is 0
    must come out as 0.

    >>> a = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int8)  # rows 0, 1: scale 0.5; row 2: scale 2
    >>> b = torch.tensor([[1], [1]], dtype=torch.int8)
    >>> scaled_matmul(a, torch.tensor([0.5, 2.0]), b, torch.tensor([10.0]), block=2).tolist()
    [[15.0], [35.0], [220.0]]
    """
    ### SOLUTION: give each row and column its scale, applied to the integers' sums
    rows, columns = a.shape[0], b.shape[1]
    s_a = a_scale.repeat_interleave(block)[:rows, None]  # [M, 1]
    s_b = b_scale.repeat_interleave(block)[None, :columns]  # [1, N]
    return integer_matmul(a, b) * s_a * s_b


def tiled_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, block: int) -> Tensor:
    """The product P V of attention: the scales change along the contraction, every `block` keys.

    a int8 [M, K], a_scale float32 [M, ceil(K / block)]: one per row and per block of K
    b int8 [K, N], b_scale float32 [ceil(K / block)]: one per block of K
    -> float32 [M, N]. The last block may be partial.

    >>> a = torch.tensor([[1, 2, 3]], dtype=torch.int8)
    >>> b = torch.tensor([[1], [1], [1]], dtype=torch.int8)
    >>> tiled_matmul(a, torch.tensor([[1.0, 10.0]]), b, torch.tensor([0.5, 2.0]), block=2).tolist()
    [[61.5]]

    (1 + 2) * 1 * 0.5 = 1.5 from the first two keys, 3 * 10 * 2 = 60 from the third.
    """
    result = torch.zeros(a.shape[0], b.shape[1])
    for number, start in enumerate(range(0, a.shape[1], block)):
        keys = slice(start, start + block)
        ### SOLUTION: multiply the integers of this tile, scale the result and add it
        result += integer_matmul(a[:, keys], b[keys]) * a_scale[:, number, None] * b_scale[number]
    return result
