"""Backward levels 4 to 6, Hopper's: their source on the CPU against the simulation, and what that GPU alone shows."""

import functools
import math
import re

import pytest
import torch
from kernel_cases import (
    BACKWARD,
    DEVICE,
    MARKS,
    ON_GPU,
    Case,
    all_equal,
    assert_backward,
    draw,
    forward_level,
    prepare_backward,
    run_backward,
    run_backward_level,
    run_forward_level,
)

pytest.importorskip("triton")
from layouts import heads_last
from sage_kernels import hopper
from sage_kernels.common.memory import is_heads_last
from sage_kernels.common.tiles import TINY
from sage_kernels.hopper import toolbox
from sage_kernels.hopper.emulator import Changed, Machine, OnCPU, plain
from sage_kernels.sagebwd import ladder, ops
from sage_kernels.sagebwd.backward import level4, level5
from sage_kernels.sagebwd.backward import level6_apart as apart
from sage_kernels.sagebwd.backward.level4 import keys, queries
from sage_kernels.sagebwd.backward.level5 import narrow, units, wide
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS
from sage_lab.bench import tuning

from sage_ref import sagebwd_attention

pytestmark = MARKS
LEVELS = {4: level4, 5: level5, 6: apart}
PROGRAMS = {
    queries: "dq_hopper_program", keys: "dkdv_hopper_program", narrow: "dqdkdv_program", wide: "dqdkdv_wide_program",
    apart: "dkdv_pairs_program",
}  # fmt: skip
WRONG = "from what the reference computes|^$"  # numbers: what `assert_backward` says
on_the_cpu = pytest.mark.skipif(ON_GPU, reason="the GPU tests run the program itself")


def row_maximum(x, is_positive):
    """A GPU's maximum passes over NaN."""
    assert not is_positive or not (x < 0).any()
    return x.abs().nan_to_num(0.0, posinf=math.inf).amax(1).clamp(min=TINY.value)


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def on_the_cpu_instead(patch, seed=0, **names):
    """Let the levels' programs run on the CPU. names: what some global names of their source mean instead."""
    for module, name in PROGRAMS.items():
        program = OnCPU(getattr(module, name), seed=seed, row_maximum=row_maximum, **names)
        patch.setattr(module, name, program)


def prepared(level, case, tensors=None, forward=None):
    query, key, value, grad_output = tensors or draw(case)
    run_level4 = run_forward_level if tensors else forward_level
    inputs, output, log_sum_exp = forward or run_level4(case, 4, *([tensors] if tensors else []))
    options = {name: getattr(inputs, name) for name in ("q_hat", "k_hat", "v_range")} | {"is_causal": case.is_causal}
    return prepare_backward(grad_output, query, key, value, output, log_sum_exp, level, **options)


def run_source(level, case, tensors=None, forward=None, seed=None, **names):
    """dQ, dK, dV of a level, after forward level 4."""
    if not LEVELS[level].kernels(case.head_dim):
        pytest.skip(f"level {level} has no program for a head size of {case.head_dim}")
    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu_instead(patch, seed or case.n_q, **names)
        return LEVELS[level].run(prepared(level, case, tensors, forward), **case.options)


def altered(case, **alter):
    """Q, K, V, dO of a case; alter: name -> function that changes that tensor where it is."""
    tensors = dict(zip(("query", "key", "value", "grad_output"), (x.clone() for x in draw(case)), strict=True))
    for name, function in alter.items():
        function(tensors[name])
    return tuple(tensors.values())


def times(factor, *where):
    """Multiply what `where` selects."""
    return lambda x: x[where].mul_(factor)


def assert_same(*runs):
    assert all(all_equal(run, runs[0]) for run in runs[1:])


def assert_near(found, expected, allowed):
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y.double()).norm() <= allowed * y.double().norm()


ALL = slice(None)
SOURCE_CASES = [
    Case(1, 1, 64),
    Case(3, 3, 128, 4, 2, is_causal=True, batch=2),
    Case(113, 203, 40, 2, 1),
    Case(203, 113, 96, 2, 1, is_causal=True),
    Case(300, 420, 64, 1, 1),
    Case(420, 300, 64, 2, 1, is_causal=True),
    Case(420, 300, 128, 1, 1, is_causal=True),  # dV's three warpgroups have different last tiles
    Case(257, 384, 128, 1, 1),
    Case(20, 400, 64, 1, 1, is_causal=True),  # keys that no query sees
    Case(400, 20, 33, 1, 1, is_causal=True),
    Case(20, 300, 128, 4, 2, is_causal=True),
    Case(200, 140, 72, 4, 2),
    *(
        case._replace(heads=1, kv_heads=1)
        for case in (
            Case(150, 140, scale=-0.2),
            Case(150, 140, scale=0.0, is_causal=True),
            Case(150, 300, smooth_k=False, key_offset=3.0),
            Case(150, 140, std=5.0),
        )
    ),
]


