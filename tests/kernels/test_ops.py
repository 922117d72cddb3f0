"""The registered operations: autograd, torch.compile, CUDA graphs, autocast; what they save, refuse, make of NaN."""

import functools
import math
import re
import warnings
from contextlib import nullcontext
from itertools import product

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
    Calls,
    all_equal,
    guarded_allocations,
    heads_last,
    opcheck,
    prologue_for,
)
from sage_course.teaching import bytes_kept_for_backward
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.quantize import SCALE_BLOCK
from sage_kernels.sagebwd import ops as sagebwd_ops
from sage_kernels.sla2 import ops as sla2_ops
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from torch.utils.flop_counter import FlopCounterMode

from sage_ref import SLA2, Prologue, sagebwd_attention, sparse_linear_attention
from sage_ref import backend as ops
from sage_ref.sla2 import EQUATIONS_16_17, block_count
from sage_ref.sla2.api import reference_attention

pytestmark = MARKS
HEAD_DIM = 64 if ON_GPU else 32


# The two operations, described alike for the tests of both


class SageBwd:
    """`sagebwd_attention`; its cases say whether it is causal, its scale and whether K is smoothed.

    norm: None, or a prologue with QK-norm or without.
    """

    Case = kernel_cases.Case
    tiny = Case(20, 40, HEAD_DIM, 2, 1, is_causal=True)
    ragged = Case(3, 130, 48, 2, 1, unbiased=True)

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

    def largest_error(self, case, number):
        """Return what the reference's result of this number (O, dQ, dK, dV, of gains) and the kernels' may differ by.

        They differ by rounding alone: O's last bits reach delta, and a dS near a tie may go to the other side. Where a
        whole tile shares a scale that step is larger: up to 6e-3 of dQ and dK in single shapes that are not here.
        """
        return 5e-3 if case.dtype == torch.bfloat16 or number >= 4 else 4e-3


class Sla2:
    """`sparse_linear_attention`, or if routed the module, whose router chooses the blocks."""

    Case = sla2_cases.Case
    tiny = Case(20, 70, "half", 32, 2, 1)
    ragged = Case(3, 130, "all", 48, 2, 1)  # opcheck compares lists to their ends: past a row's count are no numbers

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

    def module(self, case, *, backend="triton", sparsity=0.5, **options):
        """Return an SLA2 whose projections aren't the identity and whose alphas differ, one per block of queries."""
        options |= {"query_blocks": block_count(case.n_q, MASK_BLOCK_Q), "quantize": self.quantize, "backend": backend}
        module = SLA2(case.head_dim, case.heads, sparsity=sparsity, **options).to(DEVICE)
        router = sla2_cases.drawn_router(case, 1)
        with torch.no_grad():
            module.router.proj_q.weight.copy_(router.proj_q)
            module.router.proj_k.weight.copy_(router.proj_k)
            module.alpha_logit.copy_(torch.linspace(-1, 2, module.alpha_logit.numel()).view_as(module.alpha_logit))
        return module

    def largest_error(self, case, number):
        return 1e-2 if ON_GPU else 2e-3  # bfloat16 sums on a GPU


SAGEBWD, PROLOGUES = [SageBwd("row"), SageBwd("block")], [SageBwd(norm=norm) for norm in (False, True)]
MASKED, ROUTED = ([Sla2(quantize, routed) for quantize in (False, True)] for routed in (False, True))


def each_of(*operations):
    return pytest.mark.parametrize("operation", operations, ids=repr)


ONE_OF_EACH = each_of(SAGEBWD[0], MASKED[0])


def with_requested_gradients(inputs):
    return [x.detach().requires_grad_() for x in inputs]


def with_gradients(operation, case, inputs=None, grad_output=None, call=None):
    """Return O, and the gradients of all inputs."""
    leaves = with_requested_gradients(operation.inputs(case) if inputs is None else inputs)
    output = (call or operation.on(case))(*leaves)
    grad_output = operation.grad_output(case) if grad_output is None else grad_output
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


