"""The level of Hopper's: its own source on the CPU against the simulation, where it runs, and repeats on that GPU."""

import math
import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    FORWARD,
    MARKS,
    ON_GPU,
    VALUE_BLOCKS,
    Case,
    assert_backward,
    assert_forward,
    assert_forward_by_blocks,
    distance,
    draw,
    exact,
    forward_level,
    prepare_forward,
    run_forward,
    run_forward_level,
    simulated_forward,
)

pytest.importorskip("triton")
from sage_kernels import hopper
from sage_kernels.common.launch import Launch
from sage_kernels.hopper import toolbox
from sage_kernels.hopper.emulator import Changed, OnCPU, plain
from sage_kernels.sagebwd import ops
from sage_kernels.sagebwd.forward import level5_hopper
from sage_lab.bench import tuning

from sage_ref import sagebwd_attention

pytestmark = MARKS
LEVEL = 5
on_the_cpu = pytest.mark.skipif(ON_GPU, reason="the GPU tests run the program itself")
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(LEVEL not in FORWARD, reason="needs a Hopper GPU")]


# The program's own source, run on the CPU


def run_source(case, tensors=None, **names):
    """O and L of level 5; names: what some global names of its source mean instead."""
    query, key, value, _ = tensors or draw(case)
    inputs = prepare_forward(query, key, value, LEVEL, **case.prepared)
    with pytest.MonkeyPatch.context() as patch:
        program = OnCPU(level5_hopper.forward_hopper_program, seed=case.n_q, **names)
        patch.setattr(level5_hopper, "forward_hopper_program", program)
        return level5_hopper.run(inputs, **case.options)


SOURCE_CASES = [
    Case(1, 1, 64),
    Case(3, 3, 128, 8, 2, is_causal=True, batch=2),
    Case(113, 203, 40, 4, 2),
    Case(203, 113, 96, 2, 1, is_causal=True),
    Case(300, 1100, 64),  # nine key tiles in three places
    Case(400, 330, 64, 10, 5, is_causal=True),  # ten heads, eight at a time; warpgroups with different last tiles
    Case(150, 140, scale=-0.2),
    Case(150, 140, scale=0.0, is_causal=True),
    Case(150, 300, smooth_k=False, key_offset=3.0),
    Case(113, 203, 96, ramp=4.0),
    Case(203, 113, 96, 2, 1, is_causal=True, unbiased=True, value_offset=3.0),
    Case(113, 203, 40, 4, 2, batch=2, unbiased=True),
]


@on_the_cpu
@pytest.mark.parametrize("case", SOURCE_CASES, ids=str)
def test_source_gives_the_simulations_result(case):
    output, log_sum_exp = run_source(case)
    assert_forward(case, LEVEL, output)
    level4 = forward_level(case, 4)
    torch.testing.assert_close(log_sum_exp, level4.log_sum_exp, rtol=1e-5, atol=1e-4)  # and huge past the end


@on_the_cpu
@pytest.mark.parametrize("case", VALUE_BLOCKS, ids=str)
def test_source_with_value_blocks_of_different_size(case):
    assert_forward_by_blocks(case, LEVEL, run_source(case)[0])


@on_the_cpu
def test_source_at_sizes_float16_does_not_have():
    """Blocks of values of any size, one after another: the sum changes units every time."""
    for blocks in ((1e12, 1e4, 1, 1e-8), (1e-8, 1, 1e4, 1e12), (1, 1e-15, 1, 1e-15)):
        case = Case(200, 500, value_blocks=blocks, dtype=torch.float32, is_causal=True)
        assert_forward_by_blocks(case, LEVEL, run_source(case)[0])


@on_the_cpu
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("std", [10.0, 20.0, 140.0])
def test_source_at_large_scores(std, unbiased):
    """From the largest on the rounding of exponents, left alone, would let 127 P + 127/128 reach 128, which is -128."""
    case = Case(150, 140, std=std, is_causal=True, unbiased=unbiased)
    output, simulated = run_source(case)[0], simulated_forward(case, LEVEL)[0]
    assert distance(output, simulated) <= 0.1 * distance(simulated, exact(case)[0])


