"""Notebook 12: SLA2 in Triton: lists of blocks, the loop over a list, dK and dV.

One head, [N, D] in memory. The last block of queries and of keys may be partial. L = m + log2(l).
Needs Triton, and `teaching.triton_device()` before it is imported.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sage_kernels.common.device import triton_device
from sage_kernels.common.tiles import LOG2_E
from torch import Tensor

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes

if not torch.cuda.is_available():
    import sage_kernels.common.interpreter  # noqa: F401


class Blocks(NamedTuple):
    """Sizes of a block of queries and of a block of keys, in tokens."""

    q: int = 32
    kv: int = 16


SMALL = Blocks()
ROOM = 64  # numbers before and behind a table


@triton.jit
def load_rows(x_ptr, row, n, D: tl.constexpr):
    """[rows, D] of a tensor [n, D]; zeros where a row doesn't exist."""
    return tl.load(x_ptr + row[:, None] * D + tl.arange(0, D)[None, :], mask=row[:, None] < n, other=0.0)


@triton.jit
def store_rows(x_ptr, x, row, n, D: tl.constexpr):
    """The rows that exist."""
    places = x_ptr + row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(places, x.to(x_ptr.dtype.element_ty), mask=row[:, None] < n)


@triton.jit
def key_tile(m, l, o_i, q_i, j, k_ptr, v_ptr, n, c, D: tl.constexpr, BLOCK_KV: tl.constexpr):
    """(m, l, O_i) after block j of the keys: the body of notebook 07's loop."""
    key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_j, v_j = load_rows(k_ptr, key, n, D), load_rows(v_ptr, key, n, D)
    s_ij = tl.where(key[None, :] < n, tl.dot(q_i, tl.trans(k_j)) * (c * LOG2_E), -float("inf"))
    m_new = tl.maximum(m, tl.max(s_ij, 1))
    p_ij = tl.math.exp2(s_ij - m_new[:, None])
    rescale = tl.math.exp2(m - m_new)
    return m_new, l * rescale + tl.sum(p_ij, 1), tl.dot(p_ij.to(v_j.dtype), v_j, o_i * rescale[:, None])


@triton.jit
def list_row(mask_ptr, stride_row, stride_column, columns, table_ptr, count_ptr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    pointers = mask_ptr + row * stride_row + column * stride_column
    selected = tl.load(pointers, mask=column < columns, other=0).to(tl.int32)  # [WIDTH], 0 or 1
    place = tl.cumsum(selected, 0) - 1
    tl.store(table_ptr + row * columns + place, column, mask=selected != 0)
    tl.store(count_ptr + row, tl.sum(selected, 0))


@triton.jit
def sparse(
    q_ptr, k_ptr, v_ptr, table_ptr, count_ptr, o_ptr, l_ptr, n, width, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    query = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_i = load_rows(q_ptr, query, n, D)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, D], tl.float32)
    for place in range(0, tl.load(count_ptr + i)):
        j = tl.load(table_ptr + i * width + place)
        m, l, o_i = key_tile(m, l, o_i, q_i, j, k_ptr, v_ptr, n, c, D, BLOCK_KV)
    store_rows(o_ptr, o_i / l[:, None], query, n, D)
    tl.store(l_ptr + query, m + tl.math.log2(l), mask=query < n)


def bytes_read(selected, unselected, block_q, block_kv, d):
    q_i, k_j_and_v_j, h_and_z = 2 * block_q * d, 2 * 2 * block_kv * d, 2 * d * (d + 1)
    dense = q_i + (selected + unselected) * k_j_and_v_j
    as_printed = q_i + selected * k_j_and_v_j + unselected * h_and_z
    by_list = q_i + selected * k_j_and_v_j + h_and_z
    return dense, as_printed, by_list


