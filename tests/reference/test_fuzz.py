"""Odd calls of every public function: a documented result, or an error that names an argument.

A case is a good call with arguments replaced. `bad` replacements must be refused, `odd` ones must work. A clean result
has the documented shape and dtype, and is finite where the docstrings say so. Every replacement is tried alone; then
up to two are drawn at random, with magnitudes at the edge of what is documented. SAGE_REF_FUZZ=2100 draws that many
cases on the reference, and a seventh of them in Triton's interpreter.
"""

import importlib.util
import math
import os
import random
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_ref import SLA, SLA2, QKNorm, sagebwd_attention, sparse_linear_attention
from sage_ref.quantization import fake_quantize, integer_matmul, quantize, quantized_matmul
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sla2 import BlockSettings, Relaxation, block_count, soft_top_k

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, of layouts that it is going to drop
CASES = int(os.environ.get("SAGE_REF_FUZZ", 150))
KINDS = 14  # of good calls
IN_THE_INTERPRETER = CASES // 7 if "SAGE_REF_FUZZ" in os.environ else 4
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
    like: tuple[str, ...]  # the results have the shapes and dtypes of these arguments; (): not tensors that we check
    names: set  # of arguments that an error may name
    is_bad: bool = False  # must be refused
    is_tame: bool = True  # must be finite
    has_tame_gradients: bool = True


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
    **dict.fromkeys(("sparsity", "skipped"), BAD_SHARES),
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
    "sparsity": [0, 0.5, 0.999, np.float32(0.5)], "skipped": [0.1], "temperature": [1e-6, 1e6, 1],
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
    made_of = {
        name: arguments.pop(name) for name in list(arguments) if name not in ("query", "key", "value", "protect")
    }
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


def call_integers(a, b):
    assert integer_matmul(a, b).dtype == torch.int32, "not int32"


def call_quantize(x, block_shape, rounding):
    quantized = quantize(x, block_shape, rounding)
    assert quantized.values.shape == x.shape, "another shape"
    return quantized.dequantize().to(x.dtype)


def call_fake_quantize(x, block_shape, rounding):
    return fake_quantize(x, block_shape, rounding).to(x.dtype)


def call_quantized_matmul(a, b):
    return quantized_matmul(a, b)


def good_call(rng, backend, kind=None):
    """(call, arguments, which of them are tensors that may be replaced, which argument the results are like)."""
    dtype = rng.choice(DTYPES) if backend == "reference" else torch.float16
    head_dim = rng.randint(1, 20) if backend == "reference" else rng.choice([32, 48])
    heads = rng.choice([1, 2, 4])
    qkv = attention_tensors(rng, dtype, heads, heads, head_dim)
    inputs, blocks = ("query", "key", "value"), {"block_q": 16, "block_kv": 8} if backend == "reference" else {}
    n_q, n_k = qkv["query"].shape[2], qkv["key"].shape[2]
    kind = rng.randrange(KINDS if backend == "reference" else 3) if kind is None else kind
    if kind == 0:
        options = {"is_causal": False, "scale": None, "enable_gqa": False, "smooth_k": True, "smooth_q": False}
        options |= {"unbiased": False, "attn_mask": None, "dropout_p": 0.0}
        return sagebwd_attention, qkv | options | {"granularity": "row", "backend": backend}, inputs, ("query",)
    if kind == 1:
        sizes = blocks or {"block_q": 128, "block_kv": 64}
        mask = torch.rand(block_count(n_q, sizes["block_q"]), block_count(n_k, sizes["block_kv"])) < 0.5
        options = {"block_mask": mask, "alpha": 0.5, "quantize": False, "scale": None, "backend": backend}
        return sparse_linear_attention, qkv | options | blocks, inputs, ("query",)
    module = {"head_dim": head_dim, "num_heads": heads, "sparsity": 0.6} | blocks
    if kind == 2:
        module |= {"quantize": rng.random() < 0.5, "relaxation": Relaxation(), "query_blocks": 1, "backend": backend}
        module["stage"] = rng.choice([1, 2]) if backend == "reference" else 2
        protect = {"protect": rng.choice([None, torch.arange(n_k) == 0])}
        return call_module(SLA2), qkv | module | protect, inputs, ("query",)
    if kind == 3:
        return call_module(SLA), qkv | module, inputs, ("query",)
    if kind == 4:
        del qkv["value"]
        return call_initialize_alpha, qkv | module | {"protect": None}, ("query", "key"), ()
    if kind == 5:
        del qkv["value"]
        return call_norm, qkv | {"head_dim": head_dim}, ("query", "key"), ("query", "key")
    if kind in (6, 7):
        x = {"x": qkv["query"], "block_shape": (4, None), "rounding": "nearest"}
        return call_quantize if kind == 6 else call_fake_quantize, x, ("x",), ("x",)
    if kind == 8:
        a = (draw(rng, torch.float32, 2, 1, 3, head_dim) * 127).to(torch.int8)
        return call_integers, {"a": a, "b": a.mT[:1]}, ("a", "b"), ()
    if kind == 9:
        a = quantize(qkv["query"])
        return call_quantized_matmul, {"a": a, "b": a.mT}, ("a", "b"), ()
    if kind == 10:
        return soft_top_k, {"x": qkv["query"], "count": 2, "temperature": 0.1}, ("x",), ("x",)
    settings = {
        11: (Relaxation, {"scores": "P_c", "temperature": 1.0, "straight_through": True}),
        12: (BlockSettings, blocks | {"scale": None, "feature_map": "relu", "quantize": False}),
        13: (SageBwdSettings, blocks | {"scale": None, "smooth_k": True, "is_causal": False, "granularity": "row",
                                        "ds_rounding": "nearest", "exact_matmuls": ("dP",), "output_dtype": None}),
    }[kind]  # fmt: skip
    return *settings, (), ()


