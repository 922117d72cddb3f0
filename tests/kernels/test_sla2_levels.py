"""SLA2's kernels by level against the oracles; memory, layouts and launches; routing, lists, sums, pieces of lists."""

import math
from itertools import product

import pytest
import torch
from kernel_cases import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    MARKS,
    ON_GPU,
    all_equal,
    as_hopper,
    distance,
    emulated,
    fill_cache,
    guarded,
    guarded_allocations,
    heads_last,
    name_of,
    on_the_cpu,
    times,
)
from sage_kernels import hopper
from sage_kernels.common.candidates import CANDIDATES, DEFAULTS
from sage_kernels.common.launch import choose_launch
from sage_kernels.common.quantize import padded_length
from sage_kernels.sla2 import ladder
from sage_kernels.sla2.ladder import BACKWARD_KERNELS, LEVELS
from sage_kernels.sla2.lists import block_lists
from sage_kernels.sla2.ops import LEVEL_16BIT, LEVEL_HOPPER, LEVEL_INT8
from sage_kernels.sla2.pieces import KEY_BLOCKS_PER_PLACE, LEAST_ENTRIES, pieces_of
from sage_kernels.sla2.routing import MASK_BLOCK_KV, sequence_mean, top_blocks
from sage_kernels.sla2.sums import COLUMNS, sums_dtype
from sla2_cases import (
    BACKWARD,
    CASES,
    FORWARD,
    HOPPER_CASES,
    OPTIONS,
    SMALL,
    TRAINED,
    Case,
    altered,
    assert_forward,
    assert_gradients,
    draw,
    drawn_router,
    eager,
    exact,
    forward_level,
    gradients_after,
    natural_log_sum_exp,
    run_gradients,
    run_level,
    shared,
    simulated,
    takes,
)
from triton.runtime.errors import OutOfResources

import sage_ref.sla2
from sage_ref.sla2 import Router, block_count, sla2_forward

pytestmark = MARKS
HOPPER_IS_HERE = hopper.obstacle(DEVICE, 64) is None
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER_IS_HERE, reason="needs a Hopper GPU")]
HEADS = [(40, 8), (64, 2), (96, 8), (128, 1)]  # head size, heads of keys
BOTH_DTYPES = [torch.float16, torch.bfloat16]
AFTER = {level: [of_backward for forward, of_backward in BACKWARD if forward == level] for level in FORWARD}
EVERY_FORWARD = pytest.mark.parametrize("level", FORWARD)
EVERY_BACKWARD = pytest.mark.parametrize(("level", "level_of_backward"), BACKWARD)


def of_levels(cases, hopper_cases):
    """Parametrise by case, the levels of one side by side: its results are kept. On the CPU a level has every other."""
    levels = [(level,) for level in FORWARD] + BACKWARD
    every = [
        (case, x)
        for (i, case), x in product(enumerate(cases), levels)
        if takes(case, *x) and (ON_GPU or (i + sum(x)) % 2 == 0)
    ]
    every += [(case, x) for case in hopper_cases for x in [(LEVEL_HOPPER,), (LEVEL_HOPPER, 1)]]
    ids = [f"{case}-{'forward' if len(x) == 1 else 'backward'}{'after'.join(map(str, x[::-1]))}" for case, x in every]
    return pytest.mark.parametrize(("case", "levels"), every, ids=ids)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """On a GPU, compile beforehand and in parallel what the tests below run."""
    if ON_GPU:
        cases = [
            Case(113, 203, "half", head_dim, 8, kv_heads, dtype)
            for head_dim, kv_heads, dtype in product((32, 64, 96, 128), (8, 2), DTYPES)
        ]
        jobs = [(run_level, case, level) for case, level in product(cases, FORWARD)]
        jobs += [(run_gradients, case, level) for case, level in product(cases, TRAINED)]
        jobs += [(run_launch, *launch) for launch in LAUNCHES]
        if HOPPER_IS_HERE:
            cases = [
                Case(113, 203, "half", head_dim, 8, kv_heads, dtype)
                for (head_dim, kv_heads), dtype in product(HEADS, BOTH_DTYPES)
            ]
            jobs += [(run_level, case, LEVEL_HOPPER) for case in cases]
            cases += [case._replace(matched=True) for case in cases]
            jobs += [(run_gradients, case, LEVEL_INT8, None, None, 1) for case in cases]
        fill_cache(jobs)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def matched(case, level):
    """Return the same case with a matched backward pass, in a list that is empty after a level in 16 bit."""
    return [case._replace(matched=True)] * bool(LEVELS[level].int8)


