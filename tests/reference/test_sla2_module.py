"""The modules SLA and SLA2: what they compute, what trains in each stage, alpha, what they refuse."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from sla2_oracles import LENGTHS, averaged, drawn_qkv, features, sdpa_over, token_weights
from torch.testing import assert_close

from sage_ref import SLA, SLA2, sparse_linear_attention
from sage_ref.sla2 import (
    EQUATIONS_16_17,
    PRINTED,
    BlockSettings,
    Relaxation,
    block_count,
    heuristic_scores,
    selected_count,
    soft_top_k,
    top_blocks,
)
from sage_ref.sla2.router import SCORES

BLOCKS = {"sparsity": 0.6, "block_q": 16, "block_kv": 8}
SMALL = BLOCKS | {"backend": "reference", "relaxation": PRINTED}
EVERY = pytest.mark.parametrize("kind", ["SLA", 1, 2])  # SLA, or a stage of SLA2
ROUTER = ("router.proj_q.weight", "router.proj_k.weight")
STAGES = pytest.mark.parametrize("stage", [1, 2])


def with_drawn_parameters(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def module(heads=2, **options):
    return with_drawn_parameters(SLA2(8, heads, **(SMALL | options)))


def sla(heads=2, **options):
    return with_drawn_parameters(SLA(8, heads, **(BLOCKS | options)))


def build(kind, heads=2, **options):
    return sla(heads) if kind == "SLA" else module(heads, **options).stage(kind)


def at_tokens(block_weights, n_q, n_k):
    return token_weights(block_weights, n_q, n_k, 16, 8)


def probabilities(q, k):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


# SLA


def test_sla_is_the_sparse_branch_plus_the_projected_linear_branch_which_is_zero_at_first():
    q, k, v = drawn_qkv(40, 80)
    model = sla().double()
    scores = heuristic_scores(q, k, BlockSettings(16, 8))
    rank = (scores[..., None, :] > scores[..., :, None]).sum(-1)  # how many blocks of the row have larger scores
    selected = rank < 4
    o_s = sdpa_over(q, k, v, at_tokens(selected, 40, 80))
    o_l = averaged(features(q) @ features(k).mT * at_tokens(~selected, 40, 80), v)
    assert torch.equal(model.block_mask(q, k), selected)
    assert_close(model(q, k, v), o_s + o_l @ model.proj.weight.mT + model.proj.bias, atol=1e-12, rtol=0)
    model.proj.register_forward_hook(lambda layer, inputs, output: 0 * output)  # it is called, and not read
    assert_close(model(q, k, v), o_s, atol=1e-12, rtol=0)
    assert_close(SLA(8, 2, **BLOCKS)(q, k, v), o_s, atol=1e-13, rtol=0)


# SLA2, stage 2: the real thing


def test_the_options_are_those_of_the_papers_by_default():
    baseline = SLA(8, 2)
    assert (baseline.sparsity, baseline.settings) == (0.9, BlockSettings())
    model = SLA2(8, 2)
    assert (model.sparsity, model.relaxation, model.backend, model.current_stage) == (0.97, Relaxation(), "auto", 2)
    assert model.settings == BlockSettings(quantize=True)
    assert model.alpha_logit.shape == (2, 1)
    assert_close(model.alpha(3, 5), torch.full((3, 2, 5), 1 / (1 + math.exp(-3))))
    for new in (baseline, model):  # and of one that was made on "meta", by reset_parameters of each part
        other = with_drawn_parameters(type(new)(8, 2)).apply(lambda part: getattr(part, "reset_parameters", tuple)())
        assert_close(other.state_dict(), new.state_dict())


def at_mask(model, q, k, v, mask, quantize=True):
    options = {"quantize": quantize, "block_q": 16, "block_kv": 8, "backend": "reference"}
    return sparse_linear_attention(q, k, v, mask, torch.sigmoid(model.alpha_logit), **options)


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
@pytest.mark.parametrize("quantize", [False, True])
def test_stage_2_is_sparse_linear_attention_at_the_routers_hard_mask(n_q, n_k, quantize):
    q, k, v = drawn_qkv(n_q, n_k)
    model = module(quantize=quantize)
    mask = top_blocks(model.router(q, k), selected_count(0.6, block_count(n_k, 8)))
    assert torch.equal(model.block_mask(q, k), mask)
    assert torch.equal(model(q, k, v), at_mask(model, q, k, v, mask, quantize))


# SLA2, stage 1: the soft mask


def scores_by_hand(model, q, k, kind):
    """Of Eq. 16, without softmax and c, of Algorithm 2, and its log, from the means of blocks."""
    q_bar = torch.stack([part.mean(-2) for part in q.split(16, -2)], -2) @ model.router.proj_q.weight.double().mT
    k_bar = [part.mean(-2) for part in (k - k.mean(-2, keepdim=True)).split(8, -2)]
    logits = q_bar @ (torch.stack(k_bar, -2) @ model.router.proj_k.weight.double().mT).mT
    p_c = (logits / 8**0.5).exp()
    p_c = p_c / p_c.sum(-1, keepdim=True)
    return {"logits": logits, "P_c": p_c, "log P_c": p_c.log()}[kind]


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
@pytest.mark.parametrize("scores", SCORES)
def test_stage_1_weighs_both_branches_by_soft_top_k(n_q, n_k, scores):
    """Dense: softmax of M e^S, and averages by common features weighed by 1 - M."""
    q, k, v = drawn_qkv(n_q, n_k)
    model = module(relaxation=Relaxation(scores, 0.3, straight_through=False)).stage(1)
    soft = soft_top_k(scores_by_hand(model, q, k, scores), selected_count(0.6, block_count(n_k, 8)), 0.3)
    assert_close(model.soft_block_mask(q, k), soft, atol=1e-12, rtol=0)
    w = at_tokens(soft, n_q, n_k)
    o_s = averaged(probabilities(q, k) * w, v)
    o_l = averaged(features(q) @ features(k).mT * (1 - w), v)
    alpha = torch.sigmoid(model.alpha_logit.double())[:, :, None]
    assert_close(model(q, k, v), alpha * o_s + (1 - alpha) * o_l, atol=1e-6, rtol=0)  # alpha is a float32 parameter
    assert_close(model.double()(q, k, v), alpha * o_s + (1 - alpha) * o_l, atol=1e-12, rtol=0)


@pytest.mark.parametrize("relaxation", [PRINTED, replace(EQUATIONS_16_17, temperature=0.5)])
def test_gradients_of_stage_1_pass_gradcheck_in_inputs_router_and_alpha(relaxation):
    qkv = [x.requires_grad_() for x in drawn_qkv(3, 7, 2, heads=1)]
    options = {"block_q": 2, "block_kv": 2, "query_blocks": 2, "relaxation": relaxation, "backend": "reference"}
    model = SLA2(2, 1, sparsity=0.5, **options).double().stage(1)
    named = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}

    def output(q, k, v, *parameters):
        return torch.func.functional_call(model, dict(zip(named, parameters, strict=True)), (q, k, v))

    assert torch.autograd.gradcheck(output, [*qkv, *named.values()])


# What trains when


@STAGES
def test_the_router_trains_in_stage_1_only_and_alpha_in_both(stage):
    qkv = [x.requires_grad_() for x in drawn_qkv(40, 80)]
    model = module().requires_grad_(False).stage(stage)  # as LoRA freezes what it adapts
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == ({"alpha_logit", *ROUTER} if stage == 1 else {"alpha_logit"})
    model.requires_grad_(True)  # in stage 2 Top-k has no gradient, and nothing pretends that it had
    model(*qkv).square().sum().backward()
    assert {name for name, x in model.named_parameters() if x.grad is not None} == trainable
    for leaf in (*qkv, *(x for x in model.parameters() if x.grad is not None)):
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()


def test_alpha_is_broadcast_or_one_per_block_of_queries():
    qkv = drawn_qkv(40, 50)
    one, three = module(), module(query_blocks=3)
    for model in (one, three):
        assert torch.equal(model.alpha(4, 3), torch.sigmoid(model.alpha_logit)[None].expand(4, 2, 3))
    three.router.load_state_dict(one.router.state_dict())
    with torch.no_grad():
        three.alpha_logit.copy_(one.alpha_logit + torch.tensor([-1, 0, 1]))
    for stage in (1, 2):
        same = one.stage(stage)(*qkv) == three.stage(stage)(*qkv)
        assert same[:, :, 16:32].all()
        assert not same[:, :, [*range(16), *range(32, 40)]].all(-1).any()
    q, k, v = drawn_qkv(32, 50)
    for call in (partial(three, q, k, v), partial(three.initialize_alpha, q, k)):
        with pytest.raises(ValueError, match="^query: expected 3 blocks of queries, .* got 2$"):
            call()


@pytest.mark.parametrize("query_blocks", [1, 3])
def test_initial_alpha_is_the_mass_of_the_selected_blocks(query_blocks):
    """Mean over what shares it: the batch, the queries of a block and, for one alpha per head, the blocks."""
    q, k, _ = (torch.cat([x, x.flip(2) * 1.5]) for x in drawn_qkv(40, 50))
    model = module(query_blocks=query_blocks)
    mass = (probabilities(q, k) * at_tokens(model.block_mask(q, k), 40, 50)).sum(-1)
    expected = torch.stack([part.mean((0, -1)) for part in mass.split(16, -1)], -1)
    if query_blocks == 1:
        expected = expected.mean(-1, keepdim=True)
    model.initialize_alpha(q, k)
    assert_close(torch.sigmoid(model.alpha_logit.double()), expected, atol=1e-6, rtol=0)
    assert model.alpha_logit.requires_grad
    assert model.alpha_logit.dtype == torch.float32


def test_alpha_of_a_mass_of_1_stays_where_it_can_learn():
    everything = module(sparsity=0.0)
    everything.initialize_alpha(*drawn_qkv(40, 50)[:2])
    assert_close(everything.alpha(1, 3), torch.full((1, 2, 3), 1 - 1e-4), atol=1e-6, rtol=0)


# As modules


@EVERY
def test_gqa_is_the_module_with_the_heads_repeated(kind):
    q, k, v = drawn_qkv(20, 40, heads=4, kv_heads=2)
    model, shared = build(kind, 4), [x.repeat_interleave(2, 1) for x in (k, v)]
    assert torch.equal(model(q, k, v), model(q, *shared))
    if kind == 2:
        assert torch.equal(model.selected_mass(q, k), model.selected_mass(q, shared[0]))


@EVERY
def test_autocast_casts_the_inputs_and_nothing_inside(kind):
    """Queries and keys in float32 beside values in bfloat16, as behind a norm."""
    q, k, v = (x.float() for x in drawn_qkv(20, 40))
    model = build(kind)
    expected = model(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(q, k, v.bfloat16()), expected)
    if kind == 2:
        with torch.autocast("cpu", torch.bfloat16):
            mass = model.selected_mass(q, k)
        wide = model.selected_mass(q.bfloat16().double(), k.bfloat16().double())  # which autocast leaves alone
        assert_close(mass.double(), wide, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
@EVERY
def test_a_compiled_module_is_one_graph_with_the_same_numbers(kind):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in drawn_qkv(20, 40)]
    model = build(kind)
    trained = [x for x in model.parameters() if x.requires_grad]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*leaves), model(*leaves), atol=1e-13, rtol=0)
    eager, ours = (torch.autograd.grad(f(*leaves).square().sum(), [*leaves, *trained]) for f in (model, compiled))
    for x, y in zip(ours, eager, strict=True):
        assert_close(x, y, atol=1e-6 if x.dtype == torch.float32 else 1e-11, rtol=1e-6)
    shared = [leaves[0]] * 3
    assert_close(compiled(*shared), model(*shared), atol=1e-13, rtol=0)


@pytest.mark.gpu
@STAGES
def test_it_moves_to_another_device(stage):
    qkv = drawn_qkv(40, 50)
    model = module(quantize=False).stage(stage)
    expected = model(*qkv)
    output = model.cuda()(*(x.cuda() for x in qkv))
    assert_close(output.cpu(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1, 4, 8), (1, 2, 4, 4)])
@pytest.mark.parametrize("kind", ["SLA", 2])
def test_the_modules_take_the_heads_they_were_made_for(kind, shape):
    with pytest.raises(ValueError, match=r"^query: expected shape \(B, 2, N, 8\), as the module takes it, got "):
        build(kind)(*[torch.ones(shape)] * 3)
