"""The registered operations: autograd, torch.compile, CUDA graphs, autocast; what they save, refuse, make of NaN."""

import functools
import math
import re
import sys
import warnings
from itertools import cycle, product

import kernel_cases
import pytest
import sla2_cases
import torch
import torch.nn.functional as F
from kernel_cases import (
    DEVICE,
    DTYPES,
    EVERY_DTYPE,
    MARKS,
    ON_GPU,
    PER_BLOCK,
    Calls,
    Constant,
    all_equal,
    fill_cache,
    heads_last,
    on_the_cpu,
    prologue_for,
)
from sage_course.teaching import bytes_kept_for_backward
from sage_kernels import hopper
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.quantize import SCALE_BLOCK, padded_head_dim, padded_length, quantize_program
from sage_kernels.sagebwd import ops as sagebwd_ops
from sage_kernels.sagebwd.prologue import NO_PROLOGUE
from sage_kernels.sla2 import ops as sla2_ops
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_kernels.sla2.sums import padded_columns, sums_dtype
from triton.runtime.jit import JITFunction

from sage_ref import SLA, SLA2, sagebwd_attention, sparse_linear_attention
from sage_ref import backend as ops
from sage_ref.tracing import relative_l2

pytestmark = MARKS
HEAD_DIM = 64 if ON_GPU else 32


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """On a GPU, compile beforehand and in parallel what the tests below run."""
    if ON_GPU:
        run_level = kernel_cases.run_backward_level
        jobs = [
            (run_level, case, sagebwd_ops.backward_level(DEVICE, head_dim, is_causal, granularity))
            for head_dim, kv_heads, is_causal, dtype in product((32, 64, 96, 128), (2, 1), (False, True), DTYPES)
            for case in [SageBwd.Case(20, 20, head_dim, 2, kv_heads, is_causal, dtype)]
            for granularity in ("row", "block")
        ]
        jobs += [
            (Sla2(quantize, routed=False).of_the_ladder, Sla2.Case(20, 20, "half", head_dim, 2, kv_heads, dtype))
            for head_dim, kv_heads, dtype, quantize in product((32, 64, 128), (2, 1), DTYPES, (False, True))
        ]
        jobs += [
            (with_gradients, operation, case._replace(dtype=dtype))
            for operation, case, dtype in product(PROLOGUES, ROTATED, DTYPES)
        ]
        fill_cache(jobs)


# The two operations, described alike for the tests of both


class SageBwd:
    """`sagebwd_attention`; its cases say whether it is causal, its scale and whether K is smoothed.

    norm: None, or a prologue with QK-norm or without.
    """

    Case = kernel_cases.Case
    tiny = Case(20, 40, HEAD_DIM, 2, 1, is_causal=True)
    ragged = Case(3, 130, 48, 2, 1)
    kernel = torch.ops.sage_kernels.forward.default
    backward_kernel = torch.ops.sage_kernels.backward.default
    prologue_kernel = torch.ops.sage_kernels.prologue_backward.default

    def __init__(self, granularity="row", norm=None):
        self.granularity, self.norm = granularity, norm

    def __repr__(self):
        return f"sagebwd-{self.granularity}" if self.norm is None else f"rotated{'-normed' * self.norm}"

    def prologue(self, case):
        return None if self.norm is None else prologue_for(case, self.norm)

    def inputs(self, case):
        """Return what gets a gradient: Q, K, V, and the gains of a prologue with QK-norm."""
        return *kernel_cases.draw(case)[:3], *(self.prologue(case)[2:4] if self.norm else ())

    def grad_output(self, case):
        return kernel_cases.draw(case)[3]

    def on(self, case, backend="triton", **options):
        """Return the public function of the inputs, with everything else as a case says."""
        options |= {"is_causal": case.is_causal, "scale": case.scale, "smooth_k": case.smooth_k}
        options |= {"unbiased": case.unbiased, "granularity": self.granularity, "enable_gqa": True, "backend": backend}
        prologue = self.prologue(case)

        def call(query, key, value, *gains):
            given = prologue._replace(query_gain=gains[0], key_gain=gains[1]) if gains else prologue
            return sagebwd_attention(query, key, value, prologue=given, **options)

        return call

    def of_the_ladder(self, case):
        """Return O, dQ, dK, dV."""
        row = sagebwd_ops.backward_level(DEVICE, kernel_cases.SMALL.head_dim, case.is_causal)
        level = PER_BLOCK if self.granularity == "block" else row
        forward = kernel_cases.run_forward_level(case, kernel_cases.feeding(level, case))
        return forward.output, *kernel_cases.run_backward_level(case, level, forward=forward)

    def registered(self, case, layout=lambda x: x):
        """Return (kernel, arguments) of what is registered, each in the first of the operations that has it."""
        query, key, value, grad_output = (layout(x) for x in kernel_cases.draw(case))
        prologue = self.prologue(case) or NO_PROLOGUE
        forward = query, key, value, case.is_causal, 0.125, True, *prologue
        if self.norm is not None:
            raw = (query, key) if self.norm else (None, None)
            return [(self.kernel, (*forward, False)), (self.prologue_kernel, (grad_output, key, *raw, *prologue))]
        backward = grad_output, value, *self.kernel(*forward, False), case.is_causal, 0.125, self.granularity
        forwards = [(self.kernel, (*forward, unbiased)) for unbiased in (False, True)]
        return forwards * (self.granularity == "row") + [(self.backward_kernel, backward)]


