"""Every level of SageBwd's ladders against the oracles; memory, layouts and launches; what comes before both passes."""

import math
from itertools import product

import pytest
import torch
from kernel_cases import (
    BACKWARD,
    CASES,
    DEVICE,
    DTYPES,
    FORWARD,
    HOPPER_CASES,
    LAID_OUT,
    MARKS,
    ON_GPU,
    OPTIONS,
    SMALL,
    VALUE_BLOCKS,
    Case,
    all_equal,
    altered,
    assert_backward,
    assert_forward,
    assert_forward_by_blocks,
    backward_level,
    distance,
    draw,
    emulated,
    exact,
    feeding,
    forward_level,
    guarded_allocations,
    natural_log_sum_exp,
    run_backward_level,
    run_forward_level,
    simulated_backward,
    simulated_forward,
    takes,
)
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.memory import is_heads_last
from sage_kernels.common.quantize import SCALE_BLOCK, padded_head_dim, padded_length
from sage_kernels.sagebwd import ladder
from sage_kernels.sagebwd.forward.key_mean import key_mean
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS, prepare_forward
from sage_kernels.sagebwd.prologue import NO_PROLOGUE

from sage_ref.quantization import quantize

pytestmark = MARKS
LADDERS = {"forward": FORWARD_LEVELS, "backward": BACKWARD_LEVELS}
LEVELS = [*product(["forward"], FORWARD), *product(["backward"], BACKWARD)]


def is_hoppers(ladder, level):
    return LADDERS[ladder][level].hopper is not None


def of_levels(cases, hopper_cases=()):
    """Parametrise by case, the levels of one side by side: its results are kept. A level has every other case."""
    every = [
        (case, kind, level) for (i, case), (kind, level) in product(enumerate(cases), LEVELS) if (i + level) % 2 == 0
    ]
    every += [(case, *level) for case in hopper_cases for level in LEVELS if is_hoppers(*level)]
    taken = [(case, kind, level) for case, kind, level in every if takes(level, case, LADDERS[kind])]
    ids = [f"{case}-{kind}{level}" for case, kind, level in taken]
    return pytest.mark.parametrize(("case", "ladder", "level"), taken, ids=ids)


# The levels against the oracles


def assert_same_error(case, found, simulated, exact):
    """Assert that the error against G is S's within 15%: not larger, nor that of a kernel that quantised less."""
    error, rounding = distance(simulated, exact), torch.finfo(case.dtype).eps / 2 * exact.norm()
    assert 0.85 * error - rounding <= distance(found, exact) <= 1.15 * error + rounding


@of_levels(CASES + OPTIONS, HOPPER_CASES)
def test_results_and_their_errors_are_the_simulations(case, ladder, level):
    if ladder == "forward":
        _, output, log_sum_exp = forward_level(case, level)
        found, simulated, of_g = [output], simulated_forward(case, level)[:1], exact(case)[:1]
        assert_forward(case, level, output)
        expected = simulated_forward(case, level)[1]
        torch.testing.assert_close(natural_log_sum_exp(case, level), expected, rtol=1e-5, atol=1e-4)
        past_the_end = log_sum_exp[..., case.n_q :]  # there probabilities vanish
        assert past_the_end.shape[-1] == padded_length(case.n_q) - case.n_q
        assert (past_the_end > 1e9).all()
    else:
        found, of_g = backward_level(case, level), exact(case)[1:]
        simulated = simulated_backward(case, level) if level else of_g
        assert_backward(case, level, found)
    assert all(x.dtype == case.dtype and x.is_contiguous() for x in found)
    assert all_equal(draw(case), draw.__wrapped__(case))
    if level:
        for one in zip(found, simulated, of_g, strict=True):
            assert_same_error(case, *one)


NEAREST, DITHERED = FORWARD[1:], [x for x in FORWARD if FORWARD_LEVELS[x].takes_unbiased]
LARGER = [*product(NEAREST, (20, 200), [False]), *product(DITHERED, (20, 80), [True])]
LARGER += [(5, 140, True)] * (5 in FORWARD)


