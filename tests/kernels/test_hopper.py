"""Hopper's programs: what the emulator notices of mistakes in their source, their parts, and where they run.

test_sagebwd_levels.py and test_sla2_levels.py hold their results against the oracles.
"""

import functools
import math
from itertools import product
from types import SimpleNamespace

import pytest
import sla2_cases
import torch
from kernel_cases import (
    DEVICE,
    FORWARD,
    MARKS,
    Case,
    all_equal,
    altered,
    as_hopper,
    assert_backward,
    assert_forward,
    assert_forward_by_blocks,
    backward_level,
    draw,
    emulated,
    forward_level,
    heads_last,
    on_the_cpu,
    run_backward_level,
    run_forward_level,
    takes,
    times,
)
from sage_kernels.hopper import toolbox
from sage_kernels.sagebwd import ladder, ops
from sage_kernels.sagebwd.backward import level6_apart as apart
from sage_kernels.sagebwd.backward import level6_queries as queries
from sage_kernels.sagebwd.backward.level5 import narrow, units, wide
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sla2.backward import keys_hopper, linear_queries_hopper, queries_hopper
from sage_kernels.sla2.forward import level4_hopper
from sage_kernels.sla2.ops import LEVEL_HOPPER, LEVEL_INT8
from sage_lab.emulator import Changed, Machine, Registers, plain

from sage_ref import sagebwd_attention

pytestmark = MARKS
EVERY_LEVEL = pytest.mark.parametrize("level", [5, 6])
BOTH_HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128])


def assert_same(*runs):
    assert all(all_equal(run, runs[0]) for run in runs[1:])


def assert_near(found, expected, allowed):
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y.double()).norm() <= allowed * y.double().norm()


def run_one_pass(case, level, tensors=None, **names):
    """Return dQ, dK, dV of a backward level. names: what some global names of its source mean instead."""
    return run_backward_level(case, level, tensors, start=emulated(case.n_q, **names))


# Mistakes that the emulator notices: programs with one place of their source changed. Each of its complaints comes up
# in each kind of program; plain wrong numbers need no test of their own, since the oracles meet them.

WRONG = "from what the reference computes|^$"  # the numbers
READ, UNSEEN = "a tile is overwritten while", "the copy engine may not see what has been written"
UNENDED = "a matmul's result is used before its end"
EARLY = f"{READ}|more arrivals|nobody has waited|deadlock|{WRONG}"
ACQUIRE = "mbarrier.wait(ring.ready.index(n % places), (n // places) & 1)"
RELEASE = "mbarrier.arrive(ring.empty.index(n % places), count=1)"
FETCH = "mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)"
HAND_OVER = "ds.tiles.index(H).slice(W * ROWS, ROWS).store(dst)"
HANDED_OVER = "mbarrier.arrive(ds.ready.index(H), count=1)"
NEVER_RELEASED = Changed(toolbox.release, RELEASE)
WAIT_FOR_PV = "pv_ij = warpgroup_mma_wait(0, deps=(product,))\n"
RELEASE_V = "        release(rings.v, n + step - 1)\n"
WAIT_FOR_DQ = "dq_i = warpgroup_mma_wait(0, deps=(gradient,))\n"
RELEASE_K = "            release(rings.k, n + step - 1)\n"
RELEASE_Q_HAT, RELEASE_K_HAT = "release(rings.q_hat, n)", "release(rings.k_hat, n + step)"
LOAD_S_Q = "s_q = gl.load(pointers.q_scale + row // (HALVES * ROWS))"
STORE_S_Q = "lines.q_scale.index(n % PLACES).slice(0, 1).store(gl.full([1], s_q, gl.float32, ONE_WARP))"
H_I = "h_i = acquire(rings.h, turn)"
SHARE = "shared.q_share"
SPARSE, ROWS_OF_DQ, SHARED = level4_hopper.sparse_branch, queries_hopper.query_rows, linear_queries_hopper


