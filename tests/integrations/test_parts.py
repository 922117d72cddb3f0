"""Masks that leave parts of each sequence: padding, packed documents, new tokens behind cached ones, prefixes."""

import sys
import warnings
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

from sage_ref import sagebwd_attention, sdpa
from sage_ref.integrations import calls as parts_calls
from sage_ref.integrations import parts
from sage_ref.integrations.parts import Part, parts_of
from sage_ref.tracing import relative_l2

REFERENCE = {"backend": "reference"}
LENGTHS = (150, 37, 140, 37)  # two alike; 150 and 140 have two blocks of 128 tokens
N = 150
NEVER = -torch.inf


def spans(side, lengths=LENGTHS, n=N):
    """The tokens of each sequence, if padding is on that side."""
    return [slice(0, length) if side == "right" else slice(n - length, n) for length in lengths]


def keys_of(side, lengths=LENGTHS, n=N):
    """[B, N], True for a token."""
    has = torch.zeros(len(lengths), n, dtype=torch.bool)
    for i, span in enumerate(spans(side, lengths, n)):
        has[i, span] = True
    return has


def mask_of(side, is_causal):
    """[B, 1, N, N], as transformers makes it."""
    has = keys_of(side)[:, None, None].expand(-1, 1, N, N)
    return has & torch.ones(N, N, dtype=torch.bool).tril() if is_causal else has


@pytest.fixture
def qkv():
    return random_tensors(head_dim=16)


def random_tensors(head_dim, **options):
    """Q, K, V: four heads that share two of keys."""
    return [torch.randn(len(LENGTHS), heads, N, head_dim, requires_grad=True, **options) for heads in (4, 2, 2)]


class Place(NamedTuple):
    """Where attention is computed, and how far from exact attention INT8 and the dtype may be there."""

    device: str
    dtype: torch.dtype
    head_dim: int
    backend: str
    error: float


PLACES = [
    pytest.param(Place("cpu", torch.float32, 16, "reference", 0.03), id="reference"),
    pytest.param(Place("cuda", torch.bfloat16, 64, "triton", 0.05), id="kernels", marks=pytest.mark.gpu),
]


def with_gradients(attention, tensors, weights):
    output = attention(*tensors)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("place", PLACES)
def test_a_padded_sequence_has_the_bits_of_the_unpadded_one_and_its_padding_no_gradient(place, side, is_causal):
    """Forward and backward; against exact attention as far off as INT8 is."""
    where = {"device": place.device, "dtype": place.dtype}
    qkv, mask = random_tensors(place.head_dim, **where), mask_of(side, is_causal).to(place.device)
    weights = torch.randn(len(LENGTHS), 4, N, place.head_dim, **where)
    weights[~keys_of(side)[:, None].expand(-1, 4, -1)] = 0  # nobody looks at what comes out of padding
    with sdpa(otherwise="error", backend=place.backend) as routed:
        found = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, mask, enable_gqa=True), qkv, weights)
    assert routed.taken == 1
    options = {"is_causal": is_causal, "enable_gqa": True}
    for i, span in enumerate(spans(side)):
        alone = [x[i : i + 1, :, span].detach().requires_grad_() for x in qkv]
        same = with_gradients(
            lambda *x: sagebwd_attention(*x, **options, backend=place.backend), alone, weights[i, :, span]
        )
        exact = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, **options), alone, weights[i, :, span])
        for of_batch, of_same, of_exact in zip(found, same, exact, strict=True):
            assert torch.equal(of_batch[i : i + 1, :, span], of_same)
            assert 1e-3 < relative_l2(of_same, of_exact) < place.error
        outside = torch.ones(N, dtype=torch.bool)
        outside[span] = False
        assert not any(gradient[i, :, outside].any() for gradient in found[1:])
        if is_causal:
            assert not found[0][i, :, outside].any()


