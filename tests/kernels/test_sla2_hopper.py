"""SLA2's programs for Hopper: their own source on the CPU against the oracles; on that GPU the programs themselves."""

import math
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from kernel_cases import DEVICE, MARKS, ON_GPU, all_equal, distance, fill_cache, guarded, guarded_allocations
from layouts import heads_last
from sla2_cases import (
    Case,
    Result,
    assert_forward,
    assert_gradients,
    draw,
    forward_level,
    gradients_after,
    natural_log_sum_exp,
    run_gradients,
    run_level,
    simulated,
)

pytest.importorskip("triton")
from sage_kernels import hopper
from sage_kernels.common.launch import Launch
from sage_kernels.hopper import toolbox
from sage_kernels.hopper.emulator import Changed, OnCPU
from sage_kernels.sla2 import pieces
from sage_kernels.sla2.backward import keys_hopper, linear_queries_hopper, queries_hopper
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.forward import level4_hopper
from sage_kernels.sla2.ladder import prepare, run, run_backward
from sage_kernels.sla2.lists import block_lists
from sage_kernels.sla2.ops import LEVEL_16BIT, LEVEL_INT8

pytestmark = MARKS
LEVEL = 4
IS_HERE = hopper.obstacle(DEVICE, 64) is None
PROGRAMS = (
    (level4_hopper, "sla2_forward_hopper_program"), (linear_queries_hopper, "sla2_linear_query_hopper_program"),
    (queries_hopper, "sla2_query_hopper_program"), (keys_hopper, "sla2_key_hopper_program"),
)  # fmt: skip
on_the_cpu = pytest.mark.skipif(ON_GPU, reason="the GPU tests run the program itself")
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not IS_HERE, reason="needs a Hopper GPU")]
MULTIPROCESSORS = 2  # of what is a GPU on the CPU
HEADS = [(40, 8), (64, 2), (96, 8), (128, 1)]  # head size, heads of keys
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """On a Hopper GPU: what the tests below run is compiled beforehand, in parallel."""
    if IS_HERE:
        cases = [
            Case(113, 203, "half", head_dim, 8, kv_heads, dtype)
            for (head_dim, kv_heads), dtype in product(HEADS, DTYPES)
        ]
        fill_cache(
            [(run_level, case, LEVEL) for case in cases]
            + [(run_gradients, case, LEVEL_INT8, None, None, 1) for case in cases]
        )