def check(kind, case, start):
    """Run a pass with `start` and compare its results with the oracles."""
    if kind == "forward 5":
        assert_forward(case, 5, run_forward_level(case, 5, start=start).output)
    elif kind == "sla2 forward":
        result = sla2_cases.run_level(case, LEVEL_HOPPER, start=start)
        sla2_cases.assert_forward(case, LEVEL_HOPPER, result.forward.output)
    elif kind in ("sla2 backward", "sla2 matched"):
        case = case._replace(matched=kind == "sla2 matched")
        gradients = sla2_cases.run_gradients(case, LEVEL_INT8, level_of_backward=1, start=start)
        sla2_cases.assert_gradients(case, LEVEL_INT8, gradients)
    else:
        level = int(kind.removeprefix("backward "))
        assert_backward(case, level, run_backward_level(case, level, start=start))


def mistakes(kinds, case, *changes):
    """Return a test parameter for each pass and each (changed functions ..., the error expected)."""
    return [
        pytest.param(kind, case, changed, noticed, id=f"{kind}-{'-'.join(x.name for x in changed)}")
        for kind, (*changed, noticed) in product(kinds, changes)
    ]


LONG_CAUSAL = Case(700, 700, 64, 2, 1, is_causal=True)
RINGS = (
    (Changed(toolbox.acquire, ACQUIRE), EARLY),
    (NEVER_RELEASED, "deadlock"),
    (Changed(toolbox.release, RELEASE, f"{RELEASE}; {RELEASE.replace('n %', '(n + 1) %')}"), EARLY),
    (Changed(toolbox.claim, FETCH), EARLY),
)
MISTAKES = (
    *mistakes(("backward 5",), Case(500, 300, 64), *RINGS),
    *mistakes(
        ("backward 5",), Case(300, 300, 64, 1, 1),
        (Changed(narrow.hand_over, "mbarrier.wait(ds.empty.index(H), (n & 1) ^ 1)"), f"deadlock|{WRONG}"),
        (Changed(narrow.hand_over, f"{HAND_OVER}\n    {HANDED_OVER}", f"{HANDED_OVER}\n    {HAND_OVER}"), WRONG),
        (Changed(narrow.add_part, "mbarrier.wait(ds.ready.index(H), n & 1)"), f"deadlock|more arrivals|{WRONG}"),
        (Changed(narrow.add_part, "mbarrier.arrive(ds.empty.index(H), count=1)"), "deadlock"),
        (Changed(narrow.add_part, "tma.store_wait(0)"), READ),
        (Changed(narrow.add_part, "fence_async_shared()"), UNSEEN),
        (Changed(narrow.query_rows, "tma.store_wait(0)"), "a program ends before its tiles are read"),
    ),
    *mistakes(
        ("backward 5",), Case(300, 300, 128, 1, 1),
        (Changed(wide.hand_over, "mbarrier.wait(barriers.empty, (n & 1) ^ 1)"), f"deadlock|{WRONG}"),
        (Changed(wide.query_tile, "mbarrier.wait(barriers.queries, n & 1)"), EARLY),
        (Changed(wide.add_part, "mbarrier.wait(barriers.full, n & 1)"), WRONG),
        (Changed(wide.add_part, "mbarrier.arrive(barriers.empty, count=1)"), "deadlock"),
        (Changed(wide.load_tiles, "mbarrier.wait(barriers.full, (n & 1) ^ 1)"), EARLY),
        (Changed(wide.load_tiles, "mbarrier.wait(barriers.empty, (n & 1) ^ 1)"), EARLY),
    ),
    *mistakes(
        ("backward 6",), Case(500, 300, 128, 2, 1),
        (Changed(apart.query_tile, "release(rings.q, n)"), "deadlock"),
        (Changed(apart.query_tile, "release(rings.dot, n)", "release(rings.qt, n)"), EARLY),
        (Changed(apart.query_tile, "do_i = acquire(rings.do, n)", "do_i = rings.do.tiles.index(n % 2)"), EARLY),
    ),
    *mistakes(
        ("backward 6",), LONG_CAUSAL._replace(head_dim=128),
        (Changed(apart.query_tile, "_wait(1, deps=(st_0,))", "_wait(2, deps=(st_0,))"), UNENDED),
        (Changed(toolbox.skip, "release(ring, n)"), "deadlock"),
        (Changed(queries.key_tile, "release(rings.k, j)", "release(rings.v, j)"), EARLY),
        (Changed(queries.query_rows, "skip(rings.kt, j)"), EARLY),
    ),
    *mistakes(
        ("forward 5",), Case(192, 1280),
        (Changed(toolbox.acquire, ACQUIRE), EARLY),
        (Changed(toolbox.acquire, "return", f"{RELEASE}; return"), NEVER_RELEASED, EARLY),
        (NEVER_RELEASED, "deadlock"),
        (Changed(toolbox.claim, FETCH), EARLY),
    ),
    *mistakes(
        ("sla2 forward",), sla2_cases.Case(700, 1280, "half", 64, 1, 1),
        (Changed(SPARSE, WAIT_FOR_PV + RELEASE_V, f"{RELEASE_V.strip()}\n        {WAIT_FOR_PV}"), EARLY),
        (Changed(level4_hopper.linear_branch, H_I, f"{H_I}; release(rings.h, turn)"), EARLY),
        (Changed(SPARSE, "wait(1, deps=(scores,))", "wait(2, deps=(scores,))"), UNENDED),
        (Changed(level4_hopper.query_rows, "n += item.steps", "n += 0"), EARLY),
    ),
    *mistakes(
        ("sla2 backward",), sla2_cases.Case(820, 1270, "half", 64, 1, 1),
        (Changed(ROWS_OF_DQ, WAIT_FOR_DQ + RELEASE_K, f"{RELEASE_K.strip()}\n            {WAIT_FOR_DQ}"), EARLY),
        (Changed(ROWS_OF_DQ, "wait(1, deps=(product,))", "wait(2, deps=(product,))"), UNENDED),
        (Changed(ROWS_OF_DQ, "release(rings.k, n + step - 1)"), "deadlock"),
        (Changed(
            keys_hopper.query_tile,
            "    dk_j = warpgroup_mma_wait(0, deps=(sum_of_dk,))\n    release(rings.q, n)\n",
            "    release(rings.q, n)\n    dk_j = warpgroup_mma_wait(0, deps=(sum_of_dk,))\n",
        ), EARLY),
        (Changed(SHARED.hand_over, f"mbarrier.arrive({SHARE}.ready.index(0), count=1)"), "deadlock"),
        (Changed(SHARED.hand_over, f"mbarrier.wait({SHARE}.empty.index(0), (turn & 1) ^ 1)"), EARLY),
        (Changed(SHARED.store_sums, f"acquire({SHARE}, turn)", f"{SHARE}.tiles.index(0)"), EARLY),
        (Changed(SHARED.linear_rows, H_I, f"{H_I}; release(rings.h, turn)"), EARLY),
    ),
    *mistakes(
        ("sla2 matched",), sla2_cases.Case(820, 1270, "half", 64, 1, 1),
        (Changed(ROWS_OF_DQ, RELEASE_K_HAT, f"{RELEASE_K_HAT}; {RELEASE_K_HAT}"), EARLY),
        (Changed(ROWS_OF_DQ, RELEASE_K_HAT), "deadlock"),
        (Changed(keys_hopper.query_tile, RELEASE_Q_HAT, f"{RELEASE_Q_HAT}; {RELEASE_Q_HAT}"), EARLY),
        (Changed(keys_hopper.query_tile, RELEASE_Q_HAT), "deadlock"),
        (Changed(keys_hopper.fetch_q_hat, LOAD_S_Q, f"{LOAD_S_Q}; {STORE_S_Q}"), EARLY),
    ),
)  # fmt: skip


