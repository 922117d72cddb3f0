"""The Llama is its equations: each part against a slower way to write it, and what attention by name changes."""

import pytest
import torch
import torch.nn.functional as F
from sage_lab.models.llama import Attention, Llama, LlamaConfig, RotaryEmbedding
from torch.testing import assert_close

from sage_ref.attention import attention_forward

SMALL = {"vocab_size": 31, "context": 24, "layers": 2, "width": 32, "heads": 4}


def llama(seed=0, dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    return Llama(LlamaConfig(**SMALL | changes)).to(dtype)


def tokens(count=24, batch=2, seed=1):
    return torch.randint(SMALL["vocab_size"], (batch, count), generator=torch.Generator().manual_seed(seed))


def as_complex(x):
    """Features (x_i, x_(i + D/2)) as x_i + i x_(i + D/2)."""
    return torch.complex(*x.chunk(2, dim=-1))


def test_rotary_embedding_is_a_complex_rotation():
    torch.manual_seed(0)
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    rotary = RotaryEmbedding(8, 20).double()
    for n in range(20):
        turn = torch.tensor([n * 10000 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
        expected = as_complex(x)[:, n] * torch.polar(torch.ones_like(turn), turn)
        assert_close(as_complex(rotary(x))[:, n], expected, atol=1e-5, rtol=0)  # its angles are float32


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_its_equation_head_by_head(qk_norm):
    torch.manual_seed(0)
    attention = Attention(LlamaConfig(**SMALL, qk_norm=qk_norm)).double()
    norms = (attention.qk_norm.query_norm, attention.qk_norm.key_norm) if qk_norm else ()
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(24, 32, dtype=torch.float64)
    heads = []
    for head in range(4):
        projections = (attention.query, attention.key, attention.value)
        q, k, v = (x @ project.weight[head * 8 : head * 8 + 8].T for project in projections)
        if qk_norm:
            q, k = (
                y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
                for y, norm in zip((q, k), norms, strict=True)
            )
        heads.append(attention_forward(attention.rotary(q), attention.rotary(k), v, is_causal=True).output)
    expected = torch.cat(heads, dim=-1) @ attention.output.weight.T
    assert_close(attention(x[None])[0], expected, atol=1e-12, rtol=0)


def test_swiglu_and_the_residual_stream_are_their_equations():
    model = llama()
    block, x = model.blocks[0], torch.randn(2, 24, 32, dtype=torch.float64)
    mlp = block.mlp
    silu = torch.sigmoid(x @ mlp.gate.weight.T) * (x @ mlp.gate.weight.T)
    assert_close(mlp(x), (silu * (x @ mlp.up.weight.T)) @ mlp.down.weight.T)
    between = x + block.attention(block.attention_norm(x))
    assert_close(block(x), between + mlp(block.mlp_norm(between)))


def test_initial_weights():
    model = Llama(LlamaConfig(vocab_size=256, layers=8))
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / 4, rel=0.02)
        elif parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.02)
        else:
            assert (parameter == 1).all()


def loss_of(model):
    return F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=2).flatten())


@pytest.mark.parametrize(("backend", "qk_norm"), [("reference", True), ("auto", True), ("auto", False)])
@pytest.mark.filterwarnings("ignore:sage_ref. backend='auto' uses the reference:UserWarning")
def test_a_fused_prologue_is_the_norm_and_the_rotation_before_the_attention(backend, qk_norm):
    """Loss and the gradient of every weight, gains included, and what the core is given; in float32."""
    results, given = [], []
    for fused in (False, True):
        model = llama(dtype=torch.float32, attention="sagebwd", qk_norm=qk_norm, backend=backend, fused_prologue=fused)
        attention = model.blocks[0].attention
        for norm in [attention.qk_norm.query_norm, attention.qk_norm.key_norm] if qk_norm else []:
            torch.nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(3))
        attention.core.register_forward_hook(lambda core, arguments, o: given.append(arguments))
        loss = loss_of(model)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*results, strict=True):
        assert_close(one, other)
    (q, k, v), (raw_q, raw_k, same_v, prologue) = given
    assert (prologue.query_gain is None) == (not qk_norm)
    assert not torch.equal(raw_q, q)
    for found, expected in zip((*prologue.applied(raw_q, raw_k), same_v), (q, k, v), strict=True):
        assert torch.equal(found, expected)


def test_attention_compiles_to_one_graph():
    model = llama(qk_norm=True, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 36}, "width: expected an even number for each of the 4 heads, got 36"),
        ({"block_kv": 64}, "backend: expected 'reference', which alone takes block_kv=64, got 'auto'"),
        ({"ds_rounding": "stochastic", "backend": "triton"}, "backend: expected 'reference'.*, got 'triton'"),
        ({"remedy": "ordered P"}, "backend: expected 'reference', which alone takes remedy='ordered P', got 'auto'"),
        ({"granularity": "column"}, "granularity: "),
        ({"remedy": "hope", "backend": "reference"}, "remedy: expected one of"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**SMALL | changes)
