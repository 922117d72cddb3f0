"""The SLA2 module: what it computes and what trains in each stage, alpha, protected keys, what it refuses."""

import copy
import math
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from sage_ref import SLA2, sparse_linear_attention
from sage_ref import backend as ops
from sage_ref.sla2 import (
    PRINTED,
    BlockSettings,
    Relaxation,
    block_count,
    heuristic_scores,
    selected_count,
    soft_top_k,
    top_blocks,
)

SHAPES = [(1, 1), (3, 3), (16, 1), (1, 16), (33, 50), (50, 33), (64, 64)]  # Nq, Nk
SMALL = {"sparsity": 0.6, "block_q": 16, "block_kv": 8, "backend": "reference", "relaxation": PRINTED}


def module(heads=2, **options):
    """With projections and alphas that are not the initial ones."""
    model = SLA2(8, heads, **(SMALL | options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def probabilities(q, k):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


# Stage 2: the real thing


def test_the_options_are_those_of_the_paper_by_default():
    model = SLA2(8, 2)
    assert (model.sparsity, model.relaxation, model.backend, model.current_stage) == (0.97, Relaxation(), "auto", 2)
    assert model.settings == BlockSettings(quantize=True)
    assert model.alpha_logit.shape == (2, 1)
    assert_close(model.alpha(3, 5), torch.full((3, 2, 5), 1 / (1 + math.exp(-3))))


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("quantize", [False, True])
def test_stage_2_is_sparse_linear_attention_at_the_routers_hard_mask(inputs, n_q, n_k, quantize):
    q, k, v, _ = inputs(n_q, n_k, 8)
    model = module(quantize=quantize)
    mask = top_blocks(model.router(q, k), selected_count(0.6, block_count(n_k, 8)))
    assert torch.equal(model.block_mask(q, k), mask)
    alpha = torch.sigmoid(model.alpha_logit)
    options = {"quantize": quantize, "block_q": 16, "block_kv": 8, "backend": "reference"}
    assert torch.equal(model(q, k, v), sparse_linear_attention(q, k, v, mask, alpha, **options))


def test_at_first_it_routes_as_sla_does(inputs):
    q, k, _, _ = inputs(50, 80, 8)
    model = SLA2(8, 2, **SMALL)
    assert torch.equal(model.block_mask(q, k), top_blocks(heuristic_scores(q, k, BlockSettings(16, 8)), 4))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_gqa_is_sla2_with_the_heads_repeated(inputs, stage, kv_heads):
    q, k, v, _ = inputs(20, 40, 8, heads=4, kv_heads=kv_heads)
    model = module(4).stage(stage)
    shared = [x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)]
    assert torch.equal(model(q, k, v), model(q, *shared))
    model.initialize_alpha(q, k)
    alpha = model.alpha_logit.clone()
    model.initialize_alpha(q, shared[0])
    assert torch.equal(model.alpha_logit, alpha)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_constant_added_to_all_keys_moves_nothing_but_the_linear_branchs_features(inputs, stage):
    """phi = softmax over the features doesn't see a constant that all features share; the softmax and router none."""
    q, k, v, _ = inputs(40, 50, 8)
    model = module().stage(stage)
    assert_close(model(q, k + 100, v), model(q, k, v), atol=1e-9, rtol=0)
    offset = torch.linspace(-5, 5, 8, dtype=torch.float64)
    assert torch.equal(model.block_mask(q, k + offset), model.block_mask(q, k))
    assert_close(model.soft_block_mask(q, k + offset), model.soft_block_mask(q, k), atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stage", [1, 2])
def test_it_computes_wide_and_returns_the_dtype_of_query(inputs, stage, dtype):
    qkv = inputs(20, 40, 8, dtype=dtype)[:3]
    model = module(quantize=False).stage(stage)
    output = model(*qkv)
    assert output.dtype == dtype
    wide = model(*(x.double() for x in qkv))
    assert_close(output.double(), wide, atol=1e-5, rtol=4 * torch.finfo(dtype).eps)
    assert_close(model.to(torch.bfloat16)(*qkv).double(), wide, atol=0.1, rtol=0)


@pytest.mark.parametrize("stage", [1, 2])
def test_autocast_casts_the_inputs_and_nothing_inside(inputs, stage):
    """Queries and keys in float32 beside values in bfloat16, as behind a norm."""
    q, k, v, _ = inputs(20, 40, 8, dtype=torch.float32)
    model = module().stage(stage)
    expected = model(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(q, k, v.bfloat16())
        model.initialize_alpha(q, k)
    assert torch.equal(output, expected)
    alpha = model.alpha_logit.clone()
    model.initialize_alpha(q.bfloat16().double(), k.bfloat16().double())  # which autocast leaves alone
    assert_close(model.alpha_logit, alpha, atol=1e-5, rtol=0)


def test_the_router_is_not_rounded_to_16_bit(inputs):
    """Blocks of keys whose scores differ by 1e-4 are told apart, where bfloat16 sees ties."""
    q, k, v, _ = inputs(16, 8, 8, dtype=torch.float32)
    size = torch.tensor([1, 1.0001, 1.0002, 1.0003, -1, -1.0001, -1.0002, -1.0003]).repeat_interleave(8)
    k = k.repeat(1, 1, 8, 1) * size[:, None]
    v = v.repeat(1, 1, 8, 1) * torch.arange(64)[:, None]
    q = q + k[:, :, :1] * 3
    model = SLA2(8, 2, **SMALL)
    mask = model.block_mask(q, k)
    assert torch.equal(mask, model.block_mask(q.double(), k.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(mask, model.block_mask(q, k))
    alpha = torch.sigmoid(model.alpha_logit)
    options = {"quantize": True, "block_q": 16, "block_kv": 8, "backend": "reference"}
    assert torch.equal(model(q, k, v), sparse_linear_attention(q, k, v, mask, alpha, **options))


# Stage 1: the soft mask


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_stage_1_weighs_both_branches_by_soft_top_k(inputs, n_q, n_k):
    """Dense: softmax of M e^S, and averages by common features weighed by 1 - M."""
    q, k, v, _ = inputs(n_q, n_k, 8)
    model = module(relaxation=replace(PRINTED, temperature=0.3)).stage(1)
    soft = soft_top_k(model.router(q, k).softmax(-1), selected_count(0.6, block_count(n_k, 8)), 0.3)
    assert torch.equal(model.soft_block_mask(q, k), soft)
    w = soft[..., (torch.arange(n_q) // 16)[:, None], torch.arange(n_k) // 8]
    p = probabilities(q, k) * w
    o_s = p @ v / p.sum(-1, keepdim=True)
    a = q.softmax(-1) @ k.softmax(-1).mT * (1 - w)
    total = a.sum(-1, keepdim=True)
    o_l = torch.where(total > 0, a @ v / total.where(total > 0, 1), 0)
    alpha = torch.sigmoid(model.alpha_logit.double())[:, :, None]
    assert_close(model(q, k, v), alpha * o_s + (1 - alpha) * o_l, atol=1e-6, rtol=0)  # alpha is a float32 parameter
    assert_close(model.double()(q, k, v), alpha * o_s + (1 - alpha) * o_l, atol=1e-12, rtol=0)


def test_a_low_temperature_brings_stage_1_to_stage_2(inputs):
    q, k, v, _ = inputs(40, 80, 8)
    model = module(quantize=False, relaxation=replace(PRINTED, temperature=1e-7))
    assert_close(model.stage(1)(q, k, v), model.stage(2)(q, k, v), atol=1e-9, rtol=0)


def test_gradients_of_stage_1_pass_gradcheck_in_inputs_router_and_alpha(inputs):
    q, k, v, _ = inputs(5, 9, 3, heads=1)
    model = SLA2(3, 1, sparsity=0.5, block_q=2, block_kv=2, query_blocks=3, relaxation=PRINTED).double().stage(1)
    named = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}

    def output(q, k, v, *parameters):
        return torch.func.functional_call(model, dict(zip(named, parameters, strict=True)), (q, k, v))

    assert torch.autograd.gradcheck(output, [x.requires_grad_() for x in (q, k, v)] + list(named.values()))


# What trains when


@pytest.mark.parametrize("stage", [1, 2])
def test_the_router_trains_in_stage_1_only_and_alpha_in_both(inputs, stage):
    q, k, v, _ = (x.requires_grad_() for x in inputs(40, 80, 8))
    model = module().stage(stage)
    assert model.current_stage == stage
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    router = {"router.proj_q.weight", "router.proj_k.weight"}
    assert trainable == ({"alpha_logit"} | router if stage == 1 else {"alpha_logit"})
    model(q, k, v).square().sum().backward()
    assert {name for name, x in model.named_parameters() if x.grad is not None and x.grad.any()} == trainable
    assert all(x.grad.isfinite().all() and x.grad.any() for x in (q, k, v))


def test_stages_can_be_changed_back_and_forth(inputs):
    q, k, v, _ = inputs(40, 80, 8)
    model = module()
    assert model.stage(1) is model
    first, second = model(q, k, v), model.stage(2)(q, k, v)
    assert not torch.equal(first, second)
    assert torch.equal(model.stage(1)(q, k, v), first)
    for number in (0, 3, "1", None):
        with pytest.raises(ValueError, match=f"^number: expected stage 1 or 2, got {number!r}$"):
            model.stage(number)
    assert model.current_stage == 1


def test_a_router_made_trainable_in_stage_2_gets_no_gradient(inputs):
    """Top-k has none: nothing pretends that it had."""
    q, k, v, _ = inputs(40, 80, 8)
    model = module()
    model.requires_grad_(True)
    model(q, k, v).sum().backward()
    assert model.router.proj_q.weight.grad is None
    assert model.alpha_logit.grad.any()


@pytest.mark.parametrize("protected", [False, True])
def test_a_few_steps_of_stage_1_lower_the_error(protected):
    """Two of eight blocks hold keys far out on both sides of the first feature, where queries look: most of the mass,
    but means like those of the others. The second feature marks them, where no query looks until proj_q learns it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 8, generator=generator) * size for size in (0.3, 0.3, 1))
    marked = torch.isin(torch.arange(128) // 16, torch.tensor([2, 5]))
    q[..., 0] += 3
    k[..., 0] += torch.where(marked, 3, 0) * torch.tensor([1, -1]).repeat(64)
    k[..., 1] += torch.where(marked, 2, 0)
    protect = torch.arange(128) == 35 if protected else None  # in a marked block
    full = F.scaled_dot_product_attention(q, k, v)
    model = SLA2(8, 2, sparsity=0.75, block_q=16, block_kv=16, quantize=False, backend="reference")
    model.initialize_alpha(q, k, protect)

    def error(stage):
        return F.mse_loss(model.stage(stage)(q, k, v, protect), full)

    before = {stage: error(stage).item() for stage in (1, 2)}
    optimizer = torch.optim.Adam(model.stage(1).parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        error(1).backward()
        optimizer.step()
    after = {stage: error(stage).item() for stage in (1, 2)}
    assert after[1] < before[1] / 5
    assert after[2] < before[2] / 5
    assert torch.equal(model.block_mask(q, k, protect), marked[::16].expand(1, 2, 8, 8))


# Alpha


def test_alpha_is_broadcast_or_one_per_block_of_queries(inputs):
    q, k, v, _ = inputs(40, 50, 8)
    one = module()
    three = module(query_blocks=3)
    assert torch.equal(one.alpha(4, 7), torch.sigmoid(one.alpha_logit)[None].expand(4, 2, 7))
    assert torch.equal(three.alpha(4, 3), torch.sigmoid(three.alpha_logit)[None].expand(4, 2, 3))
    three.router.load_state_dict(one.router.state_dict())
    with torch.no_grad():
        three.alpha_logit.copy_(one.alpha_logit + torch.tensor([-1, 0, 1]))
    for stage in (1, 2):
        same = one.stage(stage)(q, k, v) == three.stage(stage)(q, k, v)
        assert same[:, :, 16:32].all()
        assert not same[:, :, :16].all(-1).any()
        assert not same[:, :, 32:].all(-1).any()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("n_q", "blocks"), [(32, 2), (49, 4), (1, 1)])
def test_alphas_for_other_blocks_are_refused(inputs, stage, n_q, blocks):
    q, k, v, _ = inputs(n_q, 50, 8)
    model = module(query_blocks=3).stage(stage)
    message = f"^query: expected 3 blocks of queries, one per alpha of a head, got {blocks}$"
    for call in (lambda: model(q, k, v), lambda: model.initialize_alpha(q, k)):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("query_blocks", [1, 3])
@pytest.mark.parametrize("protected", [False, True])
def test_initial_alpha_is_the_mass_of_the_selected_blocks(inputs, query_blocks, protected):
    """Mean over what shares it: the batch, the queries of a block and, for one alpha per head, the blocks."""
    q, k, v, _ = (torch.cat([x, x.flip(2) * 1.5]) for x in inputs(40, 50, 8))
    protect = torch.arange(50) == 44 if protected else None
    model = module(query_blocks=query_blocks)
    mask = model.block_mask(q, k, protect)
    seen = mask[..., (torch.arange(40) // 16)[:, None], torch.arange(50) // 8]
    mass = (probabilities(q, k) * seen).sum(-1)
    expected = torch.stack([part.mean((0, -1)) for part in mass.split(16, -1)], -1)
    if query_blocks == 1:
        expected = expected.mean(-1, keepdim=True)
    model.initialize_alpha(q, k, protect)
    assert_close(torch.sigmoid(model.alpha_logit.double()), expected, atol=1e-6, rtol=0)
    assert model.alpha_logit.requires_grad
    assert model.alpha_logit.dtype == torch.float32


def test_initial_alpha_stays_where_it_can_learn(inputs):
    q, k, _, _ = inputs(40, 50, 8)
    model = module(sparsity=0.0)
    model.initialize_alpha(q, k)
    assert_close(model.alpha(1, 1), torch.full((1, 2, 1), 1 - 1e-4), atol=1e-6, rtol=0)


# Protected keys


@pytest.mark.parametrize(
    ("tokens", "blocks"), [([], []), ([0], [0]), ([7, 8], [0, 1]), ([49], [6]), ([3, 20, 30, 41], [0, 2, 3, 5])]
)
def test_protected_keys_are_attended_to_by_every_query(inputs, tokens, blocks):
    """7 blocks, of which 3 are selected: protected ones first, then the best of the rest, in both stages."""
    q, k, v, _ = inputs(40, 50, 8)
    protect = torch.zeros(50, dtype=torch.bool)
    protect[tokens] = True
    model = module()
    count = max(3, len(blocks))
    others = [j for j in range(7) if j not in blocks]
    logits = model.router(q, k)
    hard = model.block_mask(q, k, protect)
    assert hard[..., blocks].all()
    assert torch.equal(hard[..., others], top_blocks(logits[..., others], count - len(blocks)))
    soft = model.soft_block_mask(q, k, protect)
    assert (soft[..., blocks] == 1).all()
    if count > len(blocks):
        expected = soft_top_k(logits.softmax(-1)[..., others], count - len(blocks), 0.1)
        assert torch.equal(soft[..., others], expected)
    else:
        assert not soft[..., others].any()
    assert_close(soft.sum(-1), torch.full_like(soft[..., 0], count), atol=1e-6, rtol=0)
    for stage in (1, 2):
        output = model.stage(stage)(q, k, v, protect)
        assert output.isfinite().all()
        assert torch.equal(output, model(q, k, v)) == (not tokens)


def test_protecting_every_key_selects_every_block(inputs):
    q, k, v, _ = inputs(40, 50, 8)
    model = module(quantize=False)
    protect = torch.ones(50, dtype=torch.bool)
    expected = torch.sigmoid(model.alpha_logit)[..., None] * F.scaled_dot_product_attention(q, k, v)
    for stage in (1, 2):
        assert_close(model.stage(stage)(q, k, v, protect), expected, atol=1e-6, rtol=0)


def test_gradients_reach_the_router_beside_protected_keys(inputs):
    q, k, v, _ = inputs(5, 9, 3, heads=1)
    model = SLA2(3, 1, sparsity=0.5, block_q=2, block_kv=2, relaxation=PRINTED).double().stage(1)
    protect = torch.arange(9) == 4

    def output(w_q, w_k):
        named = {"router.proj_q.weight": w_q, "router.proj_k.weight": w_k}
        return torch.func.functional_call(model, named, (q, k, v, protect))

    weights = [x.detach().clone().requires_grad_() for x in model.router.parameters()]
    assert torch.autograd.gradcheck(output, weights)
    assert all(x.any() for x in torch.autograd.grad(output(*weights).square().sum(), weights))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("protect", "kind", "message"),
    [
        ([True] * 50, TypeError, "protect: expected a torch.Tensor, got list"),
        (torch.ones(50), TypeError, "protect: expected dtype torch.bool, got torch.float32"),
        (torch.ones(49).bool(), ValueError, "protect: expected shape (50,), one entry per key, got (49,)"),
        (torch.ones(1, 50).bool(), ValueError, "protect: expected shape (50,), one entry per key, got (1, 50)"),
    ],
)
def test_a_bad_protect_is_named(inputs, stage, protect, kind, message):
    q, k, v, _ = inputs(40, 50, 8)
    with pytest.raises(kind) as error:
        module().stage(stage)(q, k, v, protect)
    assert str(error.value) == message


# NaN


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("quantize", [False, True])
def test_a_nan_stays_in_its_head_and_one_of_a_query_in_its_block(inputs, stage, quantize):
    q, k, v, _ = inputs(40, 50, 8)
    model = module(quantize=quantize).stage(stage)
    clean = model(q, k, v)
    for name in ("query", "key", "value"):
        q_bad, k_bad, v_bad = q.clone(), k.clone(), v.clone()
        {"query": q_bad, "key": k_bad, "value": v_bad}[name][0, 1, 17, 3] = math.nan
        output = model(q_bad, k_bad, v_bad)
        assert torch.equal(output[:, 0], clean[:, 0])
        if name == "query":
            assert output[0, 1, 17].isnan().all()
            others = [i for i in range(40) if i // 16 != 1]
            assert_close(output[:, :, others], clean[:, :, others], atol=1e-12, rtol=0)
        else:
            assert output[:, 1].isnan().any(-1).all()


# As a module


@pytest.mark.parametrize("stage", [1, 2])
def test_state_dict_and_deepcopy_keep_what_was_learned(inputs, stage):
    q, k, v, _ = inputs(40, 50, 8)
    model = module(query_blocks=3).stage(stage)
    restored = SLA2(8, 2, query_blocks=3, **SMALL).stage(stage)
    restored.load_state_dict(model.state_dict())
    assert set(model.state_dict()) == {"alpha_logit", "router.proj_q.weight", "router.proj_k.weight"}
    twin = copy.deepcopy(model)
    for other in (restored, twin):
        assert torch.equal(other(q, k, v), model(q, k, v))
    twin.stage(3 - stage)
    assert model.current_stage == stage
    assert model.router.proj_q.weight.requires_grad == (stage == 1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
@pytest.mark.parametrize("stage", [1, 2])
def test_a_compiled_module_is_one_graph_with_the_same_numbers(inputs, stage):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in inputs(20, 40, 8)[:3]]
    model = module().stage(stage)
    trained = [x for x in model.parameters() if x.requires_grad]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*leaves), model(*leaves), atol=1e-13, rtol=0)
    eager, ours = (torch.autograd.grad(f(*leaves).square().sum(), [*leaves, *trained]) for f in (model, compiled))
    for x, y in zip(ours, eager, strict=True):
        assert_close(x, y, atol=1e-6 if x.dtype == torch.float32 else 1e-11, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2])
def test_it_moves_to_another_device(inputs, stage):
    q, k, v, _ = inputs(40, 50, 8)
    protect = torch.arange(50) == 20  # stays where it is
    model = module(quantize=False).stage(stage)
    expected = model(q, k, v, protect)
    output = model.cuda()(*(x.cuda() for x in (q, k, v)), protect)
    assert_close(output.cpu(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim: expected at least 1, got 0"),
        ({"num_heads": "2"}, TypeError, "num_heads: expected an int, got str"),
        ({"query_blocks": 0}, ValueError, "query_blocks: expected at least 1, got 0"),
        ({"block_q": 0}, ValueError, "block_q: expected at least 1, got 0"),
        ({"block_kv": 1.5}, TypeError, "block_kv: expected an int, got float"),
        ({"sparsity": 1}, ValueError, "sparsity: expected a share of the key blocks in [0, 1), got 1"),
        ({"sparsity": 97}, ValueError, "sparsity: expected a share of the key blocks in [0, 1), got 97"),
        ({"sparsity": None}, TypeError, "sparsity: expected a float, got NoneType"),
        ({"quantize": 1}, TypeError, "quantize: expected a bool, got int"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of ('auto', 'reference', 'triton'), got 'cuda'"),
    ],
)
def test_the_module_names_what_is_wrong(options, kind, message):
    with pytest.raises(kind) as error:
        SLA2(**({"head_dim": 8, "num_heads": 2} | options))
    assert str(error.value) == message


@pytest.mark.parametrize("stage", [1, 2])
def test_the_module_takes_the_heads_it_was_made_for(stage):
    x = torch.ones(1, 2, 4, 8)
    model = module().stage(stage)
    for bad, message in (
        ((torch.ones(1, 3, 4, 8), x[:, :1], x[:, :1]), "query: expected 2 heads, as the module has, got 3"),
        ((x[..., :4],) * 3, "query: expected head size 8, as the module has, got 4"),
        ((x, x, x[:, :, :3]), "value: expected the shape of key, (1, 2, 4, 8), got (1, 2, 3, 8)"),
        ((x[0], x, x), "query: expected 4 dimensions (B, H, N, D), got shape (2, 4, 8)"),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below)
            model(*bad)
        assert str(error.value) == message


# Which backend runs


@pytest.fixture
def kernels(monkeypatch):
    """Stands in for the Triton kernels: records its calls, and refuses them when told why."""
    package = types.ModuleType("sage_kernels.sla2.ops")
    package.calls, package.refusal = [], None
    package.obstacle = lambda query, settings: package.refusal
    package.attention = lambda *arguments: package.calls.append(arguments) or arguments[2]
    for name in ("sage_kernels", "sage_kernels.sla2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sage_kernels.sla2.ops", package)
    monkeypatch.setattr(ops, "MISSING_PACKAGE", None)
    ops._warn_once.cache_clear()
    yield package
    ops._warn_once.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_stage_2_hands_the_kernels_what_they_need(inputs, kernels, backend):
    q, k, v, _ = inputs(40, 50, 8, kv_heads=1)
    model = module(backend=backend)
    protect = torch.arange(50) == 20
    assert model(q, k, v, protect) is v
    assert model(q, k, v) is v
    for (*qkv, chooser, alpha, settings), blocks in zip(kernels.calls, ([2], []), strict=True):
        assert all(a is b for a, b in zip(qkv, (q, k, v), strict=True))
        assert torch.equal(chooser.proj_q, model.router.proj_q.weight)
        assert torch.equal(chooser.proj_k, model.router.proj_k.weight)
        assert not chooser.proj_q.requires_grad
        assert chooser.count == 3
        assert chooser.protected.nonzero().flatten().tolist() == blocks
        assert chooser.protected.shape == (7,)
        assert torch.equal(alpha, model.alpha(1, 3))
        assert settings == BlockSettings(16, 8, quantize=True)
    model.stage(1)(q, k, v)
    assert len(kernels.calls) == 2


def test_what_the_kernels_refuse_is_said_and_done_by_the_reference(inputs, kernels):
    q, k, v, _ = inputs(40, 50, 8)
    kernels.refusal = "no kernel runs on cpu"
    expected = module()(q, k, v)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(module(backend="auto")(q, k, v), expected)
    assert [str(w.message) for w in caught] == [
        "sage_ref: backend='auto' uses the reference, because no kernel runs on cpu."
    ]
    with pytest.raises(ValueError, match="^backend: expected 'triton' to be usable, but no kernel runs on cpu$"):
        module(backend="triton")(q, k, v)
    assert not kernels.calls
