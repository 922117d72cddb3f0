"""Notebook 12d: backward level 6, SLA2's forward pass on Hopper and the prologue, run on the CPU. Needs Triton."""

from types import SimpleNamespace

import torch
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.tiles import TINY
from sage_kernels.hopper.toolbox import TILE
from sage_lab.emulator import Machine, OnCPU, Pointer, plain
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes


@gluon.jit
def count_query_tiles(first_key, q_blocks, IS_CAUSAL: gl.constexpr):
    if IS_CAUSAL:
        q_blocks -= gl.minimum(first_key // TILE, q_blocks - 1)
    return q_blocks


@gluon.jit
def key_block(item, step):
    entry = gl.where(step == 0, item.count, step) - 1
    return gl.load(item.entries + entry, mask=step < item.count, other=0)


def rotated(first, second, gain, cos, sin, eps):
    mean_square = (first**2 + second**2).sum(-1, keepdim=True) / (2 * first.shape[-1])
    inverse = torch.rsqrt(mean_square + eps)
    first, second = first * inverse * gain[0], second * inverse * gain[1]
    return first * cos - second * sin, first * sin + second * cos


def emulate(seed=0, slow_reads=False, **names):
    """Return a `Start` that runs Gluon programs on the CPU; names: other functions for some that they call."""

    def start(program, *launch):
        if isinstance(program, GluonJITFunction):
            program = OnCPU(program, seed, slow_reads, row_maximum=_row_maximum, **names)
        return start_with_triton(program, *launch)

    return start


def _row_maximum(x):
    return x.abs().amax(1).clamp(min=TINY.value)  # the emulator has no gl.abs


def on_cpu(x):
    """Return a tensor, or a tuple of them, on the CPU."""
    if isinstance(x, tuple):
        return type(x)(*map(on_cpu, x))
    return x.cpu() if isinstance(x, torch.Tensor) else x


def _count(function, *arguments):
    return int(plain(function, Machine(0).names())(*arguments))


def _blocks(function, entries, count, steps):
    item = SimpleNamespace(entries=Pointer(entries), count=torch.tensor(count))
    return [int(plain(function, Machine(0).names())(item, step)) for step in range(steps)]


def _halves():
    first, second, gain, angle = draws(0, (5, 4), (5, 4), (2, 4), (5, 4))
    return [(3 * first, second, gain, angle.cos(), angle.sin(), 0.1)]


GAPS = with_mistakes(
    __file__,
    {
        "count_query_tiles": Gap(
            count_query_tiles,
            lambda: [(0, 4, True), (256, 4, True), (384, 4, True), (768, 4, True), (256, 4, False)],
            run=_count,
        ),
        "key_block": Gap(
            key_block,
            lambda: [(torch.tensor([3, 5, 8, 9, 77]), 4, 6), (torch.tensor([6, 77]), 1, 2), (torch.tensor([77]), 0, 2)],
            run=_blocks,
        ),
        "rotated": Gap(rotated, _halves),
    },
)