@triton.jit
def sparse_dk_dv(
    q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, table_ptr, count_ptr, dk_ptr, dv_ptr, n, width, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_j, v_j = load_rows(k_ptr, key, n, D), load_rows(v_ptr, key, n, D)
    dk_j, dv_j = tl.zeros([BLOCK_KV, D], tl.float32), tl.zeros([BLOCK_KV, D], tl.float32)
    for place in range(0, tl.load(count_ptr + j)):
        i = tl.load(table_ptr + j * width + place)
        query = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_i, do_i = load_rows(q_ptr, query, n, D), load_rows(do_ptr, query, n, D)
        l_i = tl.load(l_ptr + query, mask=query < n, other=0.0)
        delta_i = tl.load(delta_ptr + query, mask=query < n, other=0.0)
        # [keys, queries]: everything is transposed
        pt_ij = tl.math.exp2(tl.dot(k_j, tl.trans(q_i)) * (c * LOG2_E) - l_i[None, :])
        dv_j = tl.dot(pt_ij.to(do_i.dtype), do_i, dv_j)
        dst_ij = pt_ij * (tl.dot(v_j, tl.trans(do_i)) - delta_i[None, :])
        dk_j = tl.dot(dst_ij.to(q_i.dtype), q_i, dk_j)
    store_rows(dk_ptr, dk_j * c, key, n, D)
    store_rows(dv_ptr, dv_j, key, n, D)


# Programs that try them


@triton.jit
def mix_program(
    q_ptr, o_s_ptr, alpha_ptr, sums_ptr, o_ptr, n, MIXED: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """Call MIXED for every block of queries. sums: H_i, then Z_i, a row for each block."""
    i, d = tl.program_id(0), tl.arange(0, D)
    query, row_ptr = i * BLOCK_Q + tl.arange(0, BLOCK_Q), sums_ptr + i * D * (D + 1)
    h_i, z_i = tl.load(row_ptr + d[:, None] * D + d[None, :]), tl.load(row_ptr + D * D + d)
    o_s, q_i = load_rows(o_s_ptr, query, n, D).to(tl.float32), load_rows(q_ptr, query, n, D)
    store_rows(o_ptr, MIXED(o_s, q_i, h_i, z_i, tl.load(alpha_ptr + i), D), query, n, D)


def sizes(blocks: Blocks, head_dim: int) -> dict:
    """Return the constants of a program."""
    return {"D": head_dim, "BLOCK_Q": blocks.q, "BLOCK_KV": blocks.kv}


def with_room(table: Tensor) -> Tensor:
    """Return a copy of a table with zeros before and behind it: a wrong place must not stop the whole notebook."""
    return torch.nn.functional.pad(table.flatten(), (ROOM, ROOM))[ROOM:-ROOM].view(table.shape)


def run_list_row(program, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bool mask's table, int32 of the same shape (0 where nothing was stored), and count, int32 [rows]."""
    rows, columns = mask.shape
    mask = mask.to(triton_device())
    table, count = with_room(torch.zeros_like(mask, dtype=torch.int32)), mask.new_zeros(rows, dtype=torch.int32)
    program[(rows,)](mask, *mask.stride(), columns, table, count, WIDTH=triton.next_power_of_2(columns))
    return table, count


def run_sparse(
    program, q: Tensor, k: Tensor, v: Tensor, table: Tensor, count: Tensor, blocks: Blocks = SMALL
) -> tuple[Tensor, Tensor]:
    """Return O_s [N, D] and L [N]."""
    q, k, v, table, count = on_device(q, k, v, table, count)
    n, head_dim = q.shape
    o_s, log_sum_exp = (torch.empty(shape, device=q.device) for shape in (q.shape, n))
    scalars = n, table.shape[1], 1 / math.sqrt(head_dim)
    program[(len(table),)](q, k, v, with_room(table), count, o_s, log_sum_exp, *scalars, **sizes(blocks, head_dim))
    return o_s, log_sum_exp


def run_key_sums(program, k: Tensor, v: Tensor, blocks: Blocks = SMALL) -> Tensor:
    """Return h_j, then z_j, of every block of keys: float32 [Tn, D (D + 1)]."""
    k, v = on_device(k, v)
    (n, head_dim), key_blocks = k.shape, math.ceil(len(k) / blocks.kv)
    sums = torch.empty(key_blocks, head_dim * (head_dim + 1), device=k.device)
    program[(key_blocks,)](k, v, sums, n, D=head_dim, BLOCK_KV=blocks.kv)
    return sums


def run_mixed(function, q: Tensor, o_s: Tensor, alpha: Tensor, sums: Tensor) -> Tensor:
    """Return O [N, D]. alpha [Tm]; sums: H_i, then Z_i, of every block of queries [Tm, D (D + 1)]."""
    q, o_s, alpha, sums = on_device(q, o_s, alpha, sums)
    o, (n, head_dim) = torch.empty(q.shape, device=q.device), q.shape
    mix_program[(len(alpha),)](q, o_s, alpha, sums, o, n, function, D=head_dim, BLOCK_Q=SMALL.q)
    return o


def run_dk_dv(
    program, q: Tensor, k: Tensor, v: Tensor, do: Tensor, log_sum_exp: Tensor, delta: Tensor,
    table: Tensor, count: Tensor, blocks: Blocks = SMALL,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dK and dV, float32 [N, D]. table, count: by block of keys."""
    tensors = on_device(q, k, v, do, log_sum_exp, delta, with_room(table), count)
    (n, head_dim), device = q.shape, triton_device()
    dk, dv = (torch.empty(n, head_dim, device=device) for _ in range(2))
    scalars = n, table.shape[1], 1 / math.sqrt(head_dim)
    program[(len(table),)](*tensors, dk, dv, *scalars, **sizes(blocks, head_dim))
    return dk, dv


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [x.to(triton_device()) for x in tensors]


def _head(count: int = 4) -> list[Tensor]:
    """Draw tensors of 40 tokens and 16 features: two blocks of queries, three of keys, the last ones partial."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(40, 16, generator=generator).half() for _ in range(count)]
    tensors[1][16:] *= 2  # so that later blocks hold larger scores
    return tensors


def _masks() -> list[tuple]:
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0]]).bool()
    return [(mask,), (mask.mT,)]


def _listed() -> list[tuple]:
    table, count = torch.tensor([[0, 2, 1], [1, 0, 2]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    return [(*_head(3), table, count)]


def _backward() -> list[tuple]:
    q, k, v, do = _head()
    log_sum_exp = torch.logsumexp(q.float() @ k.float().mT / 4, -1) / math.log(2)
    table = torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.int32)
    count = torch.tensor([1, 2, 1], dtype=torch.int32)
    return [(q, k, v, do, log_sum_exp, do[:, 0].float(), table, count)]


GAPS = with_mistakes(
    __file__,
    {
        "list_row": Gap(list_row, _masks, run=run_list_row),
        "sparse": Gap(sparse, _listed, run=run_sparse),
        "bytes_read": Gap(bytes_read, lambda: [(15, 497, 128, 64, 128), (2, 6, 32, 16, 32)]),
        "sparse_dk_dv": Gap(sparse_dk_dv, _backward, run=run_dk_dv),
    },
)