@pytest.mark.parametrize(("level", "std", "unbiased"), LARGER)
def test_larger_scores_give_the_simulations_output_or_nan(level, std, unbiased):
    """From 20 on the rounding of level 3's exponents, left alone, would let 127 P round to 128, which is -128.

    From 140 on that of level 5's, unbiased, would let 127 P + 127/128 reach 128. From c max|q| max|k| = 30,000 on level
    3's exponents leave nothing of P^: the output is NaN, not wrong.
    """
    case = Case(150, 140, 64, 1, 1, is_causal=True, std=std, unbiased=unbiased)
    output, (simulated, _) = forward_level(case, level).output, simulated_forward(case, level)
    rows = (output - simulated).norm(dim=-1) / simulated.norm(dim=-1)
    assert not (rows > 0.25).any()
    assert rows.isnan().all() == (std > 100 and level in (3, 4))
    if std == 20 or (std == 140 and level == 5):
        assert distance(output, simulated) <= 0.1 * distance(simulated, exact(case)[0])


@pytest.mark.parametrize("level", BACKWARD[1:], ids="backward{}".format)
def test_gradients_at_large_scores(level):
    """A row that one large dS decides may differ if that is rounded the other way; the other rows agree."""
    case = Case(150, 140, 128 if level == 6 else 64, 1, 1, is_causal=True, std=10.0)
    for found, simulated in zip(backward_level(case, level), simulated_backward(case, level), strict=True):
        rows = (found - simulated).norm(dim=-1) / simulated.norm(dim=-1)
        assert rows.nanmedian() <= 1e-3


@pytest.mark.parametrize("value_case", VALUE_BLOCKS, ids=str)
@pytest.mark.parametrize("level", FORWARD[2:], ids="forward{}".format)
def test_value_blocks_of_different_size(level, value_case):
    assert_forward_by_blocks(value_case, level, forward_level(value_case, level).output)


@pytest.mark.parametrize("level", [n for n, level in FORWARD_LEVELS.items() if not level.takes_unbiased])
def test_a_level_that_rounds_to_nearest_alone_says_so(level):
    query, key, value, _ = draw(SMALL)
    message = f"unbiased: expected False for forward level {level}, got True; levels 4, 5 take it"
    with pytest.raises(ValueError, match=message):
        prepare_forward(query, key, value, level, scale=1.0, smooth_k=True, unbiased=True)


OVERFLOWS = [*product((0, 2, 3, 5), [64], [math.nan]), (3, 64, math.inf), (6, 128, math.nan)]


@pytest.mark.parametrize(("level", "head_dim", "bad"), [x for x in OVERFLOWS if x[0] in BACKWARD])
def test_an_overflow_in_the_gradient_is_not_lost_nor_spread_to_other_heads(level, head_dim, bad):
    """INT8 has no NaN, and a GPU's maximum ignores it, but a loss scaler must see it."""
    case = Case(80, 20, head_dim, 3, 3, is_causal=True)
    # A head's last tile ends with the first tokens of the next head.
    bad_ones = {"grad_output": lambda x: x[0, 0, 3, 5].fill_(bad), "value": lambda x: x[0, 2, 2, 1].fill_(bad)}
    gradients, fine = run_backward_level(case, level, altered(case, **bad_ones)), backward_level(case, level)
    assert not gradients[0][0, 0, 3].isfinite().any()
    assert not any(x[0, 0].isfinite().all() for x in gradients[1:])
    assert all(torch.equal(x[0, 1], y[0, 1]) for x, y in zip(gradients, fine, strict=True))


@pytest.mark.parametrize(("level", "head_dim"), [(0, 64), (3, 128), (5, 64), (5, 128), (6, 128)])
def test_repeats_are_equal_bit_for_bit(level, head_dim, request):
    """On a GPU, many programs and many tiles: a missing barrier would show in some of 100 runs.

    On the CPU, every run of a program for Hopper schedules its groups of warps differently.
    """
    if level not in BACKWARD or not (ON_GPU or is_hoppers("backward", level)):
        pytest.skip("no program that could differ")
    case = SMALL._replace(head_dim=head_dim, heads=1)
    if ON_GPU:
        request.getfixturevalue("large_memory")  # up to 15 GiB
        case = Case(2048, 2048, head_dim, 16, 4, True, torch.bfloat16, batch=4)
    first, output = backward_level(case, level), forward_level(case, feeding(level, case)).output
    for seed in range(1, 101 if ON_GPU else 2):
        forward = run_forward_level(case, feeding(level, case), start=emulated(seed))
        assert torch.equal(forward.output, output)
        assert all_equal(run_backward_level(case, level, forward=forward, start=emulated(seed)), first)


# Layouts