@on_the_cpu
@pytest.mark.parametrize("case", SOURCE_CASES, ids=str)
def test_source_gives_the_simulations_result(level, case):
    assert_backward(case, level, run_source(level, case))


@on_the_cpu
@pytest.mark.parametrize(("head_dim", "levels"), [(64, (4, 5)), (128, (6,))])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_output"])
def test_source_with_blocks_of_zeros(name, head_dim, levels):
    case = Case(140, 150, head_dim, 2, 1, is_causal=True)
    tensors = altered(case, **{name: times(0, ALL, ALL, slice(128, None))})
    forward = run_forward_level(case, 4, tensors)
    level3 = run_backward_level(case, 3, tensors, forward)
    for level in levels:
        assert_near(run_source(level, case, tensors, forward), level3, 4e-3)


@on_the_cpu
@pytest.mark.parametrize(("bad", "head_dim"), [(math.nan, 64), (math.inf, 64), (math.nan, 128)])
def test_source_does_not_lose_an_overflow_nor_spread_it_to_other_heads(level, bad, head_dim):
    """Rows past a head's end are the next head's: its NaN must not come in."""
    case = Case(30, 20, head_dim, 2, 2, batch=2)
    tensors = altered(case, grad_output=lambda x: x[0, 1, 3, 5].fill_(bad), value=lambda x: x[1, 0, 2, 1].fill_(bad))
    found, fine = run_source(level, case, tensors), run_source(level, case)
    assert not found[0][0, 1, 3].isfinite().any()
    assert not any(x[0, 1].isfinite().all() for x in found[1:])
    for head in ((0, 0), (1, -1)):
        assert_same([x[head] for x in found], [x[head] for x in fine])


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["key", "value", "grad_output"])
def test_source_lets_no_larger_numbers_of_the_next_head_in(level, name, head_dim):
    """They lie behind this head's last tokens, in its last tiles, and are beyond the float16 that fits this head."""
    case = Case(30, 20, head_dim)
    found = []
    for factor in (1, 1e4):
        sizes = torch.tensor([1 / 64] + [factor] * (case.heads - 1))[:, None, None].half()
        found.append(run_source(level, case, altered(case, **{name: times(sizes, ALL)})))
    assert_same(*([x[:, 0] for x in run] for run in found))


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_source_lets_later_values_change_nothing_before_them(level, head_dim):
    case = Case(150, 150, head_dim, 1, 1, is_causal=True)
    later = altered(case, value=times(1e4, ALL, ALL, slice(128, None)))
    assert_same(*([run_source(level, case, x)[0][:, :, :128]] for x in (altered(case), later)))


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_source_with_values_of_any_size(level, head_dim):
    """Powers of two in V and in dO, 1e-20 to 1e15, come out as such: nothing underflows, overflows or saturates."""
    case = Case(30, 140, head_dim, 1, 1)
    query, key, value, grad_output = (x.bfloat16() for x in draw(case))
    forward = forward_level(case, 4)

    def gradients(v, do):
        inputs = forward.inputs._replace(v_range=2.0**v * forward.inputs.v_range)
        given = forward._replace(inputs=inputs, output=2.0**v * forward.output.bfloat16())
        return run_source(level, case, (query, key, 2.0**v * value, 2.0**do * grad_output), given)

    plain = gradients(0, 0)
    for v, do in ((-66, 0), (0, -66), (50, 50)):
        for x, y, exponent in zip(plain, gradients(v, do), (v + do, v + do, do), strict=True):
            assert torch.equal(x.double() * 2.0**exponent, y.double())


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_source_repeats_whoever_is_ahead(level, head_dim):
    case = Case(300, 260, head_dim, 1, 1, is_causal=True)
    assert_same(*(run_source(level, case, seed=seed) for seed in (1, 2, 3)))


