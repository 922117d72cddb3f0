"""The parts that programs for Hopper share. In Gluon, their language, one program's warps have different jobs.

One warp loads: it starts copies of tiles from memory into shared memory, which the copy engine (TMA) carries out.
Warpgroups (4 warps, 64 rows) compute. A `Ring` is between them: places for tiles, and for each place two barriers.

    loading warp    fetch:    wait until the place is empty   -> start the copy; its end completes `ready`
    a warpgroup     acquire:  wait until the place is ready   -> read the tile
                    release:  arrive at `empty`; with the last warpgroup's arrival the place is free again

The n-th tile is in place n % places. A barrier's phase, 0 or 1 by turns, tells one round of the ring from the next.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sage_kernels.common.memory import is_heads_last
from sage_kernels.common.quantize import SCALE_BLOCK, padded_head_dim, padded_length
from sage_kernels.hopper import HEAD_DIMS

L2_SHARE = 16 << 20  # bytes: a third of an H200's L2 cache
ROWS = gl.constexpr(64)  # of a warpgroup, the height of its matmul instruction
SCALE_Q, SCALE_KV = gl.constexpr(SCALE_BLOCK), gl.constexpr(SCALE_BLOCK)  # tokens that share a scale
TILE = gl.constexpr(SCALE_BLOCK)  # tokens of a tile that is fetched: 128, and those of one scale, whichever side it is
HALF = gl.constexpr(64)  # half of a tile's tokens, or of 128 columns
LOADING_REGISTERS = gl.constexpr(24)  # what the loading warp keeps of its share


# The order of work


class Sizes(NamedTuple):
    blocks: int  # of rows in one head: a program each
    heads_total: int  # of all batches: of queries, or of keys in a program of keys
    heads_together: int  # worked on at a time
    group_size: int  # query heads that share a head of keys
    n_q: int
    n_k: int
    q_blocks: int  # tiles of queries in one head, the last one padded
    kv_blocks: int
    # Heads that are side by side in a row of memory: one, or all where a tensor is [B, N, H, D] in memory.
    v_heads_per_row: int
    do_heads_per_row: int
    out_heads_per_row: int


SIZES = Sizes._fields  # every program takes them one by one: `do_not_specialize` makes one compilation of all sizes


def sizes_of(
    query: Tensor, key: Tensor, rows: int, *, of_keys: bool, bytes_per_number: int,
    v_heads_per_row: int = 1, do_heads_per_row: int = 1, out_heads_per_row: int = 1,
) -> Sizes:  # fmt: skip
    """Compute `Sizes` for programs of `rows` queries (or keys) that fetch so many bytes per token and column."""
    batch, heads, n_q, head_dim = query.shape
    kv_heads, n_k = key.shape[1:3]
    group_size, own, visited = heads // kv_heads, padded_length(n_q), padded_length(n_k)
    q_blocks, kv_blocks = own // SCALE_Q.value, visited // SCALE_KV.value
    if of_keys:
        heads, own, visited = kv_heads, visited, own * group_size
    together = heads_at_a_time(bytes_per_number * visited * padded_head_dim(head_dim))
    heads_per_row = v_heads_per_row, do_heads_per_row, out_heads_per_row
    return Sizes(-(-own // rows), batch * heads, together, group_size, n_q, n_k, q_blocks, kv_blocks, *heads_per_row)


def heads_at_a_time(bytes_per_head: int) -> int:
    """Return how many heads are worked on together: enough to even out causal rows, and their tiles stay in L2."""
    return max(1, min(8, L2_SHARE // bytes_per_head))


@gluon.jit
def work_item(t, sizes):
    """Return (block of rows, head) of the t-th program: group after group of heads, in each the last block first.

    In causal attention those rows take longest; a multiprocessor that is done takes the next, so short ones come last.
    """
    first = t // (sizes.blocks * sizes.heads_together) * sizes.heads_together
    t -= first * sizes.blocks
    in_group = gl.minimum(sizes.heads_together, sizes.heads_total - first)
    return sizes.blocks - 1 - t // in_group, first + t % in_group


@gluon.jit
def key_work_item(t, sizes):
    """Return `work_item` of a program of keys: the first block of keys, which most queries see, comes first."""
    block, kv_head = work_item(t, sizes)
    return sizes.blocks - 1 - block, kv_head


@gluon.jit
def count_key_tiles(first_query, rows, kv_blocks, IS_CAUSAL: gl.constexpr):
    """Return how many key tiles these rows visit. Only the last one needs a mask, for 64 aligned rows."""
    if IS_CAUSAL:
        kv_blocks = gl.minimum(kv_blocks, (first_query + rows + TILE - 1) // TILE)
    return kv_blocks


@gluon.jit
def count_query_tiles(first_key, q_blocks, IS_CAUSAL: gl.constexpr):
    """Return how many query tiles these keys visit, from the last one down to the only one on the diagonal.

    It is at least one, so that every program does the same; all of it is masked for keys that no query sees.
    """
    if IS_CAUSAL:
        q_blocks -= gl.minimum(first_key // TILE, q_blocks - 1)
    return q_blocks


# Tiles in shared memory


@cache  # one takes longer to make than the rest of a descriptor
def layout(*shape: int, dtype: torch.dtype = torch.int8) -> gl.NVMMASharedLayout:
    """Return the layout of a tile in shared memory that matmuls read without bank conflicts; or that of a line."""
    if len(shape) == 1:
        return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, rank=1)
    return gl.NVMMASharedLayout.get_default_for(list(shape), getattr(gl, str(dtype).removeprefix("torch.")))


def descriptor(x: Tensor, *shape: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of tiles [rows, columns] of x [B, H, N, D], or lines [rows] of x [B, H, N].

    An x with as many dimensions as the tile is taken as it is: see `fetched_rows` and `fetched_tokens`.
    """
    made = object.__new__(TensorDescriptor)  # without its checks, which have passed for the first of its kind
    made.__dict__.update(descriptor_fields(x.shape, x.stride(), x.dtype, shape), base=x)
    return made


