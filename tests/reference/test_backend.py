"""The public functions: what they accept, what they refuse and how they say so, what NaN does, which backend runs."""

import importlib.util
import inspect
import itertools
import math
import re
import runpy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sage_ref import SLA2, Prologue, sagebwd_attention, sparse_linear_attention
from sage_ref import backend as ops
from sage_ref.attention import attention_forward
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


SIGNATURES = {
    sagebwd_attention: "*, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, "
    "smooth_k: bool = True, smooth_q: bool = False, granularity: str = 'row', "
    "unbiased: bool = False, prologue: sage_ref.prologue.Prologue | None = None, ",
    sparse_linear_attention: "block_mask: Tensor, alpha: Tensor | float, *, quantize: bool = False, "
    "scale: float | None = None, block_q: int = 128, block_kv: int = 64, ",
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signature(function):
    expected = f"(query: Tensor, key: Tensor, value: Tensor, {SIGNATURES[function]}backend: str = 'auto') -> Tensor"
    assert str(inspect.signature(function)).replace("torch.Tensor", "Tensor") == expected


# What it accepts


def check_results(output, leaves):
    """The output is like query, and every gradient is finite and like its tensor."""
    assert (output.shape, output.dtype) == (leaves[0].shape, leaves[0].dtype)
    output.sum().backward()
    for x in leaves:
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
        assert x.grad.isfinite().all()


@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    tokens=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    head_dim=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    is_causal=st.booleans(),
    smooth=st.tuples(st.booleans(), st.booleans()),
    scale=st.none() | st.floats(-0.2, 0.2) | st.just(0),
)
def test_any_valid_call_is_close_to_exact_attention(batch, heads, tokens, head_dim, dtype, is_causal, smooth, scale):
    generator = torch.Generator().manual_seed(math.prod(tokens))
    shapes = [(batch, heads[i], tokens[i], head_dim) for i in (0, 1, 1)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    options = {"is_causal": is_causal, "scale": scale}
    output = reference(q, k, v, enable_gqa=True, smooth_k=smooth[0], smooth_q=smooth[1], **options)
    shared = (x.double().repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    exact = attention_forward(q.double(), *shared, **options).output
    assert (output - exact).abs().max() < 0.05 * v.abs().max()
    check_results(output, (q, k, v))


def test_every_option_reaches_the_computation(inputs):
    tensors = inputs(100, 100, 16)
    options = {"is_causal": True, "scale": 0.4, "smooth_k": False, "smooth_q": True, "granularity": "block"}
    options["unbiased"] = True
    results = [with_gradients(*tensors, **dict([option]))[1] for option in (("smooth_k", True), *options.items())]
    for i, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:i])
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    del options["unbiased"]
    settings = SageBwdSettings(**options, p_rounding="ordered", smooth_v=True)
    output, _ = SageBwdFunction.apply(*leaves, settings)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_casts_as_sdpa_does_and_not_inside(inputs, dtype):
    """Queries and keys in float32 (a norm's output) beside values in bfloat16 (a matmul's), backward inside or out."""
    q, k, v, do = inputs(33, 40, 16, dtype=dtype)
    v, (mask, alpha) = v.bfloat16(), mask_and_alpha(q, k)
    expected = with_gradients(q.bfloat16(), k.bfloat16(), v, do.bfloat16())
    expected_sparse = sparse_linear(q.bfloat16(), k.bfloat16(), v, mask, alpha)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert torch.equal(sparse_linear(q, k, v, mask, alpha), expected_sparse)
        output = reference(*leaves)
        inside = torch.autograd.grad(output, leaves, do.bfloat16(), retain_graph=True)
    outside = torch.autograd.grad(output, leaves, do.bfloat16())
    assert torch.equal(output, expected[0])
    for x, a, b, exact in zip((q, k, v), inside, outside, expected[1:], strict=True):
        assert a.dtype == x.dtype
        assert torch.equal(a, b)
        assert torch.equal(a, exact.to(x.dtype))


def test_autocast_leaves_float64_alone_and_no_grad_records_nothing(inputs):
    q, k, v, _ = (x.requires_grad_() for x in inputs(8, 8, 16))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        output = reference(q, k, v)
    assert not output.requires_grad
    assert torch.equal(output, reference(q, k, v))  # in float64 too


# What it refuses


def to(*kinds):
    return [lambda x, kind=kind: x.to(kind) for kind in kinds]


