"""Stage 1 on the layers of a model: its error falls, and only what the settings name learns."""

from dataclasses import replace

import pytest
import torch
from sage_lab.training.video_router import RouterSettings, RouterTraining, new_core, stage1_error
from torch.testing import assert_close
from video_cases import CONFIG, made_up_digits, opened_weights

from sage_ref.attention import attention_forward
from sage_ref.sla2 import SLA2, sparse_linear_attention

SLA2_CONFIG = replace(CONFIG, attention="sla2", sparsity=0.5)
SETTINGS = RouterSettings(steps=30, warmup_steps=2, report_every=30, query_blocks=2)


def training(**changes):
    return RouterTraining(SLA2_CONFIG, replace(SETTINGS, **changes), made_up_digits(), opened_weights())


def test_the_error_is_that_of_sla2_with_its_hard_mask_on_the_chosen_queries():
    """Straight-through: forward it is the hard mask, but for the least weight of unselected blocks."""
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    o = attention_forward(q, k, v).output
    core = SLA2(16, 1, sparsity=0.5, block_q=16, block_kv=8, quantize=False, backend="reference").stage(1)
    mask, alpha = core.block_mask(q, k), core.alpha(1, 4)
    hard = sparse_linear_attention(q, k, v, mask, alpha, block_q=16, block_kv=8, backend="reference")
    chosen = torch.cat((torch.arange(48, 64), torch.arange(16)))
    expected = (hard - o)[:, :, chosen].square().sum() / o[:, :, chosen].square().sum()
    assert_close(stage1_error(core, q, k, v, o, torch.tensor([3, 0])), expected, rtol=0.02, atol=0)


def test_passes_of_any_size_are_the_same_step():
    one, two = training(micro_batch_size=1), training(micro_batch_size=2)
    assert (len(one.passes()), len(two.passes())) == (2, 1)
    assert one.advance() == pytest.approx(two.advance(), rel=1e-5)
    for x, y in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_stage_1_lowers_the_error_and_changes_nothing_but_cores():
    stage1 = training()
    before = {name: x.clone() for name, x in stage1.watched.state_dict().items()}
    first = stage1.validation_loss()
    for _ in range(30):
        stage1.advance()
    assert stage1.validation_loss() < 0.9 * first
    assert_close(stage1.watched.state_dict(), before, rtol=0, atol=0)
    names = ("alpha_logit", "router.proj_q.weight", "router.proj_k.weight")
    assert stage1.core_weights().keys() == {f"blocks.{layer}.attention.core.{x}" for layer in (0, 1) for x in names}


@pytest.mark.parametrize("router", ["learned", "identity", "random"])
@pytest.mark.parametrize("alpha", ["learned", "one"])
def test_only_what_the_settings_name_learns(router, alpha):
    settings = replace(SETTINGS, router=router, alpha=alpha)
    assert settings.learns == ("learned" in (router, alpha))
    core = new_core(SLA2_CONFIG, settings, 0)
    assert torch.equal(core.router.proj_q.weight, torch.eye(16)) == (router != "random")
    assert (core.alpha(1, 4) == 1).all() == (alpha == "one")
    if settings.learns:
        stage1 = training(router=router, alpha=alpha)
        before = {name: x.clone() for name, x in stage1.core_weights().items()}
        stage1.advance()
        for name, x in stage1.core_weights().items():
            learns = router if "router" in name else alpha
            assert (not torch.equal(x, before[name])) == (learns == "learned"), name


def test_random_routers_differ_by_layer_and_seed_and_rows_by_step():
    first, again, layer, seed = (
        new_core(SLA2_CONFIG, replace(SETTINGS, router="random", seed=s), n).router.proj_q.weight
        for s, n in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first, again)
    assert (first - layer).abs().max() > 0.1 < (first - seed).abs().max()
    stage1 = training()
    assert torch.equal(stage1.rows(1), stage1.rows(1))
    assert len({tuple(stage1.rows(step).tolist()) for step in range(20)}) > 5