@on_the_cpu
@pytest.mark.parametrize(("kind", "case", "changed", "noticed"), MISTAKES)
def test_carelessness_is_noticed(kind, case, changed, noticed):
    start = emulated(case.n_q, **{function.fn.__name__: function for function in changed})
    with pytest.raises((AssertionError, RuntimeError), match=noticed):
        check(kind, case, start)


@on_the_cpu
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("forward 5", Case(192, 1100, 64, 1, 1)),
        ("backward 5", LONG_CAUSAL),
        ("backward 5", LONG_CAUSAL._replace(head_dim=128)),
        ("backward 6", LONG_CAUSAL._replace(head_dim=128)),
        *product(("sla2 forward", "sla2 backward", "sla2 matched"), [sla2_cases.Case(820, 1270, "half", 64, 1, 1)]),
    ],
    ids=str,
)
def test_no_release_comes_before_the_end_of_a_slow_read(kind, case):
    check(kind, case, emulated(case.n_q, slow_reads=True))


# The forward pass


@on_the_cpu
def test_programs_at_sizes_float16_does_not_have():
    """Blocks of values of any size, one after another: the sum changes units every time."""
    for blocks in ((1e12, 1e4, 1, 1e-8), (1e-8, 1, 1e4, 1e12), (1, 1e-15, 1, 1e-15)):
        case = Case(200, 500, value_blocks=blocks, dtype=torch.float32, is_causal=True)
        assert_forward_by_blocks(case, 5, run_forward_level(case, 5).output)


