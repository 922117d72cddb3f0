"""Masks that leave parts of each sequence: padding, packed documents, new tokens behind cached ones, prefixes."""

import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from sage_ref import sagebwd_attention, sdpa
from sage_ref.integrations import calls as parts_calls
from sage_ref.integrations import parts
from sage_ref.integrations.parts import parts_of
from sage_ref.tracing import relative_l2

REFERENCE = {"backend": "reference"}
LENGTHS = (150, 37, 140, 37)  # two alike; 150 and 140 have two blocks of 128 tokens
N = 150


def keys_of(side, lengths=LENGTHS, n=N):
    """[B, N], True for a token, if padding is on that side."""
    places = torch.arange(n) if side == "right" else torch.arange(n).flip(0)
    return places < torch.tensor(lengths)[:, None]


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


def exact_attention(query, key, value, mask):
    """With a mask, in the dtype of the inputs; zeros where a query sees nothing."""
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).nan_to_num()


def test_the_empty_places_of_a_cache_and_a_sequence_without_tokens():
    row = torch.zeros(3, 1, 1, 12, dtype=torch.bool)
    row[0, ..., 2:7] = row[1, ..., :7] = True
    q, k, v = torch.randn(3, 3, 1, 12, 8)
    first = row & torch.ones(7, 12, dtype=torch.bool).tril()  # seven queries; of twelve places seven are filled
    for n_q, mask in ((1, row), (7, first)):
        with sdpa(otherwise="error", **REFERENCE):
            output = F.scaled_dot_product_attention(q[:, :, :n_q], k, v, mask)
        assert relative_l2(output, exact_attention(q[:, :, :n_q], k, v, mask)) < 0.03
        assert not output[2].any()


FIRST, SECOND = torch.arange(N)[:, None], torch.arange(N)
DOCUMENTS = [*[0] * 60, *[1] * 25, *[2] * 25, *range(3, 43)]  # of 60, 25 and 25 tokens, and forty of one
SAME_DOCUMENT = torch.tensor(DOCUMENTS)[:, None] == torch.tensor(DOCUMENTS)
ON_THE_RIGHT = keys_of("right")[:, None, None]
BY_PARTS = {  # a mask, and how many calls compute it
    "everything": (torch.zeros(N, N), 1),
    "added": (torch.zeros(4, 1, 1, N).masked_fill(~ON_THE_RIGHT, -torch.inf).expand(-1, 1, N, N), 5),
    "packed, added": (torch.zeros(N, N).masked_fill(~SAME_DOCUMENT, torch.finfo(torch.float16).min), 3),
    "every head": (SAME_DOCUMENT.expand(4, 4, N, N).contiguous(), 3),
    "queries, too": (mask_of("right", False) & mask_of("right", False).mT, 3),
    "packed, causal": (SAME_DOCUMENT.tril(), 3),
    "packed, padded on the left": ((SAME_DOCUMENT & (SECOND >= 20)).tril(), 3),
    "last queries, padded on the left": ((torch.ones(N, N).tril().bool() & (SECOND >= 20))[-37:], 1),
    "more queries than keys": (torch.ones(N, N).tril().bool()[:, :120], 2),
    "some queries see nothing": ((FIRST >= 50).expand(N, N), 1),
    "prefix": (torch.ones(N, N).tril().bool() | (SECOND < 10), 2),
    "frames": (SECOND // 50 <= FIRST // 50, 3),
    "a late key seen early": (torch.ones(N, N).tril(1).bool(), 2),
    # Cross-attention to as many tokens as there are queries, of which some are padding: queries beside it are none.
    "cross-attention, padded on the left": (keys_of("left")[:, None, None].expand(-1, 1, N, N), 5),
    "cross-attention of fewer queries": (keys_of("left")[:, None, None].expand(-1, 1, 99, N), 3),
    "one mixed with causal": (torch.cat([mask_of("right", False)[1:], mask_of("right", True)[:1]]), 5),
}


@pytest.mark.parametrize("name", BY_PARTS)
@pytest.mark.parametrize("place", PLACES)
def test_masks_by_parts_are_as_exact_as_int8_forward_and_backward(place, name):
    """Against a masked attention in float64."""
    mask, expected_calls = BY_PARTS[name]
    n_q, n_k = mask.shape[-2:]
    q, k, v = random_tensors(place.head_dim, device=place.device, dtype=place.dtype)
    tensors, mask = [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]], mask.to(place.device)
    weights = torch.randn_like(tensors[0])
    calls = []

    def attention(*qkv, is_causal):
        calls.append(qkv)
        return sagebwd_attention(*qkv, is_causal=is_causal, enable_gqa=True, backend=place.backend)

    found = with_gradients(
        lambda *x: parts.by_parts(attention, *x, parts_of(mask, (len(q), 4, n_q, n_k))), tensors, weights
    )
    wide = mask if mask.dtype == torch.bool else mask.double()
    exact = with_gradients(lambda *x: exact_attention(*x, wide), [x.double() for x in tensors], weights.double())
    assert len(calls) == expected_calls
    for ours, theirs in zip(found, exact, strict=True):
        assert 1e-3 < relative_l2(ours.double(), theirs) < place.error


