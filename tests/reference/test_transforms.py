"""Magnitudes at the edge of what is documented, torch.func, torch.vmap and torch.compile of every public function."""

import math
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

from sage_ref import SLA, SLA2, QKNorm, sagebwd_attention, sparse_linear_attention
from sage_ref import backend as backends

BLOCKS = {"block_q": 16, "block_kv": 8}
SMALL = BLOCKS | {"sparsity": 0.5}
MASK = torch.tensor([[True, False, True], [False, True, False]])
dense = partial(sagebwd_attention, backend="reference")
causal = partial(dense, is_causal=True, smooth_q=True)
sparse = partial(sparse_linear_attention, block_mask=MASK, alpha=0.5, backend="reference", **BLOCKS)


sla, sla2, soft_sla2 = SLA(8, 2, **SMALL), *(SLA2(8, 2, backend="reference", **SMALL).stage(i) for i in (2, 1))
CALLS = {"SageBwd": causal, "sparse": sparse, "SLA": sla, "SLA2": sla2, "SLA2, stage 1": soft_sla2}
EVERY = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
BY_HAND = pytest.mark.parametrize(
    "call", [call for name, call in CALLS.items() if name != "SLA"], ids=[name for name in CALLS if name != "SLA"]
)


def drawn(*lead, n=20, head_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, 1, 2, n, head_dim, generator=generator).to(dtype) for _ in range(3)]


