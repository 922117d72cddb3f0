"""Odd calls of every public function: a documented result, or an error that names an argument.

A case is a good call with one argument replaced. `bad` replacements must be refused, `odd` ones must work. A clean
result has the documented shape and dtype, and is finite where the docstrings say so.
"""

import itertools
import math
import random
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_ref import SLA, SLA2, QKNorm, sagebwd_attention, sparse_linear_attention
from sage_ref.quantization import quantize
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sla2 import BlockSettings, Relaxation, soft_top_k

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, of layouts that it is going to drop
OF_TENSORS, KINDS = 8, 12  # of good calls
ERROR = re.compile(r"^(\w+): expected .+, (got|but) .+", re.DOTALL)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# What the docstrings promise: float16's own range (O within 1% of its end may round to infinity), 1e15 elsewhere.
LARGE = {torch.float16: 6e4, torch.bfloat16: 1e15, torch.float32: 1e15, torch.float64: 1e15}
SMALL = {torch.float16: 1e-7, torch.bfloat16: 1e-40, torch.float32: 1e-40, torch.float64: 1e-310}


class Subclass(Tensor):
    """A tensor of another class, which behaves like one."""


class Case(NamedTuple):
    call: object  # of keyword arguments
    arguments: dict
    tensors: tuple[str, ...] = ()  # arguments that may be replaced by other tensors
    like: tuple[str, ...] = ()  # the results have the shapes and dtypes of these; (): not tensors that we check


def bad_tensors(x):
    """Never what a floating argument may be, whatever its shape."""
    return [
        None, "x", 3, [[1.0]], x.tolist(), x.detach().numpy() if x.dtype != torch.bfloat16 else 1.5,
        x.to_sparse(), x.float().to_mkldnn(), torch.nested.nested_tensor([x[0].float()] * 2),
        torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), x.to("meta"), x.to(torch.complex64),
        x.to(torch.int8), x.to(torch.int64), x.to(torch.bool), x.to(torch.float8_e4m3fn),
    ]  # fmt: skip


def bad_shapes(x):
    """Fewer or more dimensions than four, or none of something, or another head size."""
    other = x[..., :-1] if x.shape[-1] > 1 else x.repeat(1, 1, 1, 2)
    return [x[0], x[None], x[:0], x[:, :0], x[:, :, :0], x[..., :0], x[:, :, None], x.flatten(), x.sum(), other]


def odd_tensors(x):
    """As good as x."""
    flipped = torch.view_as_complex(torch.stack((x, x), -1)).conj().imag if x.dtype == torch.float32 else x
    return [
        x.as_subclass(Subclass), torch.nn.Parameter(x.detach().clone()), flipped, x.mT.contiguous().mT,
        x[:, :, :1].expand_as(x), torch.zeros_like(x), x.transpose(0, 1).contiguous().transpose(0, 1),
    ]  # fmt: skip


BAD_SCALES = [
    10**400, -(10**5000), math.nan, math.inf, -math.inf, True, "0.1", [0.1], 1j, torch.tensor(0.1), 1e300, 10**40,
]  # fmt: skip
BAD_SWITCHES = [0, 1, None, "yes", 1.0, torch.tensor(True)]
BAD_CHOICES = ["", "cuda", None, 1, ["row"], torch.tensor([1, 2]), b"row", "x" * 200]
BAD_COUNTS = [0, -1, 1.5, "8", None, True, 10**400, 2**63, torch.tensor(3)]
BAD_SHARES = [1, 97, -0.1, math.nan, "0.9", None, True, 10**400]
BAD = {
    "scale": BAD_SCALES,
    "attn_mask": [torch.ones(1, 1).bool(), "x", 0],
    "dropout_p": [0.1, 1, True, "x"],
    **dict.fromkeys(("is_causal", "enable_gqa", "smooth_k", "smooth_q", "unbiased"), BAD_SWITCHES),
    **dict.fromkeys(("quantize", "straight_through"), BAD_SWITCHES),
    **dict.fromkeys(("backend", "granularity", "feature_map", "scores", "rounding", "ds_rounding"), BAD_CHOICES),
    **dict.fromkeys(("block_q", "block_kv", "head_dim", "num_heads", "query_blocks", "count"), BAD_COUNTS),
    "sparsity": BAD_SHARES,
    "temperature": [0, -1, math.nan, math.inf, 10**400, 1e-300, True, "1", None],
    "relaxation": [None, "soft", 1, Relaxation],
    "stage": [0, 3, True, None, "1", torch.tensor([1, 2]), 1.5],
    "block_shape": [3, None, (1,), (1, 2, 3), (0, 1), (1, -1), (1.5, 2), ("1", None), (True, 1), (10**30, 1)],
    "output_dtype": ["float32", torch.int8, 32],
    "exact_matmuls": [None, "dP", ("P",), (1,), ["dP"], 3],
}
ODD = {
    "scale": [0, 0.0, 1, -0.3, 1e-30, 5e-324, 10**20, np.float32(0.1), np.int64(1)],
    "is_causal": [True, np.True_], "smooth_k": [False, np.False_], "smooth_q": [True, np.True_], "unbiased": [np.True_],
    "quantize": [True], "granularity": ["block"], "block_q": [1, 3, 1000, 2**31 - 1, np.int64(16)],
    "block_kv": [1, 5, 2**31 - 1], "attn_mask": [None], "dropout_p": [0, np.float32(0)],
    "sparsity": [0, 0.5, 0.999, np.float32(0.5)], "temperature": [1e-6, 1e6, 1],
    "count": [1, 100, np.int64(2)],
    "rounding": ["stochastic"], "block_shape": [(None, 1), (1000, 3), [2, 2], (2**31 - 1, 1)],
}  # fmt: skip


