"""What the levels written in Gluon share: they run on Hopper alone, where one program's warps have different jobs.

One warp loads: it fetches tiles with the copy engine (TMA) into a ring of places in shared memory. Warpgroups (4 warps,
64 rows) compute. Every place has two barriers: `ready`, when its tile has arrived, and `empty`, when all warpgroups
have let go of it. The n-th tile lies in place n % places; a barrier's phase, 0 or 1 by turns, tells an arrival from the
one before it.
"""

from functools import cache

import torch
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sage_kernels.common.quantize import BLOCK_KV, padded_head_dim

HEAD_DIMS = (64, 128)  # padded
L2_SHARE = 16 << 20  # bytes: a third of an H200's L2 cache
ROWS = gl.constexpr(64)  # of a warpgroup, the height of its matmul instruction
TILE = gl.constexpr(BLOCK_KV)  # tokens of a tile of the other side: those that share a scale


def obstacle(device: torch.device, head_dim: int) -> str | None:
    """Why these levels can't run there, or None if they can."""
    if device.type != "cuda" or knobs.runtime.interpret:
        return f"it needs a Hopper GPU, and query is on {device}" + ", interpreted" * knobs.runtime.interpret
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), and this one has {capability[0]}.{capability[1]}"
    if padded_head_dim(head_dim) not in HEAD_DIMS:
        return f"it needs a head size from 33 to 128, and query has {head_dim}"
    return None


# The order of work


@gluon.jit
def work_item(t, blocks, heads_total, heads_together):
    """(block of rows, head) of the t-th program: group of heads after group, in it the last block of rows first.

    In causal attention those rows are the longest; a multiprocessor that is done takes the next program, so the short
    ones come last.
    """
    first = t // (blocks * heads_together) * heads_together
    t -= first * blocks
    in_group = gl.minimum(heads_together, heads_total - first)
    return blocks - 1 - t // in_group, first + t % in_group


def heads_at_a_time(bytes_per_head: int) -> int:
    """Several, for causal rows of all lengths to even out; not more than whose tiles stay in the L2 cache."""
    return max(1, min(8, L2_SHARE // bytes_per_head))


@gluon.jit
def key_tiles(first_query, rows, kv_blocks, IS_CAUSAL: gl.constexpr):
    """How many key tiles these rows visit. Only the last one holds keys that some of 64 aligned rows may not see."""
    if IS_CAUSAL:
        kv_blocks = gl.minimum(kv_blocks, (first_query + rows + TILE - 1) // TILE)
    return kv_blocks


# Rings of tiles


TYPES = {
    torch.int8: gl.int8, torch.int32: gl.int32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}  # fmt: skip


@cache  # one takes longer to make than the rest of a descriptor
def layout(*shape: int, dtype: torch.dtype = torch.int8) -> gl.NVMMASharedLayout:
    """How the copy engine lays a tile in shared memory so that matmuls read it without bank conflicts; or a line."""
    if len(shape) == 1:
        return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, rank=1)
    return gl.NVMMASharedLayout.get_default_for(list(shape), TYPES[dtype])


def descriptor(x: Tensor, *shape: int) -> TensorDescriptor:
    """What the copy engine has to know of x [B, H, rows, columns] to fetch tiles of `shape` [rows, columns].

    Of x [B, H, rows] it fetches lines, of a `shape` [rows].
    """
    return TensorDescriptor.from_tensor(x.flatten(0, 2), list(shape), layout(*shape, dtype=x.dtype))


@gluon.jit
def place(descriptor):
    """One place for a tile of a descriptor: what has an index(0)."""
    return gl.allocate_shared_memory(descriptor.dtype, [1] + descriptor.block_shape, descriptor.layout)


@gluon.jit
def barrier(ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=ARRIVALS)
    return made


@gluon.jit
def ring(descriptor, PLACES: gl.constexpr, WARPGROUPS: gl.constexpr):
    """(tiles, ready, empty): places for tiles of a descriptor, and their barriers."""
    tiles = gl.allocate_shared_memory(descriptor.dtype, [PLACES] + descriptor.block_shape, descriptor.layout)
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(empty.index(place), count=WARPGROUPS)
    return tiles, ready, empty


@gluon.jit
def fetch(ring, n, descriptor, row, column):
    """The loading warp: order the n-th tile as soon as its place is free."""
    tiles, ready, empty = ring
    places: gl.constexpr = tiles.shape[0]
    mbarrier.wait(empty.index(n % places), ((n // places) & 1) ^ 1)
    mbarrier.expect(ready.index(n % places), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], ready.index(n % places), tiles.index(n % places))


@gluon.jit
def arrived(ring, n):
    """The n-th tile, once it is there."""
    tiles, ready, _ = ring
    places: gl.constexpr = tiles.shape[0]
    mbarrier.wait(ready.index(n % places), (n // places) & 1)
    return tiles.index(n % places)


@gluon.jit
def let_go(ring, n):
    """This warpgroup has read the n-th tile."""
    tiles, _, empty = ring
    places: gl.constexpr = tiles.shape[0]
    mbarrier.arrive(empty.index(n % places), count=1)


@builtin
def add_to_global(descriptor, coordinates, tile, _semantic=None):
    """Let the copy engine add a tile to what `descriptor` describes, at these coordinates; `tma.store_wait` waits.

    Gluon has no name for it, but its compiler knows the operation.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


# Arithmetic


@gluon.constexpr_function
def accumulator(columns):
    """Which thread holds what of a matmul's result [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def operand(columns):
    """Which thread holds what of the int8 left operand of a matmul whose result has so many columns."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32]), 4)


@gluon.jit
def group_columns(x):
    """`tiles.group_columns` of [ROWS, TILE]: the order in which no number leaves its thread."""
    return x.reshape([ROWS, TILE // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([ROWS, TILE])


@gluon.jit
def rounded_and_packed(x):
    """round(x), ties to even, kept within INT8: four columns of [ROWS, TILE] to an int32 [ROWS, TILE / 4]."""
    even, odd = gl.split(x.reshape([ROWS, TILE // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        """{ .reg .s32 i0, i1, i2, i3, high;
        cvt.rni.s32.f32 i0, $1; cvt.rni.s32.f32 i1, $2; cvt.rni.s32.f32 i2, $3; cvt.rni.s32.f32 i3, $4;
        cvt.pack.sat.s8.s32.b32 high, i3, i2, 0; cvt.pack.sat.s8.s32.b32 $0, i1, i0, high; }""",
        "=r,f,f,f,f", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpacked(packed):
    """int32 [ROWS, TILE / 4] -> the int8 [ROWS, TILE] that it holds; no instruction is left of this."""
    byte0, byte1 = packed.to(gl.int8), (packed >> 8).to(gl.int8)
    byte2, byte3 = (packed >> 16).to(gl.int8), (packed >> 24).to(gl.int8)
    return gl.join(gl.join(byte0, byte2), gl.join(byte1, byte3)).reshape([ROWS, TILE])


@gluon.jit
def rounded(x, COLUMNS: gl.constexpr):
    """round(x) of [ROWS, TILE] as int8, columns grouped: the left operand of a matmul with so many COLUMNS."""
    packed = rounded_and_packed(gl.convert_layout(group_columns(x), operand(COLUMNS)))
    return gl.convert_layout(unpacked(packed), operand(COLUMNS))


@gluon.jit
def fast_exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# The next two are declared impure for the compiler to leave them where they stand: before a wait, not after.
@gluon.jit
def fast_log2(x):
    """log2 of a normal number, one instruction. The library's handles subnormal ones too and takes a dozen."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def fast_reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