# Memory. These tests come first: a stray store is a clear failure here and a crash elsewhere.


# The last block of queries less than half full, more, and one of two.
N_Q = [(level, n_q) for level, n_q in product(FORWARD, (40, 70, 150)) if ON_GPU or level in (2, 4) or n_q == 70]


@pytest.mark.parametrize(("level", "n_q"), N_Q)
def test_kernels_read_and_write_nothing_but_their_tensors(level, n_q):
    """Inputs are surrounded by NaNs; outputs and intermediates start out as NaN between guards. Nothing changes.

    Past the end L makes probabilities vanish: the backward pass reads whole blocks of queries.
    """
    case = SMALL._replace(n_q=n_q, head_dim=64 if n_q == 70 else 48)
    plain = draw(case)
    tensors, guards = zip(*(guarded(x, math.nan) for x in plain), strict=True)
    tensors = type(plain)(*tensors)
    with guarded_allocations():
        result = run_level(case, level, tensors)
    for x, y in zip(result.forward, forward_level(case, level).forward, strict=True):
        assert x is y is None or torch.equal(x[:, :, :n_q], y[:, :, :n_q])
    if level:
        padding = result.forward.log_sum_exp[..., n_q:]
        assert padding.shape[-1] == padded_length(n_q) - n_q
        assert (padding > 1e9).all()
    for level_of_backward, backward in product(AFTER[level], (case, *matched(case, level))):
        with guarded_allocations():
            gradients = run_gradients(backward, level, tensors, result, level_of_backward)
        assert all_equal(gradients, gradients_after(backward, level, level_of_backward=level_of_backward))
    for x, before, around in zip(tensors, plain, guards, strict=True):
        assert torch.equal(x, before)
        assert all((guard.isnan() if guard.is_floating_point() else guard).all() for guard in around)


# The levels against the oracles


@of_levels(CASES + OPTIONS, HOPPER_CASES)
def test_results_are_the_references(case, levels):
    if len(levels) == 2:
        level, level_of_backward = levels
        *gradients, dalpha = found = gradients_after(case, level, level_of_backward=level_of_backward)
        assert all(x.dtype == case.dtype and x.is_contiguous() for x in gradients)
        assert dalpha.dtype == torch.float32
        assert_gradients(case, level, found)
        return
    (level,) = levels
    result = forward_level(case, level)
    output = result.forward.output
    assert output.dtype == case.dtype
    assert output.is_contiguous()
    assert_forward(case, level, output)
    if level:  # level 0 leaves nothing for a backward pass
        expected, found = simulated(case, level)[1], natural_log_sum_exp(case, result)
        empty = expected == -math.inf
        assert (found[empty] > 1e29).all()  # P is then 0 in the backward pass
        torch.testing.assert_close(found[~empty], expected[~empty], rtol=1e-5, atol=1e-4)
    if LEVELS[level].int8:  # the error is S's within 15%: a kernel that quantised less would have a smaller one
        g, e, (s, _) = exact(case), eager(case), simulated(case, level)
        error, rounding = distance(s, g.output), torch.finfo(case.dtype).eps / 2 * g.output.norm()
        rounding += distance(e.linear_share, g.linear_share)
        assert 0.85 * error - rounding <= distance(output, g.output) <= 1.15 * error + rounding


@pytest.mark.parametrize("std", [10.0, 60.0, 300.0])
@pytest.mark.parametrize("level", FORWARD[2:])
def test_large_inputs_give_finite_outputs_and_gradients(level, std):
    """Softmax is then one-hot, and so is phi: a query may share no feature with any unselected key."""
    if std > 100 and level < LEVEL_HOPPER:
        pytest.skip("only Hopper's level promises that")
    case = SMALL._replace(std=std)
    result = forward_level(case, level)
    assert result.forward.output.isfinite().all()
    assert (result.forward.output.float() - simulated(case, level)[0]).norm(dim=-1).median() <= 2e-2
    # Printed, P = 2^(S - L) of exact S and the L of INT8 scores may exceed float16.
    for backward in [case] if level == LEVEL_16BIT else matched(case, level):
        assert all(x.isfinite().all() for x in run_gradients(backward, level, None, result, AFTER[level][0]))