class Sla2:
    """`sparse_linear_attention`, or if routed the module, whose router chooses the blocks."""

    Case = sla2_cases.Case
    tiny = Case(20, 70, "half", 32, 2, 1)
    ragged = Case(3, 130, "all", 48, 2, 1)  # opcheck compares lists to their ends: past a row's count are no numbers
    kernel = torch.ops.sage_kernels.sla2_forward.default
    backward_kernel = torch.ops.sage_kernels.sla2_backward.default

    def __init__(self, quantize=False, routed=False):
        self.quantize, self.routed = quantize, routed

    def __repr__(self):
        return "-".join(["sla2", "int8" if self.quantize else "16bit", *["routed"] * self.routed])

    def inputs(self, case):
        """Return what gets a gradient: Q, K, V, alpha."""
        tensors = sla2_cases.draw(case)
        return (*tensors[:3], self.module(case).alpha_logit.detach() if self.routed else tensors.alpha)

    def grad_output(self, case):
        return sla2_cases.draw(case).grad_output

    def on(self, case, backend="triton", **options):
        """Return the public function, or the module, of the inputs, with everything else as a case says."""
        if self.routed:
            module = self.module(case, backend=backend, **options)
            return lambda *qkv_alpha: torch.func.functional_call(module, {"alpha_logit": qkv_alpha[3]}, qkv_alpha[:3])
        block_mask = sla2_cases.draw(case).block_mask
        options |= {"scale": case.scale, "quantize": self.quantize, "backend": backend}
        options["backward"] = "matched" if case.matched else "printed"
        return lambda query, key, value, alpha: sparse_linear_attention(query, key, value, block_mask, alpha, **options)

    def module(self, case, *, backend="triton", sparsity=0.5, query_blocks=1, **options):
        """Return an SLA2 whose projections aren't the identity and whose alphas differ."""
        options |= {"sparsity": sparsity, "query_blocks": query_blocks, "quantize": self.quantize, "backend": backend}
        module = SLA2(case.head_dim, case.heads, **options).to(DEVICE)
        router = sla2_cases.drawn_router(case, 1)
        with torch.no_grad():
            module.router.proj_q.weight.copy_(router.proj_q)
            module.router.proj_k.weight.copy_(router.proj_k)
            module.alpha_logit.copy_(torch.linspace(-1, 2, module.alpha_logit.numel()).view_as(module.alpha_logit))
        return module

    def of_the_ladder(self, case):
        """Return O, dQ, dK, dV, dalpha."""
        level, level_of_backward = self.level(case), sla2_ops.backward_level(DEVICE, case.head_dim)
        result = sla2_cases.run_level(case, level)
        gradients = sla2_cases.run_gradients(case, level, result=result, level_of_backward=level_of_backward)
        return result.forward.output, *gradients

    def level(self, case):
        return sla2_ops.forward_level(DEVICE, case.head_dim, self.quantize)

    def registered(self, case, layout=lambda x: x):
        """Return (kernel, arguments) of what is registered."""
        tensors = sla2_cases.draw(case)
        tensors = tensors._replace(query=layout(tensors.query), key=layout(tensors.key))
        query, key, value, grad_output, block_mask, alpha = tensors
        router = sla2_cases.drawn_router(case, min(2, case.blocks[3]))
        chooser = (None, *router) if self.routed else (block_mask, None, None, 0)
        arguments = query, key, value, alpha, *chooser, self.quantize
        kinds = [(True, True), (False, True)] if self.quantize else [(False, True), (False, False)]  # matched, save
        calls = [(self.kernel, (*arguments, matched, 0.125, save)) for matched, save in kinds]
        if not self.routed:
            weights = 0.25 + 0.5 * block_mask.float()
            if not self.quantize:
                calls.append((self.kernel, (*arguments[:4], weights, *arguments[5:], False, 0.125, True)))
            prepared, forward = sla2_cases.run_level(case, self.level(case), tensors)
            lists, complement = prepared.choice.lists, prepared.choice.complement
            saved = forward.sparse_output, forward.log_sum_exp, prepared.inputs.sums, *lists, complement
            backward = grad_output, query, key, value, alpha, block_mask, *saved
            smoothed = [(prepared.k_mean, *[None] * 4)]  # as printed; then matched
            if self.quantize:
                copies = prepared.inputs.q_hat, prepared.inputs.k_hat
                smoothed.append((None, *(x for copy in copies for x in (copy.values, copy.scale))))
            for of_weights, of_copies in product((None, *[weights] * (not self.quantize)), smoothed):
                calls.append((self.backward_kernel, (*backward, of_weights, *of_copies, 0.125)))
        return calls


