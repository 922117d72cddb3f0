"""The registered operation: autograd, torch.compile, CUDA graphs, autocast; what it saves, refuses, makes of NaN."""

import functools
import math
import re
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import sage_kernels.sagebwd.ops
from kernel_cases import (
    DEVICE,
    MARKS,
    ON_GPU,
    PER_BLOCK,
    SMALL,
    Calls,
    Case,
    Constant,
    draw,
    feeding,
    fill_cache,
    forward_level,
    run_backward_level,
    run_forward_level,
)
from sage_kernels.common.quantize import SCALE_BLOCK, _quantize_kernel, _transpose_kernel
from sage_kernels.sagebwd.backward.level4.keys import key_program
from sage_kernels.sagebwd.backward.level4.queries import query_program
from sage_kernels.sagebwd.backward.level5.narrow import narrow_program
from sage_kernels.sagebwd.backward.level5.units import _finish_kernel, _largest_kernel, _units_kernel
from sage_kernels.sagebwd.backward.level5.wide import wide_program
from sage_kernels.sagebwd.backward.program import dkdv_program, dq_program
from sage_kernels.sagebwd.forward.level5_hopper import hopper_program
from sage_kernels.sagebwd.forward.program import forward_program
from sage_kernels.sagebwd.ops import backward_level

from sage_ref import backend as ops
from sage_ref import sagebwd_attention
from sage_ref.course.teaching import bytes_kept_for_backward
from sage_ref.tracing import relative_l2

pytestmark = MARKS
LEVEL = backward_level(DEVICE, SMALL.head_dim)  # of the cases here that name one
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """On a GPU: what the tests below run is compiled beforehand, in parallel."""
    if ON_GPU:
        choices = product((32, 64, 96, 128), (2, 1), (False, True), DTYPES)
        cases = [Case(20, 20, head_dim, 2, kv_heads, *rest) for head_dim, kv_heads, *rest in choices]
        levels = ("row", "block")
        fill_cache(
            [(run_backward_level, case, backward_level(DEVICE, case.head_dim, x)) for case in cases for x in levels]
        )


def attention(query, key, value, **options):
    return sagebwd_attention(query, key, value, enable_gqa=True, backend="triton", **options)


