"""Every level of SageBwd's ladders against the oracles; memory, layouts and launches; what comes before both passes."""

import math
from itertools import product

import pytest
import torch
from kernel_cases import (
    BACKWARD,
    CASES,
    COMPILED,
    DEVICE,
    DTYPES,
    FORWARD,
    HOPPER_CASES,
    LAYOUTS,
    MARKS,
    ON_GPU,
    OPTIONS,
    SMALL,
    VALUE_BLOCKS,
    Case,
    all_equal,
    altered,
    are_views_of_memory,
    assert_backward,
    assert_forward,
    assert_forward_by_blocks,
    backward_level,
    distance,
    draw,
    emulated,
    exact,
    feeding,
    fill_cache,
    forward_level,
    guarded,
    guarded_allocations,
    heads_last,
    name_of,
    natural_log_sum_exp,
    prepare_backward_level,
    run_backward_level,
    run_forward_level,
    simulated_backward,
    simulated_forward,
    takes,
    times,
)
from sage_kernels.common.candidates import CANDIDATES, DEFAULTS, candidates
from sage_kernels.common.launch import choose_launch
from sage_kernels.common.quantize import SCALE_BLOCK, padded_head_dim, padded_length, quantize
from sage_kernels.sagebwd import ladder
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS, prepare_forward
from triton.runtime.errors import OutOfResources

import sage_ref.quantization

pytestmark = MARKS
LADDERS = {"forward": FORWARD_LEVELS, "backward": BACKWARD_LEVELS}
LEVELS = [*product(["forward"], FORWARD), *product(["backward"], BACKWARD)]
EVERY_FORWARD = pytest.mark.parametrize("level", FORWARD, ids="forward{}".format)
EVERY_BACKWARD = pytest.mark.parametrize("level", BACKWARD, ids="backward{}".format)
INT8_FORWARD = pytest.mark.parametrize("level", FORWARD[1:], ids="forward{}".format)
INT8_BACKWARD = pytest.mark.parametrize("level", BACKWARD[1:], ids="backward{}".format)


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


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """On a GPU, compile beforehand and in parallel what the selected tests run."""
    if ON_GPU:
        names = " ".join(item.name for item in request.session.items)
        cases = [
            Case(113, 203, head_dim, 8, kv_heads, is_causal, dtype)
            for head_dim, is_causal, dtype in COMPILED for kv_heads in (8, 2)
        ]  # fmt: skip
        run = {"forward": run_forward_level, "backward": run_backward_level}
        jobs = [
            (run[kind], case, level)
            for (kind, level), case in product(LEVELS, cases) if f"{kind}{level}" in names
            and takes(level, case, LADDERS[kind])
        ]  # fmt: skip
        if test_every_launch_gives_the_simulations_result.__name__ in names:
            jobs += [(run_launch, *launch) for launch in LAUNCHES]
        fill_cache(jobs)


# Memory. These tests come first: a stray store is a clear failure here and a crash elsewhere.


GUARDED = product(BACKWARD, [SMALL, Case(70, 140, 96, 1, 1)])


@pytest.mark.parametrize(("level", "case"), [x for x in GUARDED if takes(*x, BACKWARD_LEVELS)], ids=str)
def test_kernels_read_and_write_nothing_but_their_tensors(level, case):
    """Inputs are surrounded by NaNs; outputs and intermediates start out as NaN between guards. Nothing changes."""
    tensors, guards = zip(*(guarded(x, math.nan) for x in draw(case)), strict=True)
    results = {}
    for forward in FORWARD if level == 0 else [feeding(level, case)]:
        with guarded_allocations():
            results[forward] = run_forward_level(case, forward, tensors)
    saved = results[feeding(level, case)]
    saved = saved._replace(output=guarded(saved.output, math.nan)[0])
    with guarded_allocations():
        gradients = run_backward_level(case, level, tensors, saved)
    for forward, result in results.items():
        assert torch.equal(result.output, forward_level(case, forward).output)
        assert torch.equal(result.log_sum_exp, forward_level(case, forward).log_sum_exp)
    assert all_equal(gradients, backward_level(case, level))
    for x, before, around in zip(tensors, draw(case), guards, strict=True):
        assert torch.equal(x, before)
        assert all(guard.isnan().all() for guard in around)


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
    if level:
        for one in zip(found, simulated, of_g, strict=True):
            assert_same_error(case, *one)


SOME_SCORES = [*product((10.0, 20.0), (False, True))] if ON_GPU else [(20.0, False), (20.0, True), (140.0, True)]
LARGER_SCORES = [*product((40.0, 80.0, 200.0, 300.0), (False, True))] if ON_GPU else [(80.0, True), (200.0, False)]