@on_the_cpu
@pytest.mark.parametrize("case", [Case(192, 1100, 64, 1, 1), Case(200, 200, 64, 10, 5, is_causal=True)], ids=str)
def test_many_tiles_and_heads(case):
    """Nine key tiles in three places; ten heads, eight at a time, whose warpgroups have different last tiles."""
    _, output, log_sum_exp = run_forward_level(case, 5)
    assert_forward(case, 5, output)
    torch.testing.assert_close(log_sum_exp, forward_level(case, 4).log_sum_exp, rtol=1e-5, atol=1e-4)


@on_the_cpu
@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_programs_makes_nan_where_level_4_does(broken):
    case = Case(200, 200, is_causal=True, smooth_k=False)
    tensors = altered(case, **{broken: lambda x: x[0, 1, 140, 3].fill_(math.nan)})
    output, expected = (run_forward_level(case, level, tensors).output.isnan() for level in (5, 4))
    assert expected.any()
    assert not expected.all()
    assert torch.equal(output, expected)


# The backward pass


@on_the_cpu
@pytest.mark.parametrize(("level", "head_dim"), [(5, 64), (5, 128), (6, 128)])
@pytest.mark.parametrize("name", ["key", "value", "grad_output"])
def test_programs_lets_no_larger_numbers_of_the_next_head_in(level, name, head_dim):
    """They follow this head's last tokens in its last tiles, and exceed the float16 that fits this head."""
    case = Case(30, 20, head_dim)
    found = []
    for factor in (1, 1e4):
        sizes = torch.tensor([1 / 64] + [factor] * (case.heads - 1))[:, None, None].half()
        found.append(run_one_pass(case, level, altered(case, **{name: times(sizes, slice(None))})))
    assert_same(*([x[:, 0] for x in run] for run in found))


@on_the_cpu
@BOTH_HEAD_DIMS
@EVERY_LEVEL
def test_programs_lets_later_values_change_nothing_before_them(level, head_dim):
    case = Case(150, 150, head_dim, 1, 1, is_causal=True)
    later = altered(case, value=times(1e4, ..., slice(128, None), slice(None)))
    assert_same(*([run_one_pass(case, level, x)[0][:, :, :128]] for x in (altered(case), later)))