@on_the_cpu
@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_source_makes_nan_where_level_4_does(broken):
    case = Case(300, 300, is_causal=True, smooth_k=False)
    tensors = dict(zip(("query", "key", "value", "grad_output"), (x.clone() for x in draw(case)), strict=True))
    tensors[broken][0, 1, 140, 3] = math.nan
    tensors = tuple(tensors.values())
    output, expected = run_source(case, tensors)[0], run_forward_level(case, 4, tensors).output
    assert expected.isnan().any()
    assert not expected.isnan().all()
    assert torch.equal(output.isnan(), expected.isnan())


# What the CPU run would notice: the program with one place of its source changed

RELEASE = "mbarrier.arrive(ring.empty.index(n % places), count=1)"
NEVER_RELEASED = Changed(toolbox.release, RELEASE)


@on_the_cpu
@pytest.mark.parametrize(
    "careless",
    [
        (Changed(toolbox.acquire, "mbarrier.wait(ring.ready.index(n % places), (n // places) & 1)"),),
        (Changed(toolbox.acquire, "return", f"{RELEASE}; return"), NEVER_RELEASED),
        (NEVER_RELEASED,),
        (Changed(toolbox.claim, "mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)"),),
    ],
    ids=["read before it is ready", "released before it is read", "not released", "fetched too early"],
)
def test_carelessness_with_tiles_is_noticed(careless):
    case = Case(192, 1280)
    with pytest.raises((AssertionError, RuntimeError), match="norm|deadlock|overwritten|more arrivals"):
        assert_forward(case, LEVEL, run_source(case, **{changed.fn.__name__: changed for changed in careless})[0])


# The order of work


@pytest.mark.parametrize("blocks", [1, 2, 5, 43])
@pytest.mark.parametrize("heads", [1, 3, 8, 21])
@pytest.mark.parametrize("together", [1, 2, 8])
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


def test_heads_that_are_worked_on_together_fit_the_cache():
    assert [toolbox.heads_at_a_time(size << 20) for size in (1, 2, 4, 16, 64)] == [8, 8, 4, 1, 1]


# What the copy engine has to know


@pytest.mark.parametrize(
    ("x", "tile"),
    [
        (torch.zeros(2, 3, 256, 64, dtype=torch.int8), (128, 64)),
        (torch.zeros(2, 3, 256, 64, dtype=torch.bfloat16), (64, 64)),
        (torch.zeros(2, 3, 256), (128,)),
    ],
    ids=["int8", "16 bit", "line"],
)
def test_a_descriptor_sees_one_matrix_and_a_layout_is_made_once(x, tile):
    described, other = (toolbox.descriptor(tensor, *tile) for tensor in (x, x[:1].clone()))
    assert described.base.data_ptr() == x.data_ptr()
    assert (*described.shape,) == ((6 * 256, 64) if len(tile) == 2 else (6 * 256,))
    assert described.block_shape == [*tile]
    assert described.layout is other.layout
    assert described.layout.element_bitwidth == 8 * x.itemsize
    assert described.layout.rank == len(tile)
    assert described.layout.swizzle_byte_width == (64 * x.itemsize if len(tile) == 2 else 0)


def test_tiles_of_other_shapes_and_types_have_layouts_of_their_own():
    x = torch.zeros(1, 1, 128, 128, dtype=torch.int8)
    wide, narrow = (toolbox.descriptor(x, 128, columns).layout for columns in (128, 64))
    assert (wide.swizzle_byte_width, narrow.swizzle_byte_width) == (128, 64)
    assert toolbox.descriptor(x.to(torch.float16), 128, 64).layout.element_bitwidth == 16


