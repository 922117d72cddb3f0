"""SLA2's registered operation and the module on it: autograd, torch.compile, autocast; what is saved, refused, NaN."""

import functools
import math
import re
import warnings
from itertools import product

import pytest
import torch
from kernel_cases import DEVICE, MARKS, ON_GPU, Calls, Constant, fill_cache
from sage_kernels.common.quantize import _quantize_kernel, padded_head_dim, padded_length
from sage_kernels.sla2 import ops as sla2_ops
from sage_kernels.sla2.backward.program import key_program, linear_query_program, query_program
from sage_kernels.sla2.forward.program import sparse_forward_program
from sage_kernels.sla2.ops import LEVEL_INT8
from sage_kernels.sla2.routing import MASK_BLOCK_Q, sequence_mean_program
from sage_kernels.sla2.sums import key_block_program, sums_dtype
from sla2_cases import SMALL, TRAINED, Case, draw, drawn_router, run_gradients, run_level

from sage_ref import SLA2, sparse_linear_attention
from sage_ref import backend as ops
from sage_ref.course.teaching import bytes_kept_for_backward
from sage_ref.shapes import in_working_dtype
from sage_ref.sla2.router import Routing
from sage_ref.tracing import relative_l2

pytestmark = MARKS
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
CLOSE = 1e-2 if ON_GPU else 2e-3  # to the reference: bfloat16 sums on a GPU


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """On a GPU: what the tests below run is compiled beforehand, in parallel."""
    if ON_GPU:
        choices = product((32, 64, 128), (2, 1), DTYPES, TRAINED)
        fill_cache(
            [
                (run_gradients, Case(20, 20, "half", head_dim, 2, kv_heads, dtype), level)
                for head_dim, kv_heads, dtype, level in choices
            ]
        )


def attention(query, key, value, block_mask, alpha, **options):
    return sparse_linear_attention(query, key, value, block_mask, alpha, backend="triton", **options)


def with_gradients(tensors, call=attention, **options):
    """O, dQ, dK, dV, dalpha."""
    leaves = [x.detach().requires_grad_() for x in (*tensors[:3], tensors.alpha)]
    output = call(*leaves[:3], tensors.block_mask, leaves[3], **options)
    return output.detach(), *torch.autograd.grad(output, leaves, tensors.grad_output)


def all_equal(results, expected):
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def module_for(case, *, backend="triton", quantize=False, sparsity=0.5, query_blocks=1):
    """An SLA2 whose projections aren't the identity and whose alphas differ."""
    module = SLA2(
        case.head_dim, case.heads, sparsity=sparsity, quantize=quantize, query_blocks=query_blocks, backend=backend
    ).to(DEVICE)
    router = drawn_router(case, 1)
    with torch.no_grad():
        module.router.proj_q.weight.copy_(router.proj_q)
        module.router.proj_k.weight.copy_(router.proj_k)
        module.alpha_logit.copy_(torch.linspace(-1, 2, module.alpha_logit.numel()).view_as(module.alpha_logit))
    return module


# The registration


