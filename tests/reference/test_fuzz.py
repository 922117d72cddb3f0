"""Odd calls of every public function: a documented result, or an error that names an argument.

A good call gets one argument replaced. `bad` replacements must be refused, `odd` ones must work. A clean result has the
documented shape and dtype, and is finite where the docstrings say so.
"""

import itertools
import math
import re
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_ref import SLA, SLA2, QKNorm, sagebwd_attention, sdpa, sparse_linear_attention
from sage_ref.quantization import quantize
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sla2 import BlockSettings, Relaxation, soft_top_k

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, of layouts that it is going to drop
ERROR = re.compile(r"^(\w+): expected .+, (got|but) .+", re.DOTALL)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# What the docstrings promise: float16's own range (O within 1% of its end may round to infinity), 1e15 elsewhere.
LARGE = {torch.float16: 6e4, torch.bfloat16: 1e15, torch.float32: 1e15, torch.float64: 1e15}
SMALL = {torch.float16: 1e-7, torch.bfloat16: 1e-40, torch.float32: 1e-40, torch.float64: 1e-310}


class Subclass(Tensor):
    """A tensor of another class, which behaves like one."""


# Good calls


def quantized(x, block_shape, rounding):
    return quantize(x, block_shape, rounding).dequantize().to(x.dtype)


def normalised(query, key, head_dim):
    return QKNorm(head_dim)(query, key)


def by_module(kind, query, key, value, stage=None, **options):
    module = kind(**options)
    return (module if stage is None else module.stage(stage))(query, key, value)


def initialised(query, key, **options):
    SLA2(**options).initialize_alpha(query, key)


class Call(NamedTuple):
    function: object
    shapes: dict  # of the tensors
    options: dict
    results: tuple = ("query",)  # which tensors they are like; (): not tensors that we check

    def drawn(self, dtype):
        generator = torch.Generator().manual_seed(0)
        return {
            name: (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1).to(dtype)
            for name, shape in self.shapes.items()
        }


QK = {"query": (2, 2, 20, 12), "key": (2, 2, 33, 12)}
QKV = QK | {"value": (2, 2, 33, 12)}
X = {"x": (2, 2, 20, 12)}
BLOCKS = {"block_q": 16, "block_kv": 8}
MODULE = {"head_dim": 12, "num_heads": 2, "sparsity": 0.6, **BLOCKS}
OF_SLA2 = MODULE | {"quantize": True, "relaxation": Relaxation(), "query_blocks": 1, "backend": "reference", "stage": 2}
SWITCHES_OF_SAGEBWD = dict.fromkeys(("smooth_k", "smooth_q", "unbiased"), False)
SWITCHES = SWITCHES_OF_SAGEBWD | {"is_causal": False, "enable_gqa": False}
OF_SAGEBWD = {"scale": None, "attn_mask": None, "dropout_p": 0.0, "granularity": "row", "backend": "reference"}
SPARSE = {"block_mask": torch.ones(1, 1).bool(), "alpha": 0.5, "quantize": False, "scale": None, "backend": "reference"}
RELAXATION = {"scores": "P_c", "temperature": 1.0, "straight_through": True}
SETTINGS = {"ds_rounding": "nearest", "exact_matmuls": ("dP",), "output_dtype": None}
CALLS = {
    "sagebwd_attention": Call(sagebwd_attention, QKV, SWITCHES | OF_SAGEBWD),
    "sparse_linear_attention": Call(sparse_linear_attention, QKV, SPARSE | BLOCKS),
    "SLA2": Call(partial(by_module, SLA2), QKV, OF_SLA2),
    "SLA2, stage 1": Call(partial(by_module, SLA2), QKV, OF_SLA2 | {"stage": 1, "quantize": False}),
    "SLA": Call(partial(by_module, SLA), QKV, MODULE),
    "QKNorm": Call(normalised, QK, {"head_dim": 12}, ("query", "key")),
    "quantize": Call(quantized, X, {"block_shape": (4, None), "rounding": "nearest"}, ("x",)),
    "soft_top_k": Call(soft_top_k, X, {"count": 2, "temperature": 0.1}, ("x",)),
    "initialize_alpha": Call(initialised, QK, MODULE, ()),
    "Relaxation": Call(Relaxation, {}, RELAXATION, ()),
    "BlockSettings": Call(BlockSettings, {}, BLOCKS | {"scale": None, "feature_map": "relu", "quantize": False}, ()),
    "sdpa": Call(sdpa, {}, SWITCHES_OF_SAGEBWD | {"minimum_tokens": 0, "otherwise": "exact", "backend": "auto"}, ()),
    "SageBwdSettings": Call(SageBwdSettings, {}, BLOCKS | SETTINGS, ()),
}