# The registration


OPERATIONS = [*SAGEBWD[:1], *PROLOGUES, *MASKED, ROUTED[1]]


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("operation", "changed"), [*product(OPERATIONS, [{}]), (MASKED[1], {"matched": True})], ids=repr
)
def test_opcheck(operation, changed, dtype):
    """Fake results, too, have the layouts of the real ones: heads of a token are side by side, as in a model."""
    case = operation.ragged._replace(dtype=dtype, **changed)
    query, key, *rest = operation.inputs(case)
    with Calls() as calls:
        with_gradients(operation, case, (heads_last(query), heads_last(key), *rest))
        if operation in ROUTED + MASKED:  # without a gradient less is kept
            operation.on(case)(query, key, *rest)
    assert len(calls.ours) >= 2
    for kernel, arguments, _ in calls.ours:
        opcheck(kernel, arguments)


# The reference


SAME_ON_BOTH = [
    (SAGEBWD[1], SageBwd.Case(128, 128, 128, 1, 1, is_causal=True)),
    (SAGEBWD[0], SageBwd.Case(100, 160, 96, 2, 1, unbiased=True, value_offset=3.0)),
    (SAGEBWD[1], SageBwd.Case(160, 100, 48, 2, 1, is_causal=True, unbiased=True)),
    (SAGEBWD[0], SageBwd.Case(20, 200, 40, scale=-0.3)),
    (SAGEBWD[1], SageBwd.Case(70, 90, 80, 1, 1, smooth_k=False, scale=0.0)),
    (PROLOGUES[1], SageBwd.Case(90, 70, 48, 4, 2, batch=2)),
    (PROLOGUES[0], SageBwd.Case(1, 3, 80)),
    (PROLOGUES[1], SageBwd.Case(128, 128, 128, 1, 1, is_causal=True, key_offset=3.0)),
    (PROLOGUES[0], SageBwd.Case(33, 33, 34, smooth_k=False)),
    (PROLOGUES[1], SageBwd.Case(40, 60, 64, scale=-0.3)),
    (PROLOGUES[0], SageBwd.Case(70, 60, 64, 2, 1, is_causal=True, unbiased=True, value_offset=3.0)),
    (MASKED[0], Sla2.Case(20, 70, "half", 32, 2, 1, scale=-0.3)),
    (MASKED[1], Sla2.Case(20, 70, "half", 64, 2, 1, scale=0.0)),
    (MASKED[1], Sla2.Case(140, 70, "half", 48, 2, 1, matched=True)),
    (ROUTED[0], Sla2.Case(140, 200, "half", 32, 2, 1)),
    (ROUTED[1], Sla2.Case(140, 200, "half", 32, 2, 1)),
]
if ON_GPU:
    SAME_ON_BOTH += [
        (PROLOGUES[0], SageBwd.Case(1000, 1100, 64, 8, 2, True)),
        (PROLOGUES[1], SageBwd.Case(1025, 1025, 128, 4, 4, True, batch=2)),
    ]


@EVERY_DTYPE
@pytest.mark.parametrize(("operation", "case"), SAME_ON_BOTH, ids=str)
def test_the_reference_simulates_the_kernels(operation, case, dtype):
    """O and all gradients, end to end, in the defaults of both and with one scale per tile on both."""
    case = case._replace(dtype=dtype)
    calls = (operation.on(case, backend) for backend in ("triton", "reference"))
    results = (with_gradients(operation, case, call=call) for call in calls)
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        allowed = operation.largest_error(case, number) * expected.double().norm()
        assert (found.double() - expected.double()).norm() <= allowed + 1e-5


