"""The public functions: what they accept, what they refuse and how they say so, what NaN does, which backend runs."""

import importlib.util
import math
import runpy
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sage_ref import SLA2, sagebwd_attention, sparse_linear_attention
from sage_ref import backend as ops
from sage_ref.checks import kind_of
from sage_ref.sagebwd import SageBwdFunction, SageBwdSettings
from sage_ref.sla2 import BlockSettings, SparseLinearFunction, block_count

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BLOCK = 128  # tokens that share a scale
MASK = torch.ones(1, 1).bool()


def reference(query, key, value, **options):
    return sagebwd_attention(query, key, value, backend="reference", **options)


def with_gradients(query, key, value, grad_output, **options):
    """O, dQ, dK, dV."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    output = reference(*leaves, **options)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


def sparse_linear(query, key, value, block_mask, alpha, **options):
    return sparse_linear_attention(
        query, key, value, block_mask, alpha, **({"block_q": 16, "block_kv": 8, "backend": "reference"} | options)
    )


def mask_and_alpha(query, key, block_q=16, block_kv=8):
    """Drawn, with one entry per head and block."""
    generator = torch.Generator().manual_seed(0)
    shape = (*query.shape[:2], block_count(query.shape[2], block_q), block_count(key.shape[2], block_kv))
    return torch.rand(shape, generator=generator) < 0.5, torch.rand(shape[:3], generator=generator)


# What it accepts


def test_every_option_reaches_the_computation(inputs):
    tensors = inputs(100, 100, 16)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    options = {"is_causal": True, "scale": 0.4, "smooth_k": False, "smooth_q": True, "granularity": "block"}
    output, _ = SageBwdFunction.apply(*leaves, SageBwdSettings(**options, p_rounding="ordered", smooth_v=True))
    expected = output, *torch.autograd.grad(output, leaves, tensors[3])
    for x, y in zip(with_gradients(*tensors, **options, unbiased=True), expected, strict=True):
        assert torch.equal(x, y)


def test_inputs_are_neither_changed_nor_needed_contiguous(inputs):
    tensors = inputs(70, 90, 16)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert not strided[0].is_contiguous()
    for options in ({"is_causal": True}, {"smooth_q": True}):
        for a, b in zip(*(with_gradients(*x, **options) for x in (tensors, strided)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert all(torch.equal(x, before) for x, before in zip(strided, inputs(70, 90, 16), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_casts_as_sdpa_does_and_not_inside(inputs, dtype):
    """Queries and keys in float32 (a norm's output) beside values in bfloat16 (a matmul's), backward inside or out."""
    q, k, v, do = inputs(33, 40, 16, dtype=dtype)
    v, (mask, alpha) = v.bfloat16(), mask_and_alpha(q, k)
    expected = with_gradients(q.bfloat16(), k.bfloat16(), v, do.bfloat16())
    expected_sparse = sparse_linear(q.bfloat16(), k.bfloat16(), v, mask, alpha)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert kind_of((v, v, v), ())
        assert not kind_of((q, k, v), ())  # a call that was checked outside is looked at again
        assert torch.equal(sparse_linear(q, k, v, mask, alpha), expected_sparse)
        output = reference(*leaves)
        inside = torch.autograd.grad(output, leaves, do.bfloat16(), retain_graph=True)
    outside = torch.autograd.grad(output, leaves, do.bfloat16())
    assert torch.equal(output, expected[0])
    for x, a, b, exact in zip((q, k, v), inside, outside, expected[1:], strict=True):
        assert a.dtype == x.dtype
        assert torch.equal(a, b)
        assert torch.equal(a, exact.to(x.dtype))


# What it refuses; test_fuzz.py has the rest


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options", "message"),
    [
        (4, 2, {}, r"expected 4 heads .*enable_gqa=True\), got 2"),
        (3, 2, {"enable_gqa": True}, "expected a number of heads that divides query's 3, got 2"),
    ],
)
def test_heads_are_as_many_or_divide_with_gqa(heads, kv_heads, options, message):
    q, kv = torch.ones(1, heads, 4, 8), torch.ones(1, kv_heads, 5, 8)
    with pytest.raises(ValueError, match=f"^key: {message}$"):
        reference(q, kv, kv, **options)


# What NaN and infinity do: three blocks of queries and of keys, the last ones partial; head 1 of 2 holds the bad value


@pytest.mark.parametrize(("smooth_k", "is_causal"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(("token", "bad"), [(140, math.nan), (299, -math.inf)])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_goes_where_the_docstring_says_and_nowhere_else(inputs, name, token, smooth_k, is_causal, bad):
    q, k, v, do = inputs(300, 300, 16, dtype=torch.float32)
    options = {"is_causal": is_causal, "smooth_k": smooth_k}
    clean = with_gradients(q, k, v, do, **options)
    {"query": q, "key": k, "value": v}[name][0, 1, token, 3] = bad
    block = token // BLOCK
    if name == "query":
        touched = slice(block * BLOCK, (block + 1) * BLOCK)
    elif name == "key" and smooth_k:
        touched = slice(0, None)
    else:
        touched = slice(block * BLOCK if is_causal else 0, None)
    output, *gradients = with_gradients(q, k, v, do, **options)
    expected = clean[0].clone()
    expected[0, 1, touched] = math.nan
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(output[:, 0], clean[0][:, 0])
    for i, (gradient, before) in enumerate(zip(gradients, clean[1:], strict=True)):
        assert torch.equal(gradient[:, 0], before[:, 0])
        dv_never_reads_v = name == "value" and i == 2
        assert gradient[:, 1].isnan().any() != dv_never_reads_v


# Which backend runs


CALLS = {
    "sagebwd": sagebwd_attention,
    "sparse_linear": partial(sparse_linear_attention, block_mask=MASK, alpha=0.5),
    "SLA2": lambda *qkv, **options: SLA2(8, 2, **options)(*qkv),
}


@pytest.mark.parametrize(
    ("call", "missing"), [*zip(CALLS.values(), ("triton", "sage_kernels", "triton"), strict=True)], ids=CALLS
)
def test_without_a_package_auto_says_once_that_the_reference_runs(inputs, monkeypatch, call, missing):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda found: None if found == missing else found)
        imported = runpy.run_path(ops.__file__)
    monkeypatch.setattr(ops, "MISSING_PACKAGE", imported["MISSING_PACKAGE"])
    ops._said.clear()
    q, k, v, _ = inputs(4, 4, 8)
    why = f"the package {missing} is not installed"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [call(q, k, v) for _ in range(2)]
    assert [str(w.message) for w in caught] == [f"sage_ref: backend='auto' uses the reference, because {why}."]
    assert caught[0].filename == (torch.nn.modules.module.__file__ if call is CALLS["SLA2"] else __file__)
    assert all(torch.equal(output, call(q, k, v, backend="reference")) for output in outputs)
    with pytest.raises(ValueError, match=f"^backend: expected 'triton' to be usable, but {why}$"):
        call(q, k, v, backend="triton")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_gpu_of_amd_is_refused_whose_capability_may_look_like_hoppers(monkeypatch, inputs):
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(ValueError, match="the kernels need an NVIDIA GPU, and this PyTorch is for AMD's"):
        sagebwd_attention(*inputs(4, 4, 32, dtype=torch.float16)[:3], backend="triton")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_auto_says_once_what_it_takes_and_has_no_graph_break(inputs):
    """In float64, which no kernel takes."""
    torch._dynamo.reset()
    ops._said.clear()
    compiled, tensors = torch.compile(sagebwd_attention, fullgraph=True, backend="eager"), inputs(4, 4, 8)[:3]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        outputs = [compiled(*tensors) for _ in range(3)]
    (said,) = [str(w.message) for w in caught if "sage_ref" in str(w.message)]
    assert said.startswith("sage_ref: backend='auto' uses the reference, because ")
    assert all(torch.equal(output, reference(*tensors)) for output in outputs)


@pytest.mark.no_gpu
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_two_threads_take_turns_in_tritons_interpreter(inputs):
    tensors = inputs(40, 40, 32, dtype=torch.float16)[:3]
    attention = partial(sagebwd_attention, *tensors, backend="triton")
    expected = attention()
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(attention) for _ in range(3)]
    assert all(torch.equal(x.result(), expected) for x in found)


# sparse_linear_attention


def test_every_option_of_sparse_linear_attention_reaches_the_computation(inputs):
    q, k, v, _ = inputs(40, 60, 16)
    mask, alpha = mask_and_alpha(q, k, 8, 16)
    settings = BlockSettings(8, 16, scale=0.4, quantize=True)
    expected, *_ = SparseLinearFunction.apply(q, k, v, mask, alpha, settings)
    options = {"block_q": 8, "block_kv": 16, "scale": 0.4, "quantize": True}
    assert torch.equal(sparse_linear(q, k, v, mask, alpha, **options), expected)


def test_masks_and_alphas_broadcast_and_their_gradients_are_summed(inputs):
    q, k, v, do = (torch.cat([x, x + 1]) for x in inputs(40, 60, 16))
    mask, alpha = mask_and_alpha(q, k)
    full = sparse_linear(q, k, v, mask[:1, :, :1].expand(2, 2, 3, 8), alpha[1:, :, :1].expand(2, 2, 3))
    assert torch.equal(sparse_linear(q, k, v, mask[:1, :, :1], alpha[1:, :, :1]), full)
    q_16, k_16, v_16 = (x.half() for x in (q, k, v))  # where 0.3 is not rounded to float16 on the way
    of_number, of_tensor = (sparse_linear(q_16, k_16, v_16, mask, x) for x in (0.3, torch.tensor(0.3)))
    assert torch.equal(of_number, of_tensor)
    leaf = alpha.double().requires_grad_()
    (each,) = torch.autograd.grad(sparse_linear(q, k, v, mask, leaf), leaf, do)
    shared = torch.full((2, 1), 0.4, dtype=torch.float64, requires_grad=True)
    (summed,) = torch.autograd.grad(sparse_linear(q, k, v, mask, shared), shared, do)
    torch.testing.assert_close(summed, each.sum((0, 2))[:, None], atol=1e-11, rtol=0)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_goes_where_the_docstring_of_sparse_linear_attention_says(inputs, name, quantize):
    """In a query to at most its block; in a key or value, selected or not, to every query of the head."""
    q, k, v, _ = inputs(40, 60, 16)
    mask, alpha = mask_and_alpha(q, k)
    clean = sparse_linear(q, k, v, mask, alpha, quantize=quantize)
    {"query": q, "key": k, "value": v}[name][0, 1, 17, 3] = math.nan
    output = sparse_linear(q, k, v, mask, alpha, quantize=quantize)
    assert torch.equal(output[:, 0], clean[:, 0])
    if name == "query":
        assert output[0, 1, 17].isnan().all()
        assert torch.equal(output[0, 1, 32:], clean[0, 1, 32:])
        torch.testing.assert_close(output[0, 1, :16], clean[0, 1, :16], atol=1e-12, rtol=0)
    else:
        assert output[0, 1].isnan().any(-1).all()