# Replacements


def bad_tensors(x):
    """Never what a floating argument may be, whatever its shape."""
    return [
        None, "x", 3, [[1.0]], x.tolist(), x.detach().float().numpy(), x.sum(),
        x.to_sparse(), x.float().to_mkldnn(), torch.nested.nested_tensor([x[0].float()] * 2),
        torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), x.to("meta"), x.to(torch.complex64),
        x.to(torch.int8), x.to(torch.int64), x.to(torch.bool), x.to(torch.float8_e4m3fn),
    ]  # fmt: skip


def bad_shapes(x):
    """Fewer or more dimensions than four, or none of something, or another head size."""
    return [x[0], x[None], x[:0], x[:, :0], x[:, :, :0], x[..., :0], x[:, :, None], x.flatten(), x[..., :-1]]


def unlike_query(x):
    """A key or value of another dtype or batch size."""
    return [torch.cat([x, x]), *(x.to(dtype) for dtype in DTYPES if dtype != x.dtype)]


def odd_tensors(x):
    """As good as x."""
    flipped = torch.view_as_complex(torch.stack((x, x), -1)).conj().imag if x.dtype == torch.float32 else x
    return [
        x.as_subclass(Subclass), torch.nn.Parameter(x.detach().clone()), flipped, x.mT.contiguous().mT,
        x[:, :, :1].expand_as(x), torch.zeros_like(x), x.transpose(0, 1).contiguous().transpose(0, 1),
    ]  # fmt: skip


BAD_SWITCHES = [0, 1, None, "yes", 1.0, torch.tensor(True)]
BAD_CHOICES = ["", "cuda", None, 1, ["row"], torch.tensor([1, 2]), b"row", "x" * 200]
BAD_COUNTS = [0, -1, 1.5, "8", None, True, 10**400, 2**63, torch.tensor(3)]
MASK, HALF = SPARSE["block_mask"], torch.tensor(0.5)
BAD = {
    "scale": [10**400, -(10**5000), math.nan, math.inf, True, "0.1", [0.1], 1j, torch.tensor(0.1), 1e300],
    "attn_mask": [torch.ones(1, 1).bool(), "x", 0],
    "dropout_p": [0.1, 1, True, "x"],
    **dict.fromkeys((*SWITCHES, "quantize", "straight_through"), BAD_SWITCHES),
    "minimum_tokens": [-1, True, 2.0, "512"],
    **dict.fromkeys(
        ("otherwise", "backend", "granularity", "feature_map", "scores", "rounding", "ds_rounding"), BAD_CHOICES
    ),
    **dict.fromkeys((*BLOCKS, "head_dim", "num_heads", "query_blocks", "count"), BAD_COUNTS),
    "sparsity": [1, 97, -0.1, math.nan, "0.9", None, True, 10**400],
    "temperature": [0, -1, math.nan, math.inf, 10**400, 1e-300, True, "1", None],
    "relaxation": [None, "soft", 1, Relaxation],
    "stage": [0, 3, True, "1", torch.tensor([1, 2]), 1.5],
    "block_shape": [3, None, (1,), (1, 2, 3), (0, 1), (1, -1), (1.5, 2), ("1", None), (True, 1), (10**30, 1)],
    "output_dtype": ["float32", torch.int8, 32],
    "exact_matmuls": [None, "dP", ("P",), (1,), ["dP"], 3],
    "block_mask": [None, True, MASK.float(), MASK.to("meta"), MASK.to_sparse(), MASK.tolist(), MASK.repeat(7, 9)],
    "alpha": [None, "x", math.nan, -1, 2, 10**400, True, 1j, HALF.int(), HALF.to("meta"), torch.ones(7, 7, 7)],
}
ODD = {
    "scale": [0, 0.0, 1, -0.3, 1e-30, 5e-324, 10**20, np.float32(0.1), np.int64(1)],
    "is_causal": [True, np.True_], "smooth_k": [True, np.False_], "smooth_q": [True, np.True_], "unbiased": [np.True_],
    "quantize": [True], "granularity": ["block"], "block_q": [1, 3, 1000, 2**31 - 1, np.int64(16)],
    "block_kv": [1, 5, 2**31 - 1], "dropout_p": [0, np.float32(0)], "rounding": ["stochastic"],
    "sparsity": [0, 0.5, 0.999, np.float32(0.5)], "temperature": [1e-6, 1e6, 1], "count": [1, 100, np.int64(2)],
    "block_shape": [(None, 1), (1000, 3), [2, 2], (2**31 - 1, 1)],
    "block_mask": [~MASK, MASK.as_subclass(Subclass), MASK.any()],
    "alpha": [0, 1, 0.3, HALF, HALF.double(), HALF.to(torch.bfloat16), HALF.as_subclass(Subclass)],
}  # fmt: skip
# What an error may name where one argument is bad. A query that doesn't fit the others is as likely to be right.
BLAMED = {"query": {"query", "key", "value"}, "key": {"key", "value"}, "stage": {"number"}}


