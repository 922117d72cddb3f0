"""Stage 1 on the layers of a model: its error, what learns and what stays, and that it gets better."""

from dataclasses import replace

import pytest
import torch
from sage_lab.training.video_router import RouterSettings, RouterTraining, new_core, stage1_error
from torch.testing import assert_close
from video_cases import CONFIG, made_up_digits, opened_weights

from sage_ref.attention import attention_forward
from sage_ref.sla2 import SLA2, sparse_linear_attention

DIGITS = made_up_digits()
SLA2_CONFIG = replace(CONFIG, attention="sla2", sparsity=0.5)
SETTINGS = RouterSettings(steps=30, warmup_steps=2, report_every=30, query_blocks=2)


def training(**changes):
    return RouterTraining(SLA2_CONFIG, replace(SETTINGS, **changes), DIGITS, opened_weights())


def test_the_error_is_that_of_sla2_with_its_hard_mask_on_the_chosen_queries():
    """Straight-through: forward it is the hard mask, but for the least weight of unselected blocks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    o = attention_forward(q, k, v).output
    core = SLA2(16, 1, sparsity=0.5, block_q=16, block_kv=8, quantize=False, backend="reference").stage(1)
    rows = torch.tensor([3, 0])
    mask, alpha = core.block_mask(q, k), core.alpha(1, 4)
    hard = sparse_linear_attention(q, k, v, mask, alpha, block_q=16, block_kv=8, backend="reference")
    chosen = torch.cat((torch.arange(48, 64), torch.arange(16)))
    expected = (hard - o)[:, :, chosen].square().sum() / o[:, :, chosen].square().sum()
    assert_close(stage1_error(core, q, k, v, o, rows), expected, rtol=0.02, atol=0)


def test_passes_of_any_size_are_the_same_step():
    """The error is a mean over videos, so it doesn't matter how many of them a pass works on."""
    one, two = training(micro_batch_size=1), training(micro_batch_size=2)
    assert (len(one.passes()), len(two.passes())) == (2, 1)
    assert one.advance() == pytest.approx(two.advance(), rel=1e-5)
    for x, y in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_stage_1_lowers_the_error_with_the_model_as_it_is():
    stage1 = training()
    before = {name: x.clone() for name, x in stage1.watched.state_dict().items()}
    first = stage1.validation_loss()
    for _ in range(30):
        stage1.advance()
    assert stage1.validation_loss() < 0.9 * first
    for name, x in stage1.watched.state_dict().items():
        assert torch.equal(x, before[name])
    weights = stage1.core_weights()
    assert {name.split(".core.")[1] for name in weights} == {
        "alpha_logit", "router.proj_q.weight", "router.proj_k.weight",
    }  # fmt: skip
    assert len(weights) == 3 * CONFIG.layers
    assert all((weights[f"blocks.{layer}.attention.core.alpha_logit"] != 3).all() for layer in range(2))


@pytest.mark.parametrize("router", ["learned", "identity", "random"])
@pytest.mark.parametrize("alpha", ["learned", "one"])
def test_only_what_the_settings_name_learns(router, alpha):
    settings = replace(SETTINGS, router=router, alpha=alpha)
    assert settings.learns == ("learned" in (router, alpha))
    core = new_core(SLA2_CONFIG, settings, 0)
    is_identity = torch.equal(core.router.proj_q.weight, torch.eye(16))
    assert is_identity == (router != "random")
    assert (core.alpha(1, 4) == 1).all() == (alpha == "one")
    if settings.learns:
        stage1 = training(router=router, alpha=alpha)
        before = stage1.core_weights()
        before = {name: x.clone() for name, x in before.items()}
        stage1.advance()
        for name, x in stage1.core_weights().items():
            learns = router if "router" in name else alpha
            assert (not torch.equal(x, before[name])) == (learns == "learned"), name


def test_random_routers_differ_by_layer_and_seed():
    first, layer, seed = (
        new_core(SLA2_CONFIG, replace(SETTINGS, router="random", seed=s), n).router.proj_q.weight
        for s, n in ((0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(new_core(SLA2_CONFIG, replace(SETTINGS, router="random"), 0).router.proj_q.weight, first)
    assert (first - layer).abs().max() > 0.1 < (first - seed).abs().max()


def test_rows_are_a_function_of_the_step_and_the_error_names_what_is_wrong():
    stage1 = training()
    assert torch.equal(stage1.rows(1), stage1.rows(1))
    assert len({tuple(stage1.rows(step).tolist()) for step in range(20)}) > 5
    with pytest.raises(ValueError, match="^query_blocks: expected at most 4, the whole ones, got 5"):
        training(query_blocks=5)
    for name in ("router", "alpha"):
        with pytest.raises(ValueError, match=rf"^{name}: expected one of \('learned', .*, got 'none'"):
            RouterSettings(steps=1, **{name: "none"})