@contextmanager
def on_cpu(seed, multiprocessors=MULTIPROCESSORS, **names):
    """Programs for Hopper run on the CPU. names: what some global names of their source mean instead."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in PROGRAMS:
            patch.setattr(module, name, OnCPU(getattr(module, name), seed=seed, **names))
        for module in (level4_hopper, linear_queries_hopper, queries_hopper):
            patch.setattr(module, "multiprocessors", lambda device: multiprocessors)
        yield


def run_source(case, tensors=None, *, save=True, seed=0, **options):
    """What level 4 gives. options: of `on_cpu`."""
    query, key, value, _, block_mask, alpha = tensors or draw(case)
    prepared = prepare(query, key, value, block_mask, alpha, LEVEL_INT8, scale=case.c)
    with on_cpu(seed or case.n_q, **options):
        return Result(prepared, level4_hopper.run(prepared.inputs, save=save))


def run_backward_source(case, tensors=None, result=None, **options):
    """dQ, dK, dV, dalpha of backward level 1 after forward level 3. options: of `on_cpu`."""
    query, key, value, grad_output, _, alpha = tensors or draw(case)
    prepared, forward = result or forward_level(case, LEVEL_INT8)
    inputs = BackwardInputs(
        grad_output, query, key, value, alpha, prepared.inputs.sums, *forward[1:], prepared.k_mean
    )  # fmt: skip
    with on_cpu(case.n_q, **options):
        return run_backward(inputs, prepared.choice, scale=case.c, level=1)


@on_the_cpu
def test_it_has_no_other_launch():
    case = Case(3, 3, "all")
    query, key, value, _, block_mask, alpha = draw(case)
    prepared = prepare(query, key, value, block_mask, alpha, LEVEL_INT8, scale=case.c)
    with pytest.raises(ValueError, match=r"launch: expected None for forward level 4, .*, got Launch\(block_q=128"):
        run(prepared, LEVEL, scale=case.c, launch=Launch(128, 64, 4, 1))


SOURCE_CASES = [
    Case(1, 1, "all", batch=2),
    Case(1, 1, "none"),
    Case(3, 3, "mixed", 48, 4, 1),
    Case(64, 1, "mixed", 40),
    Case(150, 203, "one", 64, 4, 2, batch=2),
    Case(203, 140, "half", 128, 2, 1),
    Case(128, 192, "all but one", 96, 1, 1),
    Case(130, 128, "all"),
    Case(400, 330, "mixed", 64, 4, 2),
    Case(260, 1100, "half", 64, 2, 1),  # lists longer than the places for tiles
    Case(300, 700, "none", 64, 2, 2),
    Case(150, 140, "mixed", scale=-0.2),
    Case(150, 140, "half", scale=0.0),
    Case(150, 140, "half", scale=1.0),
    Case(150, 140, "all", key_offset=8.0),
    Case(150, 140, "mixed", alpha=0.0),
    Case(150, 140, "mixed", alpha=1.0),
]


@on_the_cpu
@pytest.mark.parametrize("case", SOURCE_CASES, ids=str)
def test_source_gives_the_simulations_result(case):
    result = run_source(case)
    output, _, log_sum_exp = result.forward
    assert_forward(case, LEVEL, output)
    expected = simulated(case, LEVEL)[1]
    found, empty = natural_log_sum_exp(case, result), expected == -math.inf
    torch.testing.assert_close(found[~empty], expected[~empty], rtol=1e-5, atol=1e-4)
    assert (found[empty] > 1e29).all()  # P is then 0 in the backward pass
    assert (log_sum_exp[..., case.n_q :] > 1e29).all()  # and past the end


@on_the_cpu
def test_the_backward_pass_goes_on_from_it():
    case = Case(203, 140, "mixed", 64, 2, 1)
    result, expected = run_source(case), forward_level(case, LEVEL_INT8).forward.sparse_output
    assert distance(result.forward.sparse_output, expected) <= 5e-3 * expected.norm()
    gradients = run_gradients(case, LEVEL, result=result)
    for found, expected in zip(gradients, gradients_after(case, LEVEL_INT8), strict=True):
        assert distance(found, expected) <= 2e-3 * expected.norm()


@on_the_cpu
@pytest.mark.parametrize("count", [1, 3, 100])
def test_result_does_not_depend_on_how_many_programs_share_the_work(count):
    case = Case(400, 330, "mixed", 64, 2, 1)
    expected, found = run_source(case).forward, run_source(case, multiprocessors=count, seed=7).forward
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@on_the_cpu
def test_o_alone_is_the_same():
    case = Case(150, 140, "mixed")
    alone = run_source(case, save=False).forward
    assert alone[1:] == (None, None)
    assert torch.equal(alone.output, run_source(case).forward.output)


@on_the_cpu
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_heads_last_is_read_and_written_as_it_lies(head_dim):
    case = Case(150, 203, "half", head_dim, 4, 2)
    tensors = draw(case)
    lying = tensors._replace(**{name: heads_last(getattr(tensors, name)) for name in ("query", "key", "value")})
    output = run_source(case, lying).forward.output
    assert output.stride() == lying.query.stride()
    assert torch.equal(output, run_source(case).forward.output)


@on_the_cpu
def test_source_reads_and_writes_nothing_but_its_tensors():
    """Inputs lie between NaNs, outputs and intermediates between guards."""
    case = Case(70, 140, "mixed", 48, 2, 1)
    plain = draw(case)
    tensors = type(plain)(*(guarded(x, math.nan)[0] for x in plain))
    with guarded_allocations():
        result = run_source(case, tensors).forward
    for x, y in zip(result, run_source(case).forward, strict=True):
        assert torch.equal(x, y)


@on_the_cpu
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_blocks_of_zeros(name):
    """Their scale is 0, and no 0/0 or 0 * inf may come of it."""
    case = Case(130, 200, "mixed")
    tensors = draw(case)._replace(**{name: getattr(draw(case), name).clone()})
    getattr(tensors, name)[:, :, 64:128] = 0
    output, expected = (x.forward.output.float() for x in (run_source(case, tensors), run_level(case, 3, tensors)))
    assert distance(output, expected) <= 2e-3 * expected.norm()


@on_the_cpu
@pytest.mark.parametrize("sizes", [(1e3, 1.0, 1e-3), (1e-3, 1e3, 1.0)], ids=str)
def test_source_with_blocks_of_values_of_different_size(sizes):
    case = Case(130, 192, "all")
    tensors = draw(case)._replace(value=draw(case).value.clone())
    for j, size in enumerate(sizes):
        tensors.value[:, :, 64 * j : 64 * j + 64] *= size
    output, expected = (x.forward.output.float() for x in (run_source(case, tensors), run_level(case, 3, tensors)))
    assert distance(output, expected) <= 2e-3 * expected.norm()


@on_the_cpu
@pytest.mark.parametrize("std", [10.0, 60.0, 300.0])
def test_source_at_large_scores(std):
    case = Case(150, 140, "mixed", std=std)
    output, expected = run_source(case).forward.output.float(), simulated(case, LEVEL)[0]
    assert output.isfinite().all()
    assert (output - expected).norm(dim=-1).median() <= 2e-2


@on_the_cpu
@pytest.mark.parametrize("selected", ["half", "mixed"])
@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_source_makes_nan_where_level_3_does(broken, selected):
    case = Case(300, 300, selected, 64, 2, 1)
    tensors = draw(case)._replace(**{broken: getattr(draw(case), broken).clone()})
    getattr(tensors, broken)[0, 0, 40, 3] = math.nan
    output, expected = (x.forward.output for x in (run_source(case, tensors), run_level(case, 3, tensors)))
    assert expected.isnan().any()
    assert torch.equal(output.isnan(), expected.isnan())


# The backward pass


@on_the_cpu
@pytest.mark.parametrize("case", SOURCE_CASES, ids=str)
def test_source_gives_the_references_gradients(case):
    assert_gradients(case, LEVEL_INT8, run_backward_source(case))


@on_the_cpu
def test_gradients_after_the_16_bit_forward():
    """K was not smoothed, and L is that of the scores as they are."""
    case = Case(150, 203, "mixed", 64, 4, 2)
    assert_gradients(case, LEVEL_16BIT, run_backward_source(case, result=forward_level(case, LEVEL_16BIT)))


@on_the_cpu
def test_gradients_of_long_lists_in_pieces(monkeypatch):
    """Every query block selects the middle block of keys: its program's work is shared, and added up."""
    monkeypatch.setattr(pieces, "LEAST_ENTRIES", 1)
    monkeypatch.setattr(pieces, "KEY_BLOCKS_PER_PLACE", 1)
    case = Case(1300, 700, "popular", 40, 2, 1)
    prepared = forward_level(case, LEVEL_INT8).prepared
    first, _ = pieces.pieces_of(block_lists(prepared.choice.block_mask, by_key=True).counts, 1)
    assert first[0, 0, -1] > 1
    assert_gradients(case, LEVEL_INT8, run_backward_source(case))


