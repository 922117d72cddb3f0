"""SageBwd in any model that calls `torch.nn.functional.scaled_dot_product_attention`."""

import inspect
import sys
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from sage_ref.backend import pays_from, warn_once
from sage_ref.checks import Fitting, check_least, kind_of
from sage_ref.integrations.calls import SDPA, Call, Policy, by_sagebwd, obstacle, obstacle_of_mask, refuse
from sage_ref.integrations.parts import is_captured
from sage_ref.sagebwd.settings import Options

SEEN = (SDPA, torch.ops.aten.scaled_dot_product_attention.default)  # PyTorch's own, and that of an exported module
FITTING = Fitting()  # kinds of calls that SageBwd can compute
signature = lru_cache(inspect.signature)  # slower than all else that is done for a call


# The modes that this thread's code has entered, or this asyncio task's and those of the tasks around it.
_entered: ContextVar[tuple["SdpaMode", ...]] = ContextVar("sage_ref.sdpa", default=())


class SdpaMode(TorchFunctionMode):
    """A context inside which calls of SDPA go to `attend`, the innermost context's first.

    PyTorch keeps modes for a thread, in which several asyncio tasks take turns: a mode lets calls of a task that is not
    inside it pass, and is left wherever it stands among the modes of the thread. Code is compiled for the modes of the
    thread.
    """

    def __enter__(self):
        if not torch.compiler.is_compiling():
            _entered.set((*_entered.get(), self))
        return super().__enter__()

    def __exit__(self, kind, error, traceback):
        if torch.compiler.is_compiling():
            super().__exit__(kind, error, traceback)
            return
        entered, above = list(_entered.get()), []
        if self in entered:
            del entered[len(entered) - 1 - entered[::-1].index(self)]
            _entered.set(tuple(entered))
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def holds(self) -> bool:
        """Return whether the code that runs now is inside this context."""
        return torch.compiler.is_compiling() or self in _entered.get()

    def attend(self, call: Call) -> Tensor:
        """Compute O of a call. A call of SDPA in here goes to the mode around this one, or to PyTorch."""
        raise NotImplementedError

    def unreachable(self, reason: str) -> None:
        """React to attention that is computed where no mode sees it."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function in SEEN and self.holds():
            return self.attend(Call(*arguments, **options))
        if function is F.multi_head_attention_forward and self.holds():
            return self._multi_head_attention(*arguments, **options)
        if function is Tensor.unflatten and self.holds():  # which torch.compile can't trace below a mode
            function = torch.unflatten
        return function(*arguments, **options)

    def _multi_head_attention(self, *arguments, **options):
        """Run the call of `torch.nn.MultiheadAttention`. A mode sees it, but not the call of SDPA inside it."""
        function, reason = F.multi_head_attention_forward, None
        if torch.compiler.is_compiling():
            reason = "model: expected no torch.nn.MultiheadAttention under torch.compile, got one"
        elif signature(function).bind(*arguments, **options).arguments.get("need_weights", True):
            reason = "need_weights: expected False, since SageBwd never has the weights, got True"
        if reason:
            self.unreachable(reason)
        else:
            names = {**function.__globals__, "scaled_dot_product_attention": lambda *a, **o: self.attend(Call(*a, **o))}
            function = FunctionType(function.__code__, names, argdefs=function.__defaults__)
        return function(*arguments, **options)


# Where code breaks the graph inside a context, torch.compile (2.11, 2.13) would compile `__torch_function__` by itself,
# and then take one function's code for another: sin would give cos. So it is only compiled as a part of other code.
with suppress(ImportError):  # these names are private: if they go, a test of compiled code says whether the fault went
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    only_inlined = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(SdpaMode.__torch_function__.__code__, only_inlined)


class sdpa(SdpaMode):  # noqa: N801 (a context manager, named for the function that it replaces)
    """A context, `with sage_ref.sdpa():`, in which SageBwd computes the calls of `F.scaled_dot_product_attention`.

    It takes calls with is_causal, scale and enable_gqa, and those that torch.nn.MultiheadAttention makes where its
    weights are not requested (a TransformerEncoderLayer doesn't). `taken` counts them, except in compiled code.

    Masks: a mask is taken if it is padding, before or after the tokens of each sequence, with causality or without, or
    if it leaves parts of each sequence: packed documents, a prefix, the last queries of a causal sequence. Each part is
    then computed on its own tokens, together with others of the same length. A query that sees no key gets zeros; so
    does one in the padding of a causal mask. On a GPU each call with a mask waits and reads it, but for short ones
    (minimum_tokens) and torch.nn.attention.bias, whose two causal biases need no reading. torch.compile,
    torch.jit.trace, torch.func, torch.vmap and the capture of a CUDA graph can't read a mask: there SageBwd can't
    compute a call with one. In a CUDA graph PyTorch then computes it without cuDNN, whose first call can't be captured.

    Strides of the output are those that SDPA's fused kernels give it: they follow the strides of query.

    Nesting: the innermost context takes what it can, and passes the rest to the next one. Threads and asyncio: a
    context holds in the thread or task that entered it and in tasks started inside; another thread enters its own.
    Compiled code takes the contexts of its thread, whichever task entered them. A DataLoader's worker that is forked
    inside a context is inside it, a spawned one is not. A backward pass runs outside of all contexts.

    It sees PyTorch's own function, wherever it is called from: also inside a function that somebody has put in place of
    F.scaled_dot_product_attention, and in an exported module. It doesn't see TorchScript, an exported module that was
    decomposed, and functions that compute attention by other means. Where it has seen no call at all, and no code was
    compiled, one warning says so at its end.

    torch.compile: enter this context inside the compiled function, which then runs at no extra cost, or around it,
    where each call takes the CPU some time. Neither breaks the graph. torch.nn.MultiheadAttention then stays exact, and
    so does nn.TransformerEncoderLayer without gradients, whose fast path (torch.backends.mha.set_fastpath_enabled) is
    invisible to compiled code. Activation checkpointing computes the forward pass again during the backward pass,
    outside of this context: give `torch.utils.checkpoint` context_fn=lambda: (sage_ref.sdpa(), sage_ref.sdpa()), or its
    check of the saved tensors fails. With use_reentrant=True it checks nothing: enter this context inside the function
    that is checkpointed. In a compiled checkpoint PyTorch hides SDPA from every context, and attention stays exact
    without a word: call sagebwd_attention itself there.

    Cost: outside of compiled code, PyTorch asks this context about each of its functions, which takes some microseconds
    of the CPU's time each. So put it around the model's call alone, not around the optimiser, and where small models
    wait for the CPU, call `sagebwd_attention` yourself.

    Args:
        smooth_k, smooth_q, granularity, unbiased, backend: As in `sage_ref.sagebwd_attention`. On a GPU "auto" computes
            what the kernels can, and never by the reference.
        minimum_tokens: A call with fewer queries, or fewer keys, is left to the context around this one, or to PyTorch,
            which computes it exactly; its mask is not read. None: on a GPU, the length from which on INT8, which saves
            memory, was measured to take at most 5% more time than PyTorch's attention on such a card, and one warning
            says so; on a CPU, with backend="reference" and on cards that were not measured, 0. 0: every call is
            computed in INT8.
        otherwise: What happens to a call that SageBwd can't compute (a mask that isn't padding, dropout, a value with a
            different head size than the query's, on a GPU float32 or a head size above 128, ...). "exact": PyTorch
            computes it, with one warning for each reason. "error": a ValueError. With backend="triton" a dtype, head
            size, device or option that the kernels don't have is an error always.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it.
    """

    captured = False  # whether a CUDA graph has recorded calls, which later run without being seen

    def __init__(
        self,
        *,
        smooth_k: bool = True,
        smooth_q: bool = False,
        granularity: str = "row",
        unbiased: bool = False,
        backend: str = "auto",
        minimum_tokens: int | None = None,
        otherwise: str = "exact",
    ):
        super().__init__()
        check_least("minimum_tokens", minimum_tokens)
        self.minimum_tokens = minimum_tokens
        self.policy = Policy(Options(smooth_k, smooth_q, granularity, unbiased, backend), otherwise).checked()
        self.taken = 0
        self.seen = False

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        if torch.compiler.is_compiling():
            return
        around = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, sdpa)]
        for mode in around:
            mode.seen |= self.seen
        if not self.seen and not around and kind is None and not (_has_compiled() or sdpa.captured):
            replaced = "" if F.scaled_dot_product_attention is SDPA else " It was replaced by a different function."
            unseen = "TorchScript, decomposed exported modules and other attentions are not seen"
            warn_once(f"sdpa: expected calls of F.scaled_dot_product_attention, got none: {unseen}.{replaced}", 1)

    def attend(self, call: Call) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen = True
            sdpa.captured |= is_captured(call.query)
        kind = kind_of(call[:3], (*call[4:], *self.policy.options)) if call.attn_mask is None else None
        if not FITTING.get(kind):
            reason = obstacle(call._replace(attn_mask=None), self.policy.options)
            if call.attn_mask is not None and not reason and not self._is_short(call):  # on a GPU to read it is to wait
                reason = obstacle_of_mask(call)
            if reason:
                refuse(reason, self.policy.otherwise, depth=3)
                return call.exactly()
            FITTING.add(kind, True)
        if self._is_short(call):
            return call.exactly()
        if not torch.compiler.is_compiling():
            self.taken += 1
        return by_sagebwd(call, self.policy.options)

    def _is_short(self, call: Call) -> bool:
        """Return whether a call has so few tokens that it is computed exactly."""
        tokens = min(call.query.shape[2], call.key.shape[2])
        if self.minimum_tokens is not None:
            return tokens < self.minimum_tokens
        if not call.query.is_cuda or self.policy.options.backend == "reference":
            return False
        least = pays_from(call.query.device, call.query.shape[3], call.is_causal)
        if tokens < least:
            text = "minimum_tokens: on this GPU short calls are faster exact, and stay so; 0 computes them in INT8, too"
            warn_once(f"sdpa: {text}.", 3)
        return tokens < least

    def unreachable(self, reason: str) -> None:
        self.seen |= not torch.compiler.is_compiling()
        refuse(reason, self.policy.otherwise, depth=4)


def _has_compiled() -> bool:
    """Return whether torch.compile has compiled code in this process, which later runs without being seen."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
