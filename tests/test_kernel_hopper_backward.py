"""Backward levels 4 and 6, Hopper's: their source on the CPU against the simulation, and what that GPU alone shows."""

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
    assert_backward,
    draw,
    forward_level,
    prepare_backward,
    run_backward,
    run_backward_level,
    run_forward_level,
)

pytest.importorskip("triton")
from gluon_on_cpu import OnCPU, arrived_or_not, never_let_go
from sage_kernels import hopper, ops, tuning
from sage_kernels.backward import kept, level4_hopper, level6_hopper
from sage_kernels.ladder import BACKWARD_LEVELS
from sage_kernels.quantize import padded_head_dim
from sage_kernels.tiles import TINY
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sage_ref import sagebwd_attention

pytestmark = MARKS
LEVELS = {4: level4_hopper, 6: level6_hopper}
on_the_cpu = pytest.mark.skipif(ON_GPU, reason="the GPU tests run the program itself")


def largest_of(x, is_positive):
    """A GPU's maximum passes over NaN."""
    assert not is_positive or not (x < 0).any()
    return x.abs().nan_to_num(0.0, posinf=math.inf).amax(1).clamp(min=TINY.value)


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def on_the_cpu_instead(patch, seed=0, **names):
    """Let the levels' programs run on the CPU. names: what some global names of their source mean instead."""
    for module in LEVELS.values():
        for program in {"query_program", "key_program"} & vars(module).keys():
            on_cpu = OnCPU(getattr(module, program), seed=seed, largest_of=largest_of, **names)
            patch.setattr(module, program, on_cpu)


def run_source(level, case, tensors=None, forward=None, seed=None, **names):
    """dQ, dK, dV of a level."""
    query, key, value, grad_output = tensors or draw(case)
    inputs, output, log_sum_exp = forward or forward_level(case, 4)
    hats = {"q_hat": inputs.q_hat, "k_hat": inputs.k_hat}
    prepared = prepare_backward(grad_output, query, key, value, output, log_sum_exp, level, **hats)
    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu_instead(patch, seed or case.n_q, **names)
        return LEVELS[level].run(prepared, **case.options)


SOURCE_CASES = [
    Case(1, 1, 64),
    Case(3, 3, 128, 4, 2, is_causal=True, batch=2),
    Case(113, 203, 40, 2, 1),
    Case(203, 113, 96, 2, 1, is_causal=True),
    Case(300, 420, 64),
    Case(420, 300, 64, 4, 2, is_causal=True),
    Case(420, 300, 128, 2, 1, is_causal=True),  # dV's three warpgroups have different last tiles
    Case(20, 400, 64, is_causal=True),  # keys that no query sees
    Case(400, 20, 33, 1, 1, is_causal=True),
    Case(150, 140, scale=-0.2),
    Case(150, 140, scale=0.0, is_causal=True),
    Case(150, 300, smooth_k=False, key_offset=3.0),
    Case(150, 140, std=5.0),
]


@on_the_cpu
@pytest.mark.parametrize("case", SOURCE_CASES, ids=str)
def test_source_gives_the_simulations_result(level, case):
    assert_backward(case, level, run_source(level, case))


@on_the_cpu
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_output"])
def test_source_with_blocks_of_zeros(level, name):
    case = Case(200, 300, 64, 2, 1, is_causal=True)
    tensors = dict(zip(("query", "key", "value", "grad_output"), (x.clone() for x in draw(case)), strict=True))
    tensors[name][:, :, 128:] = 0
    forward = run_forward_level(case, 4, tuple(tensors.values()))
    gradients = run_source(level, case, tuple(tensors.values()), forward)
    level3 = run_backward_level(case, 3, tuple(tensors.values()), forward)
    for found, expected in zip(gradients, level3, strict=True):
        assert (found - expected).norm() <= 4e-3 * expected.norm()


@on_the_cpu
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_source_does_not_lose_an_overflow_nor_spread_it_to_other_heads(level, bad):
    """Rows past a head's end are the next head's: its NaN must not come in."""
    case = Case(150, 140, 64, 4, 2, batch=2)
    query, key, value, grad_output = (x.clone() for x in draw(case))
    fine = run_source(level, case)
    grad_output[0, 2, 3, 5] = bad
    value[1, 0, 2, 1] = bad
    tensors = (query, key, value, grad_output)
    found = run_source(level, case, tensors, run_forward_level(case, 4, tensors))
    assert not found[0][0, 2, 3].isfinite().any()
    assert not any(x[0, 1].isfinite().all() for x in found[1:])
    assert all(
        torch.equal(x[0, 0], y[0, 0]) and torch.equal(x[1, -1], y[1, -1]) for x, y in zip(found, fine, strict=True)
    )