def draw(rng, dtype, *shape):
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1).to(dtype)


def attention_tensors(rng, dtype, heads, kv_heads, head_dim):
    batch, n_q, n_k = rng.randint(1, 2), rng.randint(1, 40), rng.randint(1, 40)
    query = draw(rng, dtype, batch, heads, n_q, head_dim)
    return {"query": query} | {name: draw(rng, dtype, batch, kv_heads, n_k, head_dim) for name in ("key", "value")}


def build(kind, arguments):
    """A module from the arguments that make it, and what is left for its call."""
    made_of = {name: arguments.pop(name) for name in list(arguments) if name not in ("query", "key", "value")}
    stage = made_of.pop("stage", 2)
    module = kind(**made_of)
    return module.stage(stage) if kind is SLA2 else module


def call_module(kind):
    def call(**arguments):
        return build(kind, arguments)(**arguments)

    return call


def call_initialize_alpha(**arguments):
    module = build(SLA2, arguments)
    module.initialize_alpha(**arguments)
    alpha = module.alpha_logit
    assert alpha.isfinite().all(), "alpha isn't finite"


def call_norm(head_dim, query, key):
    return QKNorm(head_dim)(query, key)


def call_quantize(x, block_shape, rounding):
    quantized = quantize(x, block_shape, rounding)
    assert quantized.values.shape == x.shape, "another shape"
    return quantized.dequantize().to(x.dtype)


def good_call(kind, dtype):
    rng = random.Random(kind)
    head_dim, heads = rng.randint(1, 20), rng.choice([1, 2, 4])
    qkv = attention_tensors(rng, dtype, heads, heads, head_dim)
    inputs, blocks = ("query", "key", "value"), {"block_q": 16, "block_kv": 8}
    module = {"head_dim": head_dim, "num_heads": heads, "sparsity": 0.6} | blocks
    without_value = {name: qkv[name] for name in ("query", "key")}
    if kind == 0:
        options = {"is_causal": False, "scale": None, "enable_gqa": False, "smooth_k": True, "smooth_q": False}
        options |= {"unbiased": False, "attn_mask": None, "dropout_p": 0.0, "granularity": "row"}
        return Case(sagebwd_attention, qkv | options | {"backend": "reference"}, inputs, ("query",))
    if kind == 1:
        options = {
            "block_mask": torch.ones(1, 1).bool(),
            "alpha": 0.5,
            "quantize": False,
            "scale": None,
            "backend": "reference",
        }
        return Case(sparse_linear_attention, qkv | options | blocks, inputs, ("query",))
    if kind in (2, 3):
        module |= {"quantize": kind == 2, "relaxation": Relaxation(), "query_blocks": 1, "backend": "reference"}
        return Case(call_module(SLA2), qkv | module | {"stage": kind - 1}, inputs, ("query",))
    if kind == 4:
        return Case(call_module(SLA), qkv | module, inputs, ("query",))
    if kind == 5:
        return Case(call_norm, without_value | {"head_dim": head_dim}, ("query", "key"), ("query", "key"))
    if kind == 6:
        x = {"x": qkv["query"], "block_shape": (4, None), "rounding": "nearest"}
        return Case(call_quantize, x, ("x",), ("x",))
    if kind == 7:
        return Case(soft_top_k, {"x": qkv["query"], "count": 2, "temperature": 0.1}, ("x",), ("x",))
    if kind == OF_TENSORS:
        return Case(call_initialize_alpha, without_value | module, ("query", "key"))
    if kind == 9:
        return Case(Relaxation, {"scores": "P_c", "temperature": 1.0, "straight_through": True})
    if kind == 10:
        return Case(BlockSettings, blocks | {"scale": None, "feature_map": "relu", "quantize": False})
    return Case(SageBwdSettings, blocks | {"ds_rounding": "nearest", "exact_matmuls": ("dP",), "output_dtype": None})