def replaceable(arguments, tensors):
    return [name for name in arguments if name in tensors or name in BAD or name in EXTRA]


def replacements(name, call, arguments, tensors):
    """(bad, odd) values for one argument."""
    x = arguments[name]
    if name in EXTRA:
        return EXTRA[name](arguments)
    if name not in tensors:
        return BAD[name], ODD.get(name, [x])
    if call in (call_integers, call_quantized_matmul):
        bad = [None, 3, torch.ones(2, 3), torch.ones(3), [1]]
        if call is call_integers:
            bad += [x.to("meta"), x.to_sparse(), x[..., 0].flatten()]
            bad += [x[..., :-1, :], x.expand(3, *x.shape[1:])] if name == "b" else []
        return bad, [x]
    differing = [torch.cat([x, x])] + [torch.cat([x, x], 1), torch.cat([x, x], 2)] * (name == "value")
    differing += [x.to(dtype) for dtype in DTYPES if dtype != x.dtype]
    differing *= name in ("key", "value") and call is not call_norm  # from query, or from key
    shapes = {call_norm: [x.sum(), x.repeat(1, 1, 1, 2)], soft_top_k: [x.sum()]}
    shapes |= dict.fromkeys((call_quantize, call_fake_quantize), [x.sum(), x.flatten(), x[:, :, :0], x[..., :0]])
    return bad_tensors(x) + shapes.get(call, bad_shapes(x)) + differing, odd_tensors(x)


def block_masks(arguments):
    mask = arguments["block_mask"]
    bad = [None, True, mask.float(), mask.to("meta"), mask.to_sparse(), mask.tolist(), mask.repeat(3, 5), mask.int()]
    return bad, [mask[:1, :1], ~mask, torch.ones_like(mask), mask.as_subclass(Subclass), mask.any()]


def alphas(arguments):
    bad = [None, "x", math.nan, math.inf, -1, 2, 10**400, True, 1j, torch.tensor(1), torch.tensor(0.5, device="meta")]
    bad += [torch.tensor([0.5]).to_sparse(), torch.tensor([0.5]).to_mkldnn(), torch.ones(7, 7, 7)]
    half = torch.tensor(0.5)
    return bad, [0, 1, 0.3, half, half.double(), half.to(torch.bfloat16), half.as_subclass(Subclass)]


def protects(arguments):
    key = arguments["key"]
    length = key.shape[2] if isinstance(key, Tensor) and not key.is_nested and key.dim() == 4 else 1
    good = torch.arange(length) == 0
    bad = [True, [True], good.float(), good.to("meta"), good.to_sparse(), good[None], torch.ones(length + 1).bool()]
    return bad, [good, ~good, good.as_subclass(Subclass), None]


EXTRA = {"block_mask": block_masks, "alpha": alphas, "protect": protects}


def magnified(rng, arguments, tensors, backend):
    """Some tensors at the edge of what is documented; on the kernels c max|q| max|k| is."""
    large = LARGE if backend == "reference" else {torch.float16: 2e3}
    for name in tensors:
        x = arguments[name]
        if isinstance(x, Tensor) and x.is_floating_point() and rng.random() < 0.5:
            arguments[name] = x * rng.choice([large, SMALL])[x.dtype]