@on_the_cpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_pairs_are_the_same_whether_dq_is_apart(is_causal):
    case = Case(300, 260, 128, 2, 1, is_causal)
    one_pass, apart = (run_source(level, case) for level in (5, 6))
    assert_same(apart[1:], one_pass[1:])
    assert_same(apart[:1], run_source(4, case)[:1])


# What the CPU run would notice: programs with one place of their source changed

READ, UNSEEN = "a tile is overwritten while", "the copy engine may not see what has been written"
UNENDED = "a matmul's result is used before its end"
EARLY = f"{READ}|more arrivals|nobody has waited|deadlock|{WRONG}"
ACQUIRE = "mbarrier.wait(ring.ready.index(n % places), (n // places) & 1)"
RELEASE = "mbarrier.arrive(ring.empty.index(n % places), count=1)"
FETCH = "mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)"
HAND_OVER = "ds.tiles.index(H).slice(W * ROWS, ROWS).store(dst)"
HANDED_OVER = "mbarrier.arrive(ds.ready.index(H), count=1)"


def mistakes(levels, case, *changes):
    return [pytest.param(n, case, *change, id=f"{n}-{change[0].name}") for n in levels for change in changes]


LONG_CAUSAL = Case(700, 700, 64, 2, 1, is_causal=True)
MISTAKES = (
    *(
        mistake
        for levels, case in (((4, 5), Case(500, 300, 64)), ((6,), Case(500, 300, 128, 1, 1)))
        for mistake in mistakes(
            levels, case,
            (Changed(toolbox.acquire, ACQUIRE), EARLY),
            (Changed(toolbox.release, RELEASE), "deadlock"),
            (Changed(toolbox.release, RELEASE, f"{RELEASE}; {RELEASE.replace('n %', '(n + 1) %')}"), EARLY),
            (Changed(toolbox.claim, FETCH), EARLY),
        )
    ),
    *mistakes(
        (4,), LONG_CAUSAL,
        (Changed(toolbox.skip, "release(ring, n)"), "deadlock"),
        (Changed(queries.key_tile, "release(rings.k, j)", "release(rings.v, j)"), EARLY),
        (Changed(queries.query_rows, "skip(rings.kt, j)"), EARLY),
        (Changed(keys.dkdv_tile, "release(rings.do, n)"), "deadlock"),
        (Changed(keys.dkdv_tile, "delta_i.slice(HALF, HALF)", "delta_i.slice(0, HALF)"), WRONG),
    ),
    *mistakes(
        (4,), LONG_CAUSAL._replace(head_dim=128),
        (Changed(keys.key_rows, "skip(rings.q, n)"), EARLY),  # dV's, which has three warpgroups
        (Changed(keys.dk_tile, "release(rings.do, n)"), "deadlock"),
        (Changed(keys.dv_tile, "release(rings.dot, n)"), "deadlock"),
    ),
    *mistakes(
        (5,), Case(300, 300, 64, 1, 1),
        (Changed(narrow.hand_over, "mbarrier.wait(ds.empty.index(H), (n & 1) ^ 1)"), f"deadlock|{WRONG}"),
        (Changed(narrow.hand_over, f"{HAND_OVER}\n    {HANDED_OVER}", f"{HANDED_OVER}\n    {HAND_OVER}"), WRONG),
        (Changed(narrow.hand_over, HAND_OVER, HAND_OVER.replace("index(H)", "index(1 - H)")), WRONG),
        (Changed(narrow.add_part, "mbarrier.wait(ds.ready.index(H), n & 1)"), f"deadlock|more arrivals|{WRONG}"),
        (Changed(narrow.add_part, "mbarrier.arrive(ds.empty.index(H), count=1)"), "deadlock"),
        (Changed(narrow.add_part, "tma.store_wait(0)"), READ),
        (Changed(narrow.add_part, "fence_async_shared()"), UNSEEN),
        (Changed(narrow.query_rows, "tma.store_wait(0)"), "a program ends before its tiles are read"),
    ),
    *mistakes(
        (5,), Case(300, 300, 128, 1, 1),
        (Changed(wide.hand_over, "mbarrier.wait(barriers.empty, (n & 1) ^ 1)"), f"deadlock|{WRONG}"),
        (Changed(wide.hand_over, "ds.index(H + zero)", "ds.index(1 - H + zero)"), WRONG),
        (Changed(wide.hand_over, "H == 1", "H == 0"), WRONG),
        (Changed(wide.read_back, "slice(W * ROWS", "slice((1 - W) * ROWS"), WRONG),
        (Changed(wide.query_tile, "mbarrier.wait(barriers.queries, n & 1)"), EARLY),
        (Changed(wide.query_tile, "mbarrier.wait(barriers.dot, n & 1)"), EARLY),
        (Changed(wide.query_tile, "mbarrier.wait(barriers.qt, n & 1)"), EARLY),
        (Changed(wide.add_part, "mbarrier.wait(barriers.full, n & 1)"), WRONG),
        (Changed(wide.add_part, "mbarrier.arrive(barriers.empty, count=1)"), "deadlock"),
        (Changed(wide.add_part, "tma.store_wait(0)"), READ),
        (Changed(wide.add_part, "fence_async_shared()"), UNSEEN),
        (Changed(wide.key_rows, "tma.store_wait(0)"), "a program ends before its tiles are read"),
        (Changed(wide.load_tiles, "mbarrier.wait(barriers.full, (n & 1) ^ 1)"), EARLY),
        (Changed(wide.load_tiles, "mbarrier.wait(barriers.empty, (n & 1) ^ 1)"), EARLY),
        (Changed(toolbox.store_halves, "pointers + HALF", "pointers"), WRONG),
    ),
    *mistakes(
        (6,), Case(500, 300, 128, 2, 1),
        (Changed(apart.query_tile, "release(rings.q, n)"), "deadlock"),
        (Changed(apart.query_tile, "release(rings.do, n)"), "deadlock"),
        (Changed(apart.query_tile, "release(rings.dot, n)", "release(rings.qt, n)"), EARLY),
        (Changed(apart.query_tile, "do_i = acquire(rings.do, n)", "do_i = rings.do.tiles.index(n % 2)"), EARLY),
        (Changed(apart.query_tile, "delta.slice(HALF, HALF)", "delta.slice(0, HALF)"), WRONG),
        (Changed(apart.query_tile, "log_sum_exp.slice(HALF, HALF)", "log_sum_exp.slice(0, HALF)"), WRONG),
        (Changed(apart.query_tile, "join_pairs(dst_0, dst_1)", "join_pairs(dst_1, dst_0)"), WRONG),
        (Changed(apart.query_tile, "s_p *= factor_v", "s_p *= factor_k"), WRONG),
        (Changed(apart.key_rows, "at -= 1"), WRONG),
        (Changed(apart.key_rows, "dk_1 * dk_scale", "dk_1"), WRONG),
    ),
    *mistakes(
        (6,), LONG_CAUSAL._replace(head_dim=128),
        (Changed(apart.query_tile, "_wait(1, deps=(st_0,))", "_wait(2, deps=(st_0,))"), UNENDED),
        (Changed(apart.query_tile, "_wait(0, deps=(st_1,))", "_wait(1, deps=(st_1,))"), UNENDED),
        (Changed(apart.query_tile, "_wait(0, deps=(dpt_0,))", "_wait(1, deps=(dpt_0,))"), UNENDED),
        (Changed(apart.query_tile, "first_query + HALF", "first_query"), WRONG),
        (Changed(apart.key_rows, "RAGGED, IS_CAUSAL, W", "RAGGED, False, W"), WRONG),
    ),
)  # fmt: skip


