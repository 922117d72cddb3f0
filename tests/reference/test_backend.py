"""The public functions: what they accept, what they refuse and how they say so, what NaN does, which backend runs."""

import importlib.util
import inspect
import math
import re
import runpy
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sage_ref import backend as ops
from sage_ref import sagebwd_attention, sparse_linear_attention
from sage_ref.attention import attention_forward
from sage_ref.sagebwd import SageBwdFunction, SageBwdSettings
from sage_ref.sla2 import BlockSettings, SparseLinearFunction, block_count

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = st.sampled_from(["query", "key", "value"])
BLOCK = 128  # tokens that share a scale


def reference(query, key, value, **options):
    return sagebwd_attention(query, key, value, backend="reference", **options)


def with_gradients(query, key, value, grad_output, **options):
    """O, dQ, dK, dV."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    output = reference(*leaves, **options)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


def test_signature():
    assert str(inspect.signature(sagebwd_attention)).replace("torch.Tensor", "Tensor") == (
        "(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None, "
        "enable_gqa: bool = False, smooth_k: bool = True, smooth_q: bool = False, granularity: str = 'row', "
        "backend: str = 'auto') -> Tensor"
    )


# What it accepts


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (3, 3), (64, 1), (1, 64), (113, 203), (203, 113)])
def test_any_length_gives_finite_results_close_to_exact_attention(inputs, n_q, n_k, smooth_q, is_causal):
    *qkv, do = inputs(n_q, n_k, 32)
    ours = with_gradients(*qkv, do, is_causal=is_causal, smooth_q=smooth_q)
    leaves = [x.requires_grad_() for x in qkv]
    output = attention_forward(*leaves, is_causal=is_causal).output
    exact = (output.detach(), *torch.autograd.grad(output, leaves, do))
    for x, y in zip(ours, exact, strict=True):
        assert x.isfinite().all()
        # A query that sees one key has P = 1 and dS = 0: where all do, dQ and dK are rounding errors of dO's size.
        size = do.norm() if n_k == 1 or (n_q == 1 and is_causal) else y.norm()
        assert (x - y).norm() < 0.08 * size


@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    n_q=st.integers(1, 150),
    n_k=st.integers(1, 150),
    head_dim=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    is_causal=st.booleans(),
    smooth=st.tuples(st.booleans(), st.booleans()),
    scale=st.none() | st.floats(-0.2, 0.2) | st.just(0),
)
def test_any_valid_call_is_close_to_exact_attention(batch, heads, n_q, n_k, head_dim, dtype, is_causal, smooth, scale):
    generator = torch.Generator().manual_seed(n_q * n_k)
    shapes = ((batch, heads[0], n_q, head_dim), *[(batch, heads[1], n_k, head_dim)] * 2)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    output = reference(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True, smooth_k=smooth[0], smooth_q=smooth[1]
    )
    assert output.shape == q.shape
    assert output.dtype == dtype
    shared = (x.double().repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    exact = attention_forward(q.double(), *shared, is_causal=is_causal, scale=scale).output
    assert (output - exact).abs().max() < 0.05 * v.abs().max()
    output.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape
        assert x.grad.dtype == dtype
        assert x.grad.isfinite().all()


def test_every_option_reaches_the_computation(inputs):
    tensors = inputs(100, 100, 16)
    options = {"is_causal": True, "scale": 0.4, "smooth_k": False, "smooth_q": True, "granularity": "block"}
    results = [with_gradients(*tensors, **dict([option]))[1] for option in (("smooth_k", True), *options.items())]
    for i, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:i])
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    output = SageBwdFunction.apply(*leaves, SageBwdSettings(**options))
    expected = output, *torch.autograd.grad(output, leaves, tensors[3])
    for x, y in zip(with_gradients(*tensors, **options), expected, strict=True):
        assert torch.equal(x, y)


def test_inputs_are_neither_changed_nor_needed_contiguous(inputs):
    tensors = inputs(70, 90, 16)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    kept = [x.clone() for x in strided]
    assert not strided[0].is_contiguous()
    for a, b in zip(with_gradients(*tensors, is_causal=True), with_gradients(*strided, is_causal=True), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    reference(*strided[:3], smooth_q=True)
    for x, before in zip(strided, kept, strict=True):
        assert torch.equal(x, before)


def test_no_grad_records_nothing(inputs):
    q, k, v, _ = (x.requires_grad_() for x in inputs(4, 4, 8))
    with torch.no_grad():
        output = reference(q, k, v)
    assert not output.requires_grad
    assert torch.equal(output, reference(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_casts_as_sdpa_does_and_not_inside(inputs, dtype):
    """Queries and keys in float32 (a norm's output) beside values in bfloat16 (a matmul's), backward inside or out."""
    q, k, v, do = inputs(33, 40, 16, dtype=dtype)
    v = v.bfloat16()
    expected = with_gradients(q.bfloat16(), k.bfloat16(), v, do.bfloat16())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        output = reference(*leaves)
        inside = torch.autograd.grad(output, leaves, do.bfloat16(), retain_graph=True)
    outside = torch.autograd.grad(output, leaves, do.bfloat16())
    assert torch.equal(output, expected[0])
    for x, a, b, exact in zip((q, k, v), inside, outside, expected[1:], strict=True):
        assert a.dtype == x.dtype
        assert torch.equal(a, b)
        assert torch.equal(a, exact.to(x.dtype))


def test_autocast_leaves_float64_alone(inputs):
    q, k, v, _ = inputs(8, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reference(q, k, v), reference(q.clone(), k, v))
        assert reference(q, k, v).dtype == torch.float64


# What it refuses


def wrong_type(call, draw):
    name = draw(NAMES)
    call[name] = draw(st.sampled_from([None, 1.5, [[1.0]], "q", call[name].tolist()]))
    return TypeError, f"{name}: expected a torch.Tensor, got {type(call[name]).__name__}"


def wrong_dtype(call, draw):
    name = draw(NAMES)
    call[name] = call[name].to(draw(st.sampled_from([torch.int8, torch.int64, torch.bool, torch.complex64])))
    return TypeError, f"{name}: expected dtype float16, bfloat16, float32 or float64, got {call[name].dtype}"


def mixed_dtypes(call, draw):
    name = draw(st.sampled_from(["key", "value"]))
    call[name] = call[name].to(draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float64])))
    return TypeError, f"{name}: expected the dtype of query, torch.float32, got {call[name].dtype}"


def wrong_rank(call, draw):
    name = draw(NAMES)
    call[name] = draw(st.sampled_from([call[name][0], call[name][None], call[name].flatten(), call[name].sum()]))
    return ValueError, f"{name}: expected 4 dimensions (B, H, N, D), got shape {tuple(call[name].shape)}"


def zero_size(call, draw):
    name, axis = draw(NAMES), draw(st.integers(0, 3))
    call[name] = call[name].narrow(axis, 0, 0)
    return ValueError, f"{name}: expected no dimension of size zero, got shape {tuple(call[name].shape)}"


def meta_device(call, draw):
    name = draw(NAMES)
    call[name] = call[name].to("meta")
    return ValueError, f"{name}: expected a device that holds data, got meta"


def other_size(call, draw, axis):
    """The key or value and one more on an axis that query has too."""
    name = draw(st.sampled_from(["key", "value"]))
    expected = call["query"].shape[axis]
    call[name] = call[name].repeat_interleave(draw(st.integers(2, 3)), axis)
    return name, expected, call[name].shape[axis]


def other_batch(call, draw):
    name, expected, got = other_size(call, draw, 0)
    return ValueError, f"{name}: expected the batch size of query, {expected}, got {got}"


def other_head_dim(call, draw):
    name, expected, got = other_size(call, draw, 3)
    return ValueError, f"{name}: expected the head size of query, {expected}, got {got}"


def other_length_of_value(call, draw):
    call["value"] = call["value"].repeat_interleave(2, 2)
    return ValueError, f"value: expected the shape of key, {tuple(call['key'].shape)}, got {tuple(call['value'].shape)}"


def other_heads_of_value(call, draw):
    call["value"] = call["value"].repeat_interleave(2, 1)
    return ValueError, f"value: expected the shape of key, {tuple(call['key'].shape)}, got {tuple(call['value'].shape)}"


def other_heads_without_gqa(call, draw):
    call["query"] = call["query"].repeat_interleave(draw(st.integers(2, 3)), 1)
    heads, kv_heads = call["query"].shape[1], call["key"].shape[1]
    return ValueError, f"key: expected {heads} heads as query has (or enable_gqa=True), got {kv_heads}"


def heads_that_do_not_divide(call, draw):
    kv_heads, heads = draw(st.sampled_from([(2, 3), (3, 2), (4, 6), (2, 1)]))
    for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
        call[name] = call[name][:, :1].expand(-1, count, -1, -1)
    call["enable_gqa"] = True
    return ValueError, f"key: expected a number of heads that divides query's {heads}, got {kv_heads}"


def not_a_bool(call, draw):
    name = draw(st.sampled_from(["is_causal", "enable_gqa", "smooth_k", "smooth_q"]))
    call[name] = draw(st.sampled_from([0, 1, None, "yes", 1.0, torch.tensor(True)]))
    return TypeError, f"{name}: expected a bool, got {type(call[name]).__name__}"


def scale_of_no_number(call, draw):
    call["scale"] = draw(st.sampled_from(["0.1", True, 1j, [0.1], torch.tensor(0.1)]))
    return TypeError, f"scale: expected a float or None, got {type(call['scale']).__name__}"


def scale_not_finite(call, draw):
    call["scale"] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return ValueError, f"scale: expected a finite number, got {call['scale']}"


def unknown_granularity(call, draw):
    call["granularity"] = draw(st.sampled_from(["tile", "Row", "", None, 1, ["row"]]))
    return ValueError, f"granularity: expected one of ('block', 'row'), got {call['granularity']!r}"


def unknown_backend(call, draw):
    call["backend"] = draw(st.sampled_from(["cuda", "Triton", "", None, 1, ["reference"]]))
    return ValueError, f"backend: expected one of ('auto', 'reference', 'triton'), got {call['backend']!r}"


@pytest.mark.parametrize(
    "break_it",
    [
        wrong_type, wrong_dtype, mixed_dtypes, wrong_rank, zero_size, meta_device, other_batch, other_head_dim,
        other_length_of_value, other_heads_of_value, other_heads_without_gqa, heads_that_do_not_divide, not_a_bool,
        scale_of_no_number, scale_not_finite, unknown_granularity, unknown_backend,
    ],
)  # fmt: skip
@given(data=st.data(), shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 6)] * 3))
def test_a_bad_argument_is_named_with_what_was_expected_and_what_came(break_it, data, shape):
    batch, heads, n_q, n_k, head_dim = shape
    call = {"query": torch.ones(batch, heads, n_q, head_dim), "backend": "reference"}
    call |= {name: torch.ones(batch, heads, n_k, head_dim) for name in ("key", "value")}
    kind, message = break_it(call, data.draw)
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        sagebwd_attention(**call)


def test_unknown_and_positional_options_are_refused():
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(TypeError, match="dropout_p"):
        sagebwd_attention(x, x, x, dropout_p=0.1)
    with pytest.raises(TypeError, match="positional"):
        sagebwd_attention(x, x, x, True)


# What NaN and infinity do: three blocks of queries and of keys, the last ones partial; head 1 of 2 holds the bad value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("token", [0, 140, 299])
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


def test_nan_in_a_shared_key_stays_with_the_queries_of_its_group(inputs):
    q, k, v, _ = inputs(20, 20, 16, heads=4, kv_heads=2)
    clean = reference(q, k, v, enable_gqa=True)
    k[0, 1, 3] = math.nan
    output = reference(q, k, v, enable_gqa=True)
    assert torch.equal(output[:, :2], clean[:, :2])
    assert output[:, 2:].isnan().all()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_heads_and_batches_never_notice_each_other(inputs, name):
    q, k, v, do = (torch.cat([x, x + 1]) for x in inputs(70, 80, 16))
    before = with_gradients(q, k, v, do)
    {"query": q, "key": k, "value": v}[name][1, 0] *= 7
    for x, y in zip(with_gradients(q, k, v, do), before, strict=True):
        assert torch.equal(x[0], y[0])
        assert torch.equal(x[1, 1], y[1, 1])
    assert not torch.equal(with_gradients(q, k, v, do)[1][1, 0], before[1][1, 0])


# Which backend runs


@pytest.fixture
def fresh_warning():
    ops._warn_once.cache_clear()
    yield
    ops._warn_once.cache_clear()


@pytest.fixture(params=["triton", "sage_kernels"])
def missing(request, monkeypatch):
    """A package the Triton backend needs, made to look absent, as if sage_ref were imported without it."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == request.param else name)
        missing = runpy.run_path(ops.__file__)["MISSING_PACKAGE"]
    monkeypatch.setattr(ops, "MISSING_PACKAGE", missing)
    return request.param