@pytest.mark.parametrize("level", [0, LEVEL_16BIT])
@pytest.mark.parametrize("gap", [60.0, 80.0, 92.0, 110.0])
def test_features_in_common_may_vanish(level, gap):
    """phi(Q) Z near the smallest float32 counts as 0, as in the reference: nothing overflows."""
    case = Case(20, 70, "none", 32)
    query, key, *rest = draw(case)
    query, key = query.clone(), key.clone()
    query[..., 0] += gap
    key[..., 1] += gap
    tensors = type(draw(case))(query, key, *rest)
    result = run_level(case, level, tensors)
    *operands, block_mask, alpha = (x.float() if x.is_floating_point() else x for x in (*tensors[:3], *tensors[4:]))
    expected = sla2_forward(*operands, block_mask, alpha, case.settings()).output
    assert expected.any() == (gap < 70)
    assert distance(result.forward.output, expected) <= (1e-2 if ON_GPU else 2e-3) * expected.norm()
    if level:
        assert all(x.isfinite().all() for x in run_gradients(case, level, tensors, result))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@EVERY_FORWARD
def test_blocks_of_zeros(level, name):
    """The scale of a block of zeros (padding, for example) is 0, which must not lead to 0/0 or 0 * inf."""
    case = Case(130, 140, "mixed", 32 if ON_GPU else 48, 1, 1)
    tensors = altered(case, **{name: times(0, ..., slice(MASK_BLOCK_KV, None), slice(None))})
    result = run_level(case, level, tensors)
    assert result.forward.output.isfinite().all()
    if level == LEVEL_HOPPER:
        expected = run_level(case, LEVEL_INT8, tensors).forward.output
        assert distance(result.forward.output, expected) <= 2e-3 * expected.double().norm()
    for level_of_backward in AFTER[level]:
        gradients = run_gradients(case, level, tensors, result, level_of_backward)
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("selected", ["none", "all"])
def test_an_overflow_in_the_gradient_is_not_lost(selected, bad):
    case = Case(150, 20, selected, 32 if ON_GPU else 48, 2, 1)
    tensors = altered(case, grad_output=lambda x: x[0, 1, 70, 5].fill_(bad))
    for level, level_of_backward in BACKWARD:
        if level == LEVEL_INT8 and not level_of_backward:
            continue
        dq, dk, dv, dalpha = run_gradients(case, level, tensors, None, level_of_backward)
        fine = gradients_after(case, level, level_of_backward=level_of_backward)
        assert not dq[0, 1, 70].isfinite().any()
        assert not dk.isfinite().all()
        assert not dv.isfinite().all()
        assert not dalpha[0, 1, 0].isfinite()
        assert torch.equal(dq[0, 0], fine[0][0, 0])
        assert torch.equal(dalpha[0, 0], fine[3][0, 0])


# Hopper's programs in the emulator


@on_the_cpu
@pytest.mark.parametrize("count", [1, 3])
def test_results_do_not_depend_on_how_many_programs_share_the_work(count, monkeypatch):
    case = Case(400, 330, "mixed", 64, 2, 1)
    expected = *forward_level(case, LEVEL_HOPPER).forward, *gradients_after(case, LEVEL_INT8, level_of_backward=1)
    monkeypatch.setattr("kernel_cases.MULTIPROCESSORS", count)
    found = run_level(case, LEVEL_HOPPER, start=emulated(7)).forward
    gradients = run_gradients(case, LEVEL_INT8, level_of_backward=1, start=emulated(7))
    assert all_equal((*found, *gradients), expected)
    alone = run_level(case, LEVEL_HOPPER, save=False).forward
    assert alone[1:] == (None, None)
    assert torch.equal(alone.output, found.output)


@on_the_cpu
@pytest.mark.parametrize("sizes", [(1e3, 1.0, 1e-3), (1e-3, 1e3, 1.0)], ids=str)
def test_blocks_of_values_of_different_size(sizes):
    case = Case(130, 192, "all")
    sizes = torch.tensor(sizes).repeat_interleave(MASK_BLOCK_KV)[:, None].half()
    tensors = altered(case, value=times(sizes, ...))
    output, expected = (run_level(case, level, tensors).forward.output for level in (LEVEL_HOPPER, LEVEL_INT8))
    assert distance(output, expected) <= 2e-3 * expected.double().norm()