def replacements(name, case):
    """(bad, odd) values for one argument."""
    call, x = case.call, case.arguments[name]
    if name in EXTRA:
        return EXTRA[name](x)
    if name not in case.tensors:
        return BAD[name], ODD.get(name, [x])
    differing = [torch.cat([x, x])] + [torch.cat([x, x], 1), torch.cat([x, x], 2)] * (name == "value")
    differing += [x.to(dtype) for dtype in DTYPES if dtype != x.dtype]
    differing *= name in ("key", "value") and call is not call_norm  # from query, or from key
    shapes = {call_norm: [x.sum(), x.repeat(1, 1, 1, 2)], soft_top_k: [x.sum()]}
    shapes[call_quantize] = [x.sum(), x.flatten(), x[:, :, :0], x[..., :0]]
    return bad_tensors(x) + shapes.get(call, bad_shapes(x)) + differing, odd_tensors(x)


def block_masks(mask):
    bad = [None, True, mask.float(), mask.to("meta"), mask.to_sparse(), mask.tolist(), mask.repeat(7, 9), mask.int()]
    return bad, [mask[:1, :1], ~mask, torch.ones_like(mask), mask.as_subclass(Subclass), mask.any()]


def alphas(_):
    bad = [None, "x", math.nan, math.inf, -1, 2, 10**400, True, 1j, torch.tensor(1), torch.tensor(0.5, device="meta")]
    bad += [torch.tensor([0.5]).to_sparse(), torch.tensor([0.5]).to_mkldnn(), torch.ones(7, 7, 7)]
    half = torch.tensor(0.5)
    return bad, [0, 1, 0.3, half, half.double(), half.to(torch.bfloat16), half.as_subclass(Subclass)]


EXTRA = {"block_mask": block_masks, "alpha": alphas}


# What an error may name where one argument is bad. A query that doesn't fit the others is as likely to be right.
BLAMED = {"query": {"query", "key", "value"}, "key": {"key", "value"}, "stage": {"number"}}


def refusal_of(case, name):
    """What is wrong with the answer to a case whose argument of this name is bad, or None."""
    try:
        case.call(**case.arguments)
    except (TypeError, ValueError) as error:
        found = ERROR.match(str(error))
        if found is None or found[1] not in BLAMED.get(name, {name}):
            return f"{type(error).__name__} that doesn't name it: {str(error)[:100]}"
        return None if len(str(error)) < 400 else "an error of more than 400 letters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "accepted"


def result_of(case, has_finite_gradients=True):
    """What is wrong with what a case gives, or None."""
    tensors = {name: case.arguments[name] for name in case.tensors}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()} if case.like else tensors
    try:
        results = case.call(**(case.arguments | leaves))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    if not case.like:
        return None
    results = results if isinstance(results, tuple) else (results,)
    for name, result in zip(case.like, results, strict=True):
        x = tensors[name]
        if (result.shape, result.dtype, result.device) != (x.shape, x.dtype, x.device):
            return f"a result of {tuple(result.shape)} in {result.dtype}"
        if not result.isfinite().all():
            return "a result that is not finite"
    if any(result.requires_grad for result in results):
        sum(result.sum() for result in results).backward()
    for name, x in leaves.items():
        if x.grad is not None and has_finite_gradients and not x.grad.isfinite().all():
            return f"a gradient of {name} that is not finite"
    return None


@pytest.mark.parametrize("kind", range(KINDS))
def test_every_bad_value_of_an_argument_is_refused_and_every_odd_one_works(kind):
    case = good_call(kind, DTYPES[(kind + 2) % 4])
    problems = []
    for name in case.arguments:
        bad, odd = replacements(name, case)
        for value in bad:
            problems.append((name, refusal_of(case._replace(arguments=case.arguments | {name: value}), name)))
        for value in odd:
            problems.append((name, result_of(case._replace(arguments=case.arguments | {name: value}))))
    assert [problem for problem in problems if problem[1]] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", range(OF_TENSORS))
def test_magnitudes_at_the_edge_of_what_is_documented_are_finite(kind, dtype):
    case = good_call(kind, dtype)
    # INT8 moves a score by more than exp bears if scores are huge; 16 bit can't hold every gradient.
    fits = dtype in DTYPES[2:] and not case.arguments.get("quantize")
    for size, names in itertools.product((LARGE, SMALL), [*((name,) for name in case.tensors), case.tensors]):
        scaled = {name: case.arguments[name] * size[dtype] for name in names}
        problem = result_of(case._replace(arguments=case.arguments | scaled), fits)
        assert problem is None, (names, size[dtype], problem)