@on_the_cpu
@BOTH_HEAD_DIMS
@EVERY_LEVEL
def test_programs_with_values_of_any_size(level, head_dim):
    """Powers of two in V and in dO, 1e-20 to 1e15, come out as such: nothing underflows, overflows or saturates."""
    case = Case(30, 140, head_dim, 1, 1)
    query, key, value, grad_output = (x.bfloat16() for x in draw(case))
    forward = forward_level(case, 4)

    def gradients(v, do):
        inputs = forward.inputs._replace(v_range=2.0**v * forward.inputs.v_range)
        given = forward._replace(inputs=inputs, output=2.0**v * forward.output.bfloat16())
        return run_backward_level(case, level, (query, key, 2.0**v * value, 2.0**do * grad_output), given)

    plain = gradients(0, 0)
    for v, do in ((-66, 0), (0, -66), (50, 50)):
        for x, y, exponent in zip(plain, gradients(v, do), (v + do, v + do, do), strict=True):
            assert torch.equal(x.double() * 2.0**exponent, y.double())


@on_the_cpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_pairs_are_the_same_whether_dq_is_apart(is_causal):
    case = Case(150, 140, 128, 2, 1, is_causal)
    one_pass, apart = (run_one_pass(case, level) for level in (5, 6))
    assert_same(apart[1:], one_pass[1:])


@on_the_cpu
@EVERY_LEVEL
def test_values_that_are_part_of_a_model_s_tensor(level):
    """Keys and values come from one projection, heads of a token side by side: results have the same bits."""
    case = Case(40, 140, 128 if level == 6 else 64, batch=2)
    query, key, value, grad_output = draw(case)
    value = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], 2)[:, :, 1].transpose(1, 2)
    gradients = run_backward_level(case, level, (query, key, value, heads_last(grad_output)), forward_level(case, 4))
    assert all_equal(gradients, backward_level(case, level))


# Pairs, units and sums of levels 5 and 6


def on_plain_tensors(function):
    return plain(function, Machine(0).names())


@on_the_cpu
@pytest.mark.parametrize("size", [1.0, 3e-8, 1e-6, 9000.0])
def test_pairs_are_rounded_to_the_nearest_integer(size):
    """Numbers have every size that float16 has: s is the scale of what was rounded, and no number leaves INT8."""
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
    """Return the sums of dQ of level 5, and its dQ, dK, dV."""
    kept, emulate = [], emulated(case.n_q, **names)

    def start(program, grid, arguments, *rest):
        if program is units.finish_program:
            kept.append(arguments[0])
        return emulate(program, grid, arguments, *rest)

    gradients = run_backward_level(case, 5, tensors, start=start)
    return kept[0], gradients