@lru_cache(maxsize=1024)
def descriptor_fields(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, tile: tuple[int, ...]) -> dict:
    """Return a checked descriptor's fields, except the tensor, for every tensor of that shape at 16 bytes."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    x = x if x.dim() == len(tile) else x.flatten(0, 2)
    fields = vars(TensorDescriptor.from_tensor(x, list(tile), layout(*tile, dtype=dtype)))
    return {name: value for name, value in fields.items() if name != "base"}


class Fetched(NamedTuple):
    """16-bit x [B, H, N, D] as a matrix that the copy engine can fetch."""

    rows: Tensor
    heads_per_row: int


def fetched_rows(x: Tensor) -> Fetched:
    """Return x flattened to [B H N, D], or without a copy as [B N, H D] if a token's heads are side by side.

    Then the column after a head's last is the next head's, so no padding can be fetched: D must be one of HEAD_DIMS.
    """
    batch, heads, n, head_dim = x.shape
    fits = x.stride(3) == 1 and x.stride(1) == head_dim in HEAD_DIMS and x.stride(2) >= heads * head_dim
    fits = fits and (batch == 1 or x.stride(0) == n * x.stride(2))
    if is_heads_last(x) and fits and x.stride(2) % 8 == 0 and x.data_ptr() % 16 == 0:
        return Fetched(x.as_strided((batch * n, heads * head_dim), (x.stride(2), 1)), heads)
    return Fetched(rows_of_16_bytes(x).flatten(0, 2), 1)


def fetched_tokens(x: Tensor) -> tuple[Tensor, int]:
    """Return `fetched_rows` in three dimensions, [B H, N, D] or [B, N, H D]: zeros come after a head's last token."""
    rows, heads_per_row = fetched_rows(x)
    return rows.view(-1, x.shape[2], rows.shape[1]), heads_per_row


def rows_of_16_bytes(x: Tensor) -> Tensor:
    """Return 16-bit x [B, H, N, D], or a contiguous copy in rows of whole 16 bytes, which the copy engine can fetch."""
    if x.shape[3] % 8:
        x = torch.nn.functional.pad(x, (0, padded_head_dim(x.shape[3]) - x.shape[3]))
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@gluon.jit
def allocate(descriptor, COUNT: gl.constexpr):
    """Allocate shared memory for so many tiles, or lines, of a descriptor."""
    return gl.allocate_shared_memory(descriptor.dtype, [COUNT] + descriptor.block_shape, descriptor.layout)


