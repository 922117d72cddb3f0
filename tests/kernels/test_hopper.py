"""Hopper's programs: what the emulator notices of mistakes in their source, their parts, and where they run.

test_sagebwd_levels.py and test_sla2_levels.py hold their results against the oracles.
"""

import math
from itertools import product

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
    draw,
    emulated,
    forward_level,
    on_the_cpu,
    run_backward_level,
    run_forward_level,
    times,
)
from sage_kernels.hopper import toolbox
from sage_kernels.sagebwd import ops
from sage_kernels.sagebwd.backward import level6_apart as apart
from sage_kernels.sagebwd.backward.level5 import narrow, units, wide
from sage_kernels.sla2.backward import keys_hopper, linear_queries_hopper, queries_hopper
from sage_kernels.sla2.forward import level4_hopper
from sage_kernels.sla2.ops import LEVEL_HOPPER, LEVEL_INT8
from sage_lab.emulator import Changed

from sage_ref import sagebwd_attention

pytestmark = MARKS
PASSES = pytest.mark.parametrize(("level", "head_dim"), [(5, 64), (5, 128), (6, 128)])


def assert_near(found, expected, allowed):
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y.double()).norm() <= allowed * y.double().norm()


# Mistakes that the emulator notices: programs with one place of their source changed. Each of its complaints comes up,
# and each kind of program; plain wrong numbers need no test of their own, since the oracles meet them.

WRONG = "from what the reference computes|^$"  # the numbers
EARLY = f"a tile is overwritten while|more arrivals|nobody has waited|deadlock|{WRONG}"
RELEASE = "mbarrier.arrive(ring.empty.index(n % places), count=1)"
CLAIM = "mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)"
WAIT_FOR_DQ = "dq_i = warpgroup_mma_wait(0, deps=(gradient,))\n"
RELEASE_K = "            release(rings.k, n + step - 1)\n"


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


LAPS, NARROW = Case(500, 300, 64, 1, 1), Case(300, 300, 64, 1, 1)
WIDE, SPARSE = Case(300, 300, 128, 1, 1), sla2_cases.Case(700, 700, "half", 64, 1, 1)
MISTAKES = [
    ("backward 5", LAPS, Changed(toolbox.release, RELEASE), "deadlock"),
    ("backward 5", LAPS, Changed(toolbox.claim, CLAIM), EARLY),
    ("backward 5", NARROW, Changed(narrow.add_part, "tma.store_wait(0)"), "a tile is overwritten while"),
    ("backward 5", NARROW, Changed(narrow.add_part, "fence_async_shared()"),
     "the copy engine may not see what has been written"),
    ("backward 5", NARROW, Changed(narrow.query_rows, "tma.store_wait(0)"), "a program ends before its tiles are read"),
    ("backward 5", WIDE, Changed(wide.load_tiles, "mbarrier.wait(barriers.empty, (n & 1) ^ 1)"), EARLY),
    ("backward 6", WIDE, Changed(apart.query_tile, "_wait(1, deps=(st_0,))", "_wait(2, deps=(st_0,))"),
     "a matmul's result is used before its end"),
    ("forward 5", Case(192, 1280, 64, 1, 1), Changed(toolbox.acquire, "return", f"{RELEASE}; return"), EARLY),
    ("sla2 forward", SPARSE, Changed(level4_hopper.query_rows, "n += item.steps", "n += 0"), EARLY),
    ("sla2 backward", SPARSE, Changed(
        queries_hopper.query_rows, WAIT_FOR_DQ + RELEASE_K, f"{RELEASE_K.strip()}\n            {WAIT_FOR_DQ}"), EARLY),
    ("sla2 backward", SPARSE, Changed(
        linear_queries_hopper.hand_over, "mbarrier.arrive(shared.q_share.ready.index(0), count=1)"), "deadlock"),
    ("sla2 matched", SPARSE, Changed(keys_hopper.query_tile, "release(rings.q_hat, n)"), "deadlock"),
    ("sla2 backward", SPARSE, Changed(keys_hopper.linear_share, "dk_phi = ", "release(rings.dh, 0); dk_phi = "), EARLY),
]  # fmt: skip


@on_the_cpu
@pytest.mark.parametrize(
    ("kind", "case", "changed", "noticed"), MISTAKES, ids=lambda x: getattr(x, "name", str(x)[:20])
)
def test_carelessness_is_noticed(kind, case, changed, noticed):
    with pytest.raises((AssertionError, RuntimeError), match=noticed):
        check(kind, case, emulated(case.n_q, **{changed.fn.__name__: changed}))


LONG_CAUSAL = Case(420, 420, 64, 1, 1, is_causal=True)


@on_the_cpu
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("forward 5", Case(192, 1100, 64, 1, 1)),
        ("backward 5", LONG_CAUSAL),
        ("backward 5", LONG_CAUSAL._replace(head_dim=128)),
        ("backward 6", LONG_CAUSAL._replace(head_dim=128)),
        *product(("sla2 forward", "sla2 backward", "sla2 matched"), [SPARSE]),
        ("sla2 forward", SPARSE._replace(selected="none")),
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
        case = Case(200, 500, 64, 1, 1, value_blocks=blocks, dtype=torch.float32, is_causal=True)
        assert_forward_by_blocks(case, 5, run_forward_level(case, 5).output)