def repeated(*axes):
    return [lambda x, axis=axis: x.repeat_interleave(2, axis) for axis in axes]


QKV = ("query", "key", "value")
DTYPE = "expected dtype float16, bfloat16, float32 or float64, got {x.dtype}"
BROADCAST = "expected a shape that broadcasts to {old_shape}, got {shape}"
# Arguments, what is wrong there (or a function of what is right), the error. x is what came.
BAD_IN_BOTH = [
    (QKV, [None, 1.5, [[1.0]], "q", torch.Tensor.tolist], TypeError, "expected a torch.Tensor, got {kind}"),
    (QKV, to(torch.int8, torch.int64, torch.bool, torch.complex64), TypeError, DTYPE),
    (QKV[1:], to(*DTYPES[:2], torch.float64), TypeError, "expected the dtype of query, torch.float32, got {x.dtype}"),
    (QKV, [lambda x: x[0], lambda x: x[None], torch.Tensor.flatten, torch.Tensor.sum], ValueError,
     "expected 4 dimensions (B, H, N, D), got shape {shape}"),
    (QKV, [lambda x, axis=axis: x.narrow(axis, 0, 0) for axis in range(4)], ValueError,
     "expected no dimension of size zero, got shape {shape}"),
    (QKV, to("meta"), ValueError, "expected a device that holds data, got meta"),
    (QKV[1:], repeated(0), ValueError, "expected the batch size of query, {old_shape[0]}, got {shape[0]}"),
    (QKV[1:], repeated(3), ValueError, "expected the head size of query, {old_shape[3]}, got {shape[3]}"),
    (["value"], repeated(1, 2), ValueError, "expected the shape of key, {old_shape}, got {shape}"),
    (["scale"], ["0.1", True, 1j, [0.1], torch.tensor(0.1)], TypeError, "expected a float or None, got {kind}"),
    (["scale"], [math.nan, math.inf, -math.inf], ValueError, "expected a finite number, got {x}"),
    (["backend"], ["cuda", "Triton", "", None, 1, ["reference"]], ValueError,
     "expected one of ('auto', 'reference', 'triton'), got {x!r}"),
]  # fmt: skip
BAD_IN_ONE = {
    sagebwd_attention: [
        (["is_causal", "enable_gqa", "smooth_k", "smooth_q", "unbiased"],
         [0, 1, None, "yes", 1.0, torch.tensor(True)], TypeError, "expected a bool, got {kind}"),
        (["granularity"], ["tile", "Row", "", None, 1, ["row"]], ValueError,
         "expected one of ('block', 'row'), got {x!r}"),
    ],
    sparse_linear_attention: [
        (["quantize"], [0, 1, None, "int8"], TypeError, "expected a bool, got {kind}"),
        (["block_mask"], [None, True, [[True]], torch.Tensor.numpy], TypeError, "expected a torch.Tensor, got {kind}"),
        (["block_mask"], to(torch.float32, torch.int8, torch.int64), TypeError,
         "expected dtype torch.bool, got {x.dtype}"),
        (["block_mask"], [*repeated(0, 1, 2, 3), lambda x: x[None]], ValueError, BROADCAST),
        (["alpha"], [None, "0.5", [0.5], True, 1j], TypeError, "expected a torch.Tensor or a float, got {kind}"),
        (["alpha"], to(torch.int64, torch.bool, torch.cfloat), TypeError, "expected a floating dtype, got {x.dtype}"),
        (["alpha"], repeated(0, 1, 2), ValueError, BROADCAST),
        (["block_mask", "alpha"], to("meta"), ValueError, "expected the device of query, cpu, got meta"),
        (["block_q", "block_kv"], [0, -1, -3], ValueError, "expected at least 1, got {x}"),
        (["block_q", "block_kv"], [64.0, "64", None, True], TypeError, "expected an int, got {kind}"),
    ],
}  # fmt: skip
BAD = [(function, *row) for function, own in BAD_IN_ONE.items() for row in BAD_IN_BOTH + own]