@pytest.mark.parametrize(("std", "unbiased"), SOME_SCORES)
@INT8_FORWARD
def test_large_scores_do_not_overflow(level, std, unbiased):
    """From 20 on the rounding of level 3's exponents, left alone, would let 127 P round to 128, which is -128.

    From 140 on that of level 5's, unbiased, would let 127 P + 127/128 reach 128.
    """
    case = SMALL._replace(std=std, unbiased=unbiased)
    if std > 100 and level != 5:
        pytest.skip("see the next test")
    output, (simulated, _) = forward_level(case, level).output, simulated_forward(case, level)
    assert distance(output, simulated) <= 0.1 * distance(simulated, exact(case)[0])


@pytest.mark.parametrize(("std", "unbiased"), LARGER_SCORES)
@INT8_FORWARD
def test_larger_scores_give_the_simulations_output_or_nan(level, std, unbiased):
    """From c max|q| max|k| = 30,000 on level 3's exponents leave nothing of P^: the output is NaN, not wrong."""
    case = SMALL._replace(std=std, unbiased=unbiased)
    output, (simulated, _) = forward_level(case, level).output, simulated_forward(case, level)
    rows = (output - simulated).norm(dim=-1) / simulated.norm(dim=-1)
    assert not (rows > 0.25).any()
    assert rows.isnan().all() == (std > 100 and level in (3, 4))


@INT8_BACKWARD
def test_gradients_at_large_scores(level):
    """A row that one large dS decides may differ if that is rounded the other way; the other rows agree."""
    case = SMALL._replace(std=10.0, head_dim=128 if level == 6 else 64)
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


@pytest.mark.parametrize(("name", "head_dim"), [("query", 64), ("key", 128), ("value", 64), ("grad_output", 128)])
def test_blocks_of_zeros(name, head_dim):
    """The scale of a block of zeros (padding, for example) is 0, which must not lead to 0/0 or 0 * inf."""
    case = Case(130, 140, head_dim, 1, 1, is_causal=True, smooth_k=False)
    tensors = altered(case, **{name: times(0, ..., slice(SCALE_BLOCK, None), slice(None))})
    forward, results = run_forward_level(case, feeding(1, case), tensors), {}
    for level in BACKWARD[1:]:
        if takes(level, case, BACKWARD_LEVELS):
            results[level] = run_backward_level(case, level, tensors, forward)
            assert all(x.isfinite().all() for x in results[level])
        if level > 3 and level in results and not ON_GPU:
            for x, y in zip(results[level], results[3], strict=True):
                assert distance(x, y) <= 4e-3 * y.double().norm()
    for level in FORWARD[1:] if name != "grad_output" else []:
        assert run_forward_level(case, level, tensors).output.isfinite().all()


OVERFLOWS = [(level, 64, math.nan) for level in (0, 1, 2, 3, 5)] + [(level, 64, math.inf) for level in (0, 1, 3, 5)]
OVERFLOWS += [(level, 128, bad) for level, bad in ((5, math.nan), (6, math.nan), (6, math.inf))]


@pytest.mark.parametrize(("level", "head_dim", "bad"), [x for x in OVERFLOWS if x[0] in BACKWARD])
def test_an_overflow_in_the_gradient_is_not_lost_nor_spread_to_other_heads(level, head_dim, bad):
    """INT8 has no NaN, and a GPU's maximum ignores it, but a loss scaler must see it."""
    case = Case(80, 20, head_dim, is_causal=True, batch=2)
    # A head's last tile ends with the first tokens of the next head.
    bad_ones = {"grad_output": lambda x: x[0, 1, 3, 5].fill_(bad), "value": lambda x: x[1, 0, 2, 1].fill_(bad)}
    gradients, fine = run_backward_level(case, level, altered(case, **bad_ones)), backward_level(case, level)
    assert not gradients[0][0, 1, 3].isfinite().any()
    assert not any(x[0, 1].isfinite().all() for x in gradients[1:])
    for head in ((0, 0), (1, 1)):
        assert all(torch.equal(x[head], y[head]) for x, y in zip(gradients, fine, strict=True))


# Launches, which may change nothing but speed


