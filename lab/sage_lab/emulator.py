"""Gluon programs as plain Python on the CPU: their own source, with torch in place of the language.

`OnCPU(program)[grid](...)` is launched as the program itself would be. Every group of warps is a thread; they take
turns in an order drawn from a seed, some often ahead, some behind. Copies arrive late, matmuls read their tiles when
they are waited for and not before, additions to memory likewise, and a place is garbage from the moment the copy of its
next tile is started. With `slow_reads`, a read into registers takes as long as the matmuls of all warps in flight, as
it may on a GPU whose shared memory they keep busy, or until its own warps wait for a matmul or store something. So
whoever reads, writes or releases too early computes nonsense or fails, and
whoever waits for what never comes is told so. Layouts mean nothing here: the compiled code is the test of those.
"""

import inspect
import math
import random
import re
import threading
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITFunction


class Registers(Tensor):
    """Numbers in registers, and what is computed of them: `to` and `type` mean what they mean in Gluon."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def in_registers(function):
    """Return a PyTorch function whose result is in registers; Gluon's last argument, the layout, is left out."""
    return lambda *arguments: function(*arguments[:-1]).as_subclass(Registers)


def plain(function: JITFunction, names: dict) -> FunctionType:
    """Return a Gluon function, and those it calls, as Python functions whose global names are as in `names`."""
    made = {}

    def converted(value):
        if isinstance(value, JITFunction | Changed):
            return rebuilt(value.fn)
        if isinstance(value, ConstexprFunction):  # makes layouts
            return lambda *_: None
        return value.value if isinstance(value, gl.constexpr) else value

    def rebuilt(fn):
        if fn not in made:
            scope = {}
            made[fn] = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)
            scope.update({n: converted(names.get(n, v)) for n, v in fn.__globals__.items()})
        return made[fn]

    return rebuilt(function.fn)


class Changed:
    """A Gluon function with one place of its source changed, to be given in its stead: a mistake to be noticed."""

    def __init__(self, function: JITFunction, old: str, new: str = "pass"):
        source = inspect.getsource(function.fn)
        assert source.count(old) == 1, f"{old}: expected once in {function.fn.__name__}"
        scope = dict(function.fn.__globals__) | {"gluon": SimpleNamespace(jit=lambda fn: fn)}
        exec(source.replace(old, new), scope)
        self.fn, self.name = scope[function.fn.__name__], f"{function.fn.__name__}: {old} -> {new}"


class Pointer:
    def __init__(self, numbers: Tensor, offset=0):
        self.numbers, self.offset, self.dtype = numbers, offset, SimpleNamespace(element_ty=numbers.dtype)

    def __add__(self, offset):
        return Pointer(self.numbers, self.offset + offset)

    def load(self, mask=None, other=None):
        if mask is None:
            return self.numbers[self.offset].as_subclass(Registers)
        return torch.where(mask, self.numbers[torch.where(mask, self.offset, 0)], other).as_subclass(Registers)

    def store(self, x, mask=None):
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand(x.shape)
        self.numbers[self.offset[mask]] = x[mask]


class Descriptor:
    """Tiles of a matrix [rows, columns] or lines of a vector; past its ends are zeros."""

    def __init__(self, described: TensorDescriptor):
        self.x = described.base.as_strided(described.shape, described.strides)
        self.block_shape, self.layout = described.block_shape, None
        self.dtype = self.x.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(self.block_shape) * self.x.itemsize)

    def tile(self, *start):
        tile = torch.zeros(self.block_shape, dtype=self.dtype)
        found = self.x[tuple(slice(first, first + n) for first, n in zip(start, tile.shape, strict=True))]
        tile[tuple(map(slice, found.shape))] = found
        return tile

    def add(self, tile, *start):
        self.x[tuple(slice(first, first + n) for first, n in zip(start, tile.shape, strict=True))] += tile


class Place:
    """A tile in shared memory."""

    def __init__(self, tile: Tensor, machine: "Machine"):
        self.tile, self.readers, self.is_fenced, self.machine = tile, 0, True, machine
        self.reads = []  # into registers: for each, the matmuls that it may have to wait for
        self.sharing = [self]  # all places in the same memory

    @property
    def shape(self):
        return self.tile.shape

    @property
    def dtype(self):
        return self.tile.dtype

    def _reinterpret(self, dtype, shape, layout):
        assert (dtype, [1, *shape]) == (self.dtype, [*self.shape])
        return Part(self)

    def __getattr__(self, name):
        return getattr(Part(self), name)


