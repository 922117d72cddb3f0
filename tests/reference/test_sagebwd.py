"""SageBwd: tiled equals whole, exact where nothing is quantised, wrong by the right amount where something is."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.experiments.table1 import PAPER_TABLE1, TENSORS
from sage_ref.quantization import fake_quantize
from sage_ref.sagebwd.api import reference_attention
from sage_ref.sagebwd.whole import (
    MATMULS,
    SageBwdFunction,
    SageBwdSettings,
    sagebwd_backward,
    sagebwd_forward,
    tiled_backward,
    tiled_forward,
)
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates

SWITCHES = list(itertools.product([False, True], repeat=3))  # is_causal, smooth_k, smooth_q


def whole(q, k, v, do, settings):
    """O, L, dQ, dK, dV."""
    forward = sagebwd_forward(q, k, v, settings)
    backward = sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)
    return forward.output, forward.log_sum_exp, *backward[:3]


def tiled(q, k, v, do, settings):
    output, log_sum_exp = tiled_forward(q, k, v, settings)
    return output, log_sum_exp, *tiled_backward(do, q, k, v, output, log_sum_exp, settings)


def errors(tensors, **settings):
    """Relative L2 of O, dQ, dK, dV against exact attention in float64."""
    settings = SageBwdSettings(**settings)
    exact, quantized = exact_intermediates(*tensors, settings), sagebwd_intermediates(*tensors, settings)
    return {name: relative_l2(quantized[name], exact[name]) for name in TENSORS}


@pytest.mark.parametrize(("is_causal", "smooth_k", "smooth_q"), SWITCHES)
@pytest.mark.parametrize("scale", [None, 0.4])
def test_without_quantisation_it_is_exact_attention(inputs, is_causal, smooth_k, smooth_q, scale):
    q, k, v, do = inputs(40, 55, 16)
    options = {"is_causal": is_causal, "scale": scale}
    settings = SageBwdSettings(
        smooth_k=smooth_k, smooth_q=smooth_q, block_q=16, block_kv=8, exact_matmuls=MATMULS, **options
    )
    forward = attention_forward(q, k, v, **options)
    backward = attention_backward(do, q, k, v, forward.output, forward.log_sum_exp, **options)
    for ours, exact in zip(whole(q, k, v, do, settings), (*forward[:2], *backward[:3]), strict=True):
        assert_close(ours, exact, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("is_causal", "smooth_k", "smooth_q"), SWITCHES)
@pytest.mark.parametrize("granularity", ["block", "row"])
@pytest.mark.parametrize(
    ("n_q", "n_k", "head_dim", "block_q", "block_kv"),
    [
        (1, 1, 1, 64, 64),
        (3, 3, 7, 64, 64),
        (64, 1, 32, 64, 64),
        (1, 70, 64, 64, 64),
        (113, 203, 64, 64, 64),
        (70, 45, 7, 16, 32),
        (45, 90, 32, 32, 16),
        (50, 33, 1, 7, 5),
    ],
)
def test_tiled_and_whole_give_the_same_numbers(
    inputs, n_q, n_k, head_dim, block_q, block_kv, granularity, is_causal, smooth_k, smooth_q
):
    settings = SageBwdSettings(
        is_causal=is_causal, smooth_k=smooth_k, smooth_q=smooth_q, granularity=granularity, block_q=block_q,
        block_kv=block_kv,
    )  # fmt: skip
    tensors = inputs(n_q, n_k, head_dim)
    for by_tiles, at_once in zip(tiled(*tensors, settings), whole(*tensors, settings), strict=True):
        assert_close(by_tiles, at_once, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiled_and_whole_agree_in_the_dtypes_of_training(inputs, dtype):
    """float32 sums in another order, so a value near a tie can be rounded to the other side. Kernels get 2e-3 too."""
    tensors = inputs(100, 130, 32, dtype=dtype)
    for by_tiles, at_once in zip(tiled(*tensors, SageBwdSettings()), whole(*tensors, SageBwdSettings()), strict=True):
        assert by_tiles.dtype == at_once.dtype
        assert relative_l2(by_tiles, at_once) < 2e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("granularity", ["block", "row"])
@pytest.mark.parametrize("bad_input", range(4))
def test_nan_reaches_the_same_entries_by_tiles_and_at_once(inputs, bad_input, granularity, smooth_k, is_causal):
    settings = SageBwdSettings(is_causal=is_causal, smooth_k=smooth_k, granularity=granularity, block_q=16, block_kv=8)
    tensors = inputs(50, 60, 4)
    tensors[bad_input][0, 0, 20, 1] = math.nan
    for by_tiles, at_once in zip(tiled(*tensors, settings), whole(*tensors, settings), strict=True):
        assert_close(by_tiles, at_once, atol=1e-11, rtol=0, equal_nan=True)


@pytest.mark.parametrize("order", ["drawn", "rising", "falling"])
@pytest.mark.parametrize("offset", [0, -1000, 1000])
def test_the_online_softmax_of_any_tile_order_is_the_softmax(order, offset):
    """L must be exact where INT8 loses nothing: whether the maximum comes in the first tile, in between or in the last,
    and far from 0, where a maximum that starts at 0 underflows.

    S = q . k with q = (1, 1, 1) and k = (what varies, offset, offset) in whole multiples of max/127.
    """
    step = max(abs(offset), 30) / 127
    varying = torch.randint(-127, 128, (40, 1), generator=torch.Generator().manual_seed(0)).double() * step
    varying[::8] = 127 * step  # every tile of 8 keys uses the whole range, so its scale is that step
    if order != "drawn":
        height = torch.linspace(-1, 1, 5).double().repeat_interleave(8)[:, None].mul(127).round() * step
        varying = height if order == "rising" else -height
    k = torch.cat([varying, torch.full((40, 2), offset).double()], -1)
    q = torch.ones(3, 3, dtype=torch.float64)
    _, log_sum_exp = tiled_forward(q, k, varying, SageBwdSettings(smooth_k=False, block_q=2, block_kv=8, scale=1.0))
    assert_close(log_sum_exp, (q @ k.mT).logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_equal_scores_average_the_values_exactly():
    """P~ = 1 everywhere is on the grid, and so are whole numbers: O is the plain mean, whatever the tiles."""
    v = torch.randint(-127, 128, (1, 1, 23, 4), generator=torch.Generator().manual_seed(0)).double()
    v[:, :, ::5] = 127
    q, k = torch.zeros(1, 1, 9, 4).double(), torch.ones(1, 1, 23, 4).double()
    output, _ = tiled_forward(q, k, v, SageBwdSettings(block_q=4, block_kv=5))
    assert_close(output, v.mean(-2, keepdim=True).expand_as(output), rtol=1e-13, atol=1e-13)


def test_more_blocks_than_one_are_quantised_on_their_own(inputs):
    """An outlier in one key block must not cost the others their precision."""
    q, k, v, do = inputs(64, 64, 16)
    k[:, :, 3] *= 40
    fine = errors((q, k, v, do), smooth_k=False, block_q=16, block_kv=16)
    coarse = errors((q, k, v, do), smooth_k=False, block_q=64, block_kv=64)
    assert fine["O"] < coarse["O"] / 2


@pytest.mark.parametrize("granularity", ["block", "row"])
@pytest.mark.parametrize("form", [whole, tiled])
def test_the_error_is_that_of_int8(inputs, form, granularity):
    """Neither less (something wasn't quantised) nor more. Rounding one Gaussian operand with one scale per block leaves
    a relative error of s/sqrt(12), s = max/127; each output has two such operands, the scores errors of their own,
    and a scale shared by a whole block of P or dS adds what few large entries cost all others."""
    tensors = inputs(256, 256, 64)
    settings = SageBwdSettings(granularity=granularity)
    exact = exact_intermediates(*tensors, settings)
    operand = {"O": tensors[2], "dQ": tensors[1], "dK": tensors[0], "dV": tensors[3]}
    output, _, dq, dk, dv = form(*tensors, settings)
    for name, result in {"O": output, "dQ": dq, "dK": dk, "dV": dv}.items():
        step = operand[name].unflatten(-2, (-1, 64)).abs().amax((-2, -1)).mean() / 127 / operand[name].std()
        expected = step.item() / math.sqrt(12)
        assert expected < relative_l2(result, exact[name]) < (3 if granularity == "row" else 6) * expected


@pytest.mark.parametrize(("sigma", "granularity"), [(1, "row"), (3, "block"), (5, "block")])
def test_errors_come_within_a_third_of_the_papers_table(inputs, sigma, granularity):
    q, k, v, do = inputs(512, 512, 64)
    measured = errors((q * sigma, k * sigma, v, do), granularity=granularity)
    for name, (_, paper) in zip(TENSORS, PAPER_TABLE1[sigma], strict=True):
        assert measured[name] == pytest.approx(paper, rel=1 / 3)


@pytest.mark.parametrize(
    ("matmul", "changed"),
    [
        ("S", {"O", "L", "dQ", "dK", "dV", "delta", "P", "dS"}),
        ("O", {"O", "dQ", "dK", "delta", "dS"}),
        ("S_backward", {"dQ", "dK", "dV", "P", "dS"}),
        ("dV", {"dV"}),
        ("dP", {"dP", "dS", "dQ", "dK"}),
        ("dQ", {"dQ"}),
        ("dK", {"dK"}),
    ],
)
@pytest.mark.parametrize("smooth_q", [False, True])
def test_each_matmul_changes_what_depends_on_it_and_nothing_else(inputs, matmul, changed, smooth_q):
    tensors = inputs(40, 50, 16)

    def results(exact_matmuls):
        settings = SageBwdSettings(block_q=16, block_kv=16, smooth_q=smooth_q, exact_matmuls=exact_matmuls)
        log_sum_exp = sagebwd_forward(*tensors[:3], settings).log_sum_exp
        return sagebwd_intermediates(*tensors, settings) | {"L": log_sum_exp}

    exact, quantized = results(MATMULS), results(tuple(m for m in MATMULS if m != matmul))
    assert {name for name in exact if not torch.equal(exact[name], quantized[name])} == changed
    for name in changed:
        assert 1e-4 < relative_l2(quantized[name], exact[name]) < 0.1


@pytest.mark.parametrize("granularity", ["block", "row"])
@pytest.mark.parametrize("matmul", MATMULS)
def test_each_matmul_rounds_both_operands_with_the_scales_of_the_algorithm(inputs, matmul, granularity):
    q, k, v, do = inputs(40, 50, 16)
    settings = SageBwdSettings(
        smooth_k=False, block_q=16, block_kv=8, granularity=granularity,
        exact_matmuls=tuple(m for m in MATMULS if m != matmul),
    )  # fmt: skip
    forward = sagebwd_forward(q, k, v, settings)
    backward = sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)
    per_query, per_key = ((1, 8), (16, 1)) if granularity == "row" else ((16, 8), (16, 8))
    hat = {"q": fake_quantize(q, (16, None)), "do": fake_quantize(do, (16, None))}
    hat |= {"k": fake_quantize(k, (8, None)), "v": fake_quantize(v, (8, None))}
    s, p, ds = forward.scores, backward.probabilities, backward.grad_scores
    row_max = s.amax(-1, keepdim=True)
    ours, expected = {
        "S": (s, hat["q"] @ hat["k"].mT / 4),
        "O": (
            forward.output,
            fake_quantize(torch.exp(s - row_max), (1, 8)) @ hat["v"] / torch.exp(s - row_max).sum(-1, keepdim=True),
        ),
        "S_backward": (p, torch.exp(hat["q"] @ hat["k"].mT / 4 - forward.log_sum_exp[..., None])),
        "dV": (backward.grad_value, fake_quantize(p, per_key).mT @ hat["do"]),
        "dP": (backward.grad_probabilities, hat["do"] @ hat["v"].mT),
        "dQ": (backward.grad_query, fake_quantize(ds, per_query) @ hat["k"] / 4),
        "dK": (backward.grad_key, fake_quantize(ds, per_key).mT @ hat["q"] / 4),
    }[matmul]
    assert_close(ours, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_smoothing_keys_with_an_offset_lowers_every_error(inputs, is_causal):
    q, k, v, do = inputs(192, 192, 64)
    k = k + torch.linspace(-20, 20, 64)
    options = {"is_causal": is_causal, "granularity": "row"}
    off, on = (errors((q, k, v, do), smooth_k=smooth_k, **options) for smooth_k in (False, True))
    for name in TENSORS:
        assert on[name] < 0.5 * off[name]


def test_smoothing_queries_with_an_offset_lowers_the_error_of_the_output(inputs):
    q, k, v, do = inputs(192, 192, 64)
    q = q + torch.linspace(-20, 20, 64)
    off, on = (errors((q, k, v, do), smooth_q=smooth_q) for smooth_q in (False, True))
    assert on["O"] < 0.5 * off["O"]


def test_grad_probabilities_in_int8_cost_grad_query_and_grad_key(inputs):
    """An offset of V is large in dP and cancels in dP - delta: what rounding does to dP does not cancel."""
    q, k, v, do = inputs(192, 192, 64)
    tensors = (q, k, v + 5, do)
    in_16_bit, in_int8 = (errors(tensors, granularity="row", exact_matmuls=exact) for exact in (("dP",), ()))
    for name in ("dQ", "dK"):
        assert in_16_bit[name] < 0.5 * in_int8[name]
    for name in ("O", "dV"):
        assert in_16_bit[name] == in_int8[name]


def test_scales_per_row_beat_scales_per_block(inputs):
    tensors = inputs(256, 256, 64)
    row, block = (errors(tensors, granularity=granularity) for granularity in ("row", "block"))
    assert row["O"] == block["O"]
    for name in ("dQ", "dK", "dV"):
        assert row[name] < 0.8 * block[name]


def test_granularity_row_shares_a_scale_per_row_of_each_result(inputs):
    """A query with a huge dO must not cost the other queries' dQ, nor a key with huge scores the other keys' dK, dV."""
    q, k, v, do = inputs(64, 64, 16)
    others = [i for i in range(64) if i != 5]
    row, block = (
        SageBwdSettings(granularity=granularity, exact_matmuls=("S", "O", "S_backward", "dP"))
        for granularity in ("row", "block")
    )

    def error(name, settings, *tensors):
        exact, quantized = (f(*tensors, settings)[name] for f in (exact_intermediates, sagebwd_intermediates))
        return relative_l2(quantized[:, :, others], exact[:, :, others])

    loud = do.clone()
    loud[:, :, 5] *= 1000
    favourite = k.clone()
    q[..., 0], favourite[:, :, 5, 0] = 8, 8  # every query looks at key 5
    for name, tensors in (("dQ", (q, k, v, loud)), ("dK", (q, favourite, v, do)), ("dV", (q, favourite, v, do))):
        assert error(name, row, *tensors) < min(0.05, error(name, block, *tensors) / 2)


@pytest.mark.parametrize("form", [whole, tiled])
@pytest.mark.parametrize(("smooth_k", "smooth_q"), [(False, False), (True, False), (True, True)])
def test_log_sum_exp_is_that_of_the_unsmoothed_scores(inputs, form, smooth_k, smooth_q):
    q, k, v, do = inputs(40, 50, 16)
    q, k = q + 1, k + 3
    settings = SageBwdSettings(scale=0.1, smooth_k=smooth_k, smooth_q=smooth_q, block_q=16)
    _, log_sum_exp, *_ = form(q, k, v, do, settings)
    assert_close(log_sum_exp, (q @ k.mT * 0.1).logsumexp(-1), atol=0.1 if smooth_k else 0.5, rtol=0)


def test_log_sum_exp_is_float32_for_half_precision_inputs(inputs):
    tensors = inputs(4, 4, 8, dtype=torch.bfloat16)
    assert whole(*tensors, SageBwdSettings())[1].dtype == torch.float32
    assert tiled(*tensors, SageBwdSettings())[1].dtype == torch.float32


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gqa_is_attention_with_the_heads_repeated(inputs, kv_heads, is_causal):
    q, k, v, do = inputs(30, 40, 16, heads=4, kv_heads=kv_heads)
    settings = SageBwdSettings(is_causal=is_causal, block_q=16, block_kv=16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = reference_attention(*leaves, settings)
    dq, dk, dv = torch.autograd.grad(output, leaves, do)
    group = 4 // kv_heads
    for head in range(4):
        one = [x[:, head // group if x.shape[1] != 4 else head, None] for x in (q, k, v, do)]
        expected_output, _, expected_dq, *_ = whole(*one, settings)
        assert_close(output[:, head, None].detach(), expected_output, atol=1e-12, rtol=0)
        assert_close(dq[:, head, None], expected_dq, atol=1e-12, rtol=0)
    for kv_head in range(kv_heads):
        heads = range(kv_head * group, (kv_head + 1) * group)
        parts = [
            whole(*(x[:, i, None] for x, i in zip((q, k, v, do), (h, kv_head, kv_head, h), strict=True)), settings)
            for h in heads
        ]
        assert_close(dk[:, kv_head, None], sum(part[3] for part in parts), atol=1e-12, rtol=0)
        assert_close(dv[:, kv_head, None], sum(part[4] for part in parts), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_autograd_hands_back_what_the_functions_compute(inputs, dtype):
    q, k, v, do = inputs(33, 40, 16, dtype=dtype)
    settings = SageBwdSettings(is_causal=True, smooth_q=True, block_q=16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = SageBwdFunction.apply(*leaves, settings)
    gradients = torch.autograd.grad(output, leaves, do)
    expected_output, _, *expected = whole(q, k, v, do, settings)
    assert torch.equal(output, expected_output)
    for ours, by_hand in zip((output, *gradients), (expected_output, *expected), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, by_hand)


@pytest.mark.parametrize(("is_causal", "smooth_k", "smooth_q"), SWITCHES)
def test_gradients_without_quantisation_pass_gradcheck(inputs, is_causal, smooth_k, smooth_q):
    settings = SageBwdSettings(
        is_causal=is_causal, smooth_k=smooth_k, smooth_q=smooth_q, block_q=2, exact_matmuls=MATMULS
    )
    leaves = [x.requires_grad_() for x in inputs(5, 4, 3, heads=1)[:3]]
    assert torch.autograd.gradcheck(lambda *qkv: SageBwdFunction.apply(*qkv, settings), leaves)


def test_a_second_derivative_is_refused(inputs):
    leaves = [x.requires_grad_() for x in inputs(4, 4, 8)[:3]]
    output = SageBwdFunction.apply(*leaves, SageBwdSettings())
    for loss in (output.sum(), output.square().sum()):
        with pytest.raises(RuntimeError, match="create_graph: expected False"):
            torch.autograd.grad(loss, leaves[:1], create_graph=True)


def test_gradients_only_where_asked(inputs):
    q, k, v, do = inputs(6, 6, 8)
    v.requires_grad_()
    output = SageBwdFunction.apply(q, k, v, SageBwdSettings())
    output.backward(do)
    assert torch.equal(v.grad, whole(q, k, v.detach(), do, SageBwdSettings())[4])
    assert q.grad is None


@pytest.mark.parametrize("granularity", ["block", "row"])
def test_stochastic_rounding_of_grad_scores_is_seeded_and_unbiased(inputs, granularity):
    """Mean of 400 draws of dQ and dK against dS unrounded: z-scores with 5 as the bound for each of 512 entries."""
    q, k, v, do = inputs(16, 16, 16, heads=1)
    generator = torch.Generator().manual_seed(0)
    settings = SageBwdSettings(
        granularity=granularity, ds_rounding="stochastic", generator=generator, block_q=8, block_kv=8, smooth_k=False
    )
    forward = sagebwd_forward(q, k, v, settings)
    backward = (do, q, k, v, forward.output, forward.log_sum_exp, settings)
    first, second = sagebwd_backward(*backward), sagebwd_backward(*backward)
    generator.manual_seed(0)
    assert torch.equal(sagebwd_backward(*backward).grad_query, first.grad_query)
    assert not torch.equal(second.grad_query, first.grad_query)
    k_hat, q_hat = fake_quantize(k, (8, None)), fake_quantize(q, (8, None))
    draws = [sagebwd_backward(*backward)[:2] for _ in range(400)]
    for drawn, expected in zip(
        zip(*draws, strict=True), (first.grad_scores @ k_hat / 4, first.grad_scores.mT @ q_hat / 4), strict=True
    ):
        drawn = torch.stack(drawn)
        z = (drawn.mean(0) - expected) / (drawn.std(0) / math.sqrt(400))
        assert z.abs().max() < 5


@pytest.mark.parametrize("granularity", ["block", "row"])
def test_the_tiles_round_stochastically_too(inputs, granularity):
    """Forward and dV don't depend on the draws; dQ and dK do, within twice the error of rounding to nearest."""
    tensors = inputs(40, 40, 16)
    options = {"granularity": granularity, "block_q": 16, "block_kv": 16}
    nearest = tiled(*tensors, SageBwdSettings(**options))
    settings = SageBwdSettings(ds_rounding="stochastic", generator=torch.Generator().manual_seed(0), **options)
    stochastic = tiled(*tensors, settings)
    exact = exact_intermediates(*tensors, settings)
    for name, a, b in zip(("O", "L", "dQ", "dK", "dV"), nearest, stochastic, strict=True):
        if name in ("dQ", "dK"):
            assert not torch.equal(a, b)
            assert relative_l2(b, exact[name]) < 3 * relative_l2(a, exact[name])
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("granularity", "tile"),
        ("ds_rounding", "down"),
        ("exact_matmuls", ("dP", "P")),
        ("exact_matmuls", "dP"),
        ("block_q", 0),
        ("block_kv", -3),
    ],
)
def test_settings_name_what_is_wrong(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        SageBwdSettings(**{name: value})


def test_the_tiled_form_refuses_other_exact_matmuls(inputs):
    q, k, v, do = inputs(4, 4, 8)
    settings = SageBwdSettings(exact_matmuls=MATMULS)
    with pytest.raises(ValueError, match="exact_matmuls: the tiled form takes"):
        tiled_forward(q, k, v, settings)
    with pytest.raises(ValueError, match="exact_matmuls: the tiled form takes"):
        tiled_backward(do, q, k, v, q, q[..., 0], settings)