SAGEBWD, PROLOGUES = [SageBwd("row"), SageBwd("block")], [SageBwd(norm=norm) for norm in (False, True)]
MASKED, ROUTED = ([Sla2(quantize, routed) for quantize in (False, True)] for routed in (False, True))


def each_of(*operations):
    return pytest.mark.parametrize("operation", operations, ids=repr)


ONE_OF_EACH = each_of(SAGEBWD[0], MASKED[0])
ALL = each_of(*SAGEBWD, *PROLOGUES, *MASKED, *ROUTED)


def with_requested_gradients(inputs):
    return [x.detach().clone().requires_grad_() for x in inputs]


def with_gradients(operation, case, inputs=None, grad_output=None, call=None):
    """Return O, and the gradients of all inputs."""
    leaves = with_requested_gradients(operation.inputs(case) if inputs is None else inputs)
    output = (call or operation.on(case))(*leaves)
    grad_output = operation.grad_output(case) if grad_output is None else grad_output
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


results_of = functools.lru_cache(maxsize=32)(with_gradients)


# The registration


@EVERY_DTYPE
@ALL
def test_opcheck(operation, dtype):
    """Fake results, too, have the layouts of the real ones: heads of a token are side by side, as in a model."""
    for kernel, arguments in operation.registered(operation.ragged._replace(dtype=dtype), heads_last):
        torch.library.opcheck(kernel, arguments)


# Autograd


LADDERS = [
    *product(SAGEBWD[:1], [
        {"is_causal": False, "scale": -0.3}, {"is_causal": True}, {"scale": 0}, {"is_causal": False, "smooth_k": False},
        {"unbiased": True, "value_offset": 3.0},
    ]),
    *product(SAGEBWD[1:], [{"is_causal": False, "scale": -0.3}, {"smooth_k": False, "unbiased": True}]),
    *product(MASKED, [{"scale": -0.3}, {"scale": 0}]), (MASKED[0], {}), (MASKED[1], {"matched": True, "head_dim": 64}),
]  # fmt: skip


@EVERY_DTYPE
@pytest.mark.parametrize(("operation", "options"), LADDERS, ids=repr)
def test_results_are_the_ladders(operation, options, dtype):
    case = operation.tiny._replace(dtype=dtype, **options)
    assert all_equal(with_gradients(operation, case), operation.of_the_ladder(case))


