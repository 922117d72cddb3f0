"""Programs that store a matmul's result [64, 64] for the copy engine, as computed and as backward level 5 does."""

from sage_kernels.hopper.toolbox import HALF, ROWS, accumulator
from sage_kernels.sagebwd.backward.level5.units import spread_columns
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STAGE = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))


@gluon.jit
def stored_as_computed():
    stage = gl.allocate_shared_memory(gl.int32, [ROWS, HALF], STAGE)
    stage.store(gl.zeros([ROWS, HALF], gl.int32, accumulator(HALF)))


@gluon.jit
def stored_spread():
    stage = gl.allocate_shared_memory(gl.int32, [ROWS, HALF], STAGE)
    stage.store(spread_columns(gl.zeros([ROWS, HALF], gl.int32, accumulator(HALF))))
