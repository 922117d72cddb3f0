"""QK-norm and rotation within the kernels' reads of Q and K: the forward pass, its gradients, the sums of keys."""

import math
from functools import cache, partial
from itertools import product

import pytest
import torch
from kernel_cases import DEVICE, MARKS, ON_GPU, Calls, Case, all_equal, draw, fill_cache, guarded_allocations
from layouts import LAYOUTS, heads_last
from sage_course.teaching import bytes_kept_for_backward
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.quantize import SCALE_BLOCK
from sage_kernels.sagebwd.forward.key_mean import LEAST_STEPS, PARTS, STEP, key_mean
from sage_kernels.sagebwd.ladder import prepare_forward
from sage_kernels.sagebwd.prologue import NO_PROLOGUE, run_rotate_back

from sage_ref import Prologue, sagebwd_attention
from sage_ref.quantization import quantize
from sage_ref.tracing import relative_l2

pytestmark = MARKS
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WITH_NORM = pytest.mark.parametrize("with_norm", [False, True])
CASES = [
    Case(70, 90, 64, 2, 1, is_causal=True),
    Case(90, 70, 48, 4, 2, batch=2),
    Case(1, 3, 80),
    Case(128, 128, 128, 1, 1, is_causal=True, key_offset=3.0),
    Case(33, 33, 34, smooth_k=False),
    Case(40, 60, 64, scale=-0.3),
    Case(70, 60, 64, 2, 1, is_causal=True, unbiased=True, value_offset=3.0),
]
if ON_GPU:
    CASES += [Case(1000, 1100, 64, 8, 2, True), Case(1025, 1025, 128, 4, 4, True, batch=2), Case(600, 2000, 96, 4, 1)]
TINY, GROUPED = Case(20, 40, 64, 2, 1, is_causal=True), Case(20, 30, 48, 4, 2, batch=2)
FORWARD = torch.ops.sage_kernels.forward.default
BACKWARD = torch.ops.sage_kernels.prologue_backward.default


def prologue_for(case, with_norm, still=False):
    """Angles and gains that differ from token to token and feature to feature; still: angles of zero."""
    generator = torch.Generator(DEVICE).manual_seed(case.head_dim)
    tokens = max(case.n_q, case.n_k) + 5
    angle = 6 * torch.rand(tokens, case.head_dim // 2, generator=generator, device=DEVICE) * (not still)
    gains = 0.5 + torch.rand(2, case.head_dim, generator=generator, device=DEVICE) if with_norm else ()
    return Prologue(angle.cos(), angle.sin(), *gains, eps=1e-3 if with_norm else 1e-6)


def attention(case, prologue=None, backend="triton"):
    options = {"is_causal": case.is_causal, "scale": case.scale, "smooth_k": case.smooth_k, "enable_gqa": True}
    options["unbiased"] = case.unbiased
    return partial(sagebwd_attention, prologue=prologue, backend=backend, **options)


def with_gradients(case, prologue=None, backend="triton", layout=lambda x: x):
    """O, dQ, dK, dV, and the gradients of the gains if there are any."""
    *tensors, grad_output = (layout(x) for x in draw(case))
    leaves = [x.detach().requires_grad_() for x in tensors]
    if prologue is not None and prologue.query_gain is not None:
        leaves += [x.clone().requires_grad_() for x in prologue[2:4]]
        prologue = prologue._replace(query_gain=leaves[3], key_gain=leaves[4])
    output = attention(case, prologue, backend)(*leaves[:3])
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


def run(case, with_norm):
    with_gradients(case, prologue_for(case, with_norm))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """On a GPU: what the tests below run is compiled beforehand, in parallel."""
    if ON_GPU:
        fill_cache([(run, case._replace(dtype=dtype), x) for case, dtype, x in product(CASES, DTYPES, (False, True))])


@EVERY_DTYPE
@WITH_NORM
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_simulates_the_kernels(case, with_norm, dtype):
    """O, all gradients, those of the gains too. What nothing but rounding makes differ: see `test_ops`."""
    case = case._replace(dtype=dtype)
    prologue = prologue_for(case, with_norm)
    results = [with_gradients(case, prologue, backend) for backend in ("triton", "reference")]
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        error, is_gain = (found.double() - expected.double()).norm(), number >= 4
        allowed = 5e-3 if dtype == torch.bfloat16 or is_gain else 4e-3
        assert error <= allowed * expected.double().norm() + 1e-5


@EVERY_DTYPE
@pytest.mark.parametrize(("case", "layout"), [(TINY, heads_last), (GROUPED, lambda x: x)], ids=["TINY", "GROUPED"])
def test_angles_of_zero_change_no_bit(case, layout, dtype):
    case = case._replace(dtype=dtype)
    still = with_gradients(case, prologue_for(case, with_norm=False, still=True), layout=layout)
    assert all_equal(still, with_gradients(case, layout=layout))
    turned = with_gradients(case, prologue_for(case, with_norm=False), layout=layout)
    assert not torch.equal(turned[0], still[0])


@cache
def contiguous_with_norm(case):
    return with_gradients(case, prologue_for(case, with_norm=True))


@EVERY_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_bits_and_results_lie_as_their_tensors_do(layout, dtype):
    case = GROUPED._replace(dtype=dtype)
    found = with_gradients(case, prologue_for(case, with_norm=True), layout=layout)
    assert all_equal(found, contiguous_with_norm(case))
    assert all((x.stride(1) < x.stride(2)) == (layout is heads_last) for x in found[:4])


@EVERY_DTYPE
@WITH_NORM
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3]], ids=str)
def test_what_is_quantised_is_not_rounded_before(case, smooth_k, with_norm, dtype):
    """Q^ and K^ against psi of the reference's float32 tensors: single numbers next to a tie may differ, by one."""
    case = case._replace(dtype=dtype)
    query, key, value, _ = draw(case)
    prologue = prologue_for(case, with_norm)
    with guarded_allocations():
        found = prepare_forward(query, key, value, 4, scale=0.25, smooth_k=smooth_k, prologue=prologue)
    q, k = prologue.applied(query, key)
    k = k - k.mean(-2, keepdim=True) if smooth_k else k
    for hat, x, factor in ((found.q_hat, q, 0.25 * math.log2(math.e)), (found.k_hat, k, 1.0)):
        expected = quantize(x.cpu(), (SCALE_BLOCK, None))
        blocks = expected.scale.shape[-2]
        assert hat.values.shape[2:] == (
            SCALE_BLOCK * hat.scale.shape[2],
            max(32, 1 << (case.head_dim - 1).bit_length()),
        )
        torch.testing.assert_close(
            hat.scale[..., :blocks].cpu(), expected.scale.squeeze(-1) * factor, rtol=1e-5, atol=0
        )
        difference = hat.values[..., : x.shape[2], : case.head_dim].cpu().int() - expected.values.int()
        assert difference.abs().max() <= 1
        assert difference.bool().sum() <= 1e-3 * difference.numel() + 1
        assert not hat.values[..., x.shape[2] :, :].any()
        assert not hat.values[..., case.head_dim :].any()