@on_the_cpu
def test_source_repeats_whoever_is_ahead(level):
    case = Case(300, 260, 64, 2, 1, is_causal=True)
    runs = [run_source(level, case, seed=seed) for seed in (1, 2, 3)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@gluon.jit
def let_go_twice(ring, n):
    mbarrier.arrive(ring[2].index(n % ring[0].shape[0]), count=1)
    mbarrier.arrive(ring[2].index((n + 1) % ring[0].shape[0]), count=1)


@on_the_cpu
@pytest.mark.parametrize(
    "careless", [{"arrived": arrived_or_not}, {"let_go": let_go_twice}, {"let_go": never_let_go}], ids=str
)
def test_carelessness_with_tiles_is_noticed(level, careless):
    case = Case(300, 600, 64)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_backward(case, level, run_source(level, case, **careless))


@on_the_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kept_tiles_of_a_few_heads_at_a_time(monkeypatch, head_dim):
    """As many rounds as it takes, the same numbers; a head that doesn't fit is level 4's."""
    case = Case(200, 300, head_dim, 4, 2, batch=3)
    whole = run_source(6, case)
    calls = []
    run_kernel = level6_hopper.run_kernel

    def counting(kernel, *given, **options):
        calls.append(kernel)
        run_kernel(kernel, *given, **options)

    monkeypatch.setattr(level6_hopper, "run_kernel", counting)
    head = 2 * (2 * 256 * 384)  # bytes of two query heads
    for workspace, rounds in ((6 * head, 1), (6 * head - 1, 2), (2 * head, 3), (head, 6), (head - 1, 0)):
        monkeypatch.setattr(kept, "WORKSPACE", workspace)
        found = run_source(6, case)
        assert calls.count("dq") == rounds
        expected = whole if rounds else run_source(4, case)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        calls.clear()


@gluon.jit
def keep_without_waiting(kept, dst_ij, s_ds, head, first_key, first_query, sizes, W: gl.constexpr):
    tiles, descriptor, _ = kept
    tiles.index(W).store(dst_ij.to(gl.float16))
    tma.async_copy_shared_to_global(descriptor, [0, 0], tiles.index(W))


@on_the_cpu
def test_a_tile_that_is_overwritten_before_it_is_kept_is_noticed(monkeypatch):
    monkeypatch.setattr(level6_hopper, "keep", keep_without_waiting)
    with pytest.raises(AssertionError, match="overwritten while it is read"):
        run_source(6, Case(300, 200, 64))


@on_the_cpu
@pytest.mark.parametrize("layout", ["heads last", "every third", "unaligned", "odd size"])
def test_tensors_that_the_copy_engine_cannot_fetch_are_copied(layout):
    x = torch.arange(2 * 3 * 5 * 24, dtype=torch.float16).reshape(2, 3, 5, 24)
    x = {
        "heads last": x.transpose(1, 2), "every third": x[..., ::3], "unaligned": x.flatten()[1:-239].view(2, 2, 5, 24),
        "odd size": x[..., :23],
    }[layout]  # fmt: skip
    fetched = level4_hopper.rows_of_16_bytes(x, 32)
    assert fetched.is_contiguous()
    assert fetched.data_ptr() % 16 == fetched.shape[3] * 2 % 16 == 0
    assert torch.equal(fetched[..., : x.shape[3]], x)


def test_a_tensor_that_it_can_fetch_is_not():
    x = torch.zeros(2, 3, 5, 40, dtype=torch.float16)
    assert level4_hopper.rows_of_16_bytes(x, 64) is x


@pytest.mark.parametrize("rows", [128, 192])
def test_the_diagonal_crosses_the_last_query_tile_of_a_warpgroup_and_no_other(rows):
    tiles = level4_hopper.query_tiles.fn
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
    query, key, value, grad_output = draw(case)
    inputs, output, log_sum_exp = forward_level(case, 4)
    hats = {"q_hat": inputs.q_hat, "k_hat": inputs.k_hat}
    prepared = prepare_backward(grad_output, query, key, value, output, log_sum_exp, level, **hats)
    with pytest.raises(ValueError, match=re.escape(message)):
        run_backward(prepared, level, **case.options)


@pytest.mark.parametrize("head_dim", [33, 64, 65, 128])
def test_its_programs_are_those_that_the_ladder_names(level, head_dim):
    names = LEVELS[level].kernels(head_dim)
    assert sorted(names) == sorted(BACKWARD_LEVELS[level].kernels(padded_head_dim(head_dim)))
    assert set(names) <= set(LEVELS[level].LAUNCHES)


@on_the_cpu
def test_it_has_no_other_launch():
    assert not LEVELS.keys() & {kernel.level for kernel in tuning.kernels() if kernel.kernel != "forward"}


@pytest.mark.parametrize(
    ("capability", "head_dim", "level"),
    [((9, 0), 128, 6), ((9, 0), 33, 6), ((9, 0), 32, 5), ((8, 0), 64, 5), ((10, 0), 128, 5)],
)
def test_the_operation_takes_it_on_hopper_if_the_head_size_allows(monkeypatch, capability, head_dim, level):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ops.backward_level(torch.device("cuda"), head_dim) == level


@on_the_cpu
def test_operation_with_it(monkeypatch, level):
    case = Case(200, 150, heads=2, kv_heads=1, is_causal=True)
    query, key, value, grad_output = draw(case)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = sagebwd_attention(*leaves, is_causal=True, enable_gqa=True, backend="triton")
    expected = run_source(level, case)
    monkeypatch.setattr(ops, "backward_level", lambda device, head_dim: level)
    monkeypatch.setattr(hopper, "obstacle", lambda device, head_dim: None)
    on_the_cpu_instead(monkeypatch)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


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
            assert all(torch.equal(x, y) for x, y in zip(run_backward_level(case, level), first, strict=True))
        assert_backward(case, level, first)

    def test_the_operation_takes_it(self):
        assert [ops.backward_level(DEVICE, head_dim) for head_dim in (32, 33, 64, 128)] == [5, 6, 6, 6]
