"""Triton's interpreter, mended where it computes other numbers than a GPU: import this on a machine without one.

- A multiply-add x * y + z is rounded twice there, once on a GPU: forward level 3 counts on one rounding.
- The maximum of a number and NaN is NaN there, the number on a GPU.
"""

import numpy as np
from triton.runtime import interpreter


def fused_multiply_add(_, x, y, z):
    """x * y + z, rounded once: float64 holds the product of two float32 numbers exactly."""
    with np.errstate(all="ignore"):
        fused = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(fused.astype(z.data.dtype), z.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = fused_multiply_add
interpreter.InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