@pytest.mark.parametrize(
    "call",
    [sagebwd_attention, lambda *qkv, **options: sparse_linear_attention(*qkv, torch.ones(1, 1).bool(), 0.5, **options)],
    ids=["sagebwd", "sparse_linear"],
)
def test_without_a_package_auto_warns_once_and_triton_is_an_error(inputs, call, missing, fresh_warning):
    q, k, v, _ = inputs(4, 4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [call(q, k, v) for _ in range(3)]
    assert [str(w.message) for w in caught] == [
        f"sage_ref: backend='auto' uses the reference, because the package {missing} is not installed."
    ]
    assert caught[0].filename == __file__  # it points at the caller
    assert all(torch.equal(output, call(q, k, v, backend="reference")) for output in outputs)
    message = f"backend: expected 'triton' to be usable, but the package {missing} is not installed"
    with pytest.raises(ValueError, match=message):
        call(q, k, v, backend="triton")


@pytest.fixture
def kernels(monkeypatch):
    """Stands in for the package of Triton kernels: records its calls, and refuses those that `refusal` names."""
    package = types.ModuleType("sage_kernels.sagebwd.ops")
    package.calls, package.refusal = [], lambda query, smooth_q: None
    package.obstacle = lambda query, smooth_q: package.refusal(query, smooth_q)
    package.sagebwd_attention = lambda *tensors, **options: package.calls.append((tensors, options)) or tensors[0]
    monkeypatch.setitem(sys.modules, "sage_kernels", types.ModuleType("sage_kernels"))
    monkeypatch.setitem(sys.modules, "sage_kernels.sagebwd.ops", package)
    monkeypatch.setattr(ops, "MISSING_PACKAGE", None)
    return package


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_triton_runs_where_it_can_with_every_option(inputs, kernels, backend):
    qkv = inputs(4, 4, 16)[:3]
    assert sagebwd_attention(*qkv, backend=backend) is qkv[0]
    options = {"is_causal": True, "scale": 0.3, "smooth_k": False, "granularity": "block"}
    sagebwd_attention(*qkv, backend=backend, **options)
    (tensors, defaults), (_, passed_on) = kernels.calls
    assert all(x is y for x, y in zip(tensors, qkv, strict=True))
    assert defaults == {"is_causal": False, "scale": 1 / 4, "smooth_k": True, "granularity": "row"}
    assert passed_on == options


def test_reference_never_touches_triton(inputs, kernels):
    reference(*inputs(4, 4, 8)[:3])
    assert not kernels.calls


def test_what_the_kernels_refuse_is_said_and_done_by_the_reference(inputs, kernels, fresh_warning):
    q, k, v, _ = inputs(4, 4, 8)
    kernels.refusal = lambda query, smooth_q: f"no kernel runs on {query.device}" if smooth_q else None
    with pytest.warns(UserWarning, match="because no kernel runs on cpu"):
        assert torch.equal(sagebwd_attention(q, k, v, smooth_q=True), reference(q, k, v, smooth_q=True))
    with pytest.raises(ValueError, match="backend: expected 'triton' to be usable, but no kernel runs on cpu"):
        sagebwd_attention(q, k, v, smooth_q=True, backend="triton")
    assert not kernels.calls


# sparse_linear_attention


def sparse_linear(query, key, value, block_mask, alpha, **options):
    return sparse_linear_attention(
        query, key, value, block_mask, alpha, **({"block_q": 16, "block_kv": 8, "backend": "reference"} | options)
    )


def mask_and_alpha(query, key, block_q=16, block_kv=8):
    """Drawn, with one entry per head and block."""
    generator = torch.Generator().manual_seed(0)
    shape = (*query.shape[:2], block_count(query.shape[2], block_q), block_count(key.shape[2], block_kv))
    return torch.rand(shape, generator=generator) < 0.5, torch.rand(shape[:3], generator=generator)


def test_signature_of_sparse_linear_attention():
    assert str(inspect.signature(sparse_linear_attention)).replace("torch.Tensor", "Tensor") == (
        "(query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, alpha: Tensor | float, *, "
        "quantize: bool = False, scale: float | None = None, block_q: int = 128, block_kv: int = 64, "
        "backend: str = 'auto') -> Tensor"
    )


@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    n_q=st.integers(1, 90),
    n_k=st.integers(1, 90),
    head_dim=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    scale=st.none() | st.floats(-0.2, 0.2) | st.just(0),
    blocks=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    quantize=st.booleans(),
)
def test_any_valid_call_averages_values(batch, heads, n_q, n_k, head_dim, dtype, scale, blocks, quantize):
    """O is alpha times one average of values plus 1 - alpha times another: with all values 1 it is alpha where a block
    is selected, plus 1 - alpha where one is not. INT8 rounds P by up to 1/254 of the largest."""
    generator = torch.Generator().manual_seed(n_q * n_k)
    shapes = ((batch, heads[0], n_q, head_dim), (batch, heads[1], n_k, head_dim))
    q, k = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    v = torch.ones_like(k).requires_grad_()
    mask, alpha = mask_and_alpha(q, k, *blocks)
    alpha.requires_grad_()
    options = {"scale": scale, "block_q": blocks[0], "block_kv": blocks[1], "quantize": quantize}
    output = sparse_linear(q, k, v, mask, alpha, **options)
    assert output.shape == q.shape
    assert output.dtype == dtype
    expected = alpha * mask.any(-1) + (1 - alpha) * ~mask.all(-1)
    expected = expected.repeat_interleave(blocks[0], -1)[..., :n_q, None].expand_as(output)
    atol = 0.02 if quantize else 0.01 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(output.double(), expected.double(), atol=atol, rtol=0)
    output.sum().backward()
    for x in (q, k, v, alpha):
        assert x.grad.shape == x.shape
        assert x.grad.dtype == x.dtype
        assert x.grad.isfinite().all()