@pytest.mark.parametrize(("function", "names", "changes", "error", "message"), BAD)
def test_a_bad_argument_is_named_with_what_was_expected_and_what_came(function, names, changes, error, message):
    batch, heads, n_q, n_k, head_dim = 2, 3, 4, 5, 6
    good = {"query": torch.ones(batch, heads, n_q, head_dim), "backend": "reference"}
    good |= {name: torch.ones(batch, heads, n_k, head_dim) for name in ("key", "value")}
    if function is sparse_linear_attention:
        mask, alpha = mask_and_alpha(good["query"], good["key"], 2, 3)
        good |= {"block_mask": mask, "alpha": alpha, "block_q": 2, "block_kv": 3}
    function(**good)
    for name, change in itertools.product(names, changes):
        x = change(good[name]) if callable(change) else change
        shape, old_shape = (tuple(getattr(tensor, "shape", ())) for tensor in (x, good.get(name)))
        expected = message.format(x=x, kind=type(x).__name__, shape=shape, old_shape=old_shape)
        with pytest.raises(error, match=f"^{name}: {re.escape(expected)}$"):
            function(**(good | {name: x}))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (2, 3), (4, 2)])
def test_heads_are_as_many_or_divide_with_gqa(heads, kv_heads):
    q, kv = torch.ones(1, heads, 4, 8), [torch.ones(1, kv_heads, 5, 8)] * 2
    with pytest.raises(ValueError, match=rf"^key: expected {heads} heads .*enable_gqa=True\), got {kv_heads}$"):
        reference(q, *kv)
    for call in (partial(reference, enable_gqa=True), partial(sparse_linear, block_mask=MASK, alpha=0.5)):
        if heads % kv_heads == 0:
            assert call(q, *kv).shape == q.shape
        else:
            with pytest.raises(ValueError, match=f"^key: .* that divides query's {heads}, got {kv_heads}$"):
                call(q, *kv)


# What NaN and infinity do: three blocks of queries and of keys, the last ones partial; head 1 of 2 holds the bad value


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize(("token", "bad"), [(0, math.nan), (140, math.inf), (299, -math.inf)])
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


def test_heads_and_batches_never_notice_each_other(inputs):
    q, k, v, do = (torch.cat([x, x + 1]) for x in inputs(70, 80, 16))
    before = with_gradients(q, k, v, do)
    for changed in (q, k, v):
        changed[1, 0] *= 7
        for x, y in zip(with_gradients(q, k, v, do), before, strict=True):
            assert torch.equal(x[0], y[0])
            assert torch.equal(x[1, 1], y[1, 1])
            assert not torch.equal(x[1, 0], y[1, 0])


# Which backend runs


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_triton_runs_where_it_can_with_every_option_and_never_for_the_reference(inputs, stand_in, backend):
    qkv, kernels = inputs(4, 4, 16)[:3], stand_in("sagebwd")
    assert sagebwd_attention(*qkv, backend=backend) is qkv[0]
    options = {"is_causal": True, "scale": 0.3, "smooth_k": False, "granularity": "block", "unbiased": True}
    options["prologue"] = Prologue(torch.ones(4, 8), torch.zeros(4, 8))
    sagebwd_attention(*qkv, backend=backend, **options)
    reference(*qkv)
    (*tensors, defaults), (*_, passed_on) = kernels.calls
    assert all(x is y for x, y in zip(tensors, qkv, strict=True))
    expected = {"is_causal": False, "scale": 1 / 4, "smooth_k": True, "granularity": "row", "unbiased": False}
    assert defaults == expected | {"prologue": None}
    assert passed_on == options


