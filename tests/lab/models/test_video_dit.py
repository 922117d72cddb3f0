"""The video DiT is its equations: order of tokens, rotation by distance, identity at the start, attention exchanged."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sage_lab.models.video_dit import (
    Attention,
    NoiseEmbedding,
    Patches,
    RotaryEmbedding3D,
    VideoDiT,
    VideoDiTConfig,
    raster_order,
)
from torch import nn
from torch.testing import assert_close

from sage_ref.attention import attention_forward

SMALL = VideoDiTConfig(frames=2, size=12, patch=2, cube=(2, 2, 3), layers=2, width=32, heads=2)


def video_dit(config=SMALL):
    """In float64, every parameter random: nothing is hidden by a gate that is still zero."""
    torch.manual_seed(0)
    model = VideoDiT(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batch(config=SMALL, count=3):
    generator = torch.Generator().manual_seed(1)
    video = torch.randn(count, 3, config.frames, config.size, config.size, generator=generator, dtype=torch.float64)
    return video, torch.rand(count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("cube", [(1, 1, 1), (2, 2, 3), (1, 6, 2)])
def test_each_token_holds_the_pixels_at_its_position_and_their_order_changes_no_velocity(cube):
    patches, (video, noise_level) = Patches(replace(SMALL, cube=cube)), batch()
    split = patches.split(video)
    assert split.shape == (3, 72, 12)
    for token, (t, y, x) in enumerate(patches.positions.tolist()):
        assert torch.equal(split[:, token], video[:, :, t, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].flatten(1))
    assert torch.equal(patches.join(split), video)
    model, other = video_dit(), VideoDiT(replace(SMALL, cube=cube)).double()
    other.load_state_dict(model.state_dict())
    assert_close(other(video, noise_level), model(video, noise_level))


@pytest.mark.parametrize(("head_dim", "pairs"), [(6, (1, 1, 1)), (32, (4, 6, 6)), (128, (16, 24, 24))])
def test_pairs_are_shared_among_the_axes(head_dim, pairs):
    rotary = RotaryEmbedding3D(head_dim, torch.eye(3))
    for axis, count in enumerate(pairs):
        angle = rotary.sin[axis].asin()[rotary.sin[axis] != 0]
        # The first pair of an axis turns by one radian a place, the next ones by less, never under 1/100.
        assert_close(angle, torch.tensor([100 ** (-i / count) for i in range(count)]), atol=1e-5, rtol=0)


def test_a_new_model_passes_every_block_unchanged_and_its_gates_open_once_the_output_is_not_zero():
    model, (video, noise_level) = VideoDiT(SMALL).double(), batch()
    x, noise = torch.randn(3, 72, 32).double(), torch.randn(3, 32).double()
    for block in model.blocks:
        assert torch.equal(block(x, noise), x)
    assert torch.equal(model(video, noise_level), torch.zeros_like(video))
    nn.init.normal_(model.output.weight)
    model(video, noise_level).square().sum().backward()
    for block in model.blocks:
        for gradient in block.modulation.linear.bias.grad.chunk(6)[2::3]:
            assert (gradient != 0).all()


def test_noise_embedding_is_its_equation():
    embedding, levels = NoiseEmbedding(32), torch.linspace(0, 1, 101)
    angle = levels[:, None] * torch.tensor([1000 ** (i / 31) for i in range(32)])
    expected = embedding.mlp(torch.cat((angle.cos(), angle.sin()), dim=1))
    assert_close(embedding(levels), expected, atol=1e-4, rtol=0)


def test_blocks_of_consecutive_tokens_are_boxes():
    order = raster_order((2, 4, 4), (2, 2, 2)).tolist()
    assert order[:12] == [0, 1, 4, 5, 16, 17, 20, 21, 2, 3, 6, 7]


@pytest.mark.parametrize("where", ["blocks", "output"])
def test_the_noise_level_reaches_the_velocity_through_the_blocks_and_the_output(where):
    model, (video, _) = video_dit(), batch(count=1)
    silenced = [model.modulation] if where == "blocks" else [block.modulation for block in model.blocks]
    for modulation in silenced:
        nn.init.zeros_(modulation.linear.weight)
    low, high = (model(video, torch.tensor([t]).double()) for t in (0.2, 0.8))
    assert (low - high).abs().max() > 1e-3


def test_a_block_is_its_equation():
    block = video_dit().blocks[0]
    x, noise = torch.randn(2, 72, 32).double(), torch.randn(2, 32).double()
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = block.modulation(noise)
    y = x + gate_1 * block.attention(F.layer_norm(x, (32,), eps=1e-6) * (1 + scale_1) + shift_1)
    hidden = block.mlp[0](F.layer_norm(y, (32,), eps=1e-6) * (1 + scale_2) + shift_2)
    assert_close(block(x, noise), y + gate_2 * block.mlp[2](F.gelu(hidden, approximate="tanh")))


def test_attention_is_its_equation_head_by_head():
    attention = Attention(SMALL, Patches(SMALL).positions).double()
    norms = (attention.qk_norm.query_norm, attention.qk_norm.key_norm)
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    x, heads = torch.randn(2, 72, 32, dtype=torch.float64), []
    for head in range(2):
        rows = slice(16 * head, 16 * (head + 1))
        projections = (attention.query, attention.key, attention.value)
        q, k, v = (x @ linear.weight[rows].mT + linear.bias[rows] for linear in projections)
        q, k = (
            y * y.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * norm.weight
            for y, norm in zip((q, k), norms, strict=True)
        )
        heads.append(attention_forward(attention.rotary(q), attention.rotary(k), v).output)
    assert_close(attention(x), attention.output(torch.cat(heads, dim=-1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 13}, "size: expected a multiple of patch=2, got 13"),
        ({"cube": (2, 4, 4)}, r"cube: expected three numbers that divide the grid \(2, 6, 6\), got \(2, 4, 4\)"),
        ({"width": 34}, "width: expected an even number, 6 or more, for each of the 2 heads, got 34"),
        ({"width": 8}, "width: expected an even number, 6 or more, for each of the 2 heads, got 8"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)
