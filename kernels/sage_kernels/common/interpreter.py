"""Triton's interpreter, corrected where it computes other numbers than a GPU: import this on a machine without one.

- A multiply-add x * y + z is rounded twice there, once on a GPU: forward level 3 counts on one rounding.
- The maximum of a number and NaN is NaN there, the number on a GPU.
- A load or store outside all tensors of a launch reads other memory there, or ends Python. Here it is an IndexError.
- A pointer as the end of a `range` is a count of about 10^14 there. Here it is a TypeError, as in the compiler.
- Two threads that run programs disturb each other there. Here they take turns.
- To run a program it replaces parts of Triton's language. It looks for these parts anew in every function that the
  program calls, which takes most of its time, and what it replaces for a function alone stays: from then on nothing
  compiles. Here it looks once, and all is put back when the program, or a function called by itself, has ended.
"""

import inspect
import threading
from functools import cache
from itertools import chain

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def fused_multiply_add(_, x, y, z):
    """Return x * y + z, rounded once: float64 holds the product of two float32 numbers exactly."""
    with np.errstate(all="ignore"):
        fused = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(fused.astype(z.data.dtype), z.dtype.scalar)


class Memory:
    """The memory of the latest launch's tensors: the first address of each, and the address behind its last."""

    def __init__(self):
        self.begins = self.ends = np.zeros(0, np.uint64)

    def note(self, arguments):
        spans = sorted({span for x in arguments for span in memory_of(x)})
        self.begins, self.ends = np.array(spans, np.uint64).reshape(-1, 2).T

    def places(self, addresses):
        """Return the number of the last tensor that begins at or before each address; -1 if none does."""
        return np.searchsorted(self.begins, addresses, side="right") - 1

    def check(self, what, pointers, mask):
        """Raise IndexError if an element that the mask lets through lies in none of the tensors."""
        size, addresses = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8)), pointers.data
        first, last = self.places(np.array([addresses.min(), addresses.max()]))
        if first == last >= 0 and addresses.max() + size <= self.ends[last]:
            return  # all in one tensor, whatever the mask: the usual case, and quick
        addresses = addresses[np.asarray(mask.data).astype(bool)]  # a block pointer's mask is an array, not a handle
        places = self.places(addresses)
        if outside := ((places < 0) | (addresses + size > self.ends[places])).sum():
            raise IndexError(f"tl.{what}: expected places in the program's tensors, got {outside} outside all of them")


def memory_of(argument):
    """Yield the first address of each tensor in an argument of a program, and the address behind its last."""
    if isinstance(argument, tuple):
        yield from chain.from_iterable(map(memory_of, argument))
    elif hasattr(tensor := getattr(argument, "base", argument), "untyped_storage"):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def copied_arguments(executor, arguments, named):
    """Copy a launch's arguments to the CPU and note its tensors. Takes the place of `GridExecutor._init_args_hst`."""
    copies = copy_arguments(executor, arguments, named)
    memory.note((*copies[0], *copies[1].values()))
    return copies


def masked_load(builder, pointers, mask, *more, **named):  # a tensor descriptor names its options
    memory.check("load", pointers, mask)
    return load(builder, pointers, mask, *more, **named)


def masked_store(builder, pointers, value, mask, *more):
    memory.check("store", pointers, mask)
    return store(builder, pointers, value, mask, *more)


def integer(self):
    """Return a tensor's number, as the end of a `range` is. Takes the place of `tensor.__index__`."""
    if self.dtype.is_ptr():
        raise TypeError(f"range: expected an integer, got a value of type {self.dtype}")
    return int(self.handle.data.squeeze())


def replace_for_tensors(tensor, scope):
    replace_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", integer)


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


def launched(self, *args, **kwargs):
    """Run a program, alone: what is replaced is the language of all threads. Takes the place of a launch."""
    with turn:
        return run_program(self, *args, **kwargs)


def called(self, *args, **kwargs):
    """Call a function as a program does. Takes the place of `InterpretedFunction.__call__`."""
    with turn:
        return call_alone(self, *args, **kwargs)


def call_alone(self, *args, **kwargs):
    scope = replaced(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
    finally:
        scope.restore()


memory, replaced, turn = Memory(), Replaced(), threading.RLock()
builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor
run_program = launch.__call__
load, store, copy_arguments = builder.create_masked_load, builder.create_masked_store, launch._init_args_hst
replace_for, replace_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

builder.create_fma = fused_multiply_add
builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
launch._init_args_hst, launch.__call__ = copied_arguments, launched
interpreter._patch_lang, interpreter._patch_lang_tensor = replaced, replace_for_tensors
interpreter.InterpretedFunction.__call__ = called