@on_the_cpu
@pytest.mark.parametrize(("broken", "selected"), [("query", "half"), ("key", "mixed"), ("value", "half")])
def test_nan_goes_where_level_3_lets_it_go(broken, selected):
    case = Case(300, 300, selected, 64, 2, 1)
    tensors = altered(case, **{broken: lambda x: x[0, 0, 40, 3].fill_(math.nan)})
    output, expected = (run_level(case, level, tensors).forward.output.isnan() for level in (LEVEL_HOPPER, LEVEL_INT8))
    assert expected.any()
    assert torch.equal(output, expected)


@on_the_cpu
@pytest.mark.parametrize("is_matched", [False, True])
@pytest.mark.parametrize("name", ["key", "value", "grad_output"])
def test_nan_in_one_head_reaches_no_other(name, is_matched):
    """The copy engine fetches past a head's last key or query; the next head's numbers there must have no effect."""
    case = Case(150, 140, "mixed", 64, 2, 2, matched=is_matched)
    tensors = altered(case, **{name: lambda x: x[0, 1, 0].fill_(math.nan)})
    result = run_level(case, LEVEL_INT8, tensors)
    found, expected = (run_gradients(case, LEVEL_INT8, tensors, result, level) for level in (1, 0))
    untouched = gradients_after(case, LEVEL_INT8, level_of_backward=1)
    for x, y, before in zip(found, expected, untouched, strict=True):
        assert torch.equal(x[:, 0], before[:, 0])
        assert torch.equal(x.isnan(), y.isnan())


@on_the_cpu
def test_gradients_after_the_16_bit_forward():
    """K was not smoothed, and L is that of the scores as they are."""
    case = Case(150, 203, "mixed", 64, 4, 2)
    assert_gradients(case, LEVEL_16BIT, gradients_after(case, LEVEL_16BIT, level_of_backward=1))


MATCHED = [
    Case(1, 1, "all", matched=True),
    Case(150, 203, "mixed", 64, 4, 2, batch=2, matched=True),
    Case(203, 140, "half", 128, 2, 1, std=3.0, matched=True),
    Case(260, 1100, "half", 48, 2, 1, key_offset=8.0, matched=True),  # lists longer than the places for tiles
    Case(300, 700, "none", 96, matched=True),
]


@on_the_cpu
@pytest.mark.parametrize("level_of_backward", [0, 1])
@pytest.mark.parametrize("case", MATCHED, ids=str)
def test_matched_gradients_are_the_references(case, level_of_backward):
    assert_gradients(case, LEVEL_INT8, gradients_after(case, LEVEL_INT8, level_of_backward=level_of_backward))


@on_the_cpu
@pytest.mark.parametrize("case", [Case(20, 70, "half", 48), MATCHED[1]], ids=str)
def test_the_operation_runs_hoppers_programs(case, monkeypatch):
    *qkv, grad_output, block_mask, alpha = draw(case)
    leaves = [x.detach().requires_grad_() for x in (*qkv, alpha)]
    monkeypatch.setattr("sage_kernels.sla2.ops.recorded", lambda key, tensors, compute: compute(emulated(case.n_q)))
    options = {"quantize": True, "backward": "matched" if case.matched else "printed", "backend": "triton"}
    with as_hopper():
        output = sage_ref.sparse_linear_attention(*leaves[:3], block_mask, leaves[3], **options)
        found = torch.autograd.grad(output, leaves, grad_output)
    expected = gradients_after(case, LEVEL_HOPPER, level_of_backward=1)
    assert all_equal((output, *found), (forward_level(case, LEVEL_HOPPER).forward.output, *expected))
    assert not all_equal(found, gradients_after(case, LEVEL_HOPPER, level_of_backward=0))


@on_the_cpu
def test_matched_gradients_of_routed_blocks_are_those_of_the_same_mask():
    """The lists of a router are as wide as what it selects, and the others as wide as there are blocks."""
    case = Case(400, 330, "mixed", 64, 2, 1, matched=True)
    routed = run_level(case, LEVEL_INT8, draw(case)._replace(block_mask=drawn_router(case, 2)))
    tensors = draw(case)._replace(block_mask=routed.prepared.choice.block_mask)
    given = run_level(case, LEVEL_INT8, tensors)
    found, expected = (run_gradients(case, LEVEL_INT8, tensors, result, 1) for result in (routed, given))
    assert all_equal(found, expected)