# Levels 1 to 4, and backward 1 to 3, share a program.
@pytest.mark.parametrize(("ladder", "level"), [x for x in LEVELS if x[1] not in (1, 2) and x != ("forward", 3)])
def test_any_strides_give_the_same_bits_and_results_lie_as_their_tensors_do(ladder, level):
    """O and dQ have the layout of Q, dK and dV that of V."""
    head_dim = 128 if (ladder, level) == ("backward", 6) else 64
    case = Case(20, 40, head_dim, is_causal=True, batch=2, smooth_k=False)
    for layouts in LAID_OUT if is_hoppers(ladder, level) else [LAID_OUT[level % 2]]:
        tensors = tuple(layout(x) for layout, x in zip(layouts, draw(case), strict=True))
        of_q, of_v = is_heads_last(tensors[0]), is_heads_last(tensors[2])
        if ladder == "forward":
            found, expected = [run_forward_level(case, level, tensors).output], [forward_level(case, level).output]
        else:
            given = forward_level(case, feeding(level, case))
            given = given._replace(output=layouts[0](given.output))
            found, expected = run_backward_level(case, level, tensors, given), backward_level(case, level)
        assert all_equal(found, expected)
        assert [*map(is_heads_last, found)] == [of_q, of_v, of_v][: len(found)]


@pytest.mark.gpu
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("lengths", [(32768, 64), (64, 32768)])
def test_more_elements_than_32_bits_count(lengths):
    """Q, or K and V, of more than 2^31 elements: the last heads come out as they do alone."""
    heads = 2**31 // (32768 * 128) + 8
    case = Case(*lengths, 128, heads, heads, smooth_k=False)
    q_shape, kv_shape = ((1, heads, n, 128) for n in lengths)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    tensors = tuple(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
    alone = tuple(x[:, -2:].clone() for x in tensors)
    alone_case = case._replace(heads=2, kv_heads=2)
    level = BACKWARD[-1]
    expected = run_forward_level(alone_case, FORWARD[-1], alone)
    expected_gradients = run_backward_level(alone_case, level, alone, expected)
    forward = run_forward_level(case, FORWARD[-1], tensors)
    assert torch.equal(forward.output[:, -2:], expected.output)
    for x, y in zip(run_backward_level(case, level, tensors, forward), expected_gradients, strict=True):
        assert torch.equal(x[:, -2:], y)


# The launch that prepares all tensors


def in_order(x):
    """Undo `group_columns`: of 16 columns a thread of a matmul has 2t, 2t+1, 2t+8, 2t+9 side by side."""
    places = [4 * (column % 8 // 2) + 2 * (column // 8) + column % 2 for column in range(16)]
    return x.unflatten(-1, (-1, 16))[..., places].flatten(-2)


def assert_quantised(hat, x, mean=None, factor=1.0):
    """Assert that X^ is psi of the reference, on the CPU, where dividing by 127 is rounded correctly; then zeros."""
    x = x.float() if mean is None else x.float() - mean[:, :, None]
    expected, values = quantize(x.cpu(), (SCALE_BLOCK, None)), hat.values.cpu()
    (n, head_dim), blocks = x.shape[2:], expected.scale.shape[2]
    assert values.shape[2:] == (padded_length(n), padded_head_dim(head_dim))
    assert torch.equal(values[..., :n, :head_dim], expected.values)
    assert not values[..., n:, :].any()
    assert not values[..., head_dim:].any()
    assert torch.equal(hat.scale.cpu(), expected.scale.squeeze(-1) * factor)
    assert hat.scale.shape[2] == blocks


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "head_dim", "size"), [(1, 32, 1.0), (203, 128, 1.0), (300, 33, 1e-37)])
def test_quantised_values_and_scales_are_the_references(n, head_dim, size, dtype):
    """Blocks too small for a scale become zeros. V's range is that of V itself, also where the forward smooths it."""
    drawn = size * torch.randn(3, 1, 2, n, head_dim, generator=torch.Generator().manual_seed(n))
    query, key, value = drawn.to(DEVICE, dtype)
    options = {"scale": 0.25 / ladder.LOG2_E, "smooth_k": True}
    with guarded_allocations():
        found = prepare_forward(query, key, value, 3, **options)
        unbiased = prepare_forward(query, key, value, 4, unbiased=True, **options)
        mean = key_mean(key, NO_PROLOGUE, start_with_triton)
    v_hat, smoothed = found.v_hat, unbiased.v_hat
    assert_quantised(found.q_hat, query, factor=0.25)
    assert_quantised(found.k_hat, key, mean)
    assert_quantised(v_hat._replace(values=v_hat.transposed.mT), value)
    assert_quantised(smoothed._replace(values=in_order(smoothed.transposed).mT), value, unbiased.v_mean)
    assert torch.equal(unbiased.v_range, v_hat.scale)