def drawn_case(seed, backend="reference"):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    call, arguments, tensors, like = good_call(rng, backend)
    names = {*arguments, "number"}
    is_large = rng.random() < 0.3 and call is not call_quantized_matmul
    if is_large:
        magnified(rng, arguments, tensors, backend)
    is_bad = False
    changed = {}
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        name, refuse = rng.choice(replaceable(arguments, tensors)), rng.random() < 0.6
        if name not in changed:
            bad, odd = replacements(name, call, arguments, tensors)
            changed[name], is_bad = rng.choice(bad if refuse else odd), is_bad or refuse
    arguments = arguments | changed
    poisoned = False
    may_be_poisoned = tensors and call not in (call_integers, call_quantized_matmul)
    if may_be_poisoned and not changed and rng.random() < 0.5:
        name = rng.choice(tensors)
        arguments[name] = arguments[name].clone()
        arguments[name].flatten()[0] = rng.choice([math.nan, math.inf, -math.inf])
        poisoned, is_bad = True, call is call_initialize_alpha
    # INT8 moves a score by more than exp bears if scores are huge; 16 bit can't hold every gradient.
    quantizes = arguments.get("quantize", False) is True
    fits = not quantizes and getattr(arguments.get((*tensors, None)[0]), "dtype", None) in DTYPES[2:]
    tame_gradients = not is_large or fits
    return Case(call, arguments, like, names, is_bad, not poisoned, tame_gradients and not poisoned)


def not_clean(case):
    """What is wrong with what a case gives, or None."""
    leaves = {}
    if not case.is_bad:
        for name in case.like and ("query", "key", "value", "x"):
            x = case.arguments.get(name)
            if isinstance(x, Tensor):
                leaves[name] = x.detach().requires_grad_()
    try:
        results = case.call(**(dict(case.arguments) | leaves))
    except (TypeError, ValueError) as error:
        found = ERROR.match(str(error))
        if found is None or found[1] not in case.names:
            return f"{type(error).__name__} that names no argument: {str(error)[:100]}"
        return None if len(str(error)) < 400 else "an error of more than 400 letters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    if case.is_bad:
        return "accepted"
    results = results if isinstance(results, tuple) else (results,)
    for name, result in zip(case.like, results, strict=False):
        x = case.arguments[name]
        if (result.shape, result.dtype, result.device) != (x.shape, x.dtype, x.device):
            return f"a result of {tuple(result.shape)} in {result.dtype}"
        if case.is_tame and not result.isfinite().all():
            return "a result that is not finite"
    if case.like and any(result.requires_grad for result in results):
        sum(result.sum() for result in results).backward()
    for name, x in leaves.items():
        if x.grad is not None and case.has_tame_gradients and not x.grad.isfinite().all():
            return f"a gradient of {name} that is not finite"
    return None


def unclean(cases, backend):
    found = []
    for seed in range(cases):
        case = drawn_case(seed, backend)
        problem = not_clean(case)
        if problem is not None:
            found.append(f"seed {seed}, {getattr(case.call, '__qualname__', case.call)}: {problem}")
    return found


# What an error may name where one argument is bad. A query that doesn't fit the others is as likely to be right.
BLAMED = {"query": {"query", "key", "value"}, "key": {"key", "value"}, "stage": {"number"}}


@pytest.mark.parametrize("kind", range(KINDS))
def test_every_bad_value_of_an_argument_is_refused_and_every_odd_one_works(kind):
    call, arguments, tensors, like = good_call(random.Random(kind), "reference", kind)
    problems = []
    for name in replaceable(arguments, tensors):
        bad, odd = replacements(name, call, arguments, tensors)
        for value, is_bad in [*((x, True) for x in bad), *((x, False) for x in odd)]:
            names = BLAMED.get(name, {name}) if is_bad else {*arguments}
            problem = not_clean(Case(call, arguments | {name: value}, like, names, is_bad))
            problems += [f"{name}: {problem}"] if problem else []
    assert problems == []


def test_odd_calls_on_the_reference():
    assert unclean(CASES, "reference") == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors on the CPU are for Triton's interpreter alone")
def test_odd_calls_in_tritons_interpreter():
    assert unclean(IN_THE_INTERPRETER, "triton") == []