@gluon.jit
def barrier(ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=ARRIVALS)
    return made


class Ring(NamedTuple):
    tiles: gl.shared_memory_descriptor  # [places, rows, columns]
    ready: gl.shared_memory_descriptor  # a barrier for each place: its tile is there
    empty: gl.shared_memory_descriptor  # likewise: its readers have released it


@gluon.jit
def ring_of(tiles, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Return barriers around places: so many arrivals make one ready, so many make it empty."""
    places: gl.constexpr = tiles.shape[0]
    ready = gl.allocate_shared_memory(gl.int64, [places, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [places, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(places):
        mbarrier.init(ready.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(tiles, ready, empty)


@gluon.jit
def ring(descriptor, PLACES: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Return a ring for tiles of a descriptor, filled by the loading warp and read by warpgroups."""
    return ring_of(allocate(descriptor, PLACES), 1, WARPGROUPS)


@gluon.jit
def claim(ring, n, BYTES: gl.constexpr):
    """Wait until the n-th tile's place is empty; return its barrier, which now expects BYTES, and its number."""
    places: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)
    ready = ring.ready.index(n % places)
    mbarrier.expect(ready, BYTES)
    return ready, n % places


@gluon.jit
def fetch(ring, n, descriptor, row, column):
    """Start the copy of the n-th tile as soon as its place is empty. For the loading warp."""
    ready, place = claim(ring, n, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], ready, ring.tiles.index(place))


@gluon.jit
def row_and_column(head, token, n, heads_per_row, DP: gl.constexpr):
    """Return where a token of a head is in the matrix of `fetched_rows`."""
    return head // heads_per_row * n + token, head % heads_per_row * DP


@gluon.jit
def fetch_with_lines(ring, lines, n, descriptor, row, column, line_descriptors, token):
    """Fetch a tile, and for each of `lines` one number for every token of the tile."""
    line_count: gl.constexpr = len(lines)
    line_bytes: gl.constexpr = line_descriptors[0].block_type.nbytes
    ready, place = claim(ring, n, descriptor.block_type.nbytes + line_count * line_bytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], ready, ring.tiles.index(place))
    for i in gl.static_range(line_count):
        tma.async_copy_global_to_shared(line_descriptors[i], [token], ready, lines[i].index(place))


