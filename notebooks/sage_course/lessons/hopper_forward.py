"""Notebook 08b: a ring of tiles between a loading warp and warpgroups, in Gluon; run on the CPU by the emulator.

Needs Triton. The program finds the largest integer score of every query: level 5's loop without softmax and P V.
"""

import re

import torch
from sage_kernels.hopper.toolbox import (
    ROWS,
    TILE,
    accumulator,
    allocate,
    barrier,
    descriptor,
    release,
    ring,
    start_int8,
)
from sage_lab.emulator import OnCPU
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from sage_course.gaps import Gap, source
from sage_course.lessons import with_mistakes

HEAD_DIM, TILES = 64, 7
WRONG_PHASE = "a barrier's phases are 0 and 1"  # as the emulator says it
PLACES = gl.constexpr(3)
WARPGROUPS = gl.constexpr(3)


@gluon.jit
def acquire(ring, n):
    places: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.ready.index(n % places), (n // places) & 1)
    return ring.tiles.index(n % places)


@gluon.jit
def fetch(ring, n, descriptor, row, column):
    places: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)
    ready = ring.ready.index(n % places)
    mbarrier.expect(ready, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], ready, ring.tiles.index(n % places))


@gluon.jit
def score_maxima(q_hat_i, ring, tiles):
    m = gl.full([ROWS], -(2**31), gl.int32, gl.SliceLayout(1, accumulator(TILE)))
    for n in range(0, tiles):
        product = start_int8(q_hat_i, acquire(ring, n), TILE)
        s_ij = warpgroup_mma_wait(0, deps=(product,))
        release(ring, n)
        m = gl.maximum(m, gl.max(s_ij, 1))
    return m


# The program that tries them


@gluon.jit
def warpgroup(queries, q_ready, k_ring, out_ptr, n_q, tiles, W: gl.constexpr):
    """Compare 64 queries with every tile of keys: the work of one warpgroup."""
    mbarrier.wait(q_ready, 0)
    m = score_maxima(queries.index(W), k_ring, tiles)
    row = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
    gl.store(out_ptr + row, m, mask=row < n_q)


@gluon.jit
def loading_warp(q_descriptor, k_descriptor, queries, q_ready, k_ring, tiles):
    """Load three tiles of queries, then the keys, tile by tile."""
    mbarrier.expect(q_ready, WARPGROUPS * q_descriptor.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        tma.async_copy_global_to_shared(q_descriptor, [w * ROWS, 0], q_ready, queries.index(w))
    for n in range(0, tiles):
        fetch(k_ring, n, k_descriptor, n * TILE, 0)


@gluon.jit
def ring_program(q_descriptor, k_descriptor, out_ptr, n_q, tiles):
    """One program: the largest integer score of 192 queries."""
    queries, q_ready = allocate(q_descriptor, WARPGROUPS), barrier(1)
    k_ring = ring(k_descriptor, PLACES, WARPGROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (warpgroup, (queries, q_ready, k_ring, out_ptr, n_q, tiles, 0)),
            (warpgroup, (queries, q_ready, k_ring, out_ptr, n_q, tiles, 1)),
            (warpgroup, (queries, q_ready, k_ring, out_ptr, n_q, tiles, 2)),
            (loading_warp, (q_descriptor, k_descriptor, queries, q_ready, k_ring, tiles)),
        ],
        [4, 4, 1], [160, 160, 24],
    )  # fmt: skip


def run_ring(q_hat, k_hat, seed=0, **functions):
    """Return the largest score of every query, int32 [192], or what went wrong.

    functions: those that take the place of the functions and constants above, by name.
    """
    out = torch.zeros(len(q_hat), dtype=torch.int32)
    tiles = len(k_hat) // TILE.value
    descriptors = descriptor(q_hat, ROWS.value, HEAD_DIM), descriptor(k_hat, TILE.value, HEAD_DIM)
    try:
        OnCPU(ring_program, seed, **functions)[(1,)](*descriptors, out, len(q_hat), tiles, num_warps=4, maxnreg=128)
    except (AssertionError, IndexError, RuntimeError) as error:
        return str(error)
    return out


def run_as(name):
    """Return run(function, q_hat, k_hat, seed), which puts `function` in the place of the one with this name.

    Different mistakes end in the same deadlock. So a failure also says what the function's own line waits for.
    """

    def run(function, *arguments):
        found = run_ring(*arguments, **{name: function})
        if name == "score_maxima":
            return found if isinstance(found, str) else (found, released(function, *arguments))
        has_phase = found != WRONG_PHASE if isinstance(found, str) else False
        return f"{found} ({wait_of(function)})" if has_phase else found

    return run


def released(score_maxima, *arguments):
    """Return the numbers of the tiles that the warpgroups give back. Each tile has a place, so nobody waits for one."""
    numbers = []
    program_names = {"score_maxima": score_maxima, "release": lambda ring, n: numbers.append(int(n)), "PLACES": TILES}
    run_ring(*arguments, **program_names)
    return sorted(numbers)


def wait_of(function):
    """Describe the wait in a function's text: for which barrier, and for which phase."""
    lines = [line for line in source(function).splitlines() if "mbarrier.wait" in line]
    if not lines:
        return "it waits for no barrier"
    barrier = "empty" if ".empty" in lines[0] else "ready"
    comes = "comes" if "//" in lines[0] else "does not come"
    last_bit = ", as 0 or 1" if re.search(r"& *1|% *2", lines[0]) else ""
    before = ", and is the other one" if re.search(r"\^|1 -", lines[0]) else ""
    return f"it waits for {barrier}; the phase {comes} from the round{last_bit}{before}"


def integers(seed=0):
    """Draw Q^ [192, 64] and K^ [7 * 128, 64], int8."""
    generator = torch.Generator().manual_seed(seed)
    count = WARPGROUPS.value * ROWS.value, TILES * TILE.value
    return [torch.randint(-127, 128, (n, HEAD_DIM), generator=generator, dtype=torch.int8) for n in count]


def _trials():
    return [(*integers(), seed) for seed in (0, 1)]


GAPS = with_mistakes(
    __file__,
    {
        "acquire": Gap(acquire, _trials, run=run_as("acquire")),
        "fetch": Gap(fetch, _trials, run=run_as("fetch")),
        "score_maxima": Gap(score_maxima, _trials, run=run_as("score_maxima")),
    },
)