def test_every_option_of_sparse_linear_attention_reaches_the_computation(inputs):
    q, k, v, _ = inputs(40, 60, 16)
    mask = torch.tensor([True, False, True, True, False, False, True, False]).expand(1, 2, 3, 8)
    alpha = torch.tensor([0.3, 0.6, 0.8]).expand(1, 2, 3)
    results = [sparse_linear(q, k, v, mask, alpha, **options) for options in ({}, {"scale": 0.4}, {"quantize": True})]
    results += [
        sparse_linear(q, k, v, mask, 0.5),
        sparse_linear(q, k, v, ~mask, alpha),
        sparse_linear(q, k, v, mask[:, :, :1], alpha[..., :1], block_q=64),
        sparse_linear(q, k, v, mask[..., :1], alpha, block_kv=64),
    ]
    for i, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:i])
    settings = BlockSettings(16, 8, scale=0.4, quantize=True)
    expected = SparseLinearFunction.apply(q, k, v, mask, alpha, settings)
    assert torch.equal(sparse_linear(q, k, v, mask, alpha, scale=0.4, quantize=True), expected)


def test_masks_and_alphas_broadcast_and_their_gradients_are_summed(inputs):
    q, k, v, do = (torch.cat([x, x + 1]) for x in inputs(40, 60, 16))
    mask, alpha = mask_and_alpha(q, k)
    full = sparse_linear(q, k, v, mask[:1, :, :1].expand(2, 2, 3, 8), alpha[1:, :, :1].expand(2, 2, 3))
    assert torch.equal(sparse_linear(q, k, v, mask[:1, :, :1], alpha[1:, :, :1]), full)
    assert torch.equal(sparse_linear(q, k, v, mask[0, :, :1], alpha[1, :, :1]), full)
    of_number, of_tensor = sparse_linear(q, k, v, mask, 1), sparse_linear(q, k, v, mask, torch.ones(()))
    assert torch.equal(of_number, of_tensor)
    leaf = alpha.double().requires_grad_()
    (each,) = torch.autograd.grad(sparse_linear(q, k, v, mask, leaf), leaf, do)
    shared = torch.full((2, 1), 0.4, dtype=torch.float64, requires_grad=True)
    (summed,) = torch.autograd.grad(sparse_linear(q, k, v, mask, shared), shared, do)
    torch.testing.assert_close(summed, each.sum((0, 2))[:, None], atol=1e-11, rtol=0)