@on_the_cpu
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_gradients_of_heads_last_lie_as_their_inputs(head_dim):
    case = Case(150, 203, "half", head_dim, 4, 2)
    tensors = draw(case)
    names = ("query", "key", "value", "grad_output")
    lying = tensors._replace(**{name: heads_last(getattr(tensors, name)) for name in names})
    result = run_level(case, LEVEL_INT8, lying)
    for found, expected, x in zip(
        run_backward_source(case, lying, result), run_backward_source(case), lying, strict=False
    ):
        assert torch.equal(found, expected)
        assert found.shape != x.shape or found.stride() == x.stride()


@on_the_cpu
@pytest.mark.parametrize("name", ["key", "value", "grad_output"])
def test_nan_in_one_head_reaches_no_other(name):
    """The copy engine fetches past a head's last key or query. What it finds there must not be the next head's."""
    case = Case(150, 140, "mixed", 64, 2, 2)
    tensors = draw(case)._replace(**{name: getattr(draw(case), name).clone()})
    getattr(tensors, name)[0, 1, 0] = math.nan
    result = run_level(case, LEVEL_INT8, tensors)
    found, expected = run_backward_source(case, tensors, result), run_gradients(case, LEVEL_INT8, tensors, result)
    for x, y, untouched in zip(found, expected, run_backward_source(case), strict=True):
        assert torch.equal(x[:, 0], untouched[:, 0])
        assert torch.equal(x.isnan(), y.isnan())