PACKED = (0, 12, 24, 31, 40, 45), (0, 5)  # where the documents of two sequences begin
IN_FLOAT64 = PLACES[0].values[0]._replace(dtype=torch.float64)  # where bits don't depend on the order in memory
INTERPRETED = Place("cpu", torch.float16, 32, "triton", 0.05)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # where a GPU just computes NaN
@pytest.mark.parametrize(
    ("place", "heads", "expected_calls"),
    [
        pytest.param(IN_FLOAT64, 65535, [2, 1, 1, 2], id="by length"),
        pytest.param(IN_FLOAT64, 2, [1] * 6, id="more heads than a launch takes"),
        pytest.param(*PLACES[1].values, 65535, [2, 1, 1, 2], id="kernels", marks=pytest.mark.gpu),
        pytest.param(INTERPRETED, 65535, [[12, 12, 7, 9, 5, 5]], id="several lengths", marks=pytest.mark.no_gpu),
    ],
)
def test_packed_documents_have_the_bits_of_each_alone_forward_and_backward(place, heads, expected_calls, monkeypatch):
    """Kernels compute several lengths in one call. Tokens in no document get zeros."""
    monkeypatch.setattr(parts, "LAUNCHED_HEADS", heads)
    q, k, v = random_tensors(place.head_dim, device=place.device, dtype=place.dtype)
    tensors = q[:2, :2], k[:2, :1], v[:2, :1]
    documents = tuple(parts.parts_between(edges, edges, True) for edges in PACKED)
    weights, calls = torch.randn_like(tensors[0]), []
    of_kernels = None
    if place is INTERPRETED:
        of_kernels = parts_calls.padded_attention(tensors[0], 0.3, parts_calls.Options(backend="triton"))

    def attention(*qkv, is_causal):
        calls.append(len(qkv[0]))
        options = {"scale": 0.3, "enable_gqa": True, "backend": place.backend}
        return sagebwd_attention(*qkv, is_causal=is_causal, **options)

    def padded(*qkv, is_causal, lengths):
        calls.append(lengths.tolist())
        return of_kernels(*qkv, is_causal=is_causal, lengths=lengths)

    def packed(*qkv):
        return parts.by_parts(attention, *qkv, documents, of_kernels and padded)

    with torch.inference_mode():  # what it keeps, the other call can use
        inferred = packed(*tensors)
    assert sorted(calls, key=str) == sorted(expected_calls, key=str)
    found = with_gradients(packed, tensors, weights)
    assert torch.equal(inferred, found[0])
    for i, of_one in enumerate(documents):
        for tokens, _, _ in of_one:
            place_of_it = slice(i, i + 1), slice(None), slice(*tokens)
            alone = [x[place_of_it].detach().requires_grad_() for x in tensors]
            same = with_gradients(lambda *x: attention(*x, is_causal=True), alone, weights[place_of_it])
            assert all(torch.equal(x[place_of_it], y) for x, y in zip(found, same, strict=True))
    assert not any(x[1, :, 5:].any() for x in found)