def refusal(call, arguments, name):
    """What is wrong with the answer to a call whose argument of this name is bad, or None."""
    try:
        call.function(**arguments)
    except (TypeError, ValueError) as error:
        found = ERROR.match(str(error))
        if found is None or found[1] not in BLAMED.get(name, {name}):
            return f"{type(error).__name__} that doesn't name it: {str(error)[:100]}"
        return None if len(str(error)) < 400 else "an error of more than 400 letters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "accepted"


def result(call, arguments, has_finite_gradients=True):
    """What is wrong with what a call gives, or None."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in call.shapes}
    try:
        found = call.function(**(arguments | leaves))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    found = found if isinstance(found, tuple) else (found,)
    for name, x in zip(call.results, found, strict=False):
        like = arguments[name]
        if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
            return f"a result of {tuple(x.shape)} in {x.dtype}"
        if not x.isfinite().all():
            return "a result that is not finite"
        if x.requires_grad:
            x.sum().backward(retain_graph=True)
    gradients = [x.grad for x in leaves.values() if x.grad is not None]
    if has_finite_gradients and not all(x.isfinite().all() for x in gradients):
        return "a gradient that is not finite"
    return None


@pytest.mark.parametrize("name_of_call", CALLS)
def test_every_bad_value_of_an_argument_is_refused_and_every_odd_one_works(name_of_call):
    call = CALLS[name_of_call]
    tensors = call.drawn(torch.float32)
    good, problems = tensors | call.options, []
    for name, x in good.items():
        bad, odd = BAD.get(name), ODD.get(name, [x])
        if name in tensors:
            bad = bad_tensors(x) + bad_shapes(x) * (call.shapes == QKV)
            bad += unlike_query(x) if name in ("key", "value") and call.function is not normalised else []
            odd = odd_tensors(x)
        problems += [(name, refusal(call, good | {name: value}, name)) for value in bad]
        problems += [(name, result(call, good | {name: value})) for value in odd]
    assert [problem for problem in problems if problem[1]] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.results])
def test_magnitudes_at_the_edge_of_what_is_documented_are_finite(name, dtype):
    call = CALLS[name]
    tensors = call.drawn(dtype)
    # INT8 moves a score by more than exp bears if scores are huge; 16 bit can't hold every gradient.
    fits = dtype in DTYPES[2:] and not call.options.get("quantize")
    for size, names in itertools.product((LARGE, SMALL), [*((name,) for name in tensors), tuple(tensors)]):
        scaled = {name: tensors[name] * size[dtype] for name in names}
        assert result(call, tensors | scaled | call.options, fits) is None, (names, size[dtype])