class Part:
    """Rows or columns of a place, as they are or transposed. A tile [1, rows, columns] is one [rows, columns]."""

    def __init__(self, place: Place, cuts: tuple[tuple[int, int, int], ...] = (), order=(0, 1)):
        self.place, self.cuts, self.order, self.dtype = place, cuts, order, place.dtype

    def permute(self, order):
        return Part(self.place, self.cuts, order)

    def slice(self, first, count, axis=0):
        return Part(self.place, (*self.cuts, (axis, first, count)), self.order)

    def view(self):
        tile = self.place.tile[0] if self.place.tile.ndim == 3 else self.place.tile
        for cut in self.cuts:
            tile = tile.narrow(*cut)
        return tile

    def load(self, layout):
        machine = self.place.machine
        in_flight = [matmul for group in machine.running for matmul in group.matmuls]
        self.place.reads.append(in_flight)
        machine.current.reads.append(in_flight)
        return self.numbers()

    def numbers(self):
        return self.view().permute(self.order[: self.view().ndim]).clone().as_subclass(Registers)

    def store(self, x):
        assert self.place.readers == 0, "a tile is overwritten while it is read"
        assert (x.shape, x.dtype) == (self.view().shape, self.dtype)
        self.view().copy_(x)
        self.place.is_fenced = False


class Barrier:
    count = pending = phase = bytes = 0

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class Places(NamedTuple):
    places: list[Place | Barrier]
    shape: list[int]

    def index(self, i):
        return self.places[int(i)]

    def _reinterpret(self, dtype, shape, layout):
        """Return other places in the same memory."""
        made = self.places[0].machine.allocate(dtype, shape, layout)
        for place in self.places:
            place.sharing += made.places
        for place in made.places:
            place.sharing += self.places
        return made


class Product:
    """A matmul in flight."""

    def __init__(self, left, right, start):
        left, right = (Part(x) if isinstance(x, Place) else x for x in (left, right))
        self.left, self.right, self.start, self.result = left, right, start, None
        self.reads = [x.place for x in (left, right) if isinstance(x, Part)]
        for place in self.reads:
            place.readers += 1

    def end(self):
        left = self.left.numbers() if isinstance(self.left, Part) else self.left
        product = left.double() @ self.right.numbers().double()
        self.result = (self.start + product).to(self.start.dtype)
        for place in self.reads:
            place.readers -= 1


class Warps:
    """A group of warps: a thread that runs only in its turn."""

    def __init__(self, weight: int):
        self.weight, self.turn, self.can_go_on = weight, threading.Semaphore(0), lambda: True
        self.matmuls = []  # in flight, in their order
        self.additions = []  # likewise
        self.reads = []  # into registers, that have not ended for certain


