"""A call like an earlier one costs the CPU less: what it does is recorded once, then repeated at other addresses.

A function that allocates memory and starts programs does the same for all tensors of the same shapes; only addresses
differ. So its first call is watched: each launch with its arguments, each PyTorch operation, each allocation. Later
calls repeat the list. Memory that never leaves the call is one allocation then, and programs are started without
Triton's bookkeeping. A training step finds its memory where the step before had it: so the copy engine's maps, which
depend on addresses, are kept, too.

    outputs = recorded(("forward", is_causal), (query, key, value), lambda start: ...)

The function may look at nothing but its inputs and what is in the key: shapes yes, values no. A recording that would
not be the same again (a tensor from elsewhere, a value read back) is not kept, and such calls run as they are written.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.runtime import driver

from sage_kernels.common.launcher import direct_launch, map_makers, start_with_triton
from sage_kernels.common.tiles import Strided

ALIGNMENT = 512  # bytes: what PyTorch's own allocations begin at
MAPS_KEPT = 512  # of the copy engine's, for each descriptor of a recorded launch: a few for every layer of a model
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
}  # fmt: skip
UNFORESEEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # they read values

Function = Callable[..., tuple[Tensor, ...]]


class Place(NamedTuple):
    """Where a tensor of the recorded call begins."""

    memory: int  # which input, allocation or result, in the order in which they came
    offset: int  # in bytes, from where that begins


class View(NamedTuple):
    """A tensor of the recorded call. It begins `offset` numbers after its memory does."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensors: list[Tensor | None]) -> Tensor:
        x = tensors[self.memory]
        if x.shape == self.shape and x.stride() == self.strides and self.offset == 0:
            return x
        return x.as_strided(self.shape, self.strides, x.storage_offset() + self.offset)


class Allocation(NamedTuple):
    """Memory that the function asked for."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Return the bytes from its first number to its last."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return 0 if 0 in self.shape else (1 + last) * self.dtype.itemsize


class RecordedLaunch(NamedTuple):
    """A program's start. Where an argument depends on addresses, `arguments` has a gap."""

    launch: Callable[[int, list], None]  # the compiled program with its grid
    arguments: list
    pointers: list[tuple[int, Place]]  # (position, where it points)
    strided: list[tuple[int, Place, tuple[int, ...]]]  # (position, where it points, its strides)
    maps: list[tuple[int, Place, Callable[[int], object]]]  # (position, the descriptor's tensor, its map by address)

    def repeat(self, tensors: list[Tensor | None], addresses: list[int], stream: int) -> None:
        arguments = self.arguments.copy()
        for position, (memory, offset) in self.pointers:
            arguments[position] = addresses[memory] + offset
        for position, (memory, offset), strides in self.strided:
            arguments[position] = addresses[memory] + offset, *strides
        for position, (memory, offset), map_at in self.maps:
            arguments[position] = map_at(addresses[memory] + offset)
        self.launch(stream, arguments)


class Operation(NamedTuple):
    """A PyTorch operation that computes a new tensor. Where an argument is a tensor, `arguments` has a `View`."""

    function: Callable
    arguments: list
    keywords: dict
    memory: int  # of its result

    def repeat(self, tensors: list[Tensor | None], addresses: list[int], stream: int) -> None:
        arguments = [x.of(tensors) if isinstance(x, View) else x for x in self.arguments]
        result = self.function(*arguments, **self.keywords)
        tensors[self.memory], addresses[self.memory] = result, result.data_ptr()


class Address:
    """The one thing that a descriptor needs of a tensor."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def map_maker(descriptor, take_apart: Callable) -> Callable[[int], object]:
    """Return a function of an address: the copy engine's map of such a descriptor of a tensor that begins there."""
    kind, fields = type(descriptor), {name: value for name, value in vars(descriptor).items() if name != "base"}

    @lru_cache(maxsize=MAPS_KEPT)
    def map_at(address: int):
        made = object.__new__(kind)  # without its checks, which the first has passed
        made.__dict__.update(fields, base=Address(address))
        return take_apart(made)[0]

    return map_at