OF_LENGTHS = [  # kv_heads, causal, granularity, smooth_k, unbiased
    (2, True, "row", True, False), (1, False, "row", True, True), (1, True, "block", False, False),
    (2, False, "block", True, False),
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [48, 128] if ON_GPU else [48])
@pytest.mark.parametrize(("kv_heads", "is_causal", "granularity", "smooth_k", "unbiased"), OF_LENGTHS)
def test_sequences_of_several_lengths_have_the_bits_of_each_alone(
    kv_heads, is_causal, granularity, smooth_k, unbiased, head_dim, monkeypatch
):
    """Nothing of their padding, which is NaN, nor of what is not written, is read; both passes, on the same level."""
    monkeypatch.setattr(hopper, "obstacle", lambda *_: "alone on the portable level, too")
    monkeypatch.setattr(sagebwd_ops, "recorded", lambda key, inputs, function: function(start_with_triton))
    lengths = (1, 300, 64, 384, 129, 37) if ON_GPU else (5, 130, 37)
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = [
        torch.randn(len(lengths), heads, max(lengths), head_dim, device=DEVICE, generator=generator).to(DTYPES[-1])
        for heads in (2, kv_heads, kv_heads, 2)
    ]
    for x, n in product(tensors, enumerate(lengths)):
        x[n[0], :, n[1] :] = math.nan
    options = {"is_causal": is_causal, "granularity": granularity, "smooth_k": smooth_k, "unbiased": unbiased}

    def both_passes(*tensors, **lengths):
        *qkv, grad_output = tensors
        qkv = [x.detach().requires_grad_() for x in qkv]
        output = sagebwd_ops.sagebwd_attention(*qkv, scale=0.2, prologue=None, **options, **lengths)
        return output, *torch.autograd.grad(output, qkv, grad_output)

    with kernel_cases.guarded_allocations():
        found = both_passes(*tensors, lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    for i, n in enumerate(lengths):
        alone = both_passes(*(x[i : i + 1, :, :n] for x in tensors))
        assert all_equal([x[i : i + 1, :, :n] for x in found], alone)
        assert not any(x.isnan().any() for x in alone)
        assert all(x[i, :, n:].isnan().all() for x in found)  # not written


@each_of(SAGEBWD[0], PROLOGUES[0], MASKED[0], ROUTED[0])
def test_an_expanded_gradient(operation):
    leaves = with_requested_gradients(operation.inputs(operation.tiny))
    operation.on(operation.tiny)(*leaves).sum().backward()
    ones = torch.ones_like(operation.grad_output(operation.tiny))
    assert all_equal([x.grad for x in leaves], with_gradients(operation, operation.tiny, grad_output=ones)[1:])


@each_of(SAGEBWD[0], PROLOGUES[1], MASKED[0])
def test_inputs_without_gradients(operation):
    case = operation.tiny
    everything = results_of(operation, case)[1:]
    for needed in range(len(everything)):
        leaves = [x.detach().requires_grad_(i == needed) for i, x in enumerate(operation.inputs(case))]
        operation.on(case)(*leaves).backward(operation.grad_output(case))
        for i, (leaf, gradient) in enumerate(zip(leaves, everything, strict=True)):
            assert torch.equal(leaf.grad, gradient) if i == needed else leaf.grad is None


@ALL
def test_inputs_are_left_as_they_were_and_no_gradient_of_what_was_saved_is_filled(operation):
    inputs, grad_output = operation.inputs(operation.tiny), operation.grad_output(operation.tiny)
    before = [x.clone() for x in (*inputs, grad_output)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = operation.on(operation.tiny)(*leaves)
    with Calls() as calls:
        torch.autograd.grad(output, leaves, grad_output)
    assert all_equal((*inputs, grad_output), before)
    ours = [name for name in calls.names if name.removeprefix("sla2_").startswith(("backward", "prologue_backward"))]
    assert len(ours) == 1 + (operation in PROLOGUES)
    assert operation in ROUTED or not [name for name in calls.names if "zero" in name or "full" in name]


@ONE_OF_EACH
def test_no_gradient_comes_of_a_constant(operation):
    leaves = with_requested_gradients(operation.inputs(operation.tiny))
    Constant.apply(operation.on(operation.tiny)(*leaves)).sum().backward()
    assert not any(x.grad is not None for x in leaves)


@each_of(SAGEBWD[0], PROLOGUES[1], MASKED[0])
def test_a_second_derivative_is_an_error(operation):
    leaves = with_requested_gradients(operation.inputs(operation.tiny))
    output = operation.on(operation.tiny)(*leaves)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        gradient.sum().backward()


@each_of(SAGEBWD[0], MASKED[0], ROUTED[0])
def test_without_a_gradient_nothing_is_recorded_nor_kept(operation):
    inputs, kept = operation.inputs(operation.tiny), []
    call, leaves = operation.on(operation.tiny), with_requested_gradients(inputs)

    class Saves(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            results = function(*arguments, **(options or {}))
            if function is operation.kernel:
                kept.append(len(results) > 1)
            return results

    with Saves():
        with torch.no_grad():
            first = call(*leaves)
        second, third = call(*inputs), call(*leaves)
    assert [x.requires_grad for x in (first, second, third)] == [False, False, True]
    assert operation in SAGEBWD or kept == [False, False, True]
    assert all_equal((first, second), (third, third))


@pytest.mark.parametrize(("operation", "head_dim"), [*product(SAGEBWD[:1], (64, 128)), *product(PROLOGUES, (64,))])
def test_bytes_sagebwd_keeps_for_the_backward_pass(operation, head_dim):
    """6 D + 4 per token and head, and one float32 per block of Q, of K and of V; FlashAttention keeps 8 D + 4.

    With a prologue, the model's tables as well; with QK-norm, Q and K in 16 bit and the gains.
    """
    case = SageBwd.Case(256, 256, head_dim)
    blocks = (case.n_q + 2 * case.n_k) // SCALE_BLOCK
    expected = case.heads * (case.n_q * (6 * head_dim + 4) + 4 * blocks)
    if operation.norm is not None:
        expected += sum(x.numel() * x.itemsize for x in operation.prologue(case)[:2])
    if operation.norm:
        expected += 2 * 2 * case.heads * case.n_q * head_dim + 2 * 4 * head_dim
    *qkv, gains = *operation.inputs(case)[:3], operation.inputs(case)[3:]
    assert bytes_kept_for_backward(lambda *x: operation.on(case)(*x, *gains), *qkv) == expected


@pytest.mark.parametrize(("operation", "matched"), [(MASKED[0], False), (MASKED[1], False), (MASKED[1], True)])
def test_bytes_sla2_keeps_for_the_backward_pass(operation, matched):
    """Q, K, V, O_s in 16 bit, L, alpha, H and Z of every query block, mask, lists and complement.

    After a forward pass in INT8 also the mean key or, matched, Q^, K^ and the scales of their blocks.
    """
    case = Sla2.Case(200, 300, "half", 64, matched=matched)
    *inputs, alpha = operation.inputs(case)
    (_, _, rows, columns), head_dim, dp = case.blocks, case.head_dim, padded_head_dim(case.head_dim)
    per_head = 2 * head_dim * (2 * case.n_q + 2 * case.n_k) + 4 * padded_length(case.n_q)
    in_sums_dtype = dp * (dp + 1) + padded_columns(columns)
    per_head += rows * (4 + sums_dtype(inputs[0]).itemsize * in_sums_dtype + columns + 4 * columns + 4)
    if matched:
        lengths = ((padded_length(case.n_q), MASK_BLOCK_Q), (padded_length(case.n_k), MASK_BLOCK_KV))
        per_head += sum(dp * n + 4 * n // block for n, block in lengths)
    else:
        per_head += 4 * head_dim * operation.quantize
    attention = operation.on(case)
    assert bytes_kept_for_backward(lambda *qkv: attention(*qkv, alpha), *inputs) == case.heads * per_head


def test_broadcast_masks_and_alphas_are_as_good_as_expanded_ones():
    query, key, value, _, block_mask, alpha = sla2_cases.draw(Sla2.Case(130, 70, "mixed", 32, 2, 1))
    whole = block_mask[:, :1, :1].expand(block_mask.shape), alpha[:, :1].expand(alpha.shape)
    outputs = (
        sparse_linear_attention(query, key, value, *both, backend="triton")
        for both in (whole, [x.contiguous() for x in whole])
    )
    assert all_equal(*([x] for x in outputs))


# The modules


@pytest.mark.parametrize("operation", ROUTED)
def test_the_module_gives_what_the_reference_backend_does(operation):
    """Same blocks, same output, same gradients, alpha's logits included; projections, GQA, an alpha per block."""
    case = Sla2.Case(140, 200, "half", 32, 2, 1)
    results = []
    for backend in ("triton", "reference"):
        module = operation.module(case, backend=backend, query_blocks=2)
        leaves = with_requested_gradients(operation.inputs(case)[:3])
        output = module(*leaves)
        output.backward(operation.grad_output(case))
        assert all(weight.grad is None for weight in module.router.parameters())
        results.append((output.detach(), *(x.grad for x in leaves), module.alpha_logit.grad))
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert relative_l2(found, expected) <= (1e-2 if ON_GPU else 2e-3)  # bfloat16 sums on a GPU


@on_the_cpu
def test_sla_by_the_kernels_is_the_references():
    """O_s with alpha = 1, O_l with alpha = 0, forward and backward."""
    found, inputs = [], [torch.randn(1, 1, 128, 32) for _ in range(4)]
    for backend in ("reference", "triton"):
        sla = SLA(32, 1, sparsity=0.5, backend=backend)
        torch.nn.init.eye_(sla.proj.weight)  # at its start, 0, the linear branch has no effect
        q, k, v, do = (x.half().requires_grad_() for x in inputs)
        output = sla(q, k, v)
        found.append((output, *torch.autograd.grad(output, (q, k, v, sla.proj.weight), do.detach())))
    assert all(relative_l2(x, y) < 4e-3 for x, y in zip(*found, strict=True))


# torch.compile, CUDA graphs, autocast


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def every_compiler(test):
    test = pytest.mark.filterwarnings("ignore::DeprecationWarning")(test)  # inductor's workers fork
    compilers = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]
    return pytest.mark.parametrize("compiler", compilers)(pytest.mark.usefixtures("fresh_dynamo")(test))


@every_compiler
def test_compiled_without_a_graph_break_at_any_length(compiler):
    """One graph up to 128 tokens (one scale per head), one beyond (several); then no length compiles anything."""
    operation, case = SAGEBWD[0], SageBwd.tiny
    call = operation.on(case)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiler)

    def agree(n):
        results = (with_gradients(operation, case._replace(n_q=n, n_k=n), call=x) for x in (compiled, call))
        return all_equal(*results)

    assert all(agree(n) for n in (20, 130))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert all(agree(n) for n in (128, 150))


@every_compiler
@each_of(*PROLOGUES, *MASKED, ROUTED[1])
def test_compiled_without_a_graph_break(operation, compiler):
    case, call, inputs = operation.tiny, operation.on(operation.tiny), operation.inputs(operation.tiny)
    if operation in ROUTED:  # alphas of 1/2 and 1: the sigmoid is exact, in a fused program too
        inputs = *inputs[:3], torch.tensor([0.0, 200.0], device=DEVICE).view_as(inputs[3])
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    *found, last = zip(*(with_gradients(operation, case, inputs, call=x) for x in (call, compiled)), strict=True)
    assert all(torch.equal(*pair) for pair in found)
    assert torch.equal(*last) or operation in ROUTED  # whose alpha's gradient goes on through a sigmoid
    torch.testing.assert_close(*last)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", [SAGEBWD[0], *ROUTED], ids=repr)
def test_cuda_graph(operation):
    case = Sla2.Case(300, 500, "half", 64, 4, 2) if operation in ROUTED else kernel_cases.SMALL
    call, leaves = operation.on(case), with_requested_gradients(operation.inputs(case))
    grad_output = operation.grad_output(case).clone()

    def step():
        output = call(*leaves)
        return output, *torch.autograd.grad(output, leaves, grad_output)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [x.detach() for x in step()]  # what the graph of autograd keeps belongs to the capture's stream
    others = case._replace(std=2.0)
    with torch.no_grad():
        for static, x in zip(
            (*leaves, grad_output), (*operation.inputs(others), operation.grad_output(others)), strict=True
        ):
            static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert all_equal(results, with_gradients(operation, others, call=call))


@EVERY_DTYPE
@each_of(SAGEBWD[0], *([*MASKED, *ROUTED] if ON_GPU else [MASKED[1], ROUTED[0]]))
def test_autocast(operation, dtype):
    """The kernels take float32 inputs cast to the autocast type, and gradients come back in float32.

    SLA2's router, sums and alpha keep their type.
    """
    case = operation.tiny._replace(dtype=dtype)
    inputs, grad_output = operation.inputs(case), operation.grad_output(case)
    with torch.autocast(DEVICE.type, dtype):
        leaves = [x.float().detach().requires_grad_() for x in inputs]
        output = operation.on(case)(*leaves)
        assert F.scaled_dot_product_attention(*leaves[:3], enable_gqa=True).dtype == output.dtype == dtype
    gradients = torch.autograd.grad(output, leaves, grad_output)
    assert all(x.dtype == torch.float32 for x in gradients)
    expected = with_gradients(operation, case)
    assert all_equal((output, *gradients), (expected[0], *(x.float() for x in expected[1:])))


def kernels_compiled(operation) -> int:
    """Count what was compiled of an operation's programs.

    Two kinds aren't counted of SLA2: programs of lists, where the number of blocks is a constant, and Hopper's.
    """
    room = "sla2" if operation in MASKED else "sagebwd"
    uncounted = "sla2_list_program", "sla2_top_blocks_program", "sla2_pieces_program"
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(f"sage_kernels.{room}.") and (room == "sagebwd" or not name.endswith("hopper"))
    ]
    programs = {x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    programs = {quantize_program, *(x for x in programs if x.fn.__name__ not in uncounted)}
    return sum(len(cache[0]) for program in programs for cache in program.device_caches.values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operation", "head_dim"), [*product(SAGEBWD[:1], (64, 96, 128)), *product(MASKED, (64,))], ids=str
)
def test_no_kernel_is_compiled_again_for_another_length(operation, head_dim):
    def step(n_q, n_k, head_dim=head_dim):
        with_gradients(operation, operation.Case(n_q, n_k, head_dim=head_dim))

    step(113, 113)
    if operation in SAGEBWD:  # backward level 5 has a program for whole blocks of keys and one for others
        step(128, 128)
    compiled = kernels_compiled(operation)
    for n_q, n_k in product((1, 16, 120, 127, 128, 400), (1, 113, 128, 1024)):
        step(n_q, n_k)
    assert kernels_compiled(operation) == compiled
    step(113, 113, head_dim - 8)
    assert kernels_compiled(operation) > compiled  # another head size is another kernel


# Which backend runs


SAME_ON_BOTH = [
    SageBwd.Case(128, 128, 64),
    SageBwd.Case(128, 128, 128, is_causal=True),
    SageBwd.Case(100, 100, 32, 4, 2, is_causal=True),
    SageBwd.Case(160, 160, 64, is_causal=True),
    SageBwd.Case(100, 160, 96, 4, 1),
    SageBwd.Case(160, 100, 48, 2, 1, is_causal=True),
    SageBwd.Case(64, 200, 128),
    SageBwd.Case(200, 64, 64),
    SageBwd.Case(3, 3, 128, 8, 2, is_causal=True),
    SageBwd.Case(70, 90, 80),
    SageBwd.Case(160, 100, 48, 2, 1, is_causal=True, unbiased=True),
    SageBwd.Case(100, 160, 96, 4, 1, unbiased=True),
]
ROTATED = [
    SageBwd.Case(70, 90, 64, 2, 1, is_causal=True),
    SageBwd.Case(90, 70, 48, 4, 2, batch=2),
    SageBwd.Case(1, 3, 80),
    SageBwd.Case(128, 128, 128, 1, 1, is_causal=True, key_offset=3.0),
    SageBwd.Case(33, 33, 34, smooth_k=False),
    SageBwd.Case(40, 60, 64, scale=-0.3),
    SageBwd.Case(70, 60, 64, 2, 1, is_causal=True, unbiased=True, value_offset=3.0),
]
if ON_GPU:
    ROTATED += [
        SageBwd.Case(1000, 1100, 64, 8, 2, True), SageBwd.Case(1025, 1025, 128, 4, 4, True, batch=2),
        SageBwd.Case(600, 2000, 96, 4, 1),
    ]  # fmt: skip
    ON_BOTH = [*product(SAGEBWD, SAME_ON_BOTH), *product(PROLOGUES, ROTATED)]
else:
    ON_BOTH = [*zip(cycle(SAGEBWD), SAME_ON_BOTH, strict=False), *zip(cycle(PROLOGUES), ROTATED, strict=False)]
    ON_BOTH += [(PROLOGUES[1], ROTATED[0]), (PROLOGUES[0], ROTATED[3])]


@EVERY_DTYPE
@pytest.mark.parametrize(("operation", "case"), ON_BOTH, ids=str)
def test_the_reference_simulates_the_kernels(operation, case, dtype):
    """O and all gradients, end to end, in the defaults of both and with one scale per tile on both.

    They differ by rounding alone: O's last bits reach delta, and a dS near a tie may go to the other side. Where a
    whole tile shares a scale that step is larger: up to 6e-3 of dQ and dK in single shapes that are not here.
    """
    case = case._replace(dtype=dtype)
    calls = (operation.on(case, backend) for backend in ("triton", "reference"))
    results = (with_gradients(operation, case, call=call) for call in calls)
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        allowed = 5e-3 if dtype == torch.bfloat16 or number >= 4 else 4e-3  # 4, 5: of gains
        floor = 0.0 if operation.norm is None else 1e-5
        assert (found.double() - expected.double()).norm() <= allowed * expected.double().norm() + floor


@each_of(SAGEBWD[0], MASKED[0], ROUTED[0])
def test_auto_takes_the_kernels_where_they_can_run(operation):
    inputs = operation.inputs(operation.tiny)
    with warnings.catch_warnings(), Calls() as calls:
        warnings.simplefilter("error")
        auto = operation.on(operation.tiny, backend="auto")(*inputs)
    assert {"forward.default", "sla2_forward.default"} & set(calls.names)
    assert torch.equal(auto, operation.on(operation.tiny)(*inputs))


TYPES = "torch.float16 or torch.bfloat16" if ON_GPU else "torch.float16"
REFUSED = [
    ({"dtype": torch.float32}, f"the kernels need dtype {TYPES}, and query has torch.float32"),
    ({"head_dim": 16}, "the kernels need a head size from 32 to 128, and query has 16"),
    ({"head_dim": 256}, "the kernels need a head size from 32 to 128, and query has 256"),
]
if not ON_GPU:
    REFUSED.append(({"dtype": torch.bfloat16}, "the kernels need dtype torch.float16, and query has torch.bfloat16"))
OPTIONS_REFUSED = [
    (SAGEBWD[0], {"smooth_q": True}, "the kernels don't smooth Q"),
    *product([MASKED[0], ROUTED[0]], [{"block_q": 64}], ["the kernels need blocks of 128 x 64, and got 64 x 64"]),
    *product([MASKED[0], ROUTED[0]], [{"block_kv": 128}], ["the kernels need blocks of 128 x 64, and got 128 x 128"]),
]
EVERY_REFUSED = [
    *((operation, *what, {}, why) for operation, (*what, why) in product([SAGEBWD[0], MASKED[0], ROUTED[0]], REFUSED)),
    *((operation, {}, options, why) for operation, options, why in OPTIONS_REFUSED),
]


@pytest.mark.parametrize(("operation", "changed", "options", "reason"), EVERY_REFUSED, ids=repr)
def test_what_the_kernels_cannot_do_is_an_error_if_asked_for_and_else_the_references(
    operation, changed, options, reason
):
    case = operation.Case(3, 3)._replace(**changed)
    inputs = operation.inputs(case)

    def call(backend):
        return operation.on(case, backend, **options)(*inputs)

    with pytest.raises(ValueError, match=re.escape(f"backend: expected 'triton' to be usable, but {reason}")):
        call("triton")
    ops._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [call("auto") for _ in range(2)]
    assert [str(w.message) for w in caught] == [f"sage_ref: backend='auto' uses the reference, because {reason}."]
    assert all_equal(outputs, [call("reference")] * 2)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"is_causal": 1}, "is_causal: expected a bool, got int"),
        ({"smooth_k": 1}, "smooth_k: expected a bool, got int"),
        ({"scale": True}, "scale: expected a float or None, got bool"),
        ({"granularity": ["row"]}, "granularity: expected one of"),
        ({"backend": "Triton"}, "backend: expected one of"),
    ],
    ids=str,
)
def test_what_is_equal_to_good_options_of_an_earlier_call_is_refused(changed, error):
    """A call like an earlier one is not checked again; 1 is equal to True, and nothing like it."""
    tensors = kernel_cases.draw(SageBwd.tiny)[:3]
    options = {"is_causal": True, "smooth_k": True, "scale": 1.0, "enable_gqa": True, "backend": "triton"}
    for _ in range(2):
        sagebwd_attention(*tensors, **options)
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        sagebwd_attention(*tensors, **options | changed)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which forward mode calls
def test_tensors_unlike_those_of_earlier_calls_are_looked_at_anew():
    query, key, value = kernel_cases.draw(SageBwd.tiny)[:3]
    call = SageBwd().on(SageBwd.tiny)
    expected = call(query, key, value)
    lazy = torch._neg_view(-query)  # a negative sign that is not in memory yet
    assert lazy.is_neg()
    assert torch.equal(call(lazy, key, value), expected)
    with torch.inference_mode():
        made = query.clone()
    assert torch.equal(call(made, key.requires_grad_(), value), expected)
    with pytest.raises(ValueError, match="^key: expected"):
        call(query, key[:, :, :, :16], value)
    with pytest.raises(TypeError, match=r"^query: expected a dense tensor, got torch\.sparse_coo"):
        call(query.to_sparse(), key, value)
    with pytest.raises(ValueError, match="^query: expected reverse mode"), torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(query, query), key, value)


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_not_for_the_gpu():
    x, block_mask = torch.ones(1, 1, 3, 64, dtype=torch.float16), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for call in (sagebwd_attention, functools.partial(sparse_linear_attention, block_mask=block_mask, alpha=0.5)):
        with pytest.raises(ValueError, match=r"the kernels need a CUDA tensor .*, and query is on cpu"):
            call(x, x, x, backend="triton")