@on_the_cpu
@pytest.mark.parametrize(("level", "case", "changed", "noticed"), MISTAKES)
def test_carelessness_is_noticed(level, case, changed, noticed):
    with pytest.raises((AssertionError, RuntimeError), match=noticed):
        assert_backward(case, level, run_source(level, case, **{changed.fn.__name__: changed}))


# Level 5: pairs, units, sums


def on_plain_tensors(function):
    return plain(function, Machine(0).names())


@on_the_cpu
def test_pairs_keep_the_order_of_columns():
    x = torch.randn(64, 64)
    x[5, 6], x[7, 8], x[9, 10], x[11, 13] = 1e5, -1e5, math.inf, math.nan
    pairs = on_plain_tensors(units.round_to_pairs)(x)
    x = x.clamp(-65504, 65504)
    assert pairs.dtype == torch.int32
    torch.testing.assert_close(on_plain_tensors(units.columns_of)(pairs, 64), x.half(), rtol=0, atol=0, equal_nan=True)
    pairs_of = on_plain_tensors(units.pairs_of)
    assert torch.equal(pairs_of(x.half(), 64), pairs)
    x = x.half()
    both = on_plain_tensors(units.join_pairs)(pairs, pairs_of(2 * x, 64))
    assert torch.equal(both, pairs_of(torch.cat((x, 2 * x), 1), 128))