READY = "mbarrier.wait(ring.ready.index(n % places), (n // places) & 1)"
EMPTY = "mbarrier.wait(ring.empty.index(n % places), ((n // places) & 1) ^ 1)"
RELEASE = "mbarrier.arrive(ring.empty.index(n % places), count=1)"
WAIT_FOR_PV = "pv_ij = warpgroup_mma_wait(0, deps=(product,))\n"
RELEASE_V = "        release(rings.v, n + step - 1)\n"
WAIT_FOR_DQ = "dq_i = warpgroup_mma_wait(0, deps=(gradient,))\n"
RELEASE_K = "            release(rings.k, n + step - 1)\n"
H_I = "h_i = acquire(rings.h, turn)"
SPARSE = level4_hopper.sparse_branch
CARELESS = {
    "read before it is ready": Changed(toolbox.acquire, READY),
    "not released": Changed(toolbox.release, RELEASE),
    "fetched too early": Changed(toolbox.claim, EMPTY),
    "V released before it is read": Changed(
        SPARSE, WAIT_FOR_PV + RELEASE_V, f"{RELEASE_V.strip()}\n        {WAIT_FOR_PV}"
    ),
    "H released before it is read": Changed(
        level4_hopper.linear_branch, H_I, f"{H_I}; release(rings.h, turn)"
    ),
    "S not waited for": Changed(SPARSE, "wait(1, deps=(scores,))", "wait(2, deps=(scores,))"),
    "tiles of the block before": Changed(level4_hopper.query_rows, "n += item.steps", "n += 0"),
    "scales of the block before": Changed(level4_hopper.query_rows, "coming, coming_first", "coming, first"),
}  # fmt: skip


CARELESS_BACKWARD = {
    "K released before it is read": Changed(
        queries_hopper.query_rows, WAIT_FOR_DQ + RELEASE_K, f"{RELEASE_K.strip()}\n            {WAIT_FOR_DQ}"
    ),
    "dP not waited for": Changed(queries_hopper.query_rows, "wait(1, deps=(product,))", "wait(2, deps=(product,))"),
    "K not released": Changed(queries_hopper.query_rows, "release(rings.k, n + step - 1)"),
    "Q released before it is read": Changed(
        keys_hopper.query_tile, "    dk_j = warpgroup_mma_wait(0, deps=(sum_of_dk,))\n    release(rings.q, n)\n",
        "    release(rings.q, n)\n    dk_j = warpgroup_mma_wait(0, deps=(sum_of_dk,))\n",
    ),
    "not handed over": Changed(
        linear_queries_hopper.hand_over, "mbarrier.arrive(shared.q_share.ready.index(0), count=1)"
    ),
    "handed over too early": Changed(
        linear_queries_hopper.hand_over, "mbarrier.wait(shared.q_share.empty.index(0), (turn & 1) ^ 1)"
    ),
    "one half alone": Changed(
        linear_queries_hopper.store_sums, "acquire(shared.q_share, turn)", "shared.q_share.tiles.index(0)"
    ),
    "H released before it is read": Changed(
        linear_queries_hopper.linear_rows, "h_i = acquire(rings.h, turn)",
        "h_i = acquire(rings.h, turn); release(rings.h, turn)",
    ),
    "the second half's dalpha left out": Changed(linear_queries_hopper.store_sums, "first + second", "first"),
    "first keys of the block before": Changed(queries_hopper.query_rows, "coming, coming_j", "coming, j"),
    "the other tile's delta": Changed(keys_hopper.query_tile, "delta.index(place)", "delta.index(1 - place)"),
}  # fmt: skip