# Launches, which may change nothing but speed


def launches():
    """Yield (kernel, level, launch, case): every candidate of every level; on the CPU every tile shape once."""
    for head_dim in (64, 128) if ON_GPU else (64,):
        size = (777, 1000) if ON_GPU else (150, 140)
        case = Case(*size, "half", head_dim, 2, 1, torch.bfloat16 if ON_GPU else torch.float16)
        names = [(kernel, level) for level in FORWARD if not LEVELS[level].hopper for kernel in LEVELS[level].kernels]
        names += [(kernel, level) for level, kernel in product(TRAINED, BACKWARD_KERNELS)]
        for kernel, level in names if ON_GPU else dict(names).items():
            distinct = {x if ON_GPU else x[:2]: x for x in (*CANDIDATES[kernel], DEFAULTS[kernel])}
            yield from ((kernel, level, launch, case) for launch in distinct.values())


LAUNCHES = list(launches())


def run_launch(kernel, level, launch, case):
    """Return O, or the gradients, with this launch of one kernel and the usual one of the others."""

    def chosen(name, *rest):
        return launch if name == kernel else choose_launch(name, *rest)

    backward = kernel in BACKWARD_KERNELS
    result = forward_level(case, level) if backward else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "choose_launch", chosen)
        return run_gradients(case, level, result=result) if backward else run_level(case, level).forward.output


@pytest.mark.parametrize(("kernel", "level", "launch", "launch_case"), LAUNCHES, ids=name_of)
def test_every_launch_gives_the_references_result(kernel, level, launch, launch_case):
    try:
        result = run_launch(kernel, level, launch, launch_case)
    except OutOfResources as error:  # it can't be selected either: the launch table holds what ran
        pytest.skip(str(error))
    (assert_gradients if kernel in BACKWARD_KERNELS else assert_forward)(launch_case, level, result)


@pytest.mark.parametrize("selected", ["half", "popular"] if ON_GPU else ["popular"])
@pytest.mark.parametrize("level", TRAINED)
def test_repeats_are_equal_bit_for_bit(level, selected):
    case = Case(2000, 2000, selected, 64, 4, 2) if ON_GPU else SMALL._replace(selected=selected)
    first, gradients = forward_level(case, level).forward, gradients_after(case, level)
    for _ in range(100 if ON_GPU else 1):
        result = run_level(case, level)
        assert torch.equal(result.forward.output, first.output)
        assert all_equal(run_gradients(case, level, result=result), gradients)


# Layouts


@EVERY_FORWARD
def test_any_strides(level):
    """Q, K, V and dO have a layout each, which differ from level to level."""
    case = Case(40, 150, "half", 64, 2, 2, batch=2)
    names, first = draw(case)._fields, level % len(LAYOUTS)
    layouts = LAYOUTS[first:] + LAYOUTS[:first]
    laid_out = {name: layout(x) for name, layout, x in zip(names, layouts, draw(case), strict=False)}
    tensors = draw(case)._replace(**laid_out)
    assert not any(x.is_contiguous() for x in tensors[:4])
    result = run_level(case, level, tensors)
    assert torch.equal(result.forward.output, forward_level(case, level).forward.output)
    for level_of_backward in AFTER[level]:
        gradients = run_gradients(case, level, tensors, result, level_of_backward)
        assert all_equal(gradients, gradients_after(case, level, level_of_backward=level_of_backward))


# Any two of Q, K and V differ in one of them.
LYING = [(("query", "value"), 48), (("key", "value", "grad_output"), 48 if ON_GPU else 128)]
LYING_BY_LEVEL = [(level, *LYING[i]) for level, i in product(FORWARD, (0, 1)) if ON_GPU or level > 3 or level % 2 == i]


@pytest.mark.parametrize(("level", "last", "head_dim"), LYING_BY_LEVEL)
def test_results_have_the_layouts_of_their_inputs(level, last, head_dim):
    """O and dQ have the layout of Q, dK that of K, dV that of V: heads last for those in `last`, else contiguous."""
    case = Case(40, 90, "popular", head_dim, batch=2)
    tensors = draw(case)._replace(**{name: heads_last(getattr(draw(case), name)) for name in last})
    with guarded_allocations():
        result = run_level(case, level, tensors)
    output, expected = result.forward.output, forward_level(case, level).forward.output
    assert torch.equal(output, expected)
    assert output.stride() == tensors.query.stride()
    for level_of_backward in AFTER[level]:
        with guarded_allocations():
            gradients = run_gradients(case, level, tensors, result, level_of_backward)
        assert all_equal(gradients, gradients_after(case, level, level_of_backward=level_of_backward))
        assert [x.stride() for x in gradients[:3]] == [x.stride() for x in tensors[:3]]


