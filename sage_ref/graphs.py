"""`graphed`: training passes of a module as CUDA graphs, for passes so short that the host is slower than the GPU."""

import warnings
import weakref
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sage_ref.checks import check_module

SHAPES_KEPT = 16


def graphed(module: nn.Module) -> nn.Module:
    """Make a module start each training pass as two CUDA graphs, one forward and one backward; return the module.

        model = sage_ref.graphed(model)

    The first call with inputs of new shapes captures them, under the autocast of that call. Later calls replay.
    Gradients add up over several passes, which they silently don't with `torch.cuda.make_graphed_callables` alone:
    there the first pass's `.grad` is memory that the second pass overwrites.

    A call runs as written, with the same results, if it can't be replayed: on a CPU, in eval mode, without gradients,
    with arguments that are not tensors or are given by name, while an earlier output still waits for its backward
    pass, inside torch.compile, or after `SHAPES_KEPT` kinds of inputs. All shapes share the memory of the largest pass.

    A replay repeats what the GPU did, so the module must not decide anything by the values of its inputs.

    Raises:
        TypeError: module is no torch.nn.Module.
        RuntimeError: A second backward pass of one call, as with retain_graph; or the module can't be captured.
    """
    check_module("module", module)
    if not isinstance(module.forward, _Graphs):  # as it is in a cell of a notebook that is run again
        module.forward = _Graphs(module)
    return module


def _are_on_gpu(inputs: tuple) -> bool:
    return all(isinstance(x, Tensor) and x.is_cuda for x in inputs) and not torch.cuda.is_current_stream_capturing()


def _kept_gradient(parameter: weakref.ref, gradient: Tensor) -> Tensor:
    """Return a gradient that may become `.grad`: a copy, since the graph writes its next one to the same memory."""
    return gradient.clone() if parameter().grad is None else gradient


class _Written(nn.Module):
    """A module with its own forward, which `graphed` has replaced."""

    def __init__(self, module: nn.Module, forward: Callable):
        super().__init__()
        self.module, self.forward = module, forward


class _Graphs:
    """Function that a module calls instead of its forward. turn: the replay whose backward pass is still to come."""

    def __init__(self, module: nn.Module):
        self.module, self.forward = module, module.forward
        self.graphs: dict[Hashable, Callable] = {}
        self.pool = None
        self.kept: set[int] = set()  # parameters that have their hook
        self.turn, self.node = None, None

    def __call__(self, *inputs, **named):
        if named or not self.can_replay(inputs):
            return self.forward(*inputs, **named)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        trained = tuple(x.requires_grad for x in self.module.parameters())
        kind = autocast, trained, *((x.shape, x.dtype, x.device, x.requires_grad) for x in inputs)
        if kind not in self.graphs:
            if len(self.graphs) == SHAPES_KEPT:
                return self.forward(*inputs)
            self.graphs[kind] = self.capture(inputs)
        return self.replay(self.graphs[kind], inputs)

    def can_replay(self, inputs: tuple) -> bool:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self.module.training):
            return False
        if not _are_on_gpu(inputs):
            return False
        return self.turn is None or self.node() is None  # else a replay would overwrite what its backward pass reads

    def capture(self, inputs: tuple[Tensor, ...]) -> Callable:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        written = _Written(self.module, self.forward)
        names, parameters = [name for name, _ in written.named_parameters()], tuple(written.parameters())
        for x in parameters:
            if x.requires_grad and id(x) not in self.kept:
                self.kept.add(id(x))
                x.register_hook(partial(_kept_gradient, weakref.ref(x)))

        def call(*tensors: Tensor):
            return torch.func.functional_call(written, dict(zip(names, tensors, strict=False)), tensors[len(names) :])

        # Autograd may know the parameters from the default stream, which can't take part in a capture. Tensors that
        # share their memory are new to it.
        samples = [x.detach() for x in parameters] + [x.detach().clone() for x in inputs]
        for sample, x in zip(samples, (*parameters, *inputs), strict=True):
            sample.requires_grad_(x.requires_grad)
        caches_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the graph would go on reading casts of weights that autocast frees
        try:
            with warnings.catch_warnings():
                # PyTorch warms up on one stream and captures on another, and warns of it.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
                return torch.cuda.make_graphed_callables(call, tuple(samples), allow_unused_input=True, pool=self.pool)
        finally:
            torch.set_autocast_cache_enabled(caches_casts)

    def replay(self, graph: Callable, inputs: tuple[Tensor, ...]):
        inputs = tuple(x.view_as(x) if x.requires_grad else x for x in inputs)
        for x in inputs:
            if x.requires_grad:
                x.register_hook(torch.clone)
        outputs = graph(*self.module.parameters(), *inputs)
        node = next((x.grad_fn for x in tree_leaves(outputs) if x.grad_fn is not None), None)
        if node is not None:
            self.turn, self.node = object(), weakref.ref(node)
            node.register_prehook(partial(self.finish, self.turn))
        return tree_map(torch.clone, outputs)  # the next replay overwrites the graph's own

    def finish(self, turn: object, _: tuple) -> None:
        if turn is not self.turn:
            raise RuntimeError("graphed: expected one backward pass of each call, got a second one")
        self.turn = None