# NaN and infinity: head 1 of 2 holds one, in one of two blocks where blocks matter


def with_one_bad_number(operation, case, name, token, bad):
    """Return (results, the same with it): O and all gradients."""
    inputs = dict(zip(("query", "key", "value", "alpha"), operation.inputs(case), strict=False))
    inputs[name] = inputs[name].clone()
    inputs[name][0, 1, token, 3] = bad
    return results_of(operation, case), with_gradients(operation, case, inputs.values())


def assert_nothing_else_changed(clean, found, touched):
    """Compare O and dQ outside the rows `touched` of that head; the other gradients in other heads."""
    for rows, before in zip(found[:2], clean, strict=False):
        expected = before.clone()
        expected[0, 1, touched] = rows[0, 1, touched]
        assert torch.equal(rows.nan_to_num(7), expected.nan_to_num(7))
    for gradient, before in zip(found[2:], clean[2:], strict=True):
        assert torch.equal(gradient[0, 0], before[0, 0])


FULL = SageBwd.Case(20, 140, HEAD_DIM)
CAUSAL = FULL._replace(n_q=140, is_causal=True)
ROUGH = FULL._replace(n_k=20, smooth_k=False)


@pytest.mark.parametrize(
    ("name", "token", "bad", "case"),
    [
        ("query", 0, math.nan, FULL._replace(n_q=140, n_k=20)), ("query", 139, math.inf, CAUSAL),
        ("key", 135, -math.inf, FULL), ("key", 3, math.nan, ROUGH._replace(is_causal=True)),
        ("key", 135, math.inf, CAUSAL._replace(smooth_k=False)), ("key", 135, math.nan, CAUSAL),
        ("value", 135, math.inf, FULL), ("value", 135, math.nan, CAUSAL),
        ("value", 135, math.nan, CAUSAL._replace(unbiased=True)),
    ],
    ids=str,
)  # fmt: skip
def test_nan_goes_where_the_docstring_of_sagebwd_says_and_nowhere_else(name, token, bad, case):
    clean, found = with_one_bad_number(SAGEBWD[0], case, name, token, bad)
    first = token // SCALE_BLOCK * SCALE_BLOCK
    if name == "query":
        touched = slice(first, first + SCALE_BLOCK)
    else:
        by_mean = case.smooth_k if name == "key" else case.unbiased
        touched = slice(first if case.is_causal and not by_mean else 0, None)
    assert all(rows[0, 1, touched].isnan().all() for rows in found[:2])
    assert_nothing_else_changed(clean, found, touched)
    dv_never_reads_v = name == "value"
    assert [x[0, 1].isnan().any().item() for x in found[1:]] == [True, True, not dv_never_reads_v]