OPCHECK = Case(40, 150, "half", 32, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("routed", [True, False])
def test_opcheck_forward(routed, quantize, save, dtype):
    """With a mask that selects all: opcheck compares lists to their ends, and past a row's count they are undefined."""
    query, key, value, _, block_mask, alpha = draw(OPCHECK._replace(dtype=dtype, selected="all"))
    protected = torch.arange(3, device=DEVICE) == 2
    router = drawn_router(OPCHECK, 2, protected)
    chooser = (None, router.proj_q, router.proj_k, protected, 2) if routed else (block_mask, None, None, None, 0)
    leaves = [x.clone().requires_grad_(save) for x in (query, key, value, alpha)]
    arguments = (*leaves, *chooser, quantize, 0.125, save)
    torch.library.opcheck(torch.ops.sage_kernels.sla2_forward.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", TRAINED)
def test_opcheck_backward(level, dtype):
    case = OPCHECK._replace(dtype=dtype)
    query, key, value, grad_output, block_mask, alpha = draw(case)
    prepared, result = run_level(case, level)
    saved = result.sparse_output, result.log_sum_exp, prepared.inputs.sums, *prepared.inputs.lists, prepared.k_mean
    arguments = (grad_output, query, key, value, alpha, block_mask, *saved, 0.125)
    torch.library.opcheck(torch.ops.sage_kernels.sla2_backward.default, arguments)


# opcheck's fake tensors aren't compared where nothing is saved for a gradient, nor their values' places in the list.
@pytest.mark.parametrize(("head_dim", "n_q", "n_k"), [(48, 1, 1), (33, 130, 300)])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("routed", [True, False])
def test_fake_results_are_shaped_like_the_real_ones(routed, quantize, head_dim, n_q, n_k):
    case = Case(n_q, n_k, "half", head_dim, 2, 1)
    query, key, value, _, block_mask, alpha = draw(case)
    router = drawn_router(case, 1)
    chooser = (None, router.proj_q, router.proj_k, None, 1) if routed else (block_mask, None, None, None, 0)

    def described(results):
        return [(x.shape, x.stride(), x.dtype, x.device) for x in results]

    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [
            mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in (query, key, value, alpha, *chooser)
        ]
        fake = described(sla2_ops.forward(*fakes, quantize, 0.125, True))
    real = described(sla2_ops.forward(query, key, value, alpha, *chooser, quantize, 0.125, True))
    assert fake == real
    assert len(real) == 6 + routed + quantize


# Autograd


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", TRAINED)
@pytest.mark.parametrize("scale", [None, -0.3, 0])
def test_results_are_the_ladders(scale, level, dtype):
    case = SMALL._replace(dtype=dtype, scale=scale)
    result = run_level(case, level)
    gradients = run_gradients(case, level, result=result)
    found = with_gradients(draw(case), scale=scale, quantize=level == LEVEL_INT8)
    assert all_equal(found, (result.forward.output, *gradients))


def test_masks_and_alphas_are_broadcast_and_alphas_gradient_is_summed_in_its_dtype():
    tensors = draw(SMALL)
    block_mask = tensors.block_mask[:, :1, :1]
    expanded = tensors._replace(block_mask=block_mask.expand(tensors.block_mask.shape).contiguous())
    for dtype in (torch.float32, torch.float16):
        alpha = torch.tensor([[0.3], [0.8]], device=DEVICE, dtype=dtype, requires_grad=True)
        output = attention(*tensors[:3], block_mask, alpha)
        (dalpha,) = torch.autograd.grad(output, alpha, tensors.grad_output)
        wide = alpha.detach().float().expand(tensors.alpha.shape).contiguous()
        expected = with_gradients(expanded._replace(alpha=wide))
        assert torch.equal(output, expected[0])
        assert dalpha.dtype == dtype
        torch.testing.assert_close(dalpha, expected[4].sum((0, 2))[:, None].to(dtype))
    assert torch.equal(
        attention(*tensors[:3], block_mask, 0.8)[:, 1],
        with_gradients(expanded._replace(alpha=torch.full_like(tensors.alpha, 0.8)))[0][:, 1],
    )


@pytest.mark.parametrize("needed", range(4))
def test_inputs_without_gradients(needed):
    tensors = draw(SMALL)
    leaves = [x.detach().requires_grad_(i == needed) for i, x in enumerate((*tensors[:3], tensors.alpha))]
    attention(*leaves[:3], tensors.block_mask, leaves[3]).backward(tensors.grad_output)
    everything = with_gradients(tensors)[1:]
    for i, (leaf, gradient) in enumerate(zip(leaves, everything, strict=True)):
        assert torch.equal(leaf.grad, gradient) if i == needed else leaf.grad is None


@pytest.mark.parametrize("quantize", [True, False])
def test_the_backward_pass_fills_no_gradients_of_what_it_saved(quantize):
    tensors = draw(SMALL)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    output = attention(*leaves, *tensors[4:], quantize=quantize)
    with Calls() as calls:
        torch.autograd.grad(output, leaves, tensors.grad_output)
    assert any(name.startswith("sla2_backward") for name in calls.names)
    assert not [name for name in calls.names if "zero" in name or "full" in name]


def test_no_gradient_comes_of_a_constant():
    tensors = draw(Case(5, 5))
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    Constant.apply(attention(*leaves, *tensors[4:])).sum().backward()
    assert [x.grad for x in leaves] == [None] * 3


@pytest.mark.parametrize("routed", [True, False])
def test_without_a_gradient_nothing_is_kept(routed, monkeypatch):
    tensors, saves, original = draw(SMALL), [], sla2_ops.forward

    def spy(*arguments):
        saves.append(arguments[-1])
        results = original(*arguments)
        assert arguments[-1] or len(results) == 1
        return results

    monkeypatch.setattr(sla2_ops, "forward", spy)
    module = module_for(SMALL)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]

    def call(query, key, value):
        return module(query, key, value) if routed else attention(query, key, value, *tensors[4:])

    with torch.no_grad():
        first = call(*leaves)
    assert not first.requires_grad
    module.requires_grad_(False)
    second = call(*tensors[:3])
    assert not second.requires_grad
    third = call(*leaves)
    assert third.requires_grad
    assert saves == [False, False, True]
    assert all_equal((first, second), (third, third))


def test_a_second_derivative_is_an_error():
    tensors = draw(Case(5, 5))
    query = tensors.query.clone().requires_grad_()
    output = attention(query, *tensors[1:3], *tensors[4:])
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="sage_kernels.*no autograd formula"):
        gradient.sum().backward()