@EVERY_DTYPE
@pytest.mark.parametrize(
    "case", [Sla2.Case(1, 1, heads=2, head_dim=32), Sla2.Case(130, 190, "half", 48, 2, 1)], ids=str
)
def test_stage_1_computes_weighted_blocks_and_what_their_router_learns_from(case, dtype):
    """Weights from 0 to 1 and of very different sizes, beside the reference in float64; 1 / 1e-40 is too large."""
    query, key, value, grad_output, block_mask, alpha = sla2_cases.draw(case._replace(dtype=dtype))
    weights = torch.rand(block_mask.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) ** 8
    weights[..., 0] = 1.0
    weights[:, :, 1:, -1] = 0.0
    weights[:, :, :1, 1:2] = 1e-40
    inputs, results = (query, key, value, weights, alpha), []
    for attention, tensors in ((sla2_ops.attention, inputs), (reference_attention, [x.double() for x in inputs])):
        leaves = with_requested_gradients(tensors)
        with Calls() as calls:
            output = attention(*leaves, case.settings())
            results.append((output, *torch.autograd.grad(output, leaves, grad_output.to(output.dtype))))
        for kernel, arguments, _ in calls.ours:
            opcheck(kernel, arguments)
    for name, x, y in zip(("O", "dQ", "dK", "dV", "dW", "dalpha"), *results, strict=True):
        floor = 1e-3 * grad_output.norm()
        if name == "dW":  # a block of weight 0 was not computed, and one near it counts as such
            assert not x[weights < 1e-38].any()
            x, y = x[weights > 1e-38], y[weights > 1e-38]
            floor *= y.numel() ** 0.5
        # The linear branch's sums are in bfloat16 on a GPU.
        assert (x.double() - y).norm() <= (1.5e-2 if ON_GPU else 2e-3) * (y.norm() + floor), name


@EVERY_DTYPE
def test_stage_1_learns_by_equations_16_and_17_and_starts_from_the_mass_as_on_the_reference(dtype):
    """Weights from 1e-9 to 1; the gradients of both projections and of alpha, which starts at the selected mass."""
    query, key, value, grad_output, *_ = sla2_cases.draw(Sla2.Case(130, 300, "half", 64, 2, 1, dtype, std=2.0))
    found, alphas = [], []
    for backend in ("triton", "reference"):
        core = SLA2(64, 2, sparsity=0.7, query_blocks=2, relaxation=EQUATIONS_16_17, backend=backend).to(DEVICE)
        core.initialize_alpha(query, key)
        alphas.append(core.alpha(1, 2).detach())
        soft = core.stage(1)
        output = soft(query, key, value)
        found.append((output, *torch.autograd.grad(output, list(soft.parameters()), grad_output)))
    assert (1 - alphas[1]).max() > 0.02
    assert (alphas[0] - alphas[1]).abs().max() < 2e-3
    for x, y in zip(*found, strict=True):
        assert (x.double() - y.double()).norm() <= (3e-2 if ON_GPU else 4e-3) * y.double().norm()


# Autograd


OF_LENGTHS = [  # kv_heads, causal, granularity, smooth_k, unbiased
    (1, True, "row", True, True), (2, False, "block", False, False),
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [48, 128] if ON_GPU else [48])
@pytest.mark.parametrize(("kv_heads", "is_causal", "granularity", "smooth_k", "unbiased"), OF_LENGTHS)
def test_sequences_of_several_lengths_have_the_bits_of_each_alone(
    kv_heads, is_causal, granularity, smooth_k, unbiased, head_dim, monkeypatch
):
    """Nothing of their padding, which is NaN, nor of what is not written, is read; both passes, on the same level."""
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

    def both_passes(*tensors, lengths):
        *qkv, grad_output = tensors
        qkv = [x.detach().requires_grad_() for x in qkv]
        output = sagebwd_ops.sagebwd_attention(*qkv, scale=0.2, prologue=None, lengths=lengths, **options)
        return output, *torch.autograd.grad(output, qkv, grad_output)

    def counted(*lengths):
        return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    with guarded_allocations():
        found = both_passes(*tensors, lengths=counted(*lengths))
    for i, n in enumerate(lengths):
        # On a GPU without lengths another level would run.
        alone = both_passes(*(x[i : i + 1, :, :n] for x in tensors), lengths=counted(n) if ON_GPU else None)
        assert all_equal([x[i : i + 1, :, :n] for x in found], alone)
        assert not any(x.isnan().any() for x in alone)
        assert all(x[i, :, n:].isnan().all() for x in found)  # not written