def launches():
    """Yield (kernel, level, launch, case): every candidate of every level; on the CPU every tile shape once.

    On a GPU a candidate has both head sizes, one of them causal.
    """
    for head_dim, is_causal in product((64, 128), (True, False) if ON_GPU else (True,)):
        size = (777, 1000) if ON_GPU else (130, 140) if head_dim == 64 else (20, 140)
        case = Case(*size, head_dim, 2, 1, is_causal, torch.bfloat16 if ON_GPU else torch.float16)
        names = [
            (kernel, level)
            for kind, level in LEVELS
            for kernel in (() if is_hoppers(kind, level) else LADDERS[kind][level].kernels(head_dim))
        ]
        for kernel, level in names:
            if ON_GPU or head_dim == 64 or kernel in ("dk", "dv"):
                distinct = {launch if ON_GPU else launch[:2]: launch for launch in candidates(kernel, level)}
                for i, launch in enumerate(distinct.values()):
                    if not ON_GPU or (i + head_dim // 64 + is_causal) % 2:
                        yield kernel, level, launch, case


LAUNCHES = list(launches())


def run_launch(kernel, level, launch, case):
    """Return O, or (dQ, dK, dV), with this launch of one kernel and the usual one of the others."""
    if kernel == "forward":
        return run_forward_level(case, level, launch=launch).output

    def chosen(name, *rest):
        return launch if name == kernel else choose_launch(name, *rest)

    forward = forward_level(case, feeding(level, case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "choose_launch", chosen)
        return run_backward_level(case, level, forward=forward)


@pytest.mark.parametrize(("kernel", "level", "launch", "launch_case"), LAUNCHES, ids=name_of)
def test_every_launch_gives_the_simulations_result(kernel, level, launch, launch_case):
    try:
        result = run_launch(kernel, level, launch, launch_case)
    except OutOfResources as error:  # it can't be selected either: the launch table holds what ran
        pytest.skip(str(error))
    (assert_forward if kernel == "forward" else assert_backward)(launch_case, level, result)


def test_every_kernel_has_launches_that_keep_the_scales_constant():
    """An INT8 tile has as many keys (forward, dQ) or queries (dK, dV) as share a scale; its other side divides them."""
    assert CANDIDATES.keys() == DEFAULTS.keys() | {"forward_16bit"}
    kernels = {kernel for kernel in DEFAULTS if not kernel.startswith("sla2_")}
    assert kernels == {kernel for kernel, *_ in LAUNCHES}
    wrong = [
        (kernel, launch)
        for kernel in kernels if "16bit" not in kernel
        for launch in (DEFAULTS[kernel], *CANDIDATES[kernel])
        for block, other in [launch[1::-1] if kernel.startswith(("forward", "dq")) else launch[:2]]
        if block != SCALE_BLOCK or SCALE_BLOCK % other
    ]  # fmt: skip
    assert wrong == []


def test_a_tile_that_scales_do_not_cover_is_an_error(monkeypatch):
    monkeypatch.setattr("sage_kernels.common.launch.SCALE_BLOCK", 64)
    with pytest.raises(ValueError, match="forward: expected a tile whose sides divide SCALE_BLOCK = 64, got 64 x 128"):
        choose_launch("forward", 4, 64, False, torch.device("cpu"))


@EVERY_BACKWARD
def test_repeats_are_equal_bit_for_bit(level):
    """On the CPU, every run of a program for Hopper schedules its groups of warps differently."""
    case = SMALL._replace(head_dim=128 if level == 6 else 64)
    first, output = backward_level(case, level), forward_level(case, feeding(level, case)).output
    for seed in range(1, 101 if ON_GPU else 2):
        forward = run_forward_level(case, feeding(level, case))
        assert torch.equal(forward.output, output)
        assert all_equal(run_backward_level(case, level, forward=forward, start=emulated(seed)), first)


# Layouts


@EVERY_BACKWARD
def test_any_strides(level):
    """Q, K, V and dO have a layout each, which differ from level to level."""
    case = Case(20, 40, 128 if level == 6 else 64, 2, 2, is_causal=True, batch=2, smooth_k=False)
    first, feeder = level % len(LAYOUTS), feeding(level, case)
    layouts = LAYOUTS[first:] + LAYOUTS[:first]
    tensors = tuple(layout(x) for layout, x in zip(layouts, draw(case), strict=True))
    assert not any(x.is_contiguous() for x in tensors)
    results = {x: run_forward_level(case, x, tensors) for x in {*FORWARD[first :: len(LAYOUTS)], feeder}}
    assert all(torch.equal(result.output, forward_level(case, x).output) for x, result in results.items())
    given = results[feeder]._replace(output=layouts[0](results[feeder].output))
    assert all_equal(run_backward_level(case, level, tensors, given), backward_level(case, level))


@pytest.mark.parametrize("level", [x for x in BACKWARD if x != 4], ids="backward{}".format)
def test_results_have_the_layouts_of_their_inputs(level):
    """O and dQ have the layout of Q, dK and dV that of V; level 4, which no operation runs, makes them contiguous."""
    case = Case(20, 40, 128 if level == 6 else 64, is_causal=True, batch=2)
    query, key, value, grad_output = draw(case)
    for of_q, of_v in ((False, True), (True, False)) if level > 4 or ON_GPU else [(level % 2 == 0, level % 2 == 1)]:
        tensors = [heads_last(x) if last else x for x, last in ((query, of_q), (key, of_v), (value, of_v))]
        forward = run_forward_level(case, feeding(level, case), (*tensors, grad_output))
        gradients = run_backward_level(case, level, (*tensors, grad_output), forward)
        assert are_views_of_memory([forward.output, *gradients], [of_q, of_q, of_v, of_v])


@EVERY_FORWARD
def test_an_output_has_the_layout_of_its_query(level):
    case = Case(20, 40, is_causal=True)
    output = run_forward_level(case, level, [heads_last(x) for x in draw(case)]).output
    assert are_views_of_memory([output], [True])


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


# Before the passes: the quantiser, and the launch that prepares all tensors


def reference_psi(x, block, mean):
    """Compute psi of [B, H, N, D] by the reference, on the CPU, where dividing by 127 is rounded correctly."""
    x = x.float() if mean is None else x.float() - mean[:, :, None]
    return sage_ref.quantization.quantize(x.cpu(), (block, None))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize(("n", "head_dim"), [(1, 32), (113, 64), (128, 96), (203, 128), (300, 33)])
def test_quantised_values_and_scales_are_the_references(n, head_dim, with_mean, dtype):
    x = torch.randn(2, 3, n, head_dim, generator=torch.Generator().manual_seed(n)).to(DEVICE, dtype)
    mean = x.mean(-2, dtype=torch.float32) if with_mean else None
    expected = reference_psi(x, SCALE_BLOCK, mean)
    values, transposed, scale = quantize(x, SCALE_BLOCK, mean=mean, transposed=True)
    blocks = expected.scale.shape[-2]
    assert values.shape == (2, 3, padded_length(n), padded_head_dim(head_dim))
    assert scale.shape == (2, 3, padded_length(n) // SCALE_BLOCK)
    assert torch.equal(values[..., :n, :head_dim].cpu(), expected.values)
    assert torch.equal(scale[..., :blocks].cpu(), expected.scale.squeeze(-1))
    assert not values[..., n:, :].any()
    assert not values[..., head_dim:].any()
    assert not scale[..., blocks:].any()
    assert torch.equal(transposed, values.mT)
    none, grouped, scaled = quantize(
        x, SCALE_BLOCK, values=False, transposed=True, grouped=True, mean=mean, factor=0.25
    )
    assert none is quantize(x, SCALE_BLOCK, values=False).transposed is None
    assert torch.equal(grouped, in_groups(transposed))
    assert torch.equal(scaled, scale * 0.25)


def in_groups(x):
    """Place columns as a thread t of a matmul has them side by side: of 16, 2t, 2t+1, 2t+8, 2t+9."""
    order = [column for t in range(4) for column in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
    return x.unflatten(-1, (-1, 16))[..., order].flatten(-2)


@pytest.mark.parametrize("which", ["log_sum_exp", "output"])
def test_a_query_that_is_no_number_spoils_its_blocks_scales(which):
    """No gradient that depends on it can then be a number."""
    case = SMALL._replace(kv_heads=2)
    forward = forward_level(case, 4)
    saved = {which: getattr(forward, which).clone()}
    saved[which][0, 1, 3] = math.nan
    inputs = prepare_backward_level(case, 3, None, forward._replace(**saved))
    spoiled = torch.tensor([[[False, False], [True, False]]], device=DEVICE)
    assert torch.equal(inputs.q_hat.scale.isnan(), spoiled)
    assert torch.equal(inputs.do_hat.scale.isnan(), spoiled & (which == "log_sum_exp"))


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_backward_pass_gets_the_range_of_v_itself(unbiased):
    """It reads V as it is, also where the forward pass smooths it."""
    query, key, value, _ = draw(SMALL._replace(value_offset=3.0))
    inputs = prepare_forward(query, key, heads_last(value), 4, scale=1.0, smooth_k=True, unbiased=unbiased)
    assert torch.equal(inputs.v_range, quantize(value, SCALE_BLOCK).scale)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-44])
def test_blocks_too_small_for_a_scale_become_zeros(size):
    x = torch.full((1, 1, 64, 32), size, device=DEVICE)
    values, _, scale = quantize(x, SCALE_BLOCK)
    assert not values.any()
    assert scale[0, 0, 0].item() == pytest.approx(size / 127, abs=1e-44)