@on_the_cpu
@pytest.mark.parametrize(("head_dim", "n_k", "size"), [(64, 2, 1.0), (64, 300, 1e-3), (64, 300, 20.0), (128, 300, 1.0)])
def test_sums_of_dq_use_their_bits_and_never_pass_them(head_dim, n_k, size):
    """Half of the keys stand against the other half, in V, in K and in P: no dQ could be larger for such numbers."""
    case = Case(128, n_k, head_dim, 1, 1, scale=1.0, smooth_k=False)
    sign = torch.where(torch.arange(n_k) < n_k // 2, 1.0, -1.0)[:, None].half()
    query = torch.zeros(1, 1, 128, head_dim).half()
    query[..., 0] = 1e-4
    key, value = sign.expand(n_k, head_dim)[None, None], size * sign.expand(n_k, head_dim)[None, None]
    sums, gradients = run_and_keep_sums(case, (query, key, value, torch.full_like(query, size)))
    assert 2**28 <= sums.long().abs().max() <= 2**30
    exact = size * size * head_dim  # |dP - delta| is that for every key
    torch.testing.assert_close(gradients[0].float(), torch.full(query.shape, exact), rtol=1e-2, atol=0)


@on_the_cpu
def test_sums_are_rounded_products():
    """Integers of a matmul in INT8 times any factor: within 1/2, and what 9 bits of the factor leave out."""
    generator = torch.Generator().manual_seed(0)
    f = torch.exp2(torch.empty(4000).uniform_(-60, 31, generator=generator))
    f[:5] = torch.tensor([0.0, 1e-40, 1.0, 2.0**30, (2 - 2.0**-8) * 0.5])
    limit = (2.0**30 / f.double()).clamp(max=128 * 127**2)[:, None]
    x = torch.cat((2 * torch.rand(4000, 30, generator=generator) - 1, torch.tensor([[1.0, -1.0]]).expand(4000, 2)), 1)
    x = (x.double() * limit).int()
    m, half, k = on_plain_tensors(units.multiplier)(f.as_subclass(Registers))
    assert all(part.dtype == torch.int32 for part in (m, half, k))
    found, exact = (x * m + half >> k).double(), x.double() * f.double()[:, None]
    error = (found - exact).abs()
    assert (error <= 0.5 + 2.0**-9 * exact.abs()).all()
    large = exact.abs() > 2**20
    assert (error / exact.abs())[large].square().mean().sqrt() < 1e-3


@on_the_cpu
def test_units_are_of_all_that_a_query_sees():
    """Without a mask, units depend on later keys too."""
    case = Case(30, 300, 64, 1, 1)
    tensors = altered(case, value=times(1e4, ..., slice(256, None), slice(None)))
    assert_near(*(run_one_pass(case, level, tensors) for level in (5, 3)), 6e-3)


# The toolbox: the order of work, and what the copy engine has to know


@pytest.mark.parametrize(("blocks", "heads", "together"), [(1, 3, 1), (2, 8, 2), (5, 21, 8), (43, 1, 2), (5, 8, 8)])
def test_every_piece_of_work_is_done_once_and_long_rows_first(blocks, heads, together):
    item = plain(toolbox.work_item, {"gl": SimpleNamespace(minimum=min)})
    sizes = toolbox.Sizes(blocks, heads, together, *[0] * 8)
    items = [item(t, sizes) for t in range(blocks * heads)]
    order = product(range(blocks), range(heads))
    assert items == sorted(order, key=lambda x: (x[1] // together, -x[0], x[1]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_warpgroup_masks_its_last_key_tile_and_no_other(is_causal):
    tiles = plain(toolbox.count_key_tiles, {"gl": SimpleNamespace(minimum=min)})
    for n_q, n_k in product(range(1, 700, 13), range(1, 600, 7)):
        kv_blocks = -(-n_k // 128)
        for first in range(0, n_q, 64):
            count = tiles(first, 64, kv_blocks, is_causal)
            of_program = tiles(first // 192 * 192, 192, kv_blocks, is_causal)
            seen_by_all = min(first, n_k - 1) if is_causal else n_k - 1
            seen_by_any = min(first + 63, n_k - 1) if is_causal else n_k - 1
            assert 1 <= count <= of_program
            assert (count - 1) * 128 - 1 <= seen_by_all  # the tiles before the last need no mask
            assert seen_by_any < count * 128  # and no later one is needed


@on_the_cpu
@BOTH_HEAD_DIMS
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


@pytest.mark.parametrize("rows", [128, 192])
def test_the_diagonal_crosses_the_last_query_tile_of_a_warpgroup_and_no_other(rows):
    counted = plain(toolbox.count_query_tiles, {"gl": SimpleNamespace(minimum=min)})
    for q_blocks, first_key in product(range(1, 9), range(0, 1300, 64)):
        own = counted(first_key, q_blocks, True)
        assert 1 <= own <= counted(first_key // rows * rows, q_blocks, True) <= q_blocks == counted(0, q_blocks, False)
        visited = range(q_blocks - own, q_blocks)
        assert all(i * 128 >= first_key + 63 for i in visited[1:])  # all queries see all keys
        assert visited[0] == q_blocks - 1 or visited[0] * 128 <= first_key  # and none before sees any


# Where Hopper's levels run


@pytest.fixture
def gpu(monkeypatch):
    """Return gpu(*capability): a CUDA device of that compute capability, as PyTorch would describe it."""

    def pretend(*capability):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return pretend


# (compute capability, head size) -> the levels that run there: forward; backward without a mask; in causal attention
BY_ITSELF = {
    ((9, 0), 128): (5, 5, 6), ((9, 0), 65): (5, 5, 6), ((9, 0), 64): (5, 5, 5), ((9, 0), 33): (5, 5, 5),
    ((9, 0), 32): (4, 3, 3), ((8, 0), 64): (4, 3, 3), ((10, 0), 128): (4, 3, 3),
}  # fmt: skip


def levels_at(device, head_dim):
    backward = (ops.backward_level(device, head_dim, is_causal) for is_causal in (False, True))
    assert {ops.backward_level(device, head_dim, is_causal, "block") for is_causal in (False, True)} == {2}
    return ops.forward_level(device, head_dim), *backward


@pytest.mark.parametrize(("where", "levels"), BY_ITSELF.items())
def test_the_operation_takes_hoppers_if_the_head_size_allows(gpu, where, levels):
    capability, head_dim = where
    assert levels_at(gpu(*capability), head_dim) == levels


def test_where_int8_pays_was_measured_on_hopper_alone(gpu):
    kinds = [*product((32, 64, 80, 128), (False, True))]
    assert all(1000 < ops.pays_from(gpu(9, 0), *kind) <= 16384 for kind in kinds)
    assert not any(ops.pays_from(gpu(8, 9), *kind) for kind in kinds)


def test_the_interpreter_gets_other_levels(gpu, monkeypatch):
    device = gpu(9, 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert levels_at(device, 64) == levels_at(torch.device("cpu"), 64) == (4, 3, 3)


@on_the_cpu
@pytest.mark.parametrize(("level", "head_dim"), [(5, 64), (5, 128), (6, 128)])
def test_operation_with_them(monkeypatch, level, head_dim):
    """The operation's results are the ladder's, forward level 5's and a backward level's."""
    case = Case(140, 30, head_dim, heads=2, kv_heads=1, is_causal=True)
    *inputs, grad_output = draw(case)
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward = run_forward_level(case, 5)
    expected = forward.output, *run_backward_level(case, level, forward=forward)
    monkeypatch.setattr(ops, "recorded", lambda key, tensors, compute: compute(emulated(case.n_q)))
    monkeypatch.setattr(ops, "backward_level", lambda *where: level)
    with as_hopper():
        output = sagebwd_attention(*leaves, is_causal=True, enable_gqa=True, backend="triton")
        assert_same((output, *torch.autograd.grad(output, leaves, grad_output)), expected)
    assert not torch.equal(output, run_forward_level(case, 4).output)


@pytest.mark.gpu
@pytest.mark.skipif(5 not in FORWARD, reason="needs a Hopper GPU")
@pytest.mark.usefixtures("large_memory")  # up to 15 GiB
@BOTH_HEAD_DIMS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["forward 5", "backward 5", "backward 6"])
def test_repeats_on_the_gpu_are_equal_bit_for_bit(kind, head_dim, is_causal):
    """Many programs and many tiles: a missing barrier would show in some of 100 runs."""
    levels, number = FORWARD_LEVELS if kind == "forward 5" else BACKWARD_LEVELS, int(kind[-1])
    case = Case(2048, 2048, head_dim, 16, 4, is_causal, torch.bfloat16, batch=4)
    if not takes(number, case, levels):
        pytest.skip("no program for this head size")
    if levels is FORWARD_LEVELS:
        inputs, *first = run_forward_level(case, number)
        run = functools.partial(ladder.run_forward, inputs, number, **case.options)
        assert_forward(case, number, first[0])
    else:
        first, run = run_backward_level(case, number), functools.partial(run_backward_level, case, number)
        assert_backward(case, number, first)
    for _ in range(100):
        assert_same(run(), first)


@pytest.mark.gpu
@pytest.mark.skipif(5 not in FORWARD, reason="needs a Hopper GPU")
def test_the_operation_takes_hoppers_on_the_gpu():
    for (_, head_dim), levels in list(BY_ITSELF.items())[:5]:
        assert levels_at(DEVICE, head_dim) == levels