@gluon.jit
def fetch_tokens(ring, n, descriptor, head, token, heads_per_row, DP: gl.constexpr):
    """Fetch tokens of a head from the tensor of `fetched_tokens`."""
    ready, place = claim(ring, n, descriptor.block_type.nbytes)
    at = [head // heads_per_row, token, head % heads_per_row * DP]
    tma.async_copy_global_to_shared(descriptor, at, ready, ring.tiles.index(place))


@gluon.jit
def fetch_tokens_with_line(
    ring, line, n, descriptor, head, token, heads_per_row, DP: gl.constexpr, line_descriptor, line_token
):
    """Fetch tokens, and into `line` one number for each of them, from line_token on."""
    ready, place = claim(ring, n, descriptor.block_type.nbytes + line_descriptor.block_type.nbytes)
    at = [head // heads_per_row, token, head % heads_per_row * DP]
    tma.async_copy_global_to_shared(descriptor, at, ready, ring.tiles.index(place))
    tma.async_copy_global_to_shared(line_descriptor, [line_token], ready, line.index(place))


@gluon.constexpr_function
def matrix_layout(rows, columns, dtype):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@gluon.jit
def matrix(tile):
    """Return a tile [1, tokens, columns] of `fetch_tokens` as [tokens, columns]: the same numbers and places."""
    rows: gl.constexpr = tile.shape[1]
    columns: gl.constexpr = tile.shape[2]
    return tile._reinterpret(tile.dtype, [rows, columns], matrix_layout(rows, columns, tile.dtype))


@gluon.jit
def acquire(ring, n):
    """Wait for the n-th tile. For a warpgroup, as the next two are."""
    places: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.ready.index(n % places), (n // places) & 1)
    return ring.tiles.index(n % places)


@gluon.jit
def release(ring, n):
    """Say that the n-th tile has been read."""
    places: gl.constexpr = ring.tiles.shape[0]
    mbarrier.arrive(ring.empty.index(n % places), count=1)


@gluon.jit
def skip(ring, n):
    """Leave the n-th tile to others."""
    acquire(ring, n)
    release(ring, n)


@gluon.jit
def copy_own(tiles, ready, descriptor, row, column, WARPGROUPS: gl.constexpr):
    """Start the copies of each warpgroup's own 64 rows. Rows past a head's end are the next head's: not stored."""
    for w in gl.static_range(WARPGROUPS):
        tma.async_copy_global_to_shared(descriptor, [row + w * ROWS, column], ready, tiles.index(w))


# Numbers in registers


@gluon.constexpr_function
def accumulator(columns):
    """Return which thread holds which numbers of a matmul's result [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def accumulator_16bit(columns):
    """Return the same for a matmul in 16 bit: a different layout by name, the same numbers in the same threads."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand(columns):
    """Return which thread holds which numbers of the int8 left operand of a matmul with so many result columns."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32]), 4)


@gluon.constexpr_function
def operand_16bit(columns):
    """Return the same in 16 bit. A thread holds the same numbers of a matmul's result and of this."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]), 2)


@gluon.jit
def start_int8(left, tile, COLUMNS: gl.constexpr):
    """Start left x tile^T in INT8: int32 [ROWS, COLUMNS], there after `warpgroup_mma_wait`."""
    result = gl.zeros([ROWS, COLUMNS], gl.int32, accumulator(COLUMNS))
    return warpgroup_mma(left, tile.permute((1, 0)), result, use_acc=False, is_async=True)


@gluon.jit
def start_16bit(left, tile, COLUMNS: gl.constexpr):
    """Start left x tile^T in 16 bit: float32 [ROWS, COLUMNS]."""
    result = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_16bit(COLUMNS))
    return warpgroup_mma(left, tile.permute((1, 0)), result, use_acc=False, is_async=True)


@gluon.jit
def fast_exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def fast_reciprocal(x):
    """Return 1 / x by one instruction, impure so that the compiler leaves it where it is: before a wait."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def group_columns(x):
    """Reorder the columns of x [ROWS, keys] as `tiles.group_columns`: no number leaves its thread."""
    keys: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, keys // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([ROWS, keys])


@gluon.jit
def round_and_pack(x):
    """Return round(x), ties to even, kept within INT8: four columns of x [ROWS, keys] in an int32 [ROWS, keys / 4]."""
    even, odd = gl.split(x.reshape([ROWS, x.shape[1] // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        """{ .reg .s32 i0, i1, i2, i3, high;
        cvt.rni.s32.f32 i0, $1; cvt.rni.s32.f32 i1, $2; cvt.rni.s32.f32 i2, $3; cvt.rni.s32.f32 i3, $4;
        cvt.pack.sat.s8.s32.b32 high, i3, i2, 0; cvt.pack.sat.s8.s32.b32 $0, i1, i0, high; }""",
        "=r,f,f,f,f", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(packed):
    """Return the int8 [ROWS, keys] that int32 [ROWS, keys / 4] holds; no instruction is left of this."""
    byte0, byte1 = packed.to(gl.int8), (packed >> 8).to(gl.int8)
    byte2, byte3 = (packed >> 16).to(gl.int8), (packed >> 24).to(gl.int8)
    return gl.join(gl.join(byte0, byte2), gl.join(byte1, byte3)).reshape([ROWS, 4 * packed.shape[1]])


@gluon.jit
def round_to_int8(x, COLUMNS: gl.constexpr):
    """Return round(x) of x [ROWS, keys] as int8, columns grouped: the left operand of a matmul with so many COLUMNS."""
    return gl.convert_layout(unpack(round_to_packed(x, COLUMNS)), operand(COLUMNS))


@gluon.jit
def round_to_packed(x, COLUMNS: gl.constexpr):
    """Return `round_to_int8`, four numbers to an int32, which takes no instructions between turns of a loop."""
    return round_and_pack(gl.convert_layout(group_columns(x), operand(COLUMNS)))


@gluon.jit
def as_operand(packed, COLUMNS: gl.constexpr):
    """Return the left operand that is in `round_to_packed`'s numbers."""
    return gl.convert_layout(unpack(packed), operand(COLUMNS))


@gluon.jit
def moved(packed, zero):
    """Return int32 `packed` in registers that are written here. zero: 0, which the compiler cannot know.

    This is for what is computed while a matmul reads its predecessor's registers. The assembler would take the same
    ones and let the matmul wait; it leaves out a plain copy.
    """
    zeros = gl.full(packed.shape, zero, gl.int32, packed.type.layout)
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r", [packed, zeros], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def dither_to_int8(x, COLUMNS: gl.constexpr):
    """Return floor(x + t) of x [ROWS, TILE] from 0 to 127 as int8, with the reference's `ordered_thresholds` t.

    Columns are grouped as in `round_to_int8`, and rounded as there: round(x + t - 1/2), so one addition more. t has a
    period of 8 and tiles begin at multiples of 8: a thread adds the same two numbers all the time.
    """
    x = x.reshape([ROWS, TILE // 8, 8])
    within: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    query = gl.arange(0, ROWS, gl.SliceLayout(1, within)) & 7
    key = gl.arange(0, 8, gl.SliceLayout(0, within))
    eighth, part = (key[None, :] + 2 * query[:, None]) & 7, (5 * query & 7)[:, None]
    added = (8 * eighth + part).to(gl.float32) * (1 / 64) + (1 / 128 - 1 / 2)
    return round_to_int8((x + added[:, None, :]).reshape([ROWS, TILE]), COLUMNS)


@gluon.jit
def add_scaled(gradient, product, s, DP: gl.constexpr):
    """Return gradient + product * s [ROWS, DP], with a scale per row."""
    return gradient + product.to(gl.float32) * gl.convert_layout(s, gl.SliceLayout(1, accumulator(DP)))[:, None]


@gluon.jit
def add_scaled_half(gradient, product, s):
    """Return `add_scaled` of half the columns, in assembly that stays here: then the product's registers are free."""
    s = gl.convert_layout(s, gl.SliceLayout(1, accumulator(HALF)))
    product, s = gl.broadcast(product.to(gl.float32), s[:, None])
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, s, gradient], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def tokens_from(pointer, head, first, n, heads_per_row, D: gl.constexpr):
    """Return (where the first of some tokens of a head is in a result [B, H, N, D], how far the next one is)."""
    stride = heads_per_row * D
    token = (head // heads_per_row).to(gl.int64) * n + first
    return pointer + token * stride + head % heads_per_row * D, stride


@gluon.jit
def store_tokens(pointer, x, head, first, n, heads_per_row, D: gl.constexpr, DP: gl.constexpr):
    """Store rows of x [ROWS, DP] in 16 bit: tokens first, first + 1, ... of a head, as far as there are any."""
    layout: gl.constexpr = x.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, DP, gl.SliceLayout(0, layout))
    mask = (first + row < n)[:, None] & (d < D)[None, :]
    rows, stride = tokens_from(pointer, head, first, n, heads_per_row, D)
    gl.store(rows + row[:, None] * stride + d[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@gluon.jit
def store_halves(pointer, left, right, head, first, n, heads_per_row, D: gl.constexpr):
    """Store a gradient, given in halves of its columns, as `store_tokens` does."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(HALF)))
    d = gl.arange(0, HALF, gl.SliceLayout(0, accumulator(HALF)))
    rows, stride = tokens_from(pointer, head, first, n, heads_per_row, D)
    pointers, is_token = rows + row[:, None] * stride + d[None, :], (first + row < n)[:, None]
    gl.store(pointers, left.to(pointer.dtype.element_ty), mask=is_token)
    gl.store(pointers + HALF, right.to(pointer.dtype.element_ty), mask=is_token & (HALF + d < D)[None, :])


@gluon.jit
def stored_tokens(pointer, head, first, n, heads_per_row, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """Load what `store_tokens` has stored there, [ROWS, DP] in 16 bit; zeros past the last token."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, DP, gl.SliceLayout(0, layout))
    mask = (first + row < n)[:, None] & (d < D)[None, :]
    rows, stride = tokens_from(pointer, head, first, n, heads_per_row, D)
    return gl.load(rows + row[:, None] * stride + d[None, :], mask=mask, other=0.0)
