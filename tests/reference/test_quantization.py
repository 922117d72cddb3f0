"""The INT8 quantiser and its integer matmul."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_ref.quantization import (
    ROUNDINGS,
    QuantizedTensor,
    fake_quantize,
    integer_matmul,
    ordered_thresholds,
    quantize,
    quantized_matmul,
)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def scale_of_every_entry(q: QuantizedTensor) -> torch.Tensor:
    """The scale each entry is multiplied by, found entry by entry."""
    rows, columns = q.values.shape[-2:]
    row_block = torch.arange(rows) // q.block_shape[0]
    column_block = torch.arange(columns) // q.block_shape[1]
    return q.scale[..., row_block[:, None], column_block[None, :]]


@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    block=st.tuples(st.none() | st.integers(1, 25), st.none() | st.integers(1, 25)),
    rounding=st.sampled_from(ROUNDINGS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    exponent=st.integers(-12, 4),
)
def test_psi_of_any_shape_and_block(size, block, rounding, dtype, exponent):
    x = (gaussian(2, *size) * 2.0**exponent).to(dtype)
    before = x.clone()
    q = quantize(x, block, rounding, seeded(1))
    rows, columns = (b or n for b, n in zip(block, size, strict=True))
    assert q.values.dtype == torch.int8
    assert q.values.shape == x.shape
    assert q.scale.shape == (2, math.ceil(size[0] / rows), math.ceil(size[1] / columns))
    assert q.scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for r in range(q.scale.shape[1]):
        for c in range(q.scale.shape[2]):
            part = (slice(None), slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
            largest = x[part].abs().amax((-2, -1)).to(q.scale.dtype)
            torch.testing.assert_close(q.scale[:, r, c], largest / 127, rtol=1e-6, atol=0)
            assert (q.values[part].int().abs().amax((-2, -1)) == 127).all()  # the whole range is used
    s = scale_of_every_entry(q)
    error = (q.dequantize() - x.to(s.dtype)).abs()
    assert (error <= s * (0.5 if rounding == "nearest" else 1.0) * (1 + 1e-4)).all()
    torch.testing.assert_close(q.dequantize(), q.values.to(s.dtype) * s, rtol=0, atol=0)
    assert torch.equal(fake_quantize(x, block, rounding, seeded(1)), q.dequantize())
    assert torch.equal(x, before)


def test_nearest_rounds_ties_to_even_and_away_from_zero_alike():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49, -3.51]])
    assert quantize(x).values.tolist() == [[127, 0, 2, 2, 0, -2, -2, 3, -4]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_too_small_for_their_dtype_never_change_sign(dtype):
    """Where max|X|/127 underflows, X/s could leave [-127, 127] and wrap around in int8."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for rounding, multiple in itertools.product(ROUNDINGS, (1, 60, 190, 1000, 20000)):
        x = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64) * multiple * smallest
        x = x.to(dtype)
        result = quantize(x, rounding=rounding, generator=seeded(0)).dequantize().to(x.dtype)
        assert (result * x.sign() >= 0).all()
        assert (result - x).abs().max() <= max(x.abs().max() / 100, 127 * torch.finfo(torch.float32).tiny)


def test_stochastic_rounding_is_unbiased():
    """Mean of 2000 draws: its z-score has mean 0 and standard deviation 1. Bounds: 5 for each of 500 entries
    (exceeded by chance once in 3500 runs), 4.5 for their sum."""
    draws, x = 2000, gaussian(1, 500)
    ratio = x / (x.abs().max() / 127)
    values = quantize(x.repeat(draws, 1), (1, None), "stochastic", seeded(0)).values.double()
    assert torch.equal(values.amin(0, keepdim=True) == values.amax(0, keepdim=True), ratio.abs() == 127)
    assert ((values - ratio).abs() < 1 + 1e-9).all()
    fraction = (ratio - ratio.floor())[ratio.abs() < 127]
    z = (values.mean(0, keepdim=True) - ratio)[ratio.abs() < 127] / (fraction * (1 - fraction) / draws).sqrt()
    assert z.abs().max() < 5
    assert z.sum().abs() / math.sqrt(z.numel()) < 4.5