class Machine:
    """One program at a time: its groups of warps, and its copies in flight."""

    def __init__(self, seed: int, slow_reads: bool = False):
        self.random, self.slow_reads = random.Random(seed), slow_reads

    def run(self, function, program, arguments):
        self.program, self.running, self.flights, self.places, self.error = program, [], [], [], None
        function(**arguments)

    def run_warps(self, functions, warps, registers):
        threads = []
        for function, arguments in functions:
            group = Warps(self.random.choice((1, 1, 5, 30)))
            self.running.append(group)
            threads.append(threading.Thread(target=self.live, args=(group, function, arguments)))
            threads[-1].start()
        self.pass_on()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        assert not self.flights, "a tile arrives that nobody has waited for"

    def live(self, group, function, arguments):
        group.turn.acquire()
        try:
            with torch.no_grad():
                function(*arguments)
            assert not group.additions, "a program ends before its tiles are read"
        except Exception as error:
            self.error = self.error or error
        self.running.remove(group)
        if self.running:
            self.pass_on()

    def pass_on(self):
        """Give the turn to a group of warps that can go on, after some copies have arrived."""
        while True:
            choices = [group for group in self.running if group.can_go_on() or self.error]
            weights = [group.weight for group in choices] + [3] * len(self.flights)
            if not weights:
                self.error = RuntimeError("deadlock")
                continue
            (chosen,) = self.random.choices(choices + self.flights, weights)
            if isinstance(chosen, Warps):
                self.current = chosen
                return chosen.turn.release()
            self.flights.remove(chosen)
            chosen()

    def pause(self, can_go_on=lambda: True):
        """Let others run, at least until can_go_on()."""
        group = self.current
        group.can_go_on = can_go_on
        self.pass_on()
        group.turn.acquire()
        if self.error:
            raise RuntimeError("a different group of warps has failed")

    def names(self):
        language = SimpleNamespace(
            int8=torch.int8, int32=torch.int32, int64=torch.int64, float16=torch.float16,
            float32=torch.float32,
            minimum=lambda x, y: torch.fmin(torch.as_tensor(x), torch.as_tensor(y)),
            maximum=lambda x, y: torch.fmax(torch.as_tensor(x), torch.as_tensor(y)),
            max=torch.amax, sum=torch.sum, log2=torch.log2, static_range=range,
            where=lambda condition, x, y: torch.where(torch.as_tensor(condition), x, y),
            arange=in_registers(torch.arange),
            zeros=in_registers(lambda shape, dtype: torch.zeros(shape, dtype=dtype)),
            full=in_registers(lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)),
            split=lambda x: x.unbind(-1), join=lambda x, y: torch.stack((x, y), -1),
            broadcast=torch.broadcast_tensors, reduce=reduce,
            convert_layout=lambda x, _, assert_trivial=False: x, SliceLayout=lambda *_: None,
            load=Pointer.load, store=self.store,
            program_id=in_registers(lambda: torch.tensor(self.program)), inline_asm_elementwise=run_ptx,
            allocate_shared_memory=self.allocate, warp_specialize=self.run_warps,
        )  # fmt: skip
        barriers = SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=self.init, wait=self.wait, expect=self.expect, arrive=self.arrive
        )
        copies = SimpleNamespace(async_copy_global_to_shared=self.copy, store_wait=self.wait_for_additions)
        return {
            "gl": language, "mbarrier": barriers, "tma": copies, "fence_async_shared": self.fence,
            "add_to_global": self.add,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait_for_product,
        }  # fmt: skip

    def allocate(self, dtype, shape, layout):
        if layout == "barrier":
            return Places([Barrier() for _ in range(shape[0])], shape) if len(shape) > 1 else Barrier()
        places = [Place(torch.full(shape[1:], 77, dtype=dtype), self) for _ in range(shape[0])]
        self.places += places
        return Places(places, shape)

    def store(self, pointer, x, mask=None):
        pointer.store(x, mask)
        self.end_reads()

    def end_reads(self):
        """End the reads of this group of warps, which has gone on to use what it read."""
        for in_flight in self.current.reads:
            in_flight.clear()

    def fence(self):
        """Make what has been written into tiles visible to the copy engine."""
        for place in self.places:
            place.is_fenced = True

    def init(self, barrier, count):
        barrier.count = barrier.pending = count

    def wait(self, barrier, phase):
        assert phase in (0, 1), "a barrier's phases are 0 and 1"
        self.pause(lambda: barrier.phase != phase)

    def expect(self, barrier, size):
        barrier.bytes += size
        self.arrive(barrier, 1)

    def arrive(self, barrier, count=1):  # as Hopper's mbarrier.arrive
        assert barrier.pending >= count, "more arrivals than the phase has"
        barrier.pending -= count
        barrier.settle()
        self.pause()

    def copy(self, descriptor, coordinates, barrier, place):
        assert coordinates[-1] * place.tile.itemsize % 16 == 0, "the copy engine fetches from multiples of 16 bytes"
        for lost in place.sharing:
            assert lost.readers == 0, "a tile is overwritten while a matmul reads it"
            ended = all(matmul.result is not None for in_flight in lost.reads for matmul in in_flight)
            assert ended or not self.slow_reads, "a tile is overwritten while registers may still read it"
            lost.reads = []
            lost.tile = torch.full_like(lost.tile, 77)

        def arrive():
            place.tile = descriptor.tile(*coordinates)
            barrier.bytes -= descriptor.block_type.nbytes
            barrier.settle()

        self.flights.append(arrive)
        self.pause()

    def add(self, descriptor, coordinates, place):
        """Add a tile to memory. It is read, and added, when it is waited for and not before."""
        assert place.is_fenced, "the copy engine may not see what has been written"
        place.readers += 1

        def arrive():
            descriptor.add(place.tile, *coordinates)
            place.readers -= 1

        self.current.additions.append(arrive)
        self.pause()

    def wait_for_additions(self, in_flight):
        self.pause()
        while len(self.current.additions) > in_flight:
            self.current.additions.pop(0)()

    def multiply(self, left, right, accumulator, use_acc, is_async):
        assert is_async
        product = Product(left, right, accumulator if use_acc else torch.zeros_like(accumulator))
        self.current.matmuls.append(product)
        return product

    def wait_for_product(self, num_outstanding, deps):
        """Return the result of deps. Matmuls end in their order; the last `num_outstanding` may go on."""
        self.pause()
        matmuls = self.current.matmuls
        while len(matmuls) > num_outstanding:
            matmuls.pop(0).end()
            self.end_reads()
        (product,) = deps
        assert product.result is not None, "a matmul's result is used before its end"
        return product.result


class OnCPU:
    """A Gluon program that is launched like itself. names: other Gluon functions for some that it calls."""

    def __init__(self, program: JITFunction, seed: int = 0, slow_reads: bool = False, **names):
        self.program, self.machine = program, Machine(seed, slow_reads)
        self.arg_names = program.arg_names
        self.function = plain(program, self.machine.names() | names)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, ptx_options="", **constants):
            given = dict(zip(self.program.arg_names, map(argument, arguments), strict=False)) | constants
            for i in range(grid[0]):
                self.machine.run(self.function, i, given)

        return launch