def test_a_number_is_as_good_as_a_tensor_for_alpha_also_in_half_precision(inputs):
    """0.3 is not rounded to float16 on the way."""
    q, k, v, _ = inputs(20, 20, 8, dtype=torch.float16)
    mask, _ = mask_and_alpha(q, k)
    ours = sparse_linear(q, k, v, mask, 0.3).float()
    exact = SparseLinearFunction.apply(
        *(x.float() for x in (q, k, v)), mask, torch.full((1, 2, 2), 0.3), BlockSettings(16, 8)
    )
    torch.testing.assert_close(ours, exact.half().float(), atol=0, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sparse_linear_gqa_is_each_group_on_its_own(inputs, kv_heads, dtype):
    """Gradients of shared heads are summed before they are rounded."""
    q, k, v, do = inputs(40, 60, 16, heads=4, kv_heads=kv_heads, dtype=dtype)
    mask, alpha = mask_and_alpha(q, k)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = sparse_linear(*leaves, mask, alpha)
    gradients = torch.autograd.grad(output, leaves, do)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
    shared = (x.repeat_interleave(4 // kv_heads, 1) for x in leaves[1:])
    expected = sparse_linear(leaves[0], *shared, mask, alpha)
    for x, y in zip(gradients, torch.autograd.grad(expected, leaves, do.to(wide)), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y.to(dtype), atol=1e-12, rtol=0 if dtype == torch.float64 else 2**-7)
    assert torch.equal(output, expected.to(dtype))


def test_autocast_casts_for_sparse_linear_attention_too(inputs):
    q, k, v, _ = inputs(33, 40, 16, dtype=torch.float32)
    mask, alpha = mask_and_alpha(q, k)
    expected = sparse_linear(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, alpha)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse_linear(q, k, v.bfloat16(), mask, alpha), expected)


def sparse_not_a_bool(call, draw):
    call["quantize"] = draw(st.sampled_from([0, 1, None, "int8"]))
    return TypeError, f"quantize: expected a bool, got {type(call['quantize']).__name__}"


def mask_of_no_tensor(call, draw):
    call["block_mask"] = draw(st.sampled_from([None, True, [[True]], call["block_mask"].numpy()]))
    return TypeError, f"block_mask: expected a torch.Tensor, got {type(call['block_mask']).__name__}"


def mask_of_numbers(call, draw):
    call["block_mask"] = call["block_mask"].to(draw(st.sampled_from([torch.float32, torch.int8, torch.int64])))
    return TypeError, f"block_mask: expected dtype torch.bool, got {call['block_mask'].dtype}"


def mask_elsewhere(call, draw):
    call["block_mask"] = call["block_mask"].to("meta")
    return ValueError, "block_mask: expected the device of query, cpu, got meta"


def mask_of_other_blocks(call, draw):
    mask, axis = call["block_mask"], draw(st.integers(0, 3))
    call["block_mask"] = mask.repeat_interleave(mask.shape[axis] + 1, axis)
    message = f"expected a shape that broadcasts to {tuple(mask.shape)}, got {tuple(call['block_mask'].shape)}"
    return ValueError, f"block_mask: {message}"


def mask_of_higher_rank(call, draw):
    mask = call["block_mask"]
    call["block_mask"] = mask[None]
    message = f"expected a shape that broadcasts to {tuple(mask.shape)}, got {(1, *mask.shape)}"
    return ValueError, f"block_mask: {message}"


def alpha_of_no_number(call, draw):
    call["alpha"] = draw(st.sampled_from([None, "0.5", [0.5], True, 1j]))
    return TypeError, f"alpha: expected a torch.Tensor or a float, got {type(call['alpha']).__name__}"


def alpha_of_integers(call, draw):
    call["alpha"] = torch.ones((), dtype=draw(st.sampled_from([torch.int64, torch.bool, torch.complex64])))
    return TypeError, f"alpha: expected a floating dtype, got {call['alpha'].dtype}"


def alpha_elsewhere(call, draw):
    call["alpha"] = torch.ones((), device="meta")
    return ValueError, "alpha: expected the device of query, cpu, got meta"


def alpha_of_other_blocks(call, draw):
    shape, axis = call["block_mask"].shape[:3], draw(st.integers(0, 2))
    call["alpha"] = torch.ones(shape).repeat_interleave(shape[axis] + 1, axis)
    message = f"expected a shape that broadcasts to {tuple(shape)}, got {tuple(call['alpha'].shape)}"
    return ValueError, f"alpha: {message}"


def block_of_no_size(call, draw):
    name, size = draw(st.sampled_from(["block_q", "block_kv"])), draw(st.integers(-3, 0))
    call[name] = size
    return ValueError, f"{name}: expected at least 1, got {size}"


def block_of_no_int(call, draw):
    name = draw(st.sampled_from(["block_q", "block_kv"]))
    call[name] = draw(st.sampled_from([64.0, "64", None, True]))
    return TypeError, f"{name}: expected an int, got {type(call[name]).__name__}"


def sparse_heads_that_do_not_divide(call, draw):
    expected = heads_that_do_not_divide(call, draw)
    del call["enable_gqa"]
    return expected


@pytest.mark.parametrize(
    "break_it",
    [
        wrong_type, wrong_dtype, mixed_dtypes, wrong_rank, zero_size, meta_device, other_batch, other_head_dim,
        other_length_of_value, other_heads_of_value, sparse_heads_that_do_not_divide, sparse_not_a_bool,
        scale_of_no_number, scale_not_finite, unknown_backend, mask_of_no_tensor, mask_of_numbers, mask_elsewhere,
        mask_of_other_blocks, mask_of_higher_rank, alpha_of_no_number, alpha_of_integers, alpha_elsewhere,
        alpha_of_other_blocks, block_of_no_size, block_of_no_int,
    ],
)  # fmt: skip
@given(data=st.data(), shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 6)] * 3))
def test_a_bad_argument_of_sparse_linear_attention_is_named(break_it, data, shape):
    batch, heads, n_q, n_k, head_dim = shape
    call = {"query": torch.ones(batch, heads, n_q, head_dim), "alpha": 0.5, "backend": "reference"}
    call |= {name: torch.ones(batch, heads, n_k, head_dim) for name in ("key", "value")}
    call |= {"block_mask": mask_and_alpha(call["query"], call["key"], 2, 3)[0], "block_q": 2, "block_kv": 3}
    kind, message = break_it(call, data.draw)
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        sparse_linear_attention(**call)


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