@pytest.mark.gpu
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("lengths", [(32768, 64), (64, 32768)])
def test_more_elements_than_32_bits_count(lengths):
    """Q, or K and V, of more than 2^31 elements: the last heads come out as they do alone."""
    heads = 2**31 // (32768 * 128) + 8
    alone_case = Case(*lengths, "half", 128, 2, 2, torch.bfloat16)
    case = alone_case._replace(heads=heads, kv_heads=heads)
    q_shape, kv_shape = ((1, heads, n, 128) for n in lengths)
    q, k, v, do = (torch.randn(s, dtype=torch.bfloat16, device=DEVICE) for s in (q_shape, kv_shape, kv_shape, q_shape))
    tensors = draw(alone_case)._replace(
        query=q, key=k, value=v, grad_output=do,
        block_mask=torch.rand(case.blocks, device=DEVICE) < 0.5, alpha=torch.rand(case.blocks[:3], device=DEVICE),
    )  # fmt: skip
    alone = type(tensors)(*(x[:, -2:].clone() for x in tensors))
    for level in TRAINED:
        expected = run_level(alone_case, level, alone)
        result = run_level(case, level, tensors)
        pairs = [(result.forward.output, expected.forward.output)]
        gradients = run_gradients(case, level, tensors, result), run_gradients(alone_case, level, alone, expected)
        for found, x in [*pairs, *zip(*gradients, strict=True)]:  # the sums' matmul may split differently
            assert distance(found[:, -2:], x) <= 4e-3 * x.double().norm()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOTH_DTYPES, ids=str)
@pytest.mark.parametrize("selected", ["97%", "popular"])
@pytest.mark.parametrize("levels", [(0,), (1,), (LEVEL_16BIT, 0), (LEVEL_INT8, 0), (LEVEL_HOPPER, 1)], ids=str)
def test_a_long_sequence_at_97_percent(levels, selected, dtype):
    level, after = levels[0], levels[1:]
    if level == LEVEL_HOPPER and not HOPPER_IS_HERE:
        pytest.skip("needs a Hopper GPU")
    printed = Case(4096, 4096, selected, 128, 4, 4, dtype)
    result = forward_level(printed, level)
    assert_forward(printed, level, result.forward.output)
    for level_of_backward, case in product(after, (printed, *matched(printed, level))):
        gradients = run_gradients(case, level, level_of_backward=level_of_backward)
        assert_gradients(case, level, gradients)
        assert all_equal(run_level(printed, level).forward, result.forward)
        assert all_equal(run_gradients(case, level, level_of_backward=level_of_backward), gradients)


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=on_hopper) for x in BOTH_DTYPES], ids=str)
@pytest.mark.parametrize("selected", ["none", "one", "half", "mixed", "all but one", "all"])
@pytest.mark.parametrize(("head_dim", "kv_heads"), HEADS)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (113, 203), (1000, 1500)])
def test_program_gives_the_simulations_result(n_q, n_k, head_dim, kv_heads, selected, dtype):
    case = Case(n_q, n_k, selected, head_dim, 8, kv_heads, dtype, batch=2)
    assert_forward(case, LEVEL_HOPPER, forward_level(case, LEVEL_HOPPER).forward.output)


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=on_hopper) for x in BOTH_DTYPES], ids=str)
@pytest.mark.parametrize("selected", ["none", "half", "mixed", "all", "popular"])
@pytest.mark.parametrize(("head_dim", "kv_heads"), HEADS)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (113, 203), (1000, 1500)])
@pytest.mark.parametrize("is_matched", [False, True])
def test_programs_give_the_references_gradients(is_matched, n_q, n_k, head_dim, kv_heads, selected, dtype):
    case = Case(n_q, n_k, selected, head_dim, 8, kv_heads, dtype, batch=2, matched=is_matched)
    assert_gradients(case, LEVEL_INT8, run_gradients(case, LEVEL_INT8, level_of_backward=1))