@each_of(PROLOGUES[1], MASKED[0])
def test_each_gradient_by_itself_of_a_sum(operation):
    """The gradient of O is one number, expanded; only what is asked for gets a gradient."""
    case = operation.tiny
    ones = torch.ones_like(operation.grad_output(case))
    _, *everything = with_gradients(operation, case, grad_output=ones)
    for needed, gradient in enumerate(everything):
        leaves = [x.detach().requires_grad_(i == needed) for i, x in enumerate(operation.inputs(case))]
        operation.on(case)(*leaves).sum().backward()
        assert torch.equal(leaves[needed].grad, gradient)
        assert sum(x.grad is not None for x in leaves) == 1


@EVERY_DTYPE
def test_gains_in_16_bit_and_tables_that_are_not_contiguous(dtype):
    """A model may be in 16 bit throughout. Gradients come in the dtype of the gains."""
    operation, case = PROLOGUES[1], SageBwd.tiny._replace(dtype=dtype)
    *qkv, query_gain, key_gain = operation.inputs(case)
    low = query_gain.to(dtype), key_gain.to(dtype)
    cos, sin, *_, eps = operation.prologue(case)
    cos, sin = cos.mT.contiguous().mT, sin.mT.contiguous().mT

    def call(query, key, value, *gains):
        options = {"is_causal": True, "enable_gqa": True, "backend": "triton"}
        return sagebwd_attention(query, key, value, prologue=Prologue(cos, sin, *gains, eps), **options)

    expected = with_gradients(operation, case, (*qkv, *(x.float() for x in low)))
    found = with_gradients(operation, case, (*qkv, *low), call=call)
    assert all_equal(found[:4], expected[:4])
    assert all_equal(found[4:], [x.to(dtype) for x in expected[4:]])