@on_the_cpu
@pytest.mark.parametrize("mistake", CARELESS_BACKWARD)
def test_carelessness_in_the_backward_pass_is_noticed(mistake):
    case, changed = Case(820, 1270, "half", 64, 1, 1), CARELESS_BACKWARD[mistake]
    with pytest.raises((AssertionError, RuntimeError), match=r"deadlock|overwritten|before its end|^$"):
        assert_gradients(case, LEVEL_INT8, run_backward_source(case, **{changed.fn.__name__: changed}))


@on_the_cpu
@pytest.mark.parametrize("mistake", CARELESS)
def test_carelessness_with_tiles_is_noticed(mistake):
    case, changed = Case(700, 1280, "half", 64, 1, 1), CARELESS[mistake]
    with pytest.raises(
        (AssertionError, RuntimeError), match=r"norm|deadlock|overwritten|more arrivals|before its end|^$"
    ):
        assert_forward(case, LEVEL, run_source(case, **{changed.fn.__name__: changed}).forward.output)


# On a Hopper GPU


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=on_hopper) for x in DTYPES], ids=str)
@pytest.mark.parametrize("selected", ["none", "one", "half", "mixed", "all but one", "all"])
@pytest.mark.parametrize(("head_dim", "kv_heads"), HEADS)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (113, 203), (1000, 1500)])
def test_program_gives_the_simulations_result(n_q, n_k, head_dim, kv_heads, selected, dtype):
    case = Case(n_q, n_k, selected, head_dim, 8, kv_heads, dtype, batch=2)
    assert_forward(case, LEVEL, forward_level(case, LEVEL).forward.output)


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=on_hopper) for x in DTYPES], ids=str)
@pytest.mark.parametrize("selected", ["none", "half", "mixed", "all", "popular"])
@pytest.mark.parametrize(("head_dim", "kv_heads"), HEADS)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (113, 203), (1000, 1500)])
def test_programs_give_the_references_gradients(n_q, n_k, head_dim, kv_heads, selected, dtype):
    case = Case(n_q, n_k, selected, head_dim, 8, kv_heads, dtype, batch=2)
    assert_gradients(case, LEVEL_INT8, run_gradients(case, LEVEL_INT8, level_of_backward=1))


@pytest.mark.parametrize("selected", [pytest.param(x, marks=on_hopper) for x in ("97%", "popular")])
def test_a_long_sequence_at_97_percent(selected):
    case = Case(4096, 4096, selected, 128, 4, 4, torch.bfloat16)
    result = forward_level(case, LEVEL)
    assert_forward(case, LEVEL, result.forward.output)
    gradients = run_gradients(case, LEVEL, level_of_backward=1)
    assert_gradients(case, LEVEL, gradients)
    again = run_level(case, LEVEL)
    assert all(torch.equal(x, y) for x, y in zip(again.forward, result.forward, strict=True))
    assert all_equal(run_gradients(case, LEVEL, level_of_backward=1), gradients)