@EVERY_DTYPE
@WITH_NORM
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_gradients_go_back_through_rotation_and_norm(case, with_norm, dtype):
    """Given those of the rotated tensors, against autograd in float64; the gains' are sums in float32."""
    case = case._replace(dtype=dtype)
    query, key, _, grad_query = draw(case)
    grad_key = draw(case._replace(n_q=case.n_k + 1, heads=case.kv_heads))[3][:, :, : case.n_k]
    prologue = prologue_for(case, with_norm)
    raw = (query, key) if with_norm else (None, None)
    with guarded_allocations():
        found = run_rotate_back(grad_query, heads_last(grad_key), *raw, prologue, start_with_triton)
    again = run_rotate_back(grad_query, heads_last(grad_key), *raw, prologue, start_with_triton)
    assert all_equal(found, again)
    leaves = [x.double().requires_grad_() for x in (query, key, *(prologue[2:4] if with_norm else ()))]
    angles = prologue.cos.double(), prologue.sin.double()
    rotated = Prologue(*angles, *leaves[2:], eps=prologue.eps).applied(*leaves[:2])
    expected = torch.autograd.grad(rotated, leaves, (grad_query.double(), grad_key.double()))
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert x.dtype == dtype
        assert relative_l2(x, y) < torch.finfo(dtype).eps / 2
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, STEP + 1, LEAST_STEPS * STEP + 1, LEAST_STEPS * PARTS * STEP + 1])
def test_the_mean_key(n):
    """Of every length: of one part, of several and of parts that are longer than usual; alone and of rotated keys."""
    case = Case(1, n, 34, batch=2, heads=1, kv_heads=1)
    key = draw(case)[1]
    for prologue in (NO_PROLOGUE, prologue_for(case, with_norm=True)):
        with guarded_allocations():
            mean = key_mean(key, prologue, start_with_triton)
        rotated = key.float() if prologue is NO_PROLOGUE else prologue.applied(key, key)[1]
        torch.testing.assert_close(mean.double(), rotated.double().mean(-2), rtol=1e-5, atol=1e-6)