FORMS = {
    "[N, N], causal": (torch.ones(N, N, dtype=torch.bool).tril(), [(0, N)] * 4, True),
    "everything": (torch.zeros(N, N), [(0, N)] * 4, False),
    "added": (torch.zeros(4, 1, 1, N).masked_fill(~keys_of("right")[:, None, None], NEVER), None, False),
    "added, causal": (torch.zeros(4, 1, N, N).masked_fill(~mask_of("right", True), -3e38), None, True),
    "every head": (mask_of("right", True).expand(4, 4, N, N).contiguous(), None, True),
    "queries, too": (mask_of("right", False) & mask_of("right", False).mT, None, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_padding_comes_in_many_forms(form):
    mask, ranges, is_causal = FORMS[form]
    found = parts_of(mask, (4, 4, N, N))
    for of_one, span in zip(found, ranges or [(0, n) for n in LENGTHS], strict=True):
        assert of_one[0] == Part(span, span, is_causal)
        beside = form == "added" and span != (0, N)
        assert of_one[1:] == ((Part((span[1], N), span, False),) if beside else ())


def test_the_empty_places_of_a_cache_and_a_sequence_without_tokens():
    row = torch.zeros(3, 1, 1, 12, dtype=torch.bool)
    row[0, ..., 2:7] = row[1, ..., :7] = True
    assert parts_of(row, (3, 1, 1, 12)) == ((Part((0, 1), (2, 7), False),), (Part((0, 1), (0, 7), False),), ())
    first = row & torch.ones(7, 12, dtype=torch.bool).tril()  # seven queries; of twelve places seven are filled
    assert parts_of(first, (3, 1, 7, 12)) == ((Part((2, 7), (2, 7), True),), (Part((0, 7), (0, 7), True),), ())
    q, k, v = torch.randn(3, 3, 1, 12, 8)
    with sdpa(otherwise="error", **REFERENCE):
        output = F.scaled_dot_product_attention(q[:, :, :7], k, v, first)
    assert not output[2].any()
    assert not output[0, :, :2].any()
    assert output[:2, :, 2:].all()


FIRST, SECOND = torch.arange(N)[:, None], torch.arange(N)
DOCUMENTS = [*[0] * 60, *[1] * 25, *[2] * 25, *range(3, 43)]  # of 60, 25 and 25 tokens, and forty of one
SAME_DOCUMENT = torch.tensor(DOCUMENTS)[:, None] == torch.tensor(DOCUMENTS)
BY_PARTS = {  # a mask, and how many calls compute it
    "packed, causal": (SAME_DOCUMENT.tril(), 3),
    "packed": (SAME_DOCUMENT, 3),
    "packed, padded on the left": ((SAME_DOCUMENT & (SECOND >= 20)).tril(), 3),
    "last queries": (torch.ones(N, N).tril().bool()[-37:], 1),
    "last queries, padded on the left": ((torch.ones(N, N).tril().bool() & (SECOND >= 20))[-37:], 1),
    "more queries than keys": (torch.ones(N, N).tril().bool()[:, :120], 2),
    "some queries see nothing": ((FIRST >= 50).expand(N, N), 1),
    "prefix": (torch.ones(N, N).tril().bool() | (SECOND < 10), 2),
    "frames": (SECOND // 50 <= FIRST // 50, 3),
    "a late key seen early": (torch.ones(N, N).tril(1).bool(), 2),
    # Cross-attention to as many tokens as there are queries, of which some are padding: queries beside it are none.
    "cross-attention, padded on the right": (keys_of("right")[:, None, None].expand(-1, 1, N, N), 5),
    "cross-attention, padded on the left": (keys_of("left")[:, None, None].expand(-1, 1, N, N), 5),
    "cross-attention of fewer queries": (keys_of("left")[:, None, None].expand(-1, 1, 99, N), 3),
    "one mixed with causal": (torch.cat([mask_of("right", False)[1:], mask_of("right", True)[:1]]), 5),
}


@pytest.mark.parametrize("name", BY_PARTS)
@pytest.mark.parametrize("place", PLACES)
def test_masks_by_parts_are_as_exact_as_int8_forward_and_backward(place, name, monkeypatch):
    """Against a masked attention in float64. A query that sees nothing gets zeros."""
    mask, expected_calls = BY_PARTS[name]
    n_q, n_k = mask.shape[-2:]
    q, k, v = random_tensors(place.head_dim, device=place.device, dtype=place.dtype)
    tensors, mask = [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]], mask.to(place.device)
    weights = torch.randn_like(tensors[0])
    calls = []
    attention = parts_calls.sagebwd_attention
    monkeypatch.setattr(parts_calls, "sagebwd_attention", lambda *x, **o: calls.append(1) or attention(*x, **o))
    with sdpa(otherwise="error", backend=place.backend):
        found = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, mask, enable_gqa=True), tensors, weights)
    exact = with_gradients(
        lambda *x: F.scaled_dot_product_attention(*x, mask, enable_gqa=True).nan_to_num(),
        [x.double() for x in tensors], weights.double(),
    )  # fmt: skip
    assert len(calls) == expected_calls
    for ours, theirs in zip(found, exact, strict=True):
        assert 1e-3 < relative_l2(ours.double(), theirs) < place.error


