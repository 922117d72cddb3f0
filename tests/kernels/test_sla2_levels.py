"""SLA2's kernels by level against the oracles; memory, layouts and launches; routing, lists, sums, pieces of lists."""

import math
from itertools import product

import pytest
import torch
from kernel_cases import (
    DEVICE,
    LAID_OUT,
    MARKS,
    ON_GPU,
    all_equal,
    as_hopper,
    distance,
    emulated,
    guarded,
    guarded_allocations,
    on_the_cpu,
    times,
)
from sage_kernels.common.memory import is_heads_last
from sage_kernels.common.quantize import padded_length
from sage_kernels.sla2 import ladder
from sage_kernels.sla2.ladder import LEVELS
from sage_kernels.sla2.lists import block_lists
from sage_kernels.sla2.ops import LEVEL_16BIT, LEVEL_HOPPER, LEVEL_INT8
from sage_kernels.sla2.pieces import KEY_BLOCKS_PER_PLACE, LEAST_ENTRIES, pieces_of
from sage_kernels.sla2.routing import MASK_BLOCK_KV, top_blocks
from sage_kernels.sla2.sums import COLUMNS, sums_dtype
from sla2_cases import (
    BACKWARD,
    CASES,
    FORWARD,
    HOPPER_CASES,
    HOPPER_IS_HERE,
    MATCHED,
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

import sage_ref.sla2
from sage_ref.sla2 import Router, sla2_forward

pytestmark = MARKS
AFTER = {level: [of_backward for forward, of_backward in BACKWARD if forward == level] for level in FORWARD}


def of_levels():
    """Parametrise by case, the levels of one side by side: its results are kept. On the CPU a level has every other."""
    levels = [(level,) for level in FORWARD] + BACKWARD
    every = [
        (case, x)
        for (i, case), x in product(enumerate(CASES + OPTIONS), levels)
        if takes(case, *x) and (ON_GPU or (i + sum(x)) % 2 == 0)
    ]
    every += product(MATCHED, [x for x in BACKWARD if LEVELS[x[0]].int8])
    every += product(HOPPER_CASES, [(LEVEL_HOPPER,), (LEVEL_HOPPER, 1)])
    # K was not smoothed, and L is that of the scores as they are.
    every += product(HOPPER_CASES[-1:], [(LEVEL_16BIT, 1)])
    ids = [f"{case}-{'forward' if len(x) == 1 else 'backward'}{'after'.join(map(str, x[::-1]))}" for case, x in every]
    return pytest.mark.parametrize(("case", "levels"), every, ids=ids)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def matched(case, level):
    """Return the same case with a matched backward pass, in a list that is empty after a level in 16 bit."""
    return [case._replace(matched=True)] * bool(LEVELS[level].int8)


# The levels against the oracles


@of_levels()
def test_results_are_the_references(case, levels):
    if len(levels) == 2:
        level, level_of_backward = levels
        *gradients, dalpha = found = gradients_after(case, level, level_of_backward)
        assert all(x.dtype == case.dtype and x.is_contiguous() for x in gradients)
        assert dalpha.dtype == torch.float32
        assert all_equal(draw(case), draw.__wrapped__(case))
        assert_gradients(case, level, found)
        return
    (level,) = levels
    result = forward_level(case, level)
    output = result.forward.output
    assert output.dtype == case.dtype
    assert output.is_contiguous()
    assert_forward(case, level, output)
    if level:  # level 0 leaves nothing for a backward pass
        padding = result.forward.log_sum_exp[..., case.n_q :]
        assert padding.shape[-1] == padded_length(case.n_q) - case.n_q
        assert (padding > 1e9).all()  # probabilities vanish: the backward pass reads whole blocks of queries
        expected, found = simulated(case, level)[1], natural_log_sum_exp(case, result)
        empty = expected == -math.inf
        assert (found[empty] > 1e29).all()  # P is then 0 in the backward pass
        torch.testing.assert_close(found[~empty], expected[~empty], rtol=1e-5, atol=1e-4)
    if LEVELS[level].int8:  # the error is S's within 15%: a kernel that quantised less would have a smaller one
        g, e, (s, _) = exact(case), eager(case), simulated(case, level)
        error, rounding = distance(s, g.output), torch.finfo(case.dtype).eps / 2 * g.output.norm()
        rounding += distance(e.linear_share, g.linear_share)
        assert 0.85 * error - rounding <= distance(output, g.output) <= 1.15 * error + rounding


@pytest.mark.parametrize("std", [60.0, 300.0])
@pytest.mark.parametrize("level", FORWARD[2:])
def test_large_inputs_give_finite_outputs_and_gradients(level, std):
    """Softmax is then one-hot, and so is phi: a query may share no feature with any unselected key."""
    if std > 100 and level < LEVEL_HOPPER:
        pytest.skip("only Hopper's level promises that")
    case = SMALL._replace(std=std, heads=1, head_dim=48)  # a size that Hopper's level takes
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


# Hopper's programs in the emulator


@on_the_cpu
def test_results_do_not_depend_on_how_many_programs_share_the_work(monkeypatch):
    case = Case(260, 200, "mixed", 64, 2, 1, matched=True)
    expected = *forward_level(case, LEVEL_HOPPER).forward, *gradients_after(case, LEVEL_INT8, 1)
    monkeypatch.setattr("kernel_cases.MULTIPROCESSORS", 3)
    found = run_level(case, LEVEL_HOPPER, start=emulated(7), save=False).forward
    gradients = run_gradients(case, LEVEL_INT8, level_of_backward=1, start=emulated(7))
    assert all_equal(gradients, expected[3:])
    assert torch.equal(found.output, expected[0])
    assert found[1:] == (None, None)


@on_the_cpu
@pytest.mark.parametrize("sizes", [(1e3, 1.0, 1e-3), (1e-3, 1e3, 1.0)], ids=str)
def test_blocks_of_values_of_different_size(sizes):
    case = Case(20, 192, "all", 64, 1, 1)
    sizes = torch.tensor(sizes).repeat_interleave(MASK_BLOCK_KV)[:, None].half()
    tensors = altered(case, value=times(sizes, ...))
    output, expected = (run_level(case, level, tensors).forward.output for level in (LEVEL_HOPPER, LEVEL_INT8))
    assert distance(output, expected) <= 2e-3 * expected.double().norm()


@on_the_cpu
@pytest.mark.parametrize(
    ("broken", "is_matched"),
    [("key", True), ("value", False), ("grad_output", True)],
)
def test_nan_goes_where_the_portable_levels_let_it_go_and_to_no_other_head(broken, is_matched):
    """The copy engine fetches past a head's last key or query; the next head's numbers there must have no effect."""
    case = Case(20, 150, "mixed", 64, matched=is_matched)
    tensors = altered(case, **{broken: lambda x: x[0, 1, :2].fill_(math.nan)})
    portable, of_hopper = (run_level(case, level, tensors) for level in (LEVEL_INT8, LEVEL_HOPPER))
    found = of_hopper.forward.output, *run_gradients(case, LEVEL_INT8, tensors, portable, 1)
    expected = portable.forward.output, *run_gradients(case, LEVEL_INT8, tensors, portable, 0)
    fine = forward_level(case, LEVEL_HOPPER).forward.output, *gradients_after(case, LEVEL_INT8, 1)
    assert any(x.isnan().any() for x in expected)
    for x, y, before in zip(found, expected, fine, strict=True):
        assert torch.equal(x[:, 0], before[:, 0])
        assert torch.equal(x.isnan(), y.isnan())


@on_the_cpu
@pytest.mark.parametrize("case", [Case(20, 70, "half", 48), Case(20, 70, "half", 64, 2, 1, matched=True)], ids=str)
def test_the_operation_runs_hoppers_programs(case, monkeypatch):
    *qkv, grad_output, block_mask, alpha = draw(case)
    leaves = [x.detach().requires_grad_() for x in (*qkv, alpha)]
    monkeypatch.setattr("sage_kernels.sla2.ops.recorded", lambda key, tensors, compute: compute(emulated(case.n_q)))
    options = {"quantize": True, "backward": "matched" if case.matched else "printed", "backend": "triton"}
    with as_hopper():
        output = sage_ref.sparse_linear_attention(*leaves[:3], block_mask, leaves[3], **options)
        found = torch.autograd.grad(output, leaves, grad_output)
    expected = gradients_after(case, LEVEL_HOPPER, 1)
    assert all_equal((output, *found), (forward_level(case, LEVEL_HOPPER).forward.output, *expected))
    assert not all_equal(found, gradients_after(case, LEVEL_HOPPER, 0))


@on_the_cpu
def test_matched_gradients_of_routed_blocks_are_those_of_the_same_mask():
    """The lists of a router are as wide as what it selects, and the others as wide as there are blocks."""
    case = Case(150, 330, "mixed", 64, 1, 1, matched=True)
    routed = run_level(case, LEVEL_INT8, draw(case)._replace(block_mask=drawn_router(case, 2)))
    tensors = draw(case)._replace(block_mask=routed.prepared.choice.block_mask)
    given = run_level(case, LEVEL_INT8, tensors)
    found, expected = (run_gradients(case, LEVEL_INT8, tensors, result, 1) for result in (routed, given))
    assert all_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("selected", ["half", "popular"])
@pytest.mark.parametrize("level", TRAINED)
def test_repeats_are_equal_bit_for_bit(level, selected):
    case = Case(2000, 2000, selected, 64, 4, 2)
    first, gradients = forward_level(case, level).forward, gradients_after(case, level)
    for _ in range(100):
        result = run_level(case, level)
        assert torch.equal(result.forward.output, first.output)
        assert all_equal(run_gradients(case, level, result=result), gradients)


# Layouts


@pytest.mark.parametrize("level", FORWARD)
def test_any_strides_give_the_same_bits_and_results_lie_as_their_tensors_do(level):
    """O and dQ lie as Q does, dK as K, dV as V."""
    case = Case(20, 90, "popular", 48)
    plain, expected = draw(case), forward_level(case, level)
    for layouts in LAID_OUT if LEVELS[level].hopper else [LAID_OUT[level % 2]]:
        laid_out = (layout(x) for layout, x in zip(layouts, plain[:4], strict=True))
        tensors = type(plain)(*laid_out, *plain[4:])
        result = run_level(case, level, tensors)
        assert torch.equal(result.forward.output, expected.forward.output)
        assert is_heads_last(result.forward.output) == is_heads_last(tensors.query)
        for level_of_backward in AFTER[level]:
            gradients = run_gradients(case, level, tensors, expected, level_of_backward)
            assert all_equal(gradients, gradients_after(case, level, level_of_backward))
            assert [*map(is_heads_last, gradients[:3])] == [*map(is_heads_last, tensors[:3])]


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


# Routing: the largest scores of a row, lists


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
@pytest.mark.parametrize("columns", [7, 65])
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
@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (3, 70)])
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


@pytest.mark.parametrize(
    ("shape", "scale", "level"),
    [((1, 1), 0.125, LEVEL_INT8), ((130, 300), -0.125, LEVEL_INT8), ((20, 700), -0.125, LEVEL_16BIT)],
)
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


@pytest.mark.parametrize("lengths", [[9, 0, 1], [0] * 5, [64, *[2] * 127], [300, 40] * 20, [600]])
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


CASES_IN_PIECES = [(Case(260, 380, "popular", 48), LEVEL_INT8, 0)]  # lists that pieces do not divide
if HOPPER_IS_HERE:
    CASES_IN_PIECES.append((Case(520, 380, "popular", 40, 2, 1, matched=True), LEVEL_HOPPER, 1))


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