@on_the_cpu
@pytest.mark.parametrize("size", [1.0, 3e-8, 1e-6, 9000.0])
def test_pairs_are_rounded_to_the_nearest_integer(size):
    """Of every size that float16 has: s is the scale of what was rounded, and no number leaves INT8."""
    x = (size * torch.randn(64, 128)).clamp(-(2**15), 2**15).half()
    x[1] = x[2] = x[3] = 0
    x[2, 100], x[3, 7] = 2**15, math.nan
    pairs = on_plain_tensors(units.pairs_of)(x, 128)
    x_hat, s = on_plain_tensors(units.quantize_pairs)(pairs, 64)
    assert x_hat.dtype == torch.int8
    ordered = on_plain_tensors(toolbox.group_columns)(x)
    largest = x.double().nan_to_num(0).abs().amax(1)
    torch.testing.assert_close(s.double(), largest.clamp(min=2.0**-15) / 127, rtol=2.0**-10, atol=0)
    exact = ordered.double() / s.double()[:, None]
    is_number = ordered.isfinite()
    assert ((x_hat - exact).abs()[is_number] <= 0.5 + 1e-4).all()
    assert (x_hat[~is_number].abs() <= 1).all()
    if size > 1e-6:
        assert (x_hat.abs().amax(1) == 127)[largest > 0].all()


