"""Triton's interpreter, corrected where it computes other numbers than a GPU: import this on a machine without one.

- A multiply-add x * y + z is rounded twice there, once on a GPU: forward level 3 counts on one rounding.
- The maximum of a number and NaN is NaN there, the number on a GPU.
- To run a program it replaces parts of Triton's language. It looks for these parts anew in every function that the
  program calls, which takes most of its time, and what it replaces for a function alone stays: from then on nothing
  compiles. Here it looks once, and all is put back when the program, or a function called by itself, has ended.
"""

import inspect
from functools import cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def fused_multiply_add(_, x, y, z):
    """Return x * y + z, rounded once: float64 holds the product of two float32 numbers exactly."""
    with np.errstate(all="ignore"):
        fused = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(fused.astype(z.data.dtype), z.dtype.scalar)


class Replaced:
    """Everything replaced now, and Triton's scope for it: `restore` undoes all once the outermost call has ended."""

    def __init__(self):
        self.depth, self.languages, self.scopes = 0, set(), []

    def __call__(self, function):
        """Replace what `function` needs and nothing has replaced yet. Takes the place of `_patch_lang`."""
        if missing := languages(function) - self.languages:
            self.scopes.append(replace_for(function))
            self.languages |= missing
        self.depth += 1
        return self

    def restore(self):
        self.depth -= 1
        if self.depth == 0:
            while self.scopes:
                self.scopes.pop().restore()
            self.languages.clear()


@cache
def languages(function) -> frozenset[str]:
    """Return the modules of Triton's language that a function sees."""
    seen = [x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
    return frozenset(x.__name__ for x in seen)


def called(self, *args, **kwargs):
    """Call a function as a program does. Takes the place of `InterpretedFunction.__call__`."""
    scope = replaced(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
    finally:
        scope.restore()


interpreter.InterpreterBuilder.create_fma = fused_multiply_add
interpreter.InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
replace_for, replaced = interpreter._patch_lang, Replaced()
interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = replaced, called
