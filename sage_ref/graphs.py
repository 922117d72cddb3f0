"""`graphed`: training passes of a module as CUDA graphs, for passes so short that the host is slower than the GPU."""

import weakref
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

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

    A replay repeats what the GPU did. So the module must not decide anything by the values of its inputs, and its
    parameters must stay where they are: move and wrap it first, and load weights in place, as load_state_dict does.

    Raises:
        RuntimeError: A second backward pass of one call, as with retain_graph; or the module can't be captured.
    """
    module.forward = _Graphs(module)
    return module


def _are_on_gpu(inputs: tuple) -> bool:
    return all(isinstance(x, Tensor) and x.is_cuda for x in inputs) and not torch.cuda.is_current_stream_capturing()


def _kept_gradient(parameter: weakref.ref, gradient: Tensor) -> Tensor:
    """Return a gradient that may become `.grad`: a copy, since the graph writes its next one to the same memory."""
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # a copy in every replay
    return gradient.clone() if parameter().grad is None and not is_captured else gradient


class _Shell(nn.Module):
    """A module as it was written, for PyTorch to capture."""

    def __init__(self, module: nn.Module, forward: Callable):
        super().__init__()
        self.module, self.inner = module, forward

    def forward(self, *inputs: Tensor):
        return self.inner(*inputs)


class _Graphs:
    """Function that a module calls instead of its forward. turn: the replay whose backward pass is still to come."""

    def __init__(self, module: nn.Module):
        self.module, self.forward = module, module.forward
        self.graphs: dict[Hashable, Callable] = {}
        self.pool = None
        self.accumulators: dict[int, torch.autograd.graph.GradientEdge] = {}
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
        samples = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        for x in self.module.parameters():
            if x.requires_grad and id(x) not in self.accumulators:
                # Autograd adds gradients on the stream where it first met a parameter: let that not be the capture's.
                self.accumulators[id(x)] = torch.autograd.graph.get_gradient_edge(x)
                x.register_hook(partial(_kept_gradient, weakref.ref(x)))
        caches_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the graph would go on reading casts of weights that autocast frees
        try:
            shell = _Shell(self.module, self.forward)
            return torch.cuda.make_graphed_callables(shell, samples, allow_unused_input=True, pool=self.pool)
        finally:
            torch.set_autocast_cache_enabled(caches_casts)

    def replay(self, graph: Callable, inputs: tuple[Tensor, ...]):
        inputs = tuple(x.view_as(x) if x.requires_grad else x for x in inputs)
        for x in inputs:
            if x.requires_grad:
                x.register_hook(torch.clone)
        outputs = graph(*inputs)
        node = next((x.grad_fn for x in tree_leaves(outputs) if x.grad_fn is not None), None)
        if node is not None:
            self.turn, self.node = object(), weakref.ref(node)
            node.register_prehook(partial(self.finish, self.turn))
        return tree_map(torch.clone, outputs)  # the next replay overwrites the graph's own

    def finish(self, turn: object, _: tuple) -> None:
        if turn is not self.turn:
            raise RuntimeError("graphed: expected one backward pass of each call, got a second one")
        self.turn = None