def missing_package(name, monkeypatch):
    """MISSING_PACKAGE as if sage_ref were imported where this one is absent."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda found: None if found == name else found)
        return runpy.run_path(ops.__file__)["MISSING_PACKAGE"]


CALLS = [  # the kernels' family, a call, and what they hear of it beside the query
    ("sagebwd", partial(sagebwd_attention, smooth_q=True), True),
    ("sla2", partial(sparse_linear_attention, block_mask=MASK, alpha=0.5, block_q=16), BlockSettings(16)),
    ("sla2", lambda *qkv, **options: SLA2(8, 2, **options)(*qkv), BlockSettings(quantize=True)),
]


@pytest.mark.parametrize(("family", "call", "about"), CALLS, ids=["sagebwd", "sparse_linear", "SLA2"])
@pytest.mark.parametrize("missing", ["triton", "sage_kernels", None])
def test_what_triton_can_not_do_auto_says_once_and_the_reference_does(
    inputs, stand_in, monkeypatch, family, call, about, missing
):
    q, k, v, _ = inputs(4, 4, 8)
    kernels = stand_in(family)
    if missing:
        monkeypatch.setattr(ops, "MISSING_PACKAGE", missing_package(missing, monkeypatch))
    else:
        kernels.refusal = lambda query, told: f"no kernel runs on {query.device}" if told == about else None
    why = f"the package {missing} is not installed" if missing else "no kernel runs on cpu"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [call(q, k, v) for _ in range(3)]
    assert [str(w.message) for w in caught] == [f"sage_ref: backend='auto' uses the reference, because {why}."]
    assert caught[0].filename == (__file__ if isinstance(call, partial) else torch.nn.modules.module.__file__)
    assert all(torch.equal(output, call(q, k, v, backend="reference")) for output in outputs)
    with pytest.raises(ValueError, match=f"^backend: expected 'triton' to be usable, but {why}$"):
        call(q, k, v, backend="triton")
    assert not kernels.calls


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


# sparse_linear_attention


@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    tokens=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    head_dim=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    scale=st.none() | st.floats(-0.2, 0.2) | st.just(0),
    blocks=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    quantize=st.booleans(),
)
def test_any_valid_call_averages_values(batch, heads, tokens, head_dim, dtype, scale, blocks, quantize):
    """O is alpha times one average of values plus 1 - alpha times another: with all values 1 it is alpha where a block
    is selected, plus 1 - alpha where one is not. INT8 rounds P by up to 1/254 of the largest."""
    generator = torch.Generator().manual_seed(math.prod(tokens))
    shapes = [(batch, heads[i], tokens[i], head_dim) for i in (0, 1)]
    q, k = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    v = torch.ones_like(k).requires_grad_()
    mask, alpha = mask_and_alpha(q, k, *blocks)
    alpha.requires_grad_()
    options = {"scale": scale, "block_q": blocks[0], "block_kv": blocks[1], "quantize": quantize}
    output = sparse_linear(q, k, v, mask, alpha, **options)
    expected = alpha * mask.any(-1) + (1 - alpha) * ~mask.all(-1)
    expected = expected.repeat_interleave(blocks[0], -1)[..., : tokens[0], None].expand_as(output)
    atol = 0.02 if quantize else 0.01 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(output.double(), expected.double(), atol=atol, rtol=0)
    check_results(output, (q, k, v, alpha))


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
    expected, *_ = SparseLinearFunction.apply(q, k, v, mask, alpha, settings)
    assert torch.equal(sparse_linear(q, k, v, mask, alpha, scale=0.4, quantize=True), expected)


def test_masks_and_alphas_broadcast_and_their_gradients_are_summed(inputs):
    q, k, v, do = (torch.cat([x, x + 1]) for x in inputs(40, 60, 16))
    mask, alpha = mask_and_alpha(q, k)
    full = sparse_linear(q, k, v, mask[:1, :, :1].expand(2, 2, 3, 8), alpha[1:, :, :1].expand(2, 2, 3))
    assert torch.equal(sparse_linear(q, k, v, mask[:1, :, :1], alpha[1:, :, :1]), full)
    assert torch.equal(sparse_linear(q, k, v, mask[0, :, :1], alpha[1, :, :1]), full)
    q_16, k_16, v_16 = (x.half() for x in (q, k, v))  # where 0.3 is not rounded to float16 on the way
    of_number, of_tensor = (sparse_linear(q_16, k_16, v_16, mask, x) for x in (0.3, torch.tensor(0.3)))
    assert torch.equal(of_number, of_tensor)
    assert torch.equal(sparse_linear(q, k, v, mask, 1), sparse_linear(q, k, v, mask, torch.ones(())))
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


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_triton_runs_sparse_linear_attention_where_it_can(inputs, stand_in, backend):
    (q, k, v, _), kernels = inputs(200, 130, 16), stand_in("sla2")
    mask, alpha = torch.ones(3, dtype=torch.bool), 0.25
    assert sparse_linear_attention(q, k, v, mask, alpha, backend=backend) is q
    sparse_linear_attention(q, k, v, mask, alpha, backend=backend, quantize=True, scale=0.3)
    (*tensors, defaults, _), (*_, options, _) = kernels.calls
    assert all(x is y for x, y in zip(tensors[:3], (q, k, v), strict=True))
    assert torch.equal(tensors[3], torch.ones(1, 2, 2, 3, dtype=torch.bool))
    assert torch.equal(tensors[4], torch.full((1, 2, 2), 0.25, dtype=torch.float64))
    assert defaults == BlockSettings()
    assert options == BlockSettings(scale=0.3, quantize=True)