def with_gradients(query, key, value, grad_output, call=attention, **options):
    """O, dQ, dK, dV."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = call(*leaves, **options)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


def all_equal(results, expected):
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


# The registration


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_forward(dtype, granularity):
    query, key, value, _ = draw(Case(40, 150, heads=2, kv_heads=1, dtype=dtype))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    torch.library.opcheck(torch.ops.sage_kernels.forward.default, (*leaves, True, 0.125, True, granularity))


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_backward(dtype, granularity):
    case = Case(40, 150, heads=2, kv_heads=1, dtype=dtype)
    _, _, value, grad_output = draw(case)
    (_, _, _, q_hat, k_hat, _), output, log_sum_exp = forward_level(case, feeding(LEVEL, case))
    saved = (value, output, log_sum_exp, q_hat.values, q_hat.scale, k_hat.values, k_hat.scale)
    torch.library.opcheck(torch.ops.sage_kernels.backward.default, (grad_output, *saved, False, 0.125, granularity))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": -0.3}, {"scale": 0, "is_causal": True}, {"smooth_k": False}],
    ids=str,
)
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_results_are_the_ladders(options, dtype, granularity):
    case = SMALL._replace(dtype=dtype, **{"is_causal": False, **options})
    level = PER_BLOCK if granularity == "block" else LEVEL
    forward = run_forward_level(case, feeding(level, case))
    gradients = run_backward_level(case, level, forward=forward)
    found = with_gradients(*draw(case), granularity=granularity, **options)
    assert all_equal(found, (forward.output, *gradients))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_one_scale_per_tile_has_one_level_everywhere(head_dim):
    assert backward_level(DEVICE, head_dim, "block") == PER_BLOCK != backward_level(DEVICE, head_dim)


def test_a_gradient_that_is_one_number_seen_everywhere():
    leaves = [x.detach().requires_grad_() for x in draw(SMALL)[:3]]
    attention(*leaves).sum().backward()
    ones = torch.ones_like(draw(SMALL)[0])
    assert all_equal([x.grad for x in leaves], with_gradients(*draw(SMALL)[:3], ones)[1:])


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_inputs_without_gradients(needed):
    leaves = [x.detach().requires_grad_(need) for x, need in zip(draw(SMALL), needed, strict=False)]
    attention(*leaves).backward(draw(SMALL)[3])
    everything = with_gradients(*draw(SMALL))[1:]
    for leaf, gradient, need in zip(leaves, everything, needed, strict=True):
        assert torch.equal(leaf.grad, gradient) if need else leaf.grad is None


def test_the_backward_pass_fills_no_gradients_of_what_it_saved():
    leaves = [x.detach().requires_grad_() for x in draw(SMALL)[:3]]
    output = attention(*leaves)
    with Calls() as calls:
        torch.autograd.grad(output, leaves, draw(SMALL)[3])
    assert any(name.startswith("backward") for name in calls.names)
    assert not [name for name in calls.names if "zero" in name or "full" in name]


def test_no_gradient_comes_of_a_constant():
    leaves = [x.detach().requires_grad_() for x in draw(Case(5, 5))[:3]]
    Constant.apply(attention(*leaves)).sum().backward()
    assert [x.grad for x in leaves] == [None] * 3


def test_no_grad_records_nothing():
    leaves = [x.detach().requires_grad_() for x in draw(SMALL)[:3]]
    with torch.no_grad():
        assert not attention(*leaves).requires_grad
    assert not attention(*draw(SMALL)[:3]).requires_grad


def test_a_second_derivative_is_an_error():
    leaves = [x.detach().requires_grad_() for x in draw(Case(5, 5))[:3]]
    (gradient,) = torch.autograd.grad(attention(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="sage_kernels.*no autograd formula"):
        gradient.sum().backward()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_kept_for_the_backward_pass(head_dim):
    """6 D + 4 per token and head, and one float32 per block of Q and of K; FlashAttention keeps 8 D + 4."""
    case = Case(256, 256, head_dim)
    blocks = case.n_q // SCALE_BLOCK + case.n_k // SCALE_BLOCK
    expected = case.heads * (case.n_q * (6 * head_dim + 4) + 4 * blocks)
    assert bytes_kept_for_backward(attention, *draw(case)[:3]) == expected


# torch.compile, CUDA graphs, autocast


def causal(query, key, value):
    return attention(query, key, value, is_causal=True)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's workers fork
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_without_a_graph_break_at_any_length(compiler, fresh_dynamo):
    """One graph up to 128 tokens (one scale per head), one beyond (several); then no length compiles anything."""
    compiled = torch.compile(causal, fullgraph=True, dynamic=True, backend=compiler)
    for n in (127, 193):
        tensors = draw(Case(n, n, heads=2, kv_heads=1))
        assert all_equal(with_gradients(*tensors, call=compiled), with_gradients(*tensors, call=causal))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (64, 150, 301):
            tensors = draw(Case(n, n, heads=2, kv_heads=1))
            assert all_equal(with_gradients(*tensors, call=compiled), with_gradients(*tensors, call=causal))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's workers fork
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_inside_a_model(compiler, fresh_dynamo):
    """Projections before and after, in one graph with the attention: gradients of the weights."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(shape, generator=generator).div(8).to(DEVICE, torch.float16).requires_grad_()
        for shape in ((2, 40, 64), (64, 128), (64, 128), (64, 128), (128, 64))
    )

    def model(x, w_q, w_k, w_v, w_o):
        q, k, v = ((x @ w).unflatten(-1, (2, 64)).transpose(1, 2) for w in (w_q, w_k, w_v))
        return attention(q, k, v).transpose(1, 2).flatten(2) @ w_o

    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend=compiler)):
        output = call(x, *weights)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, *weights])))
    for one, other in zip(*results, strict=True):
        assert relative_l2(one, other) < 1e-2  # a fused operation rounds once where eager rounds twice