def with_gradients(call, tensors):
    """O, dQ, dK, dV of the sum of squares."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = call(*leaves)
    return output.detach(), *torch.autograd.grad(output.square().sum(), leaves)


# Kinds of tensors


@EVERY
def test_inference_tensors_work(call):
    tensors = drawn()
    expected = call(*tensors)
    with torch.inference_mode():
        inferred = [x.clone() for x in tensors]
    leaf = tensors[1].clone().requires_grad_()
    output = call(inferred[0], leaf, inferred[2])
    assert torch.equal(output, expected)
    output.sum().backward()
    assert leaf.grad.any()


@pytest.mark.parametrize("module", [SLA2(8, 2), QKNorm(8)], ids=["SLA2", "QKNorm"])
def test_a_module_says_that_it_is_on_another_device(module):
    q, k, v = drawn()
    with pytest.raises(ValueError, match="^query: expected the device of the module, meta, got cpu$"):
        module.to("meta")(*((q, k) if isinstance(module, QKNorm) else (q, k, v)))


# Numbers


@pytest.mark.parametrize(("name", "bad", "got"), [("query", math.nan, "nan"), ("key", -1e30, r"1e\+30")])
def test_alpha_is_not_initialised_from_nan(name, bad, got):
    tensors = dict(zip(("query", "key"), drawn(), strict=False))
    tensors[name][0, 1, 3, 2] = bad
    model = SLA2(8, 2, **SMALL)
    with pytest.raises(ValueError, match=rf"^{name}: expected finite numbers, at most 1e\+15, got {got}$"):
        model.initialize_alpha(**tensors)
    assert (model.alpha_logit == 3).all()


# Magnitudes


@pytest.mark.parametrize(("size", "dtype"), [(1.0, torch.float32), (1e19, torch.bfloat16), (3e38, torch.float32)])
def test_qk_norm_squares_nothing_that_overflows(size, dtype):
    q = (drawn()[0] / 5).clamp(-1, 1)
    norm = QKNorm(8)
    leaf = (q * size).to(dtype).requires_grad_()
    found, _ = norm(leaf, leaf)
    wide = leaf.detach().double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(found.double(), exact, atol=1e-6 if dtype == torch.float32 else 0.01, rtol=0.01)
    (found * q.to(dtype)).sum().backward()
    assert leaf.grad.isfinite().all()


# torch.func, torch.vmap, second derivatives


@EVERY
def test_vmap_is_a_loop(call):
    tensors = drawn(3)
    each = [with_gradients(call, one) for one in zip(*tensors, strict=True)]
    assert_close(vmap(call)(*tensors), torch.stack([one[0] for one in each]), atol=1e-6, rtol=1e-5)
    gradients = vmap(grad(lambda *x: call(*x).square().sum(), (0, 1, 2)))(*tensors)
    for x, y in zip(gradients, list(zip(*each, strict=True))[1:], strict=True):
        assert_close(x, torch.stack(y), atol=1e-5, rtol=1e-4)
    q, k, v = tensors
    shared = vmap(call, (None, 0, None))(q[0], k, v[0])
    assert_close(shared, torch.stack([call(q[0], one, v[0]) for one in k]), atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by make_dual itself
@BY_HAND
def test_forward_mode_is_refused(call):
    q, k, v = drawn()
    message = "^(query|x): expected reverse mode .*, got forward mode"
    with pytest.raises(ValueError, match=message):
        jvp(call, (q, k, v), (q, k, v))
    with forward_ad.dual_level(), pytest.raises(ValueError, match=message):
        call(forward_ad.make_dual(q, q), k, v)
    weight = soft_sla2.router.proj_q.weight
    with pytest.raises(ValueError, match="^proj_q.weight: expected reverse mode"):
        jvp(lambda x: functional_call(soft_sla2, {"router.proj_q.weight": x}, (q, k, v)), (weight,), (weight,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_sla_has_forward_mode_since_pytorch_differentiates_it():
    tensors = drawn()
    output, *gradients = with_gradients(sla, tensors)
    _, tangent = jvp(sla, tuple(tensors), tuple(tensors))
    expected = sum((gradient * x).sum() for gradient, x in zip(gradients, tensors, strict=True))
    assert_close(2 * (output * tangent).sum(), expected)


@BY_HAND
def test_a_second_derivative_is_refused_also_by_torch_func(call):
    q, k, v = drawn()
    name = {soft_sla2: "soft_top_k", causal: "sagebwd_attention"}
    message = f"^{name.get(call, 'sparse_linear_attention')}: expected to be differentiated once, got a second"

    def first(q):
        return grad(lambda q: call(q, k, v).square().sum())(q).sum()

    with pytest.raises(RuntimeError, match=message):
        grad(first)(q)
    leaf = q.clone().requires_grad_()
    output = call(leaf, k, v)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()


def test_the_kernels_are_not_for_torch_func(monkeypatch):
    monkeypatch.setattr(backends, "MISSING_PACKAGE", None)
    backends._said.clear()
    q, k, v = drawn(2)
    with pytest.raises(ValueError, match="^backend: expected 'triton' to be usable, but .* torch.func and torch.vmap$"):
        vmap(partial(sagebwd_attention, backend="triton"))(q, k, v)
    with pytest.warns(UserWarning, match=r"uses the reference, because .* torch.func and torch.vmap\.$"):
        assert torch.equal(vmap(sagebwd_attention)(q, k, v), vmap(dense)(q, k, v))
    assert backends.why_not_triton(lambda: (None, None)) is None


# torch.compile


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_compiled_for_any_length_it_is_one_graph_with_the_same_numbers():
    """A graph for one length alone is an error. `test_sla2_module.py` has the same for the modules, for one length."""
    torch._dynamo.reset()
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")

    def of_any_length(*tensors):
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 2, min=2, max=4096)
        return compiled(*tensors)

    for n in (20, 300):
        for x, y in zip(*(with_gradients(call, drawn(n=n)) for call in (of_any_length, causal)), strict=True):
            assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_a_tensor_in_two_places_gets_both_gradients():
    torch._dynamo.reset()
    (x, *_) = drawn()
    compiled = torch.compile(lambda x: causal(x, x, x), fullgraph=True, backend="eager")
    for found, expected in zip(
        *(with_gradients(call, [x]) for call in (compiled, lambda x: causal(x, x, x))), strict=True
    ):
        assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@BY_HAND
def test_torch_func_inside_of_compile_is_refused(call):
    """There PyTorch would differentiate the rounded forward pass as it is written."""
    torch._dynamo.reset()
    gradient = grad(lambda *tensors: call(*tensors).square().sum())
    with pytest.raises(Exception, match="expected torch.func and torch.vmap outside of torch.compile"):
        torch.compile(gradient, fullgraph=True, backend="eager")(*drawn())


@EVERY
def test_a_batch_of_gradients_is_a_loop(call):
    leaves = [x.requires_grad_() for x in drawn()]
    output = call(*leaves)
    batch = torch.randn(3, *output.shape)
    found = torch.autograd.grad(output, leaves, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(output, leaves, one, retain_graph=True) for one in batch]
    for x, y in zip(found, zip(*each, strict=True), strict=True):
        assert_close(x, torch.stack(y), atol=1e-6, rtol=1e-5)