@pytest.mark.parametrize("quantize", [True, False])
def test_bytes_kept_for_the_backward_pass(quantize):
    """Q, K, V, O_s in 16 bit, L, alpha, H and Z of every query block, mask and lists; the mean key."""
    case = Case(200, 300, "half", 64)
    tensors, dp = draw(case), padded_head_dim(case.head_dim)
    (_, _, rows, columns), head_dim = case.blocks, case.head_dim
    per_head = 2 * head_dim * (2 * case.n_q + 2 * case.n_k) + 4 * padded_length(case.n_q)
    per_head += rows * (4 + sums_dtype(tensors.query).itemsize * dp * (dp + 1) + columns + 4 * columns + 4)
    per_head += 4 * head_dim * quantize
    kept = bytes_kept_for_backward(
        lambda query, key, value: attention(query, key, value, *tensors[4:], quantize=quantize), *tensors[:3]
    )  # fmt: skip
    assert kept == case.heads * per_head


# The module


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("protecting", [True, False])
def test_the_module_gives_what_the_reference_backend_does(protecting, quantize):
    """Same blocks, same output, same gradients, alpha's logits included; projections, GQA, an alpha per block."""
    case = Case(140, 200, "half", 32, 2, 1)
    protect = torch.arange(case.n_k, device=DEVICE) >= case.n_k - 1 if protecting else None
    query, key, value, grad_output, _, _ = draw(case)
    results = []
    for backend in ("triton", "reference"):
        module = module_for(case, backend=backend, quantize=quantize, query_blocks=2)
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = module(*leaves, protect)
        output.backward(grad_output)
        assert all(weight.grad is None for weight in module.router.parameters())
        results.append((output.detach(), *(x.grad for x in leaves), module.alpha_logit.grad))
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert relative_l2(found, expected) <= CLOSE


@pytest.mark.parametrize(("sparsity", "quantize"), [(0.0, False), (0.5, False), (0.5, True), (0.97, True)])
def test_the_module_selects_the_blocks_of_the_reference_router(sparsity, quantize):
    """Compared bit by bit with the operation under that mask; the router has no gradient even if asked for one."""
    case = Case(130, 200, "half", 32, 2, 1)
    module = module_for(case, sparsity=sparsity, quantize=quantize)
    module.router.requires_grad_(True)
    query, key, value, _, _, _ = draw(case)
    expected = module.block_mask(*in_working_dtype(query, key))
    output = module(query, key, value)
    alpha = module.alpha(1, case.blocks[2]).detach()
    assert torch.equal(output, attention(query, key, value, expected, alpha, quantize=quantize))
    output.sum().backward()
    assert all(weight.grad is None for weight in module.router.parameters())
    assert module.alpha_logit.grad.isfinite().all()


# torch.compile, CUDA graphs, autocast


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's workers fork
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("call", ["attention", "quantised", "module"])
def test_compiled_without_a_graph_break(call, compiler, fresh_dynamo):
    tensors = draw(OPCHECK)
    if call == "module":
        module = module_for(OPCHECK, quantize=True)
        with torch.no_grad():  # alphas of 1/2 and 1: the sigmoid is exact, in a fused program too
            module.alpha_logit.copy_(torch.tensor([0.0, 200.0]).view_as(module.alpha_logit))
        eager, extra = (lambda query, key, value, *_: module(query, key, value)), [module.alpha_logit]
    else:
        eager = functools.partial(attention, quantize=call == "quantised")
        extra = [tensors.alpha.clone().requires_grad_()]
    results = []
    for function in (eager, torch.compile(eager, fullgraph=True, backend=compiler)):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        output = function(*leaves, tensors.block_mask, extra[0])
        results.append((output, *torch.autograd.grad(output, leaves + extra, tensors.grad_output)))
    *found, dalpha = zip(*results, strict=True)
    assert all(torch.equal(*pair) for pair in found)
    assert torch.equal(*dalpha) or call == "module"  # whose gradient goes on through a sigmoid
    torch.testing.assert_close(*dalpha)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [True, False])