def run_and_keep_sums(case, tensors, **names):
    """(sums of dQ, their unit, (dQ, dK, dV)) of level 5."""
    kept, finish = [], units.finish_program

    class Finish:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (kept.extend(arguments[:2]), finish[grid](*arguments, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "finish_program", Finish())
        gradients = run_source(5, case, tensors, **names)
    return *kept, gradients


@on_the_cpu
@pytest.mark.parametrize(("head_dim", "n_k", "size"), [(64, 2, 1.0), (64, 300, 1e-3), (64, 300, 20.0), (128, 300, 1.0)])
def test_sums_of_dq_use_their_bits_and_never_pass_them(head_dim, n_k, size):
    """Half of the keys stand against the other half, in V, in K and in P: no dQ could be larger for such numbers."""
    case = Case(128, n_k, head_dim, 1, 1, scale=1.0, smooth_k=False)
    sign = torch.where(torch.arange(n_k) < n_k // 2, 1.0, -1.0)[:, None].half()
    query = torch.zeros(1, 1, 128, head_dim).half()
    query[..., 0] = 1e-4
    key, value = sign.expand(n_k, head_dim)[None, None], size * sign.expand(n_k, head_dim)[None, None]
    sums, _, gradients = run_and_keep_sums(case, (query, key, value, torch.full_like(query, size)))
    assert 2**28 <= sums.long().abs().max() <= 2**30
    exact = size * size * head_dim  # |dP - delta| is that for every key
    torch.testing.assert_close(gradients[0].float(), torch.full(query.shape, exact), rtol=1e-2, atol=0)


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_hot_attention_with_large_values_keeps_within_the_integers(head_dim):
    """P is one for a key of its own and next to nothing for the rest: dS cancels, and none of it overflows."""
    case = Case(200, 300, head_dim, 2, 1)
    tensors = altered(case, **dict.fromkeys(("query", "value", "grad_output"), times(30, ALL)))
    sums, _, found = run_and_keep_sums(case, tensors)
    assert sums.long().abs().max() < 2**30
    assert not sums[:, :, case.n_q :].any()
    assert_near(found, run_source(4, case, tensors), 6e-3)


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_block_of_keys_that_a_query_sees_adds_one_part(head_dim, is_causal):
    """If each part were 1, made of its `half` alone, the sums would count them."""
    case = Case(300, 200, head_dim, 2, 1, is_causal)
    sums, *_ = run_and_keep_sums(case, draw(case), multiplier=lambda f: (0, 8, 3))
    parts = torch.full((384,), 2)
    parts[:128] -= int(is_causal)
    assert torch.equal(sums, parts[:, None].int().expand_as(sums))


@on_the_cpu
def test_sums_are_rounded_products():
    """Of integers of a matmul in INT8 and any factor: within half a one, and what 9 bits of the factor leave out."""
    generator = torch.Generator().manual_seed(0)
    f = torch.exp2(torch.empty(4000).uniform_(-60, 31, generator=generator))
    f[:5] = torch.tensor([0.0, 1e-40, 1.0, 2.0**30, (2 - 2.0**-8) * 0.5])
    limit = (2.0**30 / f.double()).clamp(max=128 * 127**2)[:, None]
    x = torch.cat((2 * torch.rand(4000, 30, generator=generator) - 1, torch.tensor([[1.0, -1.0]]).expand(4000, 2)), 1)
    x = (x.double() * limit).int()
    m, half, k = on_plain_tensors(units.multiplier)(f)
    assert all(part.dtype == torch.int32 for part in (m, half, k))
    found, exact = (x * m + half >> k).double(), x.double() * f.double()[:, None]
    error = (found - exact).abs()
    assert (error <= 0.5 + 2.0**-9 * exact.abs()).all()
    large = exact.abs() > 2**20
    assert (error / exact.abs())[large].square().mean().sqrt() < 1e-3


@on_the_cpu
def test_units_are_of_all_that_a_query_sees():
    """Also of keys behind it, unless attention is causal."""
    case = Case(30, 300, 64, 1, 1)
    tensors = altered(case, value=times(1e4, ALL, ALL, slice(256, None)))
    assert_near(*(run_source(level, case, tensors) for level in (5, 4)), 6e-3)


@on_the_cpu
def test_units_pass_over_what_is_no_number():
    """NaN counts as nothing; what it spoils it spoils through scales."""
    case = Case(200, 300, 64, 2, 1, batch=2)
    query, key, value, grad_output = draw(case)
    forward = forward_level(case, 4)
    q_hat, k_hat, v_range = forward.inputs.q_hat, forward.inputs.k_hat, forward.inputs.v_range

    def units_of(bad):
        k, v, do = k_hat.scale.clone(), v_range.clone(), grad_output.clone()
        k[0, 0, 1] = v[0, 0, 0] = bad
        do[1, 1, 150, 3] = math.inf if bad else 0
        hats = {"q_hat": q_hat, "k_hat": k_hat._replace(scale=k), "v_range": v}
        inputs = prepare_backward(do, query, key, value, forward.output, forward.log_sum_exp, 5, **hats)
        return inputs.units

    found, expected = units_of(math.nan), units_of(0.0)
    assert torch.equal(found.factors[..., 3].isnan(), torch.tensor([[[False] * 2] * 2, [[False] * 2, [False, True]]]))
    seen = [(x[:, :, :1], y[:, :, :1]) for x, y in zip(found, expected, strict=True)]  # of the first block of queries
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in seen)


@on_the_cpu
@pytest.mark.parametrize(
    "shape", [(200, 300, 64, 4, 2), (130, 500, 40, 2, 1), (300, 200, 128, 2, 2), (400, 300, 64, 2, 1, True)]
)
def test_units_are_the_largest_that_fit(shape):
    case = Case(*shape, batch=2)
    inputs = prepared(5, case)
    s_do = inputs.do_hat.scale.double()
    log_sum_exp, delta, factors, step, unit = (x.double() for x in inputs.units)
    s_q, fit, of_dk, of_dv = factors.unbind(-1)
    groups = case.heads // case.kv_heads
    largest_v = torch.stack([v.double().abs().amax((2, 3)) for v in inputs.value.split(128, 2)], -1)
    largest_k = 127 * inputs.k_hat.scale.double()
    # Of all that a block of queries sees.
    last = [min(i, 2) if case.is_causal else largest_v.shape[2] - 1 for i in range(s_do.shape[2])]
    largest_v, largest_k = (x.cummax(-1).values[..., last].repeat_interleave(groups, 1) for x in (largest_v, largest_k))
    bound = 2 * case.head_dim * 127 * s_do * largest_v
    # P (1 - P) 2^15 of the bound is at most 2^14.
    for largest, bits in ((bound * fit, 1), (bound * largest_k / unit, 30)):
        assert (largest <= 2**bits * 1.0001).all()
        assert (largest > 2 ** (bits - 1) * 0.9999).all()
    for x in (fit, unit):
        assert torch.equal(x.log2(), x.log2().round())
    assert torch.equal(step, 2.0**-15 / (fit * unit))
    assert torch.equal(s_q, inputs.q_hat.scale.double())
    assert torch.equal(of_dk, s_q * 2.0**-15 / fit)
    assert torch.equal(of_dv, s_do * 2.0**-15)
    torch.testing.assert_close(log_sum_exp, inputs.log_sum_exp.double() - 15, rtol=1e-6, atol=1e-5)
    assert torch.equal(delta, inputs.delta.double() * fit.repeat_interleave(128, 2))


contiguous_source = functools.lru_cache(maxsize=2)(run_source)


@on_the_cpu
@pytest.mark.parametrize("name", ["V and dO", "V", "parts of one tensor"])
@pytest.mark.parametrize("shape", [(130, 150, 64, 4, 2), (150, 130, 128, 2, 2, True)], ids=str)
def test_heads_of_a_token_side_by_side(level, shape, name):
    """As a model has them: the same bits, and results that lie so too."""
    case = Case(*shape, batch=2)
    query, key, value, grad_output = draw(case)
    expected = contiguous_source(level, case)
    if name == "parts of one tensor":
        value = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], 2)[:, :, 1].transpose(1, 2)
    else:
        value = heads_last(value)
    grad_output = heads_last(grad_output) if name == "V and dO" else grad_output
    gradients = run_source(level, case, (query, key, value, grad_output))
    assert all_equal(gradients, expected)
    assert [is_heads_last(x) for x in gradients] == [False, True, True]


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_side_by_side_are_fetched_without_a_copy(head_dim):
    x = torch.randn(2, 5, 3, head_dim).half().transpose(1, 2)
    rows, heads = toolbox.fetched_rows(x)
    assert heads == 3
    assert rows.data_ptr() == x.data_ptr()
    assert torch.equal(rows.view(2, 5, 3, head_dim).transpose(1, 2), x)