@pytest.mark.parametrize(
    ("operation", "name", "token", "bad"),
    [
        (MASKED[0], "query", 0, math.nan), (MASKED[1], "query", 129, math.inf), (MASKED[1], "key", 80, math.nan),
        (MASKED[0], "key", 3, math.inf), (MASKED[0], "value", 80, math.inf), (MASKED[1], "value", 3, math.nan),
    ],
    ids=str,
)  # fmt: skip
def test_nan_goes_where_the_docstring_of_sla2_says_and_nowhere_else(name, token, bad, operation):
    shape = (130, 70) if name == "query" else (20, 90)
    case = Sla2.Case(*shape, "mixed", 32, 2, 2)
    clean, found = with_one_bad_number(operation, case, name, token, bad)
    first = token // MASK_BLOCK_Q * MASK_BLOCK_Q
    touched = slice(first, first + MASK_BLOCK_Q) if name == "query" else slice(0, None)
    sure = slice(token, token + 1) if name == "query" else touched
    assert all((~rows[0, 1, sure].isfinite()).any(-1).all() for rows in found[:2])
    assert_nothing_else_changed(clean, found, touched)
    _, _, dk, _, dalpha = found
    assert not dk[0, 1].isfinite().all()
    assert not dalpha[0, 1].isfinite().all()


@each_of(*ROUTED)
def test_nan_in_a_query_leaves_the_choice_of_other_blocks_of_queries_alone(operation):
    case = Sla2.Case(130, 200, "half", 32, 2, 1)
    query, *rest = operation.inputs(case)
    clean = operation.on(case)(query, *rest)
    query = query.clone()
    query[0, 1, 3, 0] = math.nan
    output = operation.on(case)(query, *rest)
    assert output[0, 1, 3].isnan().all()
    touched = torch.zeros(output.shape[:3], dtype=torch.bool, device=DEVICE)
    touched[0, 1, :MASK_BLOCK_Q] = True
    assert torch.equal(output[~touched], clean[~touched])