def test_cuda_graph(quantize):
    case = Case(300, 500, "half", 64, 4, 2)
    module = module_for(case, quantize=quantize)
    query, key, value, grad_output, _, _ = draw(case)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    static_gradient = grad_output.clone()

    def step():
        output = module(*leaves)
        return output, *torch.autograd.grad(output, [*leaves, module.alpha_logit], static_gradient)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [x.detach() for x in step()]  # what the graph of autograd keeps belongs to the capture's stream
    others = draw(case._replace(std=2.0))
    with torch.no_grad():
        for static, x in zip((*leaves, static_gradient), others, strict=False):
            static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert all_equal(results, [x.detach() for x in step()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("routed", [True, False])
def test_autocast(routed, quantize, dtype):
    """float32 inputs are cast to the autocast type; router, sums and alpha keep theirs; gradients are in float32."""
    tensors = draw(SMALL._replace(dtype=dtype))
    module = module_for(SMALL, quantize=quantize)

    def call(leaves):
        return module(*leaves) if routed else attention(*leaves, *tensors[4:], quantize=quantize)

    with torch.autocast(DEVICE.type, dtype):
        leaves = [x.float().requires_grad_() for x in tensors[:3]]
        output = call(leaves)
        gradients = torch.autograd.grad(output, leaves, tensors.grad_output)
    assert output.dtype == dtype
    assert all(x.dtype == torch.float32 for x in gradients)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    expected = call(leaves)
    assert torch.equal(output, expected)
    assert all_equal(gradients, [x.float() for x in torch.autograd.grad(expected, leaves, tensors.grad_output)])


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [True, False])
def test_no_kernel_is_compiled_again_for_another_length(quantize):
    def step(n_q, n_k, head_dim=64):
        with_gradients(draw(Case(n_q, n_k, "half", head_dim)), quantize=quantize)

    programs = (sparse_forward_program, key_block_program, sequence_mean_program, _quantize_kernel)
    programs += (linear_query_program, query_program, key_program)

    def count():
        return sum(len(cache[0]) for program in programs for cache in program.device_caches.values())

    step(113, 113)
    before = count()
    for n_q, n_k in product((1, 16, 120, 128, 400), (1, 113, 128, 1024)):
        step(n_q, n_k)
    assert count() == before
    step(113, 113, 56)
    assert count() > before


# Which backend runs


def test_auto_takes_the_kernels_where_they_can_run(monkeypatch):
    calls, original = [], sla2_ops.attention
    monkeypatch.setattr(sla2_ops, "attention", lambda *x: calls.append(type(x[3])) or original(*x))
    query, key, value, _, block_mask, alpha = draw(SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_linear_attention(query, key, value, block_mask, alpha)
        module_for(SMALL, backend="auto")(query, key, value)
    assert calls == [torch.Tensor, Routing]


TYPES = "torch.float16 or torch.bfloat16" if ON_GPU else "torch.float16"
REFUSED = [
    (Case(3, 3, dtype=torch.float32), {}, f"the kernels need dtype {TYPES}, and query has torch.float32"),
    (Case(3, 3, head_dim=16), {}, "the kernels need a head size from 32 to 128, and query has 16"),
    (Case(3, 3, head_dim=256), {}, "the kernels need a head size from 32 to 128, and query has 256"),
    (Case(3, 3), {"block_q": 64}, "the kernels need blocks of 128 x 64, and got 64 x 64"),
    (Case(3, 3), {"block_kv": 128}, "the kernels need blocks of 128 x 64, and got 128 x 128"),
]
if not ON_GPU:
    bfloat16 = Case(3, 3, dtype=torch.bfloat16)
    REFUSED.append((bfloat16, {}, "the kernels need dtype torch.float16, and query has torch.bfloat16"))


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize(("case", "blocks", "reason"), REFUSED, ids=str)
def test_what_the_kernels_cannot_do_is_an_error_if_asked_for_and_else_the_references(case, blocks, reason, routed):
    query, key, value, _, block_mask, alpha = draw(case)

    def call(backend):
        if routed:
            module = SLA2(case.head_dim, case.heads, quantize=False, backend=backend, **blocks).to(DEVICE)
            return module(query, key, value)
        return sparse_linear_attention(query, key, value, block_mask, alpha, backend=backend, **blocks)

    with pytest.raises(ValueError, match=re.escape(f"backend: expected 'triton' to be usable, but {reason}")):
        call("triton")
    ops._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [call("auto") for _ in range(2)]
    assert [str(w.message) for w in caught] == [f"sage_ref: backend='auto' uses the reference, because {reason}."]
    assert all_equal(outputs, [call("reference")] * 2)


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_not_for_the_gpu():
    query, key, value, _, block_mask, alpha = (x.cpu() for x in draw(Case(3, 3)))
    with pytest.raises(ValueError, match=r"the kernels need a CUDA tensor .*, and query is on cpu"):
        attention(query, key, value, block_mask, alpha)


def test_inputs_are_left_as_they_were():
    tensors = draw(SMALL)
    before = [x.clone() for x in tensors]
    with_gradients(tensors, quantize=True)
    assert all_equal(tensors, before)


# What NaN and infinity do: head 1 of 2 in batch 1 of 2 holds one


NAN_CASE = Case(130, 90, "mixed", 32, 2, 2, batch=2)


@functools.cache
def without_nan(quantize):
    return with_gradients(draw(NAN_CASE), quantize=quantize)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")  # the interpreter's inf - inf
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("name", "token", "bad"),
    [
        ("query", 0, math.nan), ("query", 129, math.inf), ("key", 80, math.nan), ("key", 3, math.inf),
        ("value", 80, math.inf), ("value", 3, math.nan),
    ],
)  # fmt: skip
def test_nan_goes_where_the_docstring_says_and_nowhere_else(name, token, bad, quantize):
    clean = without_nan(quantize)
    tensors = draw(NAN_CASE)._replace(**{name: getattr(draw(NAN_CASE), name).clone()})
    getattr(tensors, name)[1, 1, token, 3] = bad
    output, dq, *rest = with_gradients(tensors, quantize=quantize)
    first = token // MASK_BLOCK_Q * MASK_BLOCK_Q
    touched = slice(first, first + MASK_BLOCK_Q) if name == "query" else slice(0, None)
    sure = slice(token, token + 1) if name == "query" else touched
    for rows, before in ((output, clean[0]), (dq, clean[1])):
        assert (~rows[1, 1, sure].isfinite()).any(-1).all()
        expected = before.clone()
        expected[1, 1, touched] = rows[1, 1, touched]
        assert torch.equal(rows.nan_to_num(7), expected.nan_to_num(7))
    for gradient, before in zip(rest, clean[2:], strict=True):
        assert torch.equal(gradient[0], before[0])
        assert torch.equal(gradient[1, 0], before[1, 0])
    dk, _, dalpha = (gradient[1, 1] for gradient in rest)
    assert not dk.isfinite().all()
    assert not dalpha.isfinite().all()


@pytest.mark.parametrize("quantize", [True, False])
def test_nan_in_a_query_leaves_the_choice_of_other_blocks_of_queries_alone(quantize):
    case = Case(130, 200, "half", 32, 2, 1)
    module = module_for(case, quantize=quantize)
    query, key, value, _, _, _ = draw(case)
    clean = module(query, key, value)
    query = query.clone()
    query[0, 1, 3, 0] = math.nan
    output = module(query, key, value)
    assert output[0, 1, 3].isnan().all()
    touched = torch.zeros(output.shape[:3], dtype=torch.bool, device=DEVICE)
    touched[0, 1, :MASK_BLOCK_Q] = True
    assert torch.equal(output[~touched], clean[~touched])


def test_nan_in_a_shared_key_stays_with_the_queries_of_its_group():
    tensors = draw(Case(20, 20, "half", 32, 4, 2))
    clean = attention(*tensors[:3], *tensors[4:])
    key = tensors.key.clone()
    key[0, 1, 3] = math.nan
    output = attention(tensors.query, key, tensors.value, *tensors[4:])
    assert torch.equal(output[:, :2], clean[:, :2])
    assert output[:, 2:].isnan().all()