@on_the_cpu
@pytest.mark.parametrize("layout", ["padded", "every other head", "expanded", "odd rows", "unaligned", "batch first"])
def test_heads_side_by_side_that_cannot_be_fetched_are_copied(layout):
    x = torch.randn(2, 5, 4, 64).half()
    x = {
        "padded": x[..., :40], "every other head": x[:, :, ::2], "expanded": x[:, :1].expand(2, 5, 4, 64),
        "odd rows": torch.randn(2, 5, 4 * 64 + 3).half()[..., :256].unflatten(-1, (4, 64)),
        "unaligned": x.flatten()[3:-253].view(1, 9, 4, 64)[:, :, :3],
        "batch first": x.transpose(0, 1).contiguous().transpose(0, 1),
    }[layout].transpose(1, 2)  # fmt: skip
    rows, heads = toolbox.fetched_rows(x)
    assert heads == 1
    assert torch.equal(rows.reshape(x.shape), x)
    assert rows.data_ptr() % 16 == rows.stride(0) * 2 % 16 == 0


@on_the_cpu
@pytest.mark.parametrize("layout", ["heads last", "every third", "unaligned", "odd size"])
def test_tensors_that_the_copy_engine_cannot_fetch_are_copied(layout):
    x = torch.arange(2 * 3 * 5 * 24, dtype=torch.float16).reshape(2, 3, 5, 24)
    x = {
        "heads last": x.transpose(1, 2), "every third": x[..., ::3], "unaligned": x.flatten()[1:-239].view(2, 2, 5, 24),
        "odd size": x[..., :23],
    }[layout]  # fmt: skip
    fetched = toolbox.rows_of_16_bytes(x)
    assert fetched.is_contiguous()
    assert fetched.data_ptr() % 16 == fetched.shape[3] * 2 % 16 == 0
    assert torch.equal(fetched[..., : x.shape[3]], x)


def test_a_tensor_that_it_can_fetch_is_not():
    x = torch.zeros(2, 3, 5, 40, dtype=torch.float16)
    assert toolbox.rows_of_16_bytes(x) is x