class Recorder(TorchDispatchMode):
    """Watches a call. `obstacle` says why it can't be repeated, if it can't."""

    def __init__(self, inputs: tuple[Tensor | None, ...]):
        super().__init__()
        self.obstacle = None
        self.steps, self.allocations = [], []
        self.inputs = {x.data_ptr(): number for number, x in enumerate(inputs) if x is not None}
        self.dtypes = [None if x is None else x.dtype for x in inputs]  # of every memory
        self.made = {}  # by address: (number of the memory, its tensor, which is kept for the address to be its own)

    def start(self, program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict) -> None:
        """Start a program and note the launch: a `Start`."""
        compiled = start_with_triton(program, grid, arguments, constants, options)
        launch = None if compiled is None else direct_launch(compiled, (*grid, 1, 1)[:3])
        if launch is None:
            self.obstacle = "Triton leaves no compiled program, or hides how to start it"
            return
        take_apart = map_makers(compiled)
        fixed, pointers, strided, maps = [], [], [], []
        for argument in arguments:
            if isinstance(argument, Tensor):
                pointers.append((len(fixed), self.place(argument)))
                fixed.append(None)
            elif isinstance(argument, Strided):
                strided.append((len(fixed), self.place(argument.pointer), argument[1:]))
                fixed.append(None)
            elif isinstance(getattr(argument, "base", None), Tensor):
                function = take_apart[len(maps)]
                maps.append((len(fixed), self.place(argument.base), map_maker(argument, function)))
                _, *shape_and_strides = function(argument)
                fixed += [None, *shape_and_strides]
            else:
                fixed.append(argument)
        fixed += (constants[x] for x in program.arg_names[len(arguments) :])
        self.steps.append(RecordedLaunch(launch, fixed, pointers, strided, maps))

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        if function in ALLOCATIONS:
            self.allocations.append(
                Allocation(self.memory_of(result), tuple(result.shape), result.stride(), result.dtype, result.device)
            )
        elif not function.is_view:
            self.note(function, arguments, keywords, result)
        return result

    def note(self, function, arguments: tuple, keywords: dict, result) -> None:
        nested = [x for x in tree_leaves((arguments, keywords)) if isinstance(x, Tensor)]
        views = [self.view(x) if isinstance(x, Tensor) else x for x in arguments]
        if function._schema.is_mutable or set(function.tags) & UNFORESEEN or not isinstance(result, Tensor):
            self.obstacle = f"{function} changes its arguments, reads their values or returns no tensor"
        elif len(nested) > sum(isinstance(x, View) for x in views):
            self.obstacle = f"{function} takes a list of tensors, or one by its name"
        else:
            self.steps.append(Operation(function, views, keywords, self.memory_of(result)))

    def memory_of(self, new: Tensor) -> int:
        """Return the number of new memory."""
        number = len(self.dtypes)
        self.dtypes.append(new.dtype)
        if new.device.type != "meta":
            self.made[new.untyped_storage().data_ptr()] = number, new
        return number

    def place(self, x: Tensor) -> Place:
        if x.data_ptr() in self.inputs:
            return Place(self.inputs[x.data_ptr()], 0)
        storage = x.untyped_storage().data_ptr()
        if storage in self.made:
            return Place(self.made[storage][0], x.data_ptr() - storage)
        self.obstacle = f"a tensor of shape {tuple(x.shape)} is no input and was not made by the call"
        return Place(0, 0)

    def view(self, x: Tensor) -> View:
        memory, offset = self.place(x)
        if self.dtypes[memory] != x.dtype:
            self.obstacle = f"memory of {self.dtypes[memory]} is read as {x.dtype}"
        return View(memory, tuple(x.shape), x.stride(), offset // x.element_size())


class Recording:
    """Everything that a call did, to be done for other inputs."""

    def __init__(self, recorder: Recorder, outputs: tuple[Tensor, ...]):
        self.steps, self.memories = recorder.steps, len(recorder.dtypes)
        views = [recorder.view(x) for x in outputs]
        whole = {x.memory: (x.shape, x.strides, 0) for x in recorder.allocations}
        # Most outputs are allocations: then the number of the memory says all.
        self.outputs = [x.memory if x[1:] == whole.get(x.memory) else x for x in views]
        operands = [x for step in self.steps if isinstance(step, Operation) for x in step.arguments]
        tensors = {x.memory for x in (*operands, *views) if isinstance(x, View)}
        launches = [step for step in self.steps if isinstance(step, RecordedLaunch)]
        pointed = {place.memory for x in launches for _, place, *_ in (*x.pointers, *x.strided, *x.maps)}
        self.allocations = [x for x in recorder.allocations if x.memory in tensors]
        # Memory that only programs see is part of one allocation: (number of the memory, where in it).
        self.scratch, self.scratch_bytes, self.device = [], 0, None
        for allocation in recorder.allocations:
            if allocation.memory in pointed - tensors:
                self.scratch.append((allocation.memory, self.scratch_bytes))
                self.scratch_bytes += -(-allocation.bytes // ALIGNMENT) * ALIGNMENT
                self.device = allocation.device

    def repeat(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        tensors = [*inputs, *[None] * (self.memories - len(inputs))]
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        for memory, shape, strides, dtype, device in self.allocations:
            tensors[memory] = made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            addresses[memory] = made.data_ptr()
        if self.scratch:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            begin = scratch.data_ptr()
            for memory, offset in self.scratch:
                addresses[memory] = begin + offset
        stream = driver.active.get_current_stream(inputs[0].device.index)
        for step in self.steps:
            step.repeat(tensors, addresses, stream)
        return tuple(tensors[x] if isinstance(x, int) else x.of(tensors) for x in self.outputs)


class Kept:
    """Everything known of one kind of call."""

    recording: Recording | None = None
    is_repeatable = True  # as far as we know


@lru_cache(maxsize=1024)
def kept(key: Hashable) -> Kept:
    return Kept()


def recorded(key: Hashable, inputs: tuple[Tensor | None, ...], function: Function) -> tuple[Tensor, ...]:
    """Return function(start), or repeat what it did for earlier inputs of this kind.

    It makes new tensors of `inputs`, by programs that `start` starts and by PyTorch operations. key: all else that
    decides what it does. All happens on the device of the first input, as Triton launches on the current one.
    """
    device = inputs[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return recorded(key, inputs, function)
    if is_watched():
        return function(start_with_triton)
    earlier = kept((key, kind_of(inputs)))
    if earlier.recording is not None:
        return earlier.recording.repeat(inputs)
    if earlier.is_repeatable:
        with Recorder(inputs) as recorder:
            outputs = function(recorder.start)
            recording = Recording(recorder, outputs)
        earlier.is_repeatable = recorder.obstacle is None
        earlier.recording = recording if earlier.is_repeatable else None
        return outputs
    return function(start_with_triton)


def is_watched() -> bool:
    """Return whether a profiler wants to see Triton's launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)  # a chain of hooks, or one


def kind_of(inputs: tuple[Tensor | None, ...]) -> tuple:
    """Return what decides how a function of the tensors' shapes treats them, and how its programs are compiled.

    Tensors that begin at the same address are one to a recording, so which of them do belongs to it.
    """
    kinds, addresses = [inputs[0].device], []
    for x in inputs:
        if x is None:
            kinds.append(None)
            continue
        address = x.data_ptr()
        addresses.append(address)
        kinds += x.shape, x.stride(), x.dtype, address % 16
    if len(set(addresses)) < len(addresses):
        kinds += (addresses.index(address) for address in addresses)
    return tuple(kinds)