# The registered operations


def arguments(case, with_norm, layout=lambda x: x):
    """Of the forward operation, and of what goes back through the prologue."""
    query, key, value, grad_output = (layout(x) for x in draw(case))
    prologue = prologue_for(case, with_norm)
    raw = (query, key) if with_norm else (None, None)
    return (query, key, value, True, 0.125, True, *prologue), (grad_output, key, *raw, *prologue)


@EVERY_DTYPE
@WITH_NORM
def test_opcheck(with_norm, dtype):
    forward, backward = arguments(GROUPED._replace(dtype=dtype), with_norm)
    torch.library.opcheck(FORWARD, forward)
    torch.library.opcheck(BACKWARD, backward)


@WITH_NORM
def test_fake_results_lie_in_memory_as_the_real_ones_do(with_norm):
    def described(results):
        return [(x.shape, x.stride(), x.dtype, x.device) for x in results]

    for kernel, given in zip((FORWARD, BACKWARD), arguments(GROUPED, with_norm, heads_last), strict=True):
        with torch._subclasses.FakeTensorMode() as mode:
            fake = described(kernel(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given)))
        assert fake == described(kernel(*given))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's workers fork
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@WITH_NORM
def test_compiled_without_a_graph_break(with_norm, compiler):
    torch._dynamo.reset()
    case = TINY
    *angles, query_gain, key_gain, eps = prologue_for(case, with_norm)
    gains = [x.clone().requires_grad_() for x in (query_gain, key_gain)] if with_norm else [None, None]
    leaves = [x.detach().requires_grad_() for x in draw(case)[:3]]

    def call(query, key, value, query_gain, key_gain):
        prologue = Prologue(*angles, query_gain, key_gain, eps)
        return attention(case, prologue)(query, key, value)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend=compiler)):
        output = function(*leaves, *gains)
        wanted = leaves + (gains if with_norm else [])
        results.append((output, *torch.autograd.grad(output, wanted, draw(case)[3])))
    assert all_equal(*results)
    torch._dynamo.reset()


@EVERY_DTYPE
def test_gains_in_16_bit_and_tables_that_are_not_contiguous(dtype):
    """As in a model that is in 16 bit throughout. Gradients come in the dtype of the gains."""
    case = TINY._replace(dtype=dtype)
    prologue = prologue_for(case, with_norm=True)
    low = prologue._replace(query_gain=prologue.query_gain.to(dtype), key_gain=prologue.key_gain.to(dtype))
    expected = with_gradients(case, low._replace(query_gain=low.query_gain.float(), key_gain=low.key_gain.float()))
    found = with_gradients(case, low._replace(cos=low.cos.mT.contiguous().mT, sin=low.sin.mT.contiguous().mT))
    assert all_equal(found[:4], expected[:4])
    assert all_equal(found[4:], [x.to(dtype) for x in expected[4:]])


def test_bytes_kept_for_the_backward_pass():
    """Q and K in 16 bit beside what is kept without a prologue, if there is a norm; the tables are the model's."""
    case = Case(128, 128, 64)
    kept = [
        bytes_kept_for_backward(attention(case, prologue), *draw(case)[:3])
        for prologue in (None, prologue_for(case, with_norm=False), prologue_for(case, with_norm=True))
    ]
    tables, gains = 2 * 4 * (128 + 5) * 32, 2 * 4 * 64
    assert kept[1] == kept[0] + tables
    assert kept[2] == kept[1] + 2 * 2 * case.heads * 128 * 64 + gains


def test_a_level_in_16_bit_takes_no_prologue():
    query, key, value, _ = draw(TINY)
    with pytest.raises(ValueError, match="prologue: expected none for forward level 0"):
        prepare_forward(query, key, value, 0, scale=1.0, smooth_k=True, prologue=prologue_for(TINY, with_norm=False))


def test_a_second_derivative_is_an_error():
    prologue = prologue_for(TINY, with_norm=True)
    leaves = [x.detach().requires_grad_() for x in draw(TINY)[:3]]
    output = attention(TINY, prologue)(*leaves)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        gradient.sum().backward()


def test_without_a_prologue_nothing_goes_back_through_one():
    leaves = [x.detach().requires_grad_() for x in draw(TINY)[:3]]
    names = []
    for prologue in (None, prologue_for(TINY, with_norm=False)):
        output = attention(TINY, prologue)(*leaves)
        with Calls() as calls:
            torch.autograd.grad(output, leaves, draw(TINY)[3])
        names.append([name for name in calls.names if name.startswith("prologue_backward")])
    assert [len(x) for x in names] == [0, 1]