@pytest.mark.parametrize("rows", [128, 192])
def test_the_diagonal_crosses_the_last_query_tile_of_a_warpgroup_and_no_other(rows):
    tiles = toolbox.count_query_tiles.fn
    for q_blocks in range(1, 9):
        for first_key in range(0, 1300, 64):
            own = counted(tiles, first_key, q_blocks)
            assert 1 <= own <= counted(tiles, first_key // rows * rows, q_blocks) <= q_blocks
            visited = range(q_blocks - own, q_blocks)
            assert all(i * 128 >= first_key + 63 for i in visited[1:])  # all queries see all keys
            assert visited[0] == q_blocks - 1 or visited[0] * 128 <= first_key  # and none before sees any


def counted(tiles, first_key, q_blocks):
    return q_blocks - min(first_key // 128, q_blocks - 1)


# Where it runs


@on_the_cpu
def test_asked_for_where_it_cannot_run_it_is_an_error(level):
    message = f"expected one that can run here, got backward level {level}: it needs a Hopper GPU, and query is on cpu"
    case = Case(3, 3)
    with pytest.raises(ValueError, match=re.escape(message)):
        run_backward(prepared(level, case), level, **case.options)


@pytest.mark.parametrize(("head_dim", "size"), [(33, 64), (64, 64), (65, 128), (128, 128)])
def test_their_programs_are_those_that_the_ladder_names(head_dim, size):
    expected = {
        4: {64: ("dq", "dkdv"), 128: ("dq", "dk", "dv")}, 5: {64: ("dqdkdv",), 128: ("dqdkdv_wide",)},
        6: {64: (), 128: ("dq", "dkdv_pairs")},
    }  # fmt: skip
    for level, names in expected.items():
        assert BACKWARD_LEVELS[level].kernels(size) == LEVELS[level].kernels(head_dim) == names[size]
        assert set(names[size]) <= set(LEVELS[level].LAUNCHES)


@on_the_cpu
def test_they_have_no_other_launch():
    assert not LEVELS.keys() & {kernel.level for kernel in tuning.kernels() if kernel.kernel != "forward"}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Sets the compute capability of the GPU that is said to be there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


# (compute capability, head size) -> the level that runs without a mask, and in causal attention
BY_ITSELF = {
    ((9, 0), 128): (5, 6), ((9, 0), 65): (5, 6), ((9, 0), 64): (5, 5), ((9, 0), 33): (5, 5), ((9, 0), 32): (3, 3),
    ((8, 0), 64): (3, 3), ((10, 0), 128): (3, 3),
}  # fmt: skip


@pytest.mark.parametrize(("where", "levels"), BY_ITSELF.items())
def test_the_operation_takes_hoppers_if_the_head_size_allows(on_a_gpu, where, levels):
    capability, head_dim = where
    on_a_gpu(*capability)
    for is_causal, level in zip((False, True), levels, strict=True):
        assert ops.backward_level(torch.device("cuda"), head_dim, is_causal) == level
        assert ops.backward_level(torch.device("cuda"), head_dim, is_causal, "block") == 2


@pytest.mark.parametrize(
    ("head_dim", "why"),
    [(64, "it has no program for a head size of 64"), (65, None), (128, None), (129, "33 to 128, and query has 129")],
)
def test_the_head_sizes_of_level_6(on_a_gpu, head_dim, why):
    on_a_gpu(9, 0)
    found = ladder.obstacle(BACKWARD_LEVELS[6], torch.device("cuda"), head_dim)
    assert found is None if why is None else why in found


@on_the_cpu
def test_operation_with_it(monkeypatch, level):
    case = Case(140, 30, 128, heads=2, kv_heads=1, is_causal=True)
    query, key, value, grad_output = draw(case)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = sagebwd_attention(*leaves, is_causal=True, enable_gqa=True, backend="triton")
    expected = run_source(level, case)
    monkeypatch.setattr(ops, "backward_level", lambda *where: level)
    monkeypatch.setattr(hopper, "obstacle", lambda device, head_dim: None)
    on_the_cpu_instead(monkeypatch)
    assert_same(torch.autograd.grad(output, leaves, grad_output), expected)


@pytest.mark.gpu
@pytest.mark.skipif(max(LEVELS) not in BACKWARD, reason="needs a Hopper GPU")
class TestOnHopper:
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_repeats_are_equal_bit_for_bit(self, level, head_dim, is_causal):
        """Many programs and many tiles: a missing barrier would show in some of 100 runs."""
        case = Case(2048, 2048, head_dim, 16, 4, is_causal, torch.bfloat16, batch=4)
        first = run_backward_level(case, level)
        for _ in range(100):
            assert_same(run_backward_level(case, level), first)
        assert_backward(case, level, first)

    def test_the_operation_takes_it(self):
        for (_, head_dim), levels in list(BY_ITSELF.items())[:5]:
            assert tuple(ops.backward_level(DEVICE, head_dim, is_causal) for is_causal in (False, True)) == levels