@pytest.fixture
def sparse_linear_kernels(monkeypatch, fresh_warning):
    """Stands in for the SLA2 kernels: records its calls, and refuses those that `refusal` names."""
    package = types.ModuleType("sage_kernels.sla2.ops")
    package.calls, package.refusal = [], lambda query, settings: None
    package.obstacle = lambda query, settings: package.refusal(query, settings)
    package.attention = lambda *arguments: package.calls.append(arguments) or arguments[0]
    for name in ("sage_kernels", "sage_kernels.sla2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sage_kernels.sla2.ops", package)
    monkeypatch.setattr(ops, "MISSING_PACKAGE", None)
    return package


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_triton_runs_sparse_linear_attention_where_it_can(inputs, sparse_linear_kernels, backend):
    q, k, v, _ = inputs(200, 130, 16)
    mask, alpha = torch.ones(3, dtype=torch.bool), 0.25
    assert sparse_linear_attention(q, k, v, mask, alpha, backend=backend) is q
    sparse_linear_attention(q, k, v, mask, alpha, backend=backend, quantize=True, scale=0.3)
    (*tensors, defaults), (*_, options) = sparse_linear_kernels.calls
    assert all(x is y for x, y in zip(tensors[:3], (q, k, v), strict=True))
    assert torch.equal(tensors[3], torch.ones(1, 2, 2, 3, dtype=torch.bool))
    assert torch.equal(tensors[4], torch.full((1, 2, 2), 0.25, dtype=torch.float64))
    assert defaults == BlockSettings()
    assert options == BlockSettings(scale=0.3, quantize=True)


def test_what_the_sparse_linear_kernels_refuse_is_said_and_done_by_the_reference(inputs, sparse_linear_kernels):
    q, k, v, _ = inputs(40, 60, 16)
    mask, alpha = mask_and_alpha(q, k)
    options = {"block_q": 16, "block_kv": 8}
    sparse_linear_kernels.refusal = lambda query, settings: (
        f"no kernel takes blocks of {settings.block_q} x {settings.block_kv}" if settings.block_q != 128 else None
    )
    with pytest.warns(UserWarning, match="because no kernel takes blocks of 16 x 8") as caught:
        output = sparse_linear_attention(q, k, v, mask, alpha, **options)
    assert caught[0].filename == __file__  # it points at the caller
    assert torch.equal(output, sparse_linear(q, k, v, mask, alpha))
    with pytest.raises(
        ValueError, match="backend: expected 'triton' to be usable, but no kernel takes blocks of 16 x 8"
    ):
        sparse_linear_attention(q, k, v, mask, alpha, backend="triton", **options)
    assert not sparse_linear_kernels.calls