def argument(x):
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    return pointer_to(x) if isinstance(x, Tensor) else x


def pointer_to(x):
    """Return a pointer to the first number of x, in any layout."""
    every = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return Pointer(every, x.storage_offset())


def reduce(x, axis, combine):
    """Reduce neighbours first, which is as good as any order."""
    x = x.movedim(axis, -1)
    while x.shape[-1] > 1:
        x = combine(x[..., ::2], x[..., 1::2])
    return x[..., 0]


def run_ptx(code, constraints, arguments, dtype, is_pure, pack):
    """Run the few instructions that are written in PTX; $0 is the result, or $0 and $1; the arguments follow.

    A pair of float16 is an int32; {low, high} are its halves.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    registers = {f"${i}": x for i, x in enumerate(arguments, len(dtypes))}

    def value(operand):
        if operand[0] == "{":
            return pair(*(registers[name] for name in names_in(operand)))
        return registers[operand] if operand in registers else int(operand, 0)

    for instruction in re.findall(r"(?:abs|cvt|ex2|fma|lg2|max|mov|mul|prmt|rcp|xor)\.[^;]+", code):
        name, rest = instruction.split(None, 1)
        result, *operands = re.findall(r"{[^}]+}|[^\s,]+", rest)
        found = PTX[name](*map(value, operands))
        if result[0] == "{":
            registers |= zip(names_in(result), halves(found), strict=True)
        else:
            registers[result] = found
    results = [registers[f"${i}"] for i in range(len(dtypes))]
    results = [x.to(kind).as_subclass(Registers) for x, kind in zip(results, dtypes, strict=True)]
    return results if isinstance(dtype, tuple) else results[0]


def names_in(braces):
    return re.findall(r"[^{},\s]+", braces)


def halves(pairs):
    """Return (low, high) in float16."""
    return pairs.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).unbind(-1)


def pair(low, high):
    return torch.stack((low, high), -1).view(torch.int32)[..., 0]


def of_halves(function):
    """Return an instruction on pairs: the same function of low halves and of high ones."""
    return lambda *pairs: pair(*(function(*x) for x in zip(*map(halves, pairs), strict=True)))


def multiply_add(x, y, z):
    """Return x y + z of float16, rounded once; a GPU's NaN has all bits set but the sign."""
    exact = x.double() * y.double() + z.double()
    rounded = torch.from_numpy(exact.numpy().astype(np.float16))  # PyTorch would round to float32 before
    return torch.where(rounded.isnan(), 0x7FFF, rounded.view(torch.int16)).to(torch.int16).view(torch.float16)


def pack_low(high, low, upper):
    """Emulate cvt.pack: `upper` moves up, and its two low bytes become the two numbers, kept within INT8."""
    high, low = (x.clamp(-128, 127) & 255 for x in (high, low))
    return upper << 16 | high << 8 | low


def chosen_bytes(x, y, choice):
    """Emulate prmt: a digit of `choice`, from the lowest up, is the number of a byte of x (0 ... 3) or y (4 ... 7)."""
    both = torch.cat([z.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)) for z in (x, y)], -1)
    return both[..., [choice >> 4 * i & 7 for i in range(4)]].view(torch.int32)[..., 0]


PTX = {
    "abs.f16": torch.abs,
    "cvt.f32.f16": torch.Tensor.float,
    "cvt.rn.f16x2.f32": lambda high, low: pair(low.half(), high.half()),
    "cvt.rn.satfinite.f16x2.f32": lambda high, low: pair(*(x.clamp(-65504, 65504).half() for x in (low, high))),
    "cvt.rni.s32.f32": lambda x: x.nan_to_num(0).round().clamp(-(2**31), 2**31 - 1).to(torch.int64),
    "cvt.pack.sat.s8.s32.b32": pack_low,
    "ex2.approx.ftz.f32": torch.exp2,
    "fma.rn.f16x2": lambda x, y, z: of_halves(multiply_add)(x, y, torch.full_like(x, z)),
    "fma.rn.f32": lambda x, y, z: (x.double() * y + z).float(),
    "lg2.approx.ftz.f32": torch.log2,
    "max.f16": torch.fmax,
    "max.xorsign.abs.f16x2": of_halves(lambda x, y: torch.fmax(x.abs(), y.abs())),  # nobody asks for the sign
    "mov.b32": lambda x: x,
    "mul.rn.f16x2": of_halves(torch.mul),
    "prmt.b32": chosen_bytes,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "xor.b32": torch.bitwise_xor,
}