# Where it runs


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability): what PyTorch says of a CUDA device that needn't be there."""

    def pretend(*capability):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return pretend


@pytest.mark.parametrize(
    ("capability", "head_dim", "level"),
    [((9, 0), 128, 5), ((9, 0), 64, 5), ((9, 0), 33, 5), ((9, 0), 32, 4), ((8, 0), 64, 4), ((10, 0), 128, 4)],
)
def test_the_operation_takes_it_on_hopper_if_the_head_size_allows(gpu, capability, head_dim, level):
    assert ops.forward_level(gpu(*capability), head_dim) == level


def test_the_interpreter_gets_level_4(gpu, monkeypatch):
    device = gpu(9, 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.forward_level(device, 64) == ops.forward_level(torch.device("cpu"), 64) == 4


@pytest.mark.parametrize(
    ("capability", "head_dim", "reason"),
    [
        ((8, 9), 64, "it needs a GPU of compute capability 9.0 (Hopper), and this one has 8.9"),
        ((9, 0), 32, "it needs a head size from 33 to 128, and query has 32"),
    ],
)
def test_why_it_cannot_run(gpu, capability, head_dim, reason):
    assert hopper.obstacle(gpu(*capability), head_dim) == reason


@on_the_cpu
def test_asked_for_where_it_cannot_run_it_is_an_error():
    inputs = run_forward_level(Case(3, 3), 4).inputs
    message = "level: expected one that can run here, got forward level 5: it needs a Hopper GPU, and query is on cpu"
    with pytest.raises(ValueError, match=re.escape(message)):
        run_forward(inputs, LEVEL, is_causal=False, scale=1.0)


@pytest.fixture
def hopper_on_the_cpu(monkeypatch):
    """Level 5 is chosen, and runs on the CPU; the backward level stays the interpreter's."""
    monkeypatch.setattr(hopper, "obstacle", lambda device, head_dim: None)
    monkeypatch.setattr(ops, "backward_level", lambda *where: 3)
    monkeypatch.setattr(level5_hopper, "forward_hopper_program", OnCPU(level5_hopper.forward_hopper_program))


@on_the_cpu
def test_it_has_no_other_launch(hopper_on_the_cpu):
    with pytest.raises(ValueError, match=r"launch: expected None for forward level 5, .*, got Launch\(block_q=64"):
        run_forward_level(Case(3, 3), LEVEL, launch=Launch(64, 128, 4, 1))
    assert LEVEL not in {kernel.level for kernel in tuning.kernels() if kernel.kernel == "forward"}


@on_the_cpu
def test_operation_with_it(hopper_on_the_cpu):
    """O is level 5's, and the backward level takes what it saved."""
    case = Case(200, 150, heads=2, kv_heads=1, is_causal=True)
    query, key, value, grad_output = draw(case)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = sagebwd_attention(*leaves, is_causal=True, enable_gqa=True, backend="triton")
    assert torch.equal(output, run_forward_level(case, LEVEL).output)
    assert not torch.equal(output, run_forward_level(case, 4).output)
    assert_backward(case, 3, torch.autograd.grad(output, leaves, grad_output))


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_repeats_are_equal_bit_for_bit(self, head_dim, is_causal):
        """Many programs and many tiles: a missing barrier would show in some of 100 runs."""
        case = Case(2048, 2048, head_dim, 16, 4, is_causal, torch.bfloat16, batch=4)
        first = run_forward_level(case, LEVEL)
        for _ in range(100):
            output, log_sum_exp = run_forward(first.inputs, LEVEL, **case.options)
            assert torch.equal(output, first.output)
            assert torch.equal(log_sum_exp, first.log_sum_exp)
        assert_forward(case, LEVEL, first.output)

    def test_the_operation_takes_it(self):
        assert [ops.forward_level(DEVICE, head_dim) for head_dim in (32, 33, 64, 128)] == [4, 5, 5, 5]