@on_the_cpu
def test_many_heads():
    """Ten heads, eight at a time, whose warpgroups have different last tiles."""
    case = Case(200, 200, 64, 10, 5, is_causal=True)
    assert_forward(case, 5, run_forward_level(case, 5).output)


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
@PASSES
def test_programs_let_no_larger_numbers_of_the_next_head_in(level, head_dim):
    """They follow this head's last tokens in its last tiles, and exceed the float16 that fits this head."""
    case = Case(30, 20, head_dim)
    found = []
    for factor in (1, 1e4):
        sizes = torch.tensor([1 / 64] + [factor] * (case.heads - 1))[:, None, None].half()
        larger = dict.fromkeys(("key", "value", "grad_output"), times(sizes, slice(None)))
        found.append([x[:, 0] for x in run_backward_level(case, level, altered(case, **larger))])
    assert all_equal(*found)


@on_the_cpu
@PASSES
def test_programs_let_later_values_change_nothing_before_them(level, head_dim):
    case = Case(150, 150, head_dim, 1, 1, is_causal=True)
    later = altered(case, value=times(1e4, ..., slice(128, None), slice(None)))
    before, after = (run_backward_level(case, level, x)[0][:, :, :128] for x in (altered(case), later))
    assert torch.equal(before, after)


@on_the_cpu
def test_units_are_of_all_that_a_query_sees():
    """Without a mask, units depend on later keys too."""
    case = Case(30, 300, 64, 1, 1)
    tensors = altered(case, value=times(1e4, ..., slice(256, None), slice(None)))
    assert_near(*(run_backward_level(case, level, tensors) for level in (5, 3)), 6e-3)


@on_the_cpu
@PASSES
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
@pytest.mark.parametrize(("head_dim", "n_k", "size"), [(64, 2, 1.0), (64, 300, 20.0), (128, 300, 1.0)])
def test_sums_of_dq_use_their_bits_and_never_pass_them(head_dim, n_k, size):
    """Half of the keys stand against the other half, in V, in K and in P: no dQ could be larger for such numbers."""
    case = Case(128, n_k, head_dim, 1, 1, scale=1.0, smooth_k=False)
    sign = torch.where(torch.arange(n_k) < n_k // 2, 1.0, -1.0)[:, None].half()
    query = torch.zeros(1, 1, 128, head_dim).half()
    query[..., 0] = 1e-4
    key, value = sign.expand(n_k, head_dim)[None, None], size * sign.expand(n_k, head_dim)[None, None]
    kept, emulate = [], emulated(case.n_q)

    def start(program, grid, arguments, *rest):
        if program is units.finish_program:
            kept.append(arguments[0])
        return emulate(program, grid, arguments, *rest)

    gradients = run_backward_level(case, 5, (query, key, value, torch.full_like(query, size)), start=start)
    assert 2**28 <= kept[0].long().abs().max() <= 2**30
    exact = size * size * head_dim  # |dP - delta| is that for every key
    torch.testing.assert_close(gradients[0].float(), torch.full(query.shape, exact), rtol=1e-2, atol=0)


# What the copy engine has to know


@on_the_cpu
@pytest.mark.parametrize("layout", ["a model's", "padded", "odd rows", "unaligned"])
def test_heads_side_by_side_are_fetched_without_a_copy_where_they_can_be(layout):
    x = torch.randn(2, 5, 4, 64).half()
    x = {
        "a model's": x, "padded": x[..., :40],
        "odd rows": torch.randn(2, 5, 4 * 64 + 3).half()[..., :256].unflatten(-1, (4, 64)),
        "unaligned": x.flatten()[3:-253].view(1, 9, 4, 64)[:, :, :3],
    }[layout].transpose(1, 2)  # fmt: skip
    rows, heads = toolbox.fetched_rows(x)
    assert (heads, rows.data_ptr() == x.data_ptr()) == ((4, True) if layout == "a model's" else (1, False))
    found = rows.view(2, 5, 4, 64).transpose(1, 2) if heads > 1 else rows.reshape(x.shape)
    assert torch.equal(found, x)
    assert rows.data_ptr() % 16 == rows.stride(0) * 2 % 16 == 0


@on_the_cpu
@pytest.mark.parametrize("layout", ["heads last", "unaligned", "odd size"])
def test_tensors_that_the_copy_engine_cannot_fetch_are_copied(layout):
    x = torch.arange(2 * 3 * 5 * 24, dtype=torch.float16).reshape(2, 3, 5, 24)
    x = {
        "heads last": x.transpose(1, 2), "unaligned": x.flatten()[1:-239].view(2, 2, 5, 24),
        "odd size": x[..., :23],
    }[layout]  # fmt: skip
    fetched = toolbox.rows_of_16_bytes(x)
    assert fetched.is_contiguous()
    assert fetched.data_ptr() % 16 == fetched.shape[3] * 2 % 16 == 0
    assert torch.equal(fetched[..., : x.shape[3]], x)


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
@PASSES
def test_operation_with_them(monkeypatch, level, head_dim):
    """The operation's results are the ladder's, forward level 5's and a backward level's."""
    case = Case(140, 30, head_dim, 1, 1, is_causal=True)
    *inputs, grad_output = draw(case)
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward = run_forward_level(case, 5)
    expected = forward.output, *run_backward_level(case, level, forward=forward)
    monkeypatch.setattr(ops, "recorded", lambda key, tensors, compute: compute(emulated(case.n_q)))
    monkeypatch.setattr(ops, "backward_level", lambda *where: level)
    with as_hopper():
        output = sagebwd_attention(*leaves, is_causal=True, enable_gqa=True, backend="triton")
        assert all_equal((output, *torch.autograd.grad(output, leaves, grad_output)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(5 not in FORWARD, reason="needs a Hopper GPU")
def test_the_operation_takes_hoppers_on_the_gpu():
    for (_, head_dim), levels in list(BY_ITSELF.items())[:5]:
        assert levels_at(DEVICE, head_dim) == levels