@pytest.mark.gpu
def test_cuda_graph():
    leaves = [x.clone().requires_grad_() for x in draw(SMALL)[:3]]
    grad_output = draw(SMALL)[3].clone()

    def step():
        output = attention(*leaves)
        return output, *torch.autograd.grad(output, leaves, grad_output)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [x.detach() for x in step()]  # what the graph of autograd keeps belongs to the capture's stream
    others = draw(SMALL._replace(std=2.0))
    with torch.no_grad():
        for static, x in zip((*leaves, grad_output), others, strict=True):
            static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert all_equal(results, with_gradients(*others))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast(dtype):
    """float32 inputs are cast to the autocast type, which the kernels then take, and gradients come back in float32."""
    tensors = draw(SMALL._replace(dtype=dtype))
    with torch.autocast(DEVICE.type, dtype):
        leaves = [x.float().requires_grad_() for x in tensors[:3]]
        output = attention(*leaves)
        assert F.scaled_dot_product_attention(*leaves, enable_gqa=True).dtype == output.dtype == dtype
    gradients = torch.autograd.grad(output, leaves, tensors[3])
    assert all(x.dtype == torch.float32 for x in gradients)
    expected = with_gradients(*tensors)
    assert all_equal((output, *gradients), (expected[0], *(x.float() for x in expected[1:])))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_no_kernel_is_compiled_again_for_another_length(head_dim):
    for n in (113, 128):  # backward level 5 has a program for whole blocks of keys and one for others
        with_gradients(*draw(Case(n, n, head_dim)))
    compiled = compiled_kernels()
    for n_q, n_k in product((1, 16, 120, 127, 128, 400), (1, 113, 128, 1024)):
        with_gradients(*draw(Case(n_q, n_k, head_dim)))
    assert compiled_kernels() == compiled
    with_gradients(*draw(Case(113, 113, head_dim - 8)))
    assert compiled_kernels() > compiled  # another head size is another kernel


def compiled_kernels() -> int:
    programs = (forward_program, hopper_program, dq_program, dkdv_program, query_program, key_program)
    programs += (narrow_program, wide_program, _largest_kernel, _units_kernel, _finish_kernel, _quantize_kernel)
    programs += (_transpose_kernel,)
    return sum(len(cache[0]) for program in programs for cache in program.device_caches.values())


# Which backend runs


