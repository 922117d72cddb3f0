"""A capture holds what the attention of a pre-trained model read and the gradient it got, as it was written."""

import pytest
import torch
from pretrain_cases import CONFIG, sixteen_letters
from safetensors.torch import save_file
from sage_lab.models.llama import Llama
from sage_lab.records import RECORDED
from sage_lab.training.capture import TENSORS, attention_tensors, next_token_loss, read_capture

from sage_ref.attention import attention_forward


@pytest.fixture
def double_model():
    torch.manual_seed(0)
    model = Llama(CONFIG).double()
    batch = sixteen_letters().batch(2, CONFIG.context, seed=0, step=0)
    return model, *batch


def test_captured_q_k_v_are_what_attention_multiplies(double_model):
    model, inputs, targets = double_model
    outputs = {}
    for layer, block in enumerate(model.blocks):
        block.attention.core.register_forward_hook(lambda core, qkv, o, layer=layer: outputs.update({layer: o}))
    loss, layers = attention_tensors(model, inputs, targets, (0, 1))
    assert loss == next_token_loss(model, inputs, targets).item()
    assert list(layers) == [0, 1]
    for layer, tensors in layers.items():
        assert tuple(tensors) == TENSORS
        q, k, v, do = tensors.values()
        assert q.shape == k.shape == v.shape == do.shape == (2, 4, 24, 8)
        torch.testing.assert_close(attention_forward(q, k, v, is_causal=True).output, outputs[layer])
        # QK-norm with gains of one came before, and a rotation changes no length.
        torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 4, 24).double(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("layer", [0, 1])
def test_captured_grad_output_is_the_gradient_of_the_loss(double_model, layer):
    model, inputs, targets = double_model
    _, layers = attention_tensors(model, inputs, targets, (layer,))
    direction = torch.randn(layers[layer]["grad_output"].shape, dtype=torch.float64)
    losses = []
    for step in (1e-4, -1e-4):
        core = model.blocks[layer].attention.core
        hook = core.register_forward_hook(lambda core, qkv, o, step=step: o + step * direction)
        losses.append(next_token_loss(model, inputs, targets).item())
        hook.remove()
    assert not core._forward_hooks
    assert all(p.grad is None for p in model.parameters())
    slope = (losses[0] - losses[1]) / 2e-4
    assert slope == pytest.approx((layers[layer]["grad_output"] * direction).sum().item(), rel=1e-5)


def test_a_capture_is_read_with_its_provenance():
    provenance, layers = read_capture(RECORDED / "capture_qk_norm_h200.safetensors")
    assert provenance["run"]["qk_norm"] is True
    assert list(layers) == provenance["layers_kept"]["kept"]
    for tensors in layers.values():
        assert tuple(sorted(tensors)) == tuple(sorted(TENSORS))
        assert {(x.dtype, x.shape) for x in tensors.values()} == {(torch.bfloat16, (1, 1, 512, 128))}


def test_what_is_no_capture_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: expected a capture at .*none.safetensors, found none"):
        read_capture(tmp_path / "none.safetensors")
    save_file({"layer0.query": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 20)
    for name in ("other", "junk"):
        with pytest.raises(ValueError, match="path: expected a capture, with provenance in its metadata"):
            read_capture(tmp_path / f"{name}.safetensors")