def test_ordered_thresholds_are_spread_evenly():
    thresholds = ordered_thresholds(24, 20, torch.ones((), dtype=torch.float64))
    assert torch.equal(thresholds[8:16, 8:16].flatten().sort().values, (torch.arange(64).double() + 0.5) / 64)
    assert torch.equal(thresholds[:16, :12], thresholds[8:, 8:])
    eighths = (thresholds * 8).floor()
    for line in (*eighths[:8, :8], *(eighths.diagonal(k)[:8] for k in range(8))):
        assert sorted(line.tolist()) == list(range(8))


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])
def test_the_largest_draw_stays_in_the_range(monkeypatch, noise):
    """max|X| / s can be a digit more than 127, which noise would carry to 128 or -128: another sign in int8."""
    x = gaussian(1000, 1, dtype=torch.float32)
    assert (x.abs() / (x.abs() / 127)).max() > 127
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, noise))
    values = quantize(x, (1, 1), rounding="stochastic").values
    assert torch.equal(values.sign(), x.sign().to(torch.int8))
    assert values.abs().min() >= 126


def test_stochastic_rounding_draws_from_the_generator_given():
    x = gaussian(4, 50)
    before = torch.get_rng_state()
    a, b, c = (quantize(x, rounding="stochastic", generator=seeded(seed)).values for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert torch.equal(quantize(x, rounding="stochastic").values, a)


@pytest.mark.parametrize(("rounding", "bad"), [*zip(ROUNDINGS, (math.nan, math.inf, -math.inf), strict=True)])
def test_nan_and_infinity_stay_in_their_block(rounding, bad):
    x = gaussian(2, 10, 10)
    clean = quantize(x, (4, 4), rounding, seeded(0)).dequantize()
    x[1, 5, 9] = bad
    expected = clean.clone()
    expected[1, 4:8, 8:] = math.nan
    quantized, faked = (function(x, (4, 4), rounding, seeded(0)) for function in (quantize, fake_quantize))
    for result in (quantized.dequantize(), faked):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("contraction", [1, 1024, 1025, 5000])
@pytest.mark.parametrize("values", [(-128, 128), (-128, -125)])
def test_integer_matmul_is_exact(contraction, values):
    a = torch.randint(*values, (2, 1, 5, contraction), generator=seeded(0), dtype=torch.int8)
    b = torch.randint(*values, (3, contraction, 4), generator=seeded(1), dtype=torch.int8)
    product = integer_matmul(a, b)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), a.long() @ b.long())
    longest = torch.full((1, 2**17 - 1), -128, dtype=torch.int8)  # the whole range of int32
    assert integer_matmul(longest, longest.mT).item() == 2**31 - 2**14


INT8, LONGER = torch.ones(2, 3, 4, dtype=torch.int8), torch.zeros(1, 2**17, dtype=torch.int8)
BLOCKS, ONE_SCALE = quantize(gaussian(8, 8), (4, 2)), quantize(gaussian(8, 8))
SCALES = "expected one scale along the contraction, got"
REFUSED = [
    (integer_matmul, (None, INT8), TypeError, "a: expected a torch.Tensor, got NoneType"),
    (integer_matmul, (INT8, INT8.to_sparse()), TypeError, "b: expected a dense tensor"),
    (integer_matmul, (INT8, INT8.float()), TypeError, "b: expected dtype torch.int8, got torch.float32"),
    (integer_matmul, (INT8.to("meta"), INT8), ValueError, "a: expected a device that holds data, got meta"),
    (integer_matmul, (INT8[0, 0], INT8), ValueError, r"a: expected at least 2 dimensions, got shape \(4,\)"),
    (integer_matmul, (INT8, INT8.mT.repeat(2, 1, 1)), ValueError, "b: expected to broadcast with a"),
    (quantized_matmul, (INT8, INT8), TypeError, "a: expected a QuantizedTensor, got Tensor"),
    (integer_matmul, (LONGER, LONGER.mT), ValueError, "a: expected at most 131071 columns .* got 131072"),
    (integer_matmul, (LONGER[:, :8], LONGER[:, :4]), ValueError, "b: expected 8 rows, as many as a has columns"),
    (quantized_matmul, (BLOCKS, ONE_SCALE), ValueError, f"a: {SCALES} 4"),
    (quantized_matmul, (ONE_SCALE, BLOCKS), ValueError, f"b: {SCALES} 2"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), REFUSED)
def test_what_is_refused_is_named(function, arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        function(*arguments)


@pytest.mark.parametrize(("a_rows", "b_columns"), [(1, 4), (4, None), (None, 1)])
def test_quantized_matmul_is_the_matmul_of_the_dequantized(a_rows, b_columns):
    a = quantize(gaussian(2, 10, 30), (a_rows, None))
    b = quantize(gaussian(2, 30, 7, seed=1), (None, b_columns))
    expected = a.dequantize() @ b.dequantize()
    torch.testing.assert_close(quantized_matmul(a, b), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(quantized_matmul(b.mT, a.mT), expected.mT, rtol=0, atol=1e-12)