PACKED = (0, 30, 60, 90, 97, 127, 140, N)  # where documents begin, of 30, 7, 13 and 10 tokens


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("edges", "heads", "expected_calls"),
    [((0, 50, 100, N), 65535, 1), (PACKED, 65535, 4), (PACKED, 12, 5)],
    ids=["alike", "of four lengths", "more heads than a launch takes"],
)
def test_packed_documents_have_the_bits_of_each_alone_forward_and_backward(
    place, edges, heads, expected_calls, monkeypatch
):
    """In float64 on the CPU, where a product's bits don't depend on the order in memory."""
    monkeypatch.setattr(parts, "LAUNCHED_HEADS", heads)
    dtype = torch.float64 if place.device == "cpu" else place.dtype
    tensors = [x[:1] for x in random_tensors(place.head_dim, device=place.device, dtype=dtype)]
    weights, calls = torch.randn_like(tensors[0]), []

    def attention(*qkv, is_causal):
        calls.append(qkv)
        return sagebwd_attention(*qkv, is_causal=is_causal, enable_gqa=True, backend=place.backend)

    with torch.inference_mode():  # what it keeps, the other call can use
        packed = parts.by_parts(attention, *tensors, (parts.parts_between(edges, edges, True),))
    assert len(calls) == expected_calls
    documents = (parts.parts_between(edges, edges, True),)
    found = with_gradients(lambda *x: parts.by_parts(attention, *x, documents), tensors, weights)
    assert torch.equal(packed, found[0])
    for document in map(slice, edges, edges[1:]):
        alone = [x[:, :, document].detach().requires_grad_() for x in tensors]
        same = with_gradients(lambda *x: attention(*x, is_causal=True), alone, weights[:, :, document])
        assert all(torch.equal(x[:, :, document], y) for x, y in zip(found, same, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # where a GPU just computes NaN
def test_documents_of_several_lengths_are_one_call_of_the_kernels_and_have_the_bits_of_each_alone(monkeypatch):
    """On the portable level, also where others run. Tokens in no document get zeros."""
    ops = pytest.importorskip("sage_kernels.sagebwd.ops")
    from sage_kernels.common.launcher import start_with_triton

    monkeypatch.setattr(sys.modules["sage_kernels.hopper"], "obstacle", lambda *_: "not here")
    monkeypatch.setattr(ops, "recorded", lambda key, inputs, function: function(start_with_triton))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [x[:2] for x in random_tensors(32, device=device, dtype=torch.float16)]
    edges, calls, kernels = (PACKED, (0, 50, 58)), [], ops.sagebwd_attention
    monkeypatch.setattr(ops, "sagebwd_attention", lambda *x, **o: calls.append(o.get("lengths")) or kernels(*x, **o))
    documents = tuple(parts.parts_between(one, one, True) for one in edges)
    options, weights = parts_calls.Options(backend="triton"), torch.randn_like(tensors[0])
    call = parts_calls.Call(*tensors, enable_gqa=True)
    found = with_gradients(
        lambda *qkv: parts_calls.by_sagebwd(call._replace(query=qkv[0], key=qkv[1], value=qkv[2]), options, documents),
        tensors, weights,
    )  # fmt: skip
    assert [x if x is None else x.tolist() for x in calls] == [[30, 30, 30, 30, 7, 13, 10, 8], None]
    for i, of_one in enumerate(documents):
        for span, _, _ in of_one:
            alone = [x[i : i + 1, :, slice(*span)].detach().requires_grad_() for x in tensors]
            same = with_gradients(
                lambda *x: sagebwd_attention(*x, is_causal=True, enable_gqa=True, backend="triton"),
                alone, weights[i : i + 1, :, slice(*span)],
            )  # fmt: skip
            assert all(torch.equal(x[i : i + 1, :, slice(*span)], y) for x, y in zip(found, same, strict=True))
    assert not any(x[1, :, 58:].any() for x in found)


class Operations(TorchDispatchMode):
    """Count PyTorch's operations."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.number += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("first", "step"), [((), 50), ((0, 20), 40)], ids=["alike", "of three lengths"])
def test_the_number_of_operations_does_not_grow_with_the_number_of_documents(first, step):
    counts = []
    for length in (step, 5):
        edges = (*first, *range(30 if first else 0, N + 1, length))
        q, k, v = random_tensors(8)
        parts._places.cache_clear()
        with Operations() as operations:
            documents = (parts.parts_between(edges, edges, False),) * len(q)
            parts.by_parts(lambda q, k, v, is_causal: q + k[:, :1] + v[:, :1], q, k, v, documents).sum().backward()
        counts.append(operations.number)
    assert counts[0] == counts[1] < 170


def test_a_batch_without_tokens_is_zeros():
    assert not parts.by_parts(sagebwd_attention, *torch.randn(3, 2, 1, 9, 8), ((), ())).any()


def with_a_hole():
    mask = keys_of("right")[:, None, None].clone()
    mask[1, ..., 20] = False
    return mask


MORE = {
    "window": torch.ones(N, N).tril().triu(-40).bool(),
    "hole": with_a_hole(),
    "hole, causal": with_a_hole() & torch.ones(N, N, dtype=torch.bool).tril(),
    "every query one key fewer": torch.ones(N, N).triu().bool(),
    "heads differ": torch.stack([mask_of("right", False)[:, 0], mask_of("left", False)[:, 0]] * 2, 1),
    "half hidden": torch.full((N, N), -1.0).triu(1),
    "learnt": torch.zeros(N, N, requires_grad=True),
}


@pytest.mark.parametrize("name", MORE)
def test_a_mask_that_parts_do_not_make_is_an_error_or_exact(qkv, name):
    mask = MORE[name]
    expected = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
    with (
        sdpa(otherwise="error", **REFERENCE),
        pytest.raises(
            ValueError,
            match=r"^mask: expected None or padding, .*, got one of torch\.(bool|float32)$",
        ),
    ):
        F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
    with (
        sdpa(**REFERENCE),
        pytest.warns(UserWarning, match="stays exact .*: mask: expected None or padding"),
    ):
        assert torch.equal(F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True), expected)


def written_by_a_collective(mask, new, tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        distributed.all_gather([mask], new)
    finally:
        distributed.destroy_process_group()


WRITES = {
    "in place": lambda mask, new, _: mask.copy_(new),
    "data": lambda mask, new, _: mask.data.copy_(new),
    "numpy": lambda mask, new, _: np.copyto(mask.numpy(), new.numpy()),
    "all_gather": written_by_a_collective,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", WRITES)
def test_a_mask_is_read_again_whoever_wrote_into_it(how, device, tmp_path):
    if device == "cuda" and how in ("numpy", "all_gather"):
        pytest.skip("of the CPU alone")
    mask, new = (keys_of("right", (9, n), 9)[:, None, None].to(device) for n in (4, 7))
    q, k, v = torch.randn(3, 2, 1, 9, 32, device=device, dtype=torch.float16)
    with sdpa(otherwise="error", backend="reference"):
        before = F.scaled_dot_product_attention(q, k, v, mask)
        WRITES[how](mask, new, tmp_path)
        found = F.scaled_dot_product_attention(q, k, v, mask)
        assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, new))
    assert not torch.equal(found, before)


def test_a_bias_that_is_unfrozen_later_gets_its_gradient(qkv):
    bias = torch.zeros(N, N)
    with sdpa(**REFERENCE) as routed, warnings.catch_warnings(action="ignore"):
        F.scaled_dot_product_attention(*qkv, bias, enable_gqa=True)
        bias.requires_grad_()
        F.scaled_dot_product_attention(*qkv, bias, enable_gqa=True).square().sum().backward()
    assert routed.taken == 1
    assert bias.grad.any()


@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("n_q", "n_k"), [(N, N), (37, N), (N, 37)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_of_pytorch_have_no_numbers_to_read(qkv, kind, n_q, n_k):
    """Their memory is never written. Where a query sees nothing, PyTorch gives NaN or zeros."""
    q, k, v = qkv[0][:, :, :n_q], qkv[1][:, :, :n_k], qkv[2][:, :, :n_k]
    bias, mask = kind(n_q, n_k), kind(n_q, n_k)._materialize()
    call = partial(F.scaled_dot_product_attention, enable_gqa=True)
    with sdpa(otherwise="error", **REFERENCE):
        found = call(q, k, v, bias)
    assert 1e-3 < relative_l2(found, call(q, k, v, mask).nan_to_num()) < 0.03
    with sdpa(otherwise="error", **REFERENCE), pytest.raises(ValueError, match="^mask: expected None or padding"):
        call(q, k, v, kind(n_q + 1, n_k))


class Meaning(torch.Tensor):
    """A mask whose class says what SDPA computes with it, here twice the query, whatever lies in its memory."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is F.scaled_dot_product_attention:
            return 2 * arguments[0]
        return super().__torch_function__(function, types, arguments, options)


def test_a_mask_of_a_class_with_a_meaning_of_its_own_is_not_read(qkv):
    mask = torch.zeros(N, N).as_subclass(Meaning)
    with sdpa(**REFERENCE) as routed, pytest.warns(UserWarning, match="stays exact .*: mask"):
        assert torch.equal(F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True), 2 * qkv[0])
    assert routed.taken == 0


def test_what_lies_in_padding_reaches_nobody(qkv):
    """NaN there is what PyTorch's own SDPA spreads."""
    q, k, v = (x.detach().clone() for x in qkv)
    clean = [q, k, v]
    for i, span in enumerate(spans("right")):
        for x in (k, v):
            x[i, :, span.stop :] = torch.nan
    has = keys_of("right")
    weights = torch.randn(len(LENGTHS), 4, N, 16) * has[:, None, :, None]
    for mask in (mask_of("right", True), mask_of("right", False)):
        leaves = [x.clone().requires_grad_() for x in clean]
        with sdpa(otherwise="error", **REFERENCE):
            found = with_gradients(
                lambda *x, mask=mask: F.scaled_dot_product_attention(*x, mask, enable_gqa=True)[
                    has[:, None].expand(-1, 4, -1)
                ],
                leaves, weights[has[:, None].expand(-1, 4, -1)],
            )  # fmt: skip
        assert all(x.isfinite().all() for x in found)


def test_a_fake_mask_is_not_read():
    with torch._subclasses.FakeTensorMode():
        assert not parts.can_be_read(torch.ones(1, 1, 1, 9, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_under_compile_and_torch_func_no_mask_is_read(qkv):
    mask = mask_of("right", False)
    expected = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
    message = "mask: expected None under torch.compile and torch.func"

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    torch._dynamo.reset()
    with sdpa(**REFERENCE), pytest.warns(UserWarning, match=message):
        assert torch.equal(torch.compile(masked, fullgraph=True, backend="aot_eager")(*qkv), expected)
    one = [x[:, None] for x in qkv]
    with sdpa(otherwise="error", **REFERENCE), pytest.raises(ValueError, match=f"^{message}"):
        torch.vmap(lambda *x: F.scaled_dot_product_attention(*x, mask[:1], enable_gqa=True))(*one)