reference = functools.partial(sagebwd_attention, enable_gqa=True, backend="reference")
SAME_ON_BOTH = [
    Case(128, 128, 64),
    Case(128, 128, 128, is_causal=True),
    Case(100, 100, 32, 4, 2, is_causal=True),
    Case(160, 160, 64, is_causal=True),
    Case(100, 160, 96, 4, 1),
    Case(160, 100, 48, 2, 1, is_causal=True),
    Case(64, 200, 128),
    Case(200, 64, 64),
    Case(3, 3, 128, 8, 2, is_causal=True),
    Case(70, 90, 80),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("case", SAME_ON_BOTH, ids=str)
def test_the_reference_simulates_the_kernels(case, granularity, dtype):
    """O, dQ, dK and dV, end to end, in the defaults of both and with one scale per tile on both.

    They differ by rounding alone: O's last bits reach delta, and a dS near a tie may go to the other side. Where a
    whole tile shares a scale that step is larger: up to 6e-3 of dQ and dK in single shapes that are not here.
    """
    tensors = draw(case._replace(dtype=dtype))
    options = {"is_causal": case.is_causal, "granularity": granularity}
    found, simulated = (with_gradients(*tensors, call=call, **options) for call in (attention, reference))
    for x, y in zip(found, simulated, strict=True):
        assert relative_l2(x, y) <= (5e-3 if dtype == torch.bfloat16 else 4e-3)


def test_the_granularities_differ_in_their_gradients():
    row, block = (with_gradients(*draw(SMALL), granularity=granularity) for granularity in ("row", "block"))
    assert torch.equal(row[0], block[0])
    assert all(relative_l2(x, y) > 5e-3 for x, y in zip(row[1:], block[1:], strict=True))


def test_auto_takes_the_kernels_where_they_can_run(monkeypatch):
    calls = []
    kernel = sage_kernels.sagebwd.ops.sagebwd_attention
    spy = lambda *tensors, **options: calls.append(options) or kernel(*tensors, **options)  # noqa: E731
    monkeypatch.setattr(sage_kernels.sagebwd.ops, "sagebwd_attention", spy)
    query, key, value, _ = draw(SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = sagebwd_attention(query, key, value, enable_gqa=True)
    assert calls == [{"is_causal": False, "scale": SMALL.c, "smooth_k": True, "granularity": "row"}]
    assert torch.equal(output, attention(query, key, value))


def in_float32():
    return draw(Case(3, 3, dtype=torch.float32))[:3], {}


def in_bfloat16():
    return draw(Case(3, 3, dtype=torch.bfloat16))[:3], {}


def small_head():
    return draw(Case(3, 3, 16))[:3], {}


def large_head():
    return draw(Case(3, 3, 256))[:3], {}


def smoothing_queries():
    return draw(Case(3, 3))[:3], {"smooth_q": True}


TYPES = "torch.float16 or torch.bfloat16" if ON_GPU else "torch.float16"
REFUSED = [
    (in_float32, f"the kernels need dtype {TYPES}, and query has torch.float32"),
    (small_head, "the kernels need a head size from 32 to 128, and query has 16"),
    (large_head, "the kernels need a head size from 32 to 128, and query has 256"),
    (smoothing_queries, "the kernels don't smooth Q"),
]
if not ON_GPU:
    REFUSED.append((in_bfloat16, "the kernels need dtype torch.float16, and query has torch.bfloat16"))


@pytest.mark.parametrize(("what", "reason"), REFUSED)
def test_what_the_kernels_cannot_do_is_an_error_if_asked_for_and_else_the_references(what, reason):
    tensors, options = what()
    with pytest.raises(ValueError, match=re.escape(f"backend: expected 'triton' to be usable, but {reason}")):
        attention(*tensors, **options)
    ops._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [sagebwd_attention(*tensors, **options) for _ in range(2)]
    assert [str(w.message) for w in caught] == [f"sage_ref: backend='auto' uses the reference, because {reason}."]
    reference = sagebwd_attention(*tensors, **options, backend="reference")
    assert all(torch.equal(output, reference) for output in outputs)


def test_head_sizes_at_the_limits():
    for head_dim in (32, 128):
        assert attention(*draw(Case(3, 3, head_dim))[:3]).isfinite().all()


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_not_for_the_gpu():
    query, key, value, _ = (x.cpu() for x in draw(Case(3, 3)))
    with pytest.raises(ValueError, match=r"the kernels need a CUDA tensor .*, and query is on cpu"):
        attention(query, key, value)


def test_shared_keys_must_be_asked_for():
    query, key, value, _ = draw(SMALL)
    with pytest.raises(ValueError, match=r"key: expected 2 heads as query has \(or enable_gqa=True\), got 1"):
        sagebwd_attention(query, key, value, backend="triton")


def test_inputs_are_left_as_they_were():
    tensors = draw(SMALL)
    before = [x.clone() for x in tensors]
    with_gradients(*tensors)
    assert all_equal(tensors, before)


# What NaN and infinity do: head 1 of 2 in batch 1 of 2 holds one

NAN_CASE = Case(150, 150, SMALL.head_dim, 2, 2, batch=2)


@functools.cache
def without_nan(**options):
    return with_gradients(*draw(NAN_CASE), **options)


@pytest.mark.parametrize(
    ("name", "token", "bad", "smooth_k", "is_causal"),
    [
        ("query", 0, math.nan, True, False), ("query", 149, math.inf, True, True),
        ("key", 140, -math.inf, True, False), ("key", 140, math.nan, True, True),
        ("key", 3, math.nan, False, False), ("key", 3, math.nan, False, True), ("key", 140, math.inf, False, True),
        ("value", 140, math.inf, True, False), ("value", 3, math.nan, True, True), ("value", 140, math.nan, True, True),
    ],
)  # fmt: skip
def test_nan_goes_where_the_docstring_says_and_nowhere_else(name, token, bad, smooth_k, is_causal):
    query, key, value, grad_output = (x.clone() for x in draw(NAN_CASE))
    {"query": query, "key": key, "value": value}[name][1, 1, token, 3] = bad
    if name == "query":
        first = token // SCALE_BLOCK * SCALE_BLOCK
        touched = slice(first, first + SCALE_BLOCK)
    elif name == "key" and smooth_k:
        touched = slice(0, None)
    else:
        touched = slice(token // SCALE_BLOCK * SCALE_BLOCK if is_causal else 0, None)
    options = {"is_causal": is_causal, "smooth_k": smooth_k}
    clean = without_nan(**options)
    output, *gradients = with_gradients(query, key, value, grad_output, **options)
    for rows, before in ((output, clean[0]), (gradients[0], clean[1])):  # O and dQ
        assert rows[1, 1, touched].isnan().all()
        expected = before.clone()
        expected[1, 1, touched] = rows[1, 1, touched]
        assert torch.equal(rows.nan_to_num(7), expected.nan_to_num(7))
    for i, (gradient, before) in enumerate(zip(gradients, clean[1:], strict=True)):
        assert torch.equal(gradient[0], before[0])
        assert torch.equal(gradient[1, 0], before[1, 0])
        dv_never_reads_v = name == "value" and i == 2
        assert gradient[1, 1].isnan().any() != dv_never_reads_v


def test_nan_in_a_shared_key_stays_with_the_queries_of_its_group():
    query, key, value, _ = (x.clone() for x in draw(Case(20, 20, heads=4, kv_heads=2)))
    clean = attention(query, key, value)
    key[0, 1, 3] = math.nan
    output = attention(query, key, value)
    assert torch.equal(output[:, :2], clean[:, :2])
    assert output[:, 2:].isnan().all()