class Constant(torch.autograd.Function):
    """The identity, through which no gradient flows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@ONE_OF_EACH
def test_no_gradient_comes_of_a_constant(operation):
    leaves = with_requested_gradients(operation.inputs(operation.tiny))
    Constant.apply(operation.on(operation.tiny)(*leaves)).sum().backward()
    assert not any(x.grad is not None for x in leaves)


@ONE_OF_EACH
def test_a_second_derivative_is_an_error(operation):
    leaves = with_requested_gradients(operation.inputs(operation.tiny))
    output = operation.on(operation.tiny)(*leaves)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        gradient.sum().backward()


@ONE_OF_EACH
def test_many_gradients_at_once_are_a_loop_or_refused(operation):
    leaves = with_requested_gradients(operation.inputs(operation.tiny))
    output = operation.on(operation.tiny)(*leaves)
    batch, refused = output.detach().expand(2, *output.shape), "is_grads_batched: expected one gradient of O at a time"
    with pytest.raises(RuntimeError, match=refused) if operation is MASKED[0] else nullcontext():
        (found,) = torch.autograd.grad(output, leaves[:1], batch, True, is_grads_batched=True)
        assert torch.equal(found[1], *torch.autograd.grad(output, leaves[:1], batch[1]))


# O_s, L, H with Z, lists (2), complement beside O; of a router the mask, too; in INT8 Q^, K^ and their scales.
@pytest.mark.parametrize(("operation", "kept"), [(MASKED[0], 7), (ROUTED[1], 12)])
def test_without_a_gradient_nothing_is_kept(operation, kept):
    call, inputs = operation.on(operation.tiny), operation.inputs(operation.tiny)
    with Calls() as calls:
        with torch.no_grad():
            first = call(*with_requested_gradients(inputs))
        outputs = first, call(*inputs), call(*with_requested_gradients(inputs))
    assert [len(results) for _, _, results in calls.ours] == [1, 1, kept]
    assert all(torch.equal(x, first) for x in outputs)


@pytest.mark.parametrize(("operation", "head_dim"), [*product(SAGEBWD[:1], (64, 128)), *product(PROLOGUES, (64,))])
def test_bytes_sagebwd_keeps_for_the_backward_pass(operation, head_dim):
    """6 D + 4 per token and head, and one float32 per block of Q, of K and of V; FlashAttention keeps 8 D + 4.

    With a prologue, the model's tables as well; with QK-norm, Q and K in 16 bit and the gains.
    """
    case = SageBwd.Case(256, 256, head_dim, 1, 1)
    blocks = (case.n_q + 2 * case.n_k) // SCALE_BLOCK
    expected = case.n_q * (6 * head_dim + 4) + 4 * blocks
    if operation.norm is not None:
        expected += sum(x.numel() * x.itemsize for x in operation.prologue(case)[:2])
    if operation.norm:
        expected += 2 * head_dim * (2 * case.n_q + 4)
    qkv, gains = [x.clone() for x in operation.inputs(case)[:3]], operation.inputs(case)[3:]
    with FlopCounterMode(display=False) as counted:
        assert bytes_kept_for_backward(lambda *x: operation.on(case)(*x, *gains), *qkv) == expected
    assert counted.get_total_flops() == head_dim << 18  # two matmuls of 256 x 256 x D


def test_broadcast_masks_and_alphas_are_as_good_as_expanded_ones():
    query, key, value, _, block_mask, alpha = sla2_cases.draw(Sla2.Case(130, 70, "mixed", 32, 2, 1))
    whole = block_mask[:, :1, :1].expand(block_mask.shape), alpha[:, :1].expand(alpha.shape)
    outputs = (
        sparse_linear_attention(query, key, value, *both, backend="triton")
        for both in (whole, [x.contiguous() for x in whole])
    )
    assert all_equal(*([x] for x in outputs))


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
    operation, case = SAGEBWD[0], SageBwd.tiny._replace(heads=1)
    call = operation.on(case)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiler)

    def agree(n):
        results = (with_gradients(operation, case._replace(n_q=n, n_k=n), call=x) for x in (compiled, call))
        return all_equal(*results)

    assert all(agree(n) for n in (20, 130))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert all(agree(n) for n in (40, 140))


@every_compiler
@each_of(PROLOGUES[1], MASKED[1], ROUTED[0])
def test_compiled_without_a_graph_break(operation, compiler):
    case, call, inputs = operation.tiny, operation.on(operation.tiny), operation.inputs(operation.tiny)
    if operation in ROUTED:  # alphas of 1/2 and 1: the sigmoid is exact, in a fused program too
        inputs = *inputs[:3], torch.tensor([0.0, 200.0], device=DEVICE).view_as(inputs[3])
    # PyTorch makes no graph of the router's share of a length that it doesn't know.
    compiled = torch.compile(call, fullgraph=True, dynamic=operation not in ROUTED or None, backend=compiler)
    *found, last = zip(*(with_gradients(operation, case, inputs, call=x) for x in (call, compiled)), strict=True)
    assert all(torch.equal(*pair) for pair in found)
    assert torch.equal(*last) or operation in ROUTED  # whose alpha's gradient goes on through a sigmoid
    torch.testing.assert_close(*last)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", [SAGEBWD[0], *ROUTED], ids=repr)
def test_cuda_graph(operation):
    case = Sla2.Case(300, 500, "half", 64, 4, 2) if operation in ROUTED else kernel_cases.SMALL
    call, leaves = operation.on(case), with_requested_gradients([x.clone() for x in operation.inputs(case)])
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
@each_of(SAGEBWD[0], MASKED[1])
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


# Which backend runs


@each_of(SAGEBWD[0], ROUTED[0])
def test_auto_takes_the_kernels_where_they_can_run(operation):
    inputs = operation.inputs(operation.tiny)
    with warnings.catch_warnings(), Calls() as calls:
        warnings.simplefilter("error")
        auto = operation.on(operation.tiny, backend="auto")(*inputs)
    assert calls.ours
    assert torch.equal(auto, operation.on(operation.tiny)(*inputs))


TYPES = "torch.float16 or torch.bfloat16" if ON_GPU else "torch.float16"
REFUSED = [
    *((operation, {"dtype": torch.float32}, {}, f"dtype {TYPES}, and query has torch.float32")
      for operation in (SAGEBWD[0], MASKED[0], ROUTED[0])),
    (SAGEBWD[0], {"head_dim": 16}, {}, "a head size from 32 to 128, and query has 16"),
    (SAGEBWD[0], {"head_dim": 256}, {}, "a head size from 32 to 128, and query has 256"),
    (MASKED[0], {}, {"block_q": 64}, "blocks of 128 x 64, and got 64 x 64"),
    (ROUTED[0], {}, {"block_kv": 128}, "blocks of 128 x 64, and got 128 x 128"),
]  # fmt: skip
if not ON_GPU:
    REFUSED.append((SAGEBWD[0], {"dtype": torch.bfloat16}, {}, "dtype torch.float16, and query has torch.bfloat16"))


@pytest.mark.parametrize(("operation", "changed", "options", "reason"), REFUSED, ids=repr)
def test_what_the_kernels_cannot_do_is_an_error_if_asked_for_or_on_a_gpu_and_else_the_references(
    operation, changed, options, reason
):
    case = operation.Case(3, 3)._replace(**changed)
    inputs = operation.inputs(case)

    def call(backend):
        return operation.on(case, backend, **options)(*inputs)

    reason = f"the kernels need {reason}"
    for backend in ("triton", "auto")[: 1 + ON_GPU]:
        with pytest.raises(ValueError, match=f"^backend: expected .*, but {re.escape(reason)}"):
            call(backend)
    if ON_GPU:
        return
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


# NaN and infinity: head 1 of 2 holds some, in one of two blocks where blocks matter


CAUSAL = {"is_causal": True}
BAD = [
    (SAGEBWD[0], (140, 20), {}, "query", 0, math.nan),
    (SAGEBWD[0], (140, 140), CAUSAL | {"smooth_k": False}, "key", 135, math.inf),
    (SAGEBWD[0], (20, 140), {}, "key", 135, math.nan),
    (SAGEBWD[0], (140, 140), CAUSAL, "value", 135, math.inf),
    (MASKED[1], (130, 70), {"selected": "mixed"}, "query", 129, math.inf),
    (MASKED[1], (20, 90), {"selected": "mixed"}, "key", 80, math.nan),
    (MASKED[0], (20, 90), {"selected": "mixed"}, "value", 80, math.inf),
    (MASKED[0], (130, 20), {"selected": "mixed"}, "grad_output", 70, math.inf),
    (ROUTED[1], (130, 200), {}, "query", 3, math.nan),
]


@pytest.mark.parametrize(("operation", "shape", "options", "name", "token", "bad"), BAD, ids=str)
def test_nan_goes_where_it_goes_on_the_reference(operation, shape, options, name, token, bad):
    """The docstrings say where, and the reference's tests test that."""
    case = operation.Case(*shape, head_dim=HEAD_DIM, **options)
    tensors = dict(zip(("query", "key", "value"), operation.inputs(case), strict=False))
    tensors["grad_output"] = operation.grad_output(case)
    tensors[name] = tensors[name].clone()
    tensors[name][0, 1, token, 3] = bad
    *qkv, grad_output = tensors.values()
    inputs = *qkv, *operation.inputs(case)[3:]
    calls = (operation.on(case, backend) for backend in ("triton", "reference"))
    found, expected = (with_gradients(operation, case, inputs, grad_output, call) for call in calls)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.isfinite(), y.isfinite())