def test_a_batch_without_tokens_is_zeros():
    assert not parts.by_parts(sagebwd_attention, *torch.randn(3, 2, 1, 9, 8), ((), ())).any()


def with_a_hole():
    mask = keys_of("right")[:, None, None].clone()
    mask[1, ..., 20] = False
    return mask


MORE = {
    "window": torch.ones(N, N).tril().triu(-40).bool(),
    "hole": with_a_hole(),
    "every query one key fewer": torch.ones(N, N).triu().bool(),
    "heads differ": torch.stack([mask_of("right", False)[:, 0], mask_of("left", False)[:, 0]] * 2, 1),
    "half hidden": torch.full((N, N), -1.0).triu(1),
    "learnt": torch.zeros(N, N, requires_grad=True),
}


@pytest.mark.parametrize("name", MORE)
def test_a_mask_that_parts_do_not_make_is_an_error_or_exact(qkv, name):
    mask, reason = MORE[name], r"mask: expected None or padding, .*, got one of torch\.(bool|float32)"
    expected = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
    with sdpa(otherwise="error", **REFERENCE), pytest.raises(ValueError, match=f"^{reason}$"):
        F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
    with sdpa(**REFERENCE), pytest.warns(UserWarning, match=f"stays exact .*: {reason}"):
        assert torch.equal(F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True), expected)


ON_EACH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON_EACH
def test_a_mask_is_read_again_whoever_wrote_into_it(device):
    """What is written through `.data`, by a kernel or by a collective, no version counts."""
    mask, new = (keys_of("right", (9, n), 9)[:, None, None].to(device) for n in (4, 7))
    q, k, v = torch.randn(3, 2, 1, 9, 32, device=device, dtype=torch.float16)
    with sdpa(otherwise="error", backend="reference"):
        before = F.scaled_dot_product_attention(q, k, v, mask)
        mask.data.copy_(new)
        found = F.scaled_dot_product_attention(q, k, v, mask)
        assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, new))
    assert not torch.equal(found, before)


@ON_EACH
def test_a_bias_that_is_unfrozen_later_gets_its_gradient(qkv, device):
    bias, qkv = torch.zeros(N, N, device=device), [x.to(device) for x in qkv]
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
    has = keys_of("right")
    for x in (k, v):
        x.masked_fill_(~has[:, None, :, None], torch.nan)
    tokens = has[:, None].expand(-1, 4, -1)
    weights = torch.randn(len(LENGTHS), 4, N, 16)[tokens]
    for is_causal in (False, True):
        leaves, mask = [x.clone().requires_grad_() for x in (q, k, v)], mask_of("right", is_causal)

        def of_tokens(*x, mask=mask):
            return F.scaled_dot_product_attention(*x, mask, enable_gqa=True)[tokens]

        with sdpa(otherwise="error", **REFERENCE):
            found = with_gradients(of_tokens, leaves, weights)
        assert all(x.isfinite().all() for x in found)


@pytest.mark.filterwarnings("ignore")  # of tracing, that shapes are constants
def test_under_compile_and_torch_func_no_mask_is_read(qkv):
    mask = mask_of("right", False)
    expected = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
    message = "mask: expected None under torch.compile and torch.func"

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    torch._dynamo.reset()
    with sdpa(**REFERENCE), pytest.warns(UserWarning, match=message):
        assert torch.equal(torch.compile(masked, fullgraph=True, backend="aot_eager")(*qkv), expected)
    with sdpa(**REFERENCE):
        torch.jit.trace(masked, (*qkv,))  # and compares, for it computes it again
    one = [x[:, None] for x in qkv]
    with sdpa(otherwise="error", **REFERENCE), pytest.raises(ValueError, match=f"^{message}"):
        torch.vmap(lambda *x: F.scaled_dot_product_attention(*x, mask[:1], enable_gqa=True))(*one)