# Routing: block means, the largest scores of a row, lists


@pytest.mark.parametrize("n", [64 * 64, 64 * 64 + 1, 64 * 200 - 3])
def test_sequence_mean_of_many_blocks(n):
    means = drawn(1, 2, block_count(n, 64), 48)
    tokens = torch.full(means.shape[2:3], 64.0, device=DEVICE)
    tokens[-1] = n - 64 * (len(tokens) - 1)
    expected = (means.double() * tokens[:, None].double()).sum(-2) / n
    torch.testing.assert_close(sequence_mean(means, n, 64).double(), expected, rtol=1e-5, atol=1e-6)


SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0]


def special_scores(columns):
    pick = torch.randint(len(SPECIAL), (1, 2, 3, columns), generator=torch.Generator().manual_seed(columns))
    scores = torch.tensor(SPECIAL)[pick]
    scores[0, 0, 0], scores[0, 0, 1], scores[0, 0, 2] = math.nan, -math.inf, -0.0
    scores[0, 0, 2, ::2] = 0.0
    return scores.to(DEVICE)


def few_values(columns):
    return drawn(1, 2, 2, columns, seed=columns).round()


def distinct(columns):
    return drawn(1, 2, 2, columns, seed=columns)


@pytest.mark.parametrize("scores", [distinct, few_values, special_scores])
@pytest.mark.parametrize("columns", [1, 7, 64, 65, 300])
def test_top_blocks_are_the_references(columns, scores):
    scores = scores(columns)
    for count in sorted({1, max(1, columns // 3), columns}):
        with guarded_allocations():
            mask, complement, lists = top_blocks(scores, count)
        assert_complement(complement, mask)
        assert torch.equal(mask.cpu(), sage_ref.sla2.top_blocks(scores.cpu(), count))
        assert (lists.counts == count).all()
        assert torch.equal(lists.entries, mask.nonzero()[:, -1].view(lists.entries.shape).int())
        assert lists.entries.dtype == lists.counts.dtype == torch.int32


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (5, 1), (3, 70), (4, 64)])
def test_lists_hold_what_the_mask_selects_in_ascending_order(rows, columns, by_key):
    mask = torch.rand(2, 3, rows, columns, generator=torch.Generator().manual_seed(rows)) < 0.4
    mask[0, 0], mask[1, 2] = True, False
    with guarded_allocations():
        entries, counts = block_lists(mask.to(DEVICE), by_key=by_key)
    mask = mask.mT if by_key else mask
    assert torch.equal(counts.cpu(), mask.sum(-1, dtype=torch.int32))
    assert entries.shape == mask.shape
    for found, row in zip(entries.cpu().flatten(0, 2), mask.flatten(0, 2), strict=True):
        expected = row.nonzero()[:, 0].int()
        assert torch.equal(found[: len(expected)], expected)
        assert (found[len(expected) :] == 77).all()  # what the memory held before


def reference_scores(case, router, query, key):
    """Compute scores by the reference's router module, in float64; the order of a row is what counts."""
    module = Router(case.head_dim, case.settings()).to(DEVICE, torch.float64)
    with torch.no_grad():
        module.proj_q.weight.copy_(router.proj_q)
        module.proj_k.weight.copy_(router.proj_k)
        return module(query.double(), shared(case, key).double())


@pytest.mark.parametrize("level", TRAINED)
@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (20, 700)])
def test_routed_blocks_are_the_references(shape, scale, level):
    """From there on all is as if the mask had been given."""
    case = Case(*shape, "half", 48, 2, 1, scale=scale, key_offset=4.0)
    router = drawn_router(case, max(1, case.blocks[3] // 3))
    query, key, value, _, _, alpha = draw(case)
    with guarded_allocations():
        around_nan = (guarded(x, math.nan)[0] for x in (query, key, value))
        prepared = ladder.prepare(*around_nan, router, alpha, level, scale=case.c)
    scores = reference_scores(case, router, query, key)
    steps = scores.sort(-1).values.diff(dim=-1)
    assert (steps > 1e-4 * scores.abs().amax()).all()  # no near ties, which rounding may decide
    expected = sage_ref.sla2.top_blocks(scores, router.count)
    assert torch.equal(prepared.choice.block_mask, expected)
    given = ladder.prepare(query, key, value, expected, alpha, level, scale=case.c)
    assert torch.equal(prepared.inputs.lists.counts, given.inputs.lists.counts)
    assert torch.equal(prepared.inputs.lists.entries, given.inputs.lists.entries[..., : router.count])
    assert torch.equal(prepared.inputs.sums, given.inputs.sums)
    for found, x in zip(prepared.inputs[6:], given.inputs[6:], strict=True):
        assert found is x is None or torch.equal(found.scale[..., :1], x.scale[..., :1])


def assert_complement(complement, mask):
    """Assert 1 where the mask is False, and then zeros up to rows of 16 bytes on a GPU."""
    columns = mask.shape[-1]
    assert complement.shape == (*mask.shape[:3], math.ceil(columns / COLUMNS) * COLUMNS)
    assert complement.dtype == sums_dtype(mask)
    assert torch.equal(complement[..., :columns], (~mask).to(complement.dtype))
    assert not complement[..., columns:].any()


# Long lists in pieces


def lengths_in_pieces(pieces):
    """Return per key head the number of pieces of every key block, whose places must be side by side."""
    for first, blocks in zip(pieces.first.flatten(0, 1), pieces.blocks.flatten(0, 1), strict=True):
        used = [block for block in blocks.tolist() if block != -1]
        assert used == blocks[: len(used)].tolist() == sorted(used)
        assert first.tolist() == [sum(block < j for block in used) for j in range(len(first))]
    return pieces.first.diff(dim=-1)


@pytest.mark.parametrize("lengths", [[8] * 6, [9, 0, 1], [0] * 5, [64, *[2] * 127], [64] * 128, [300, 40] * 20, [600]])
@pytest.mark.parametrize("groups", [1, 3])
def test_pieces_are_short_and_there_are_places_for_all(lengths, groups):
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE).expand(2, 2 * groups, -1).contiguous()
    with guarded_allocations():
        pieces = pieces_of(counts, 2)
    total, places = groups * sum(lengths), math.ceil(len(lengths) / KEY_BLOCKS_PER_PLACE)
    longest = max(LEAST_ENTRIES, math.ceil(2 * total / places))
    expected = [math.ceil(groups * n / longest) if groups * n > longest else 0 for n in lengths]
    assert sum(expected) <= places == pieces.blocks.shape[-1]
    assert lengths_in_pieces(pieces).tolist() == [[expected] * 2] * 2


@pytest.fixture
def short_pieces(monkeypatch):
    """Split lists that are short but longer than others: small cases then have pieces."""
    monkeypatch.setattr("sage_kernels.sla2.pieces.LEAST_ENTRIES", 1)
    monkeypatch.setattr("sage_kernels.sla2.pieces.KEY_BLOCKS_PER_PLACE", 1)


CASES_IN_PIECES = [(Case(260, 380, "popular", 32, 2, 1), LEVEL_16BIT, 0)]
CASES_IN_PIECES += [(Case(260, 380, "popular", 48), LEVEL_INT8, 0)]
if not ON_GPU:
    CASES_IN_PIECES += [
        (Case(520, 380, "popular", 40, 2, 1, matched=is_matched), LEVEL_HOPPER, 1) for is_matched in (False, True)
    ]


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(("case", "level", "level_of_backward"), CASES_IN_PIECES, ids=str)
def test_gradients_of_lists_in_pieces(case, level, level_of_backward, monkeypatch):
    """They are the reference's and repeat bit for bit; those of whole lists are as if no list were split."""
    by_key = block_lists(draw(case).block_mask, by_key=True)
    split = lengths_in_pieces(pieces_of(by_key.counts, case.kv_heads)) > 0  # [B, Hkv, Tn]
    assert split[..., case.blocks[3] // 2].all()
    assert not split.all(-1).any()
    with guarded_allocations():
        found = run_gradients(case, level, level_of_backward=level_of_backward)
    assert_gradients(case, level, found)
    assert all_equal(run_gradients(case, level, level_of_backward=level_of_backward), found)
    monkeypatch.setattr("sage_kernels.sla2.pieces.LEAST_ENTRIES", 1000)
    whole = run_gradients(case, level, level_of_backward=level_of_backward)
    assert all_equal(found[::3], whole[::3])
    by_token = split.repeat_interleave(MASK_BLOCK_KV, -1)[..., : case.n_k]
    assert all(torch.equal(x[~by_token], y[~by_token]) for x, y in zip(found[1:3], whole[1:3], strict=True))
