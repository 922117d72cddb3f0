"""The peers on the CPU: their packages are made up, and compute what is asked of them in plain PyTorch."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from sage_lab.bench import cudnn_fp8, peers
from sage_lab.bench.cudnn_fp8 import E4M3, LARGEST, dequantise, quantise
from sage_lab.bench.peers import PEERS

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.tracing import relative_l2


def heads_last(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class Lists(NamedTuple):
    """FlashAttention-4's BlockSparseTensorsTorch, by its public fields."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]

    def dense(self):
        """Return bool [B, H, rows, columns]. Its lists ascend, and the rest of a list is never read."""
        order = self.full_block_idx.long()
        is_read = torch.arange(order.shape[-1]) < self.full_block_cnt[..., None]
        assert (order.diff(dim=-1)[is_read[..., 1:]] > 0).all()
        return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order, is_read)


def seen(block_mask, block_kv, n):
    return block_mask.repeat_interleave(MASK_BLOCK_Q, -2).repeat_interleave(block_kv, -1)[..., :n, :n]


@pytest.fixture(params=[tuple, lambda output: output[0]], ids=["a tuple", "a tensor"])
def fa4_calls(monkeypatch, request):
    """Arguments of the calls of a made-up flash_attn.cute, whose tensors are [B, N, H, D]; it may return a tuple."""
    calls = []

    def flash_attn_func(q, k, v, causal=False, block_sparse_tensors=None, **options):
        calls.append({"q": q, "lists": block_sparse_tensors, **options})
        lists, heads_first = block_sparse_tensors, (x.transpose(1, 2) for x in (q, k, v))
        mask = None if lists is None else seen(lists.dense(), lists.block_size[1], q.shape[1])
        output = F.scaled_dot_product_attention(*heads_first, is_causal=causal, attn_mask=mask, enable_gqa=True)
        return request.param((output.transpose(1, 2), None))

    cute, lists = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")
    cute.flash_attn_func, lists.BlockSparseTensorsTorch = flash_attn_func, Lists
    for made_up in (ModuleType("flash_attn"), cute, lists):
        monkeypatch.setitem(sys.modules, made_up.__name__, made_up)
    return calls


def test_flash_attention_4_is_called_with_views(fa4_calls, inputs):
    query, key, value, _ = inputs(24, 24, 16, heads=4, kv_heads=2)
    output = PEERS["fa4"].required().attention(query, key, value, True)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, exact)
    assert fa4_calls[0]["q"].shape == (1, 24, 4, 16)
    assert fa4_calls[0]["q"].data_ptr() == query.data_ptr()


@pytest.mark.parametrize("block_kv", [64, 128])
def test_sparse_peers_see_the_mask_and_nothing_else(fa4_calls, inputs, block_kv, monkeypatch):
    """Three blocks of queries, the last one shorter; one list backward, where there is a backward pass."""

    def flex(query, key, value, block_mask):
        n = query.shape[2]
        assert block_mask.seq_lengths == (n, n)
        mask = seen(block_mask.to_dense().bool(), block_mask.BLOCK_SIZE[1], n)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    monkeypatch.setattr(peers, "compiled_flex", lambda: flex)
    n = 300
    query, key, value, _ = inputs(n, n, 16, dtype=torch.float32)
    block_mask = torch.rand(1, 2, 3, -(-n // block_kv)) < 0.5
    block_mask[..., -1] = True
    exact = F.scaled_dot_product_attention(query, key, value, attn_mask=seen(block_mask, block_kv, n))
    for name in ("flex", "fa4"):
        torch.testing.assert_close(PEERS[name].sparse(block_mask, block_kv, n)(query, key, value), exact)
    (call,) = fa4_calls
    assert (call["lists"].dense() == block_mask).all()
    assert call["lists"].mask_block_cnt.sum() == 0
    backward = call.get("block_sparse_tensors_bwd")
    assert (backward is None) == (block_kv == 64)
    if backward is not None:
        assert (backward.dense() == block_mask.mT).all()
        assert backward.block_size == (128, 128)


def rounded(x, inputs, name):
    return (x.float() * inputs[f"scale_{name}"]).clamp(-LARGEST, LARGEST).to(E4M3)


def sdpa_fp8(x, is_causal, scale):
    """Compute the outputs of cuDNN's operation of this name, in its order."""
    q, k, v = (x[name].float() * x[f"descale_{name}"] for name in "qkv")
    forward = attention_forward(q, k, v, is_causal=is_causal, scale=scale)
    p = (forward.scores - forward.log_sum_exp[..., None]).exp()
    # As the tensor cores read it: not normalised yet. What is reported is P.
    largest = p.amax(-1, keepdim=True)
    output = rounded(p / largest, x, "s").float() * x["descale_s"] * largest @ v
    return rounded(output, x, "o"), forward.log_sum_exp[..., None], p.max(), output.abs().max()


def sdpa_fp8_backward(x, is_causal, scale):
    """Compute the outputs of cuDNN's operation of this name, in its order."""
    q, k, v, o, do = (x[name].float() * x[f"descale_{name}"] for name in ("q", "k", "v", "o", "dO"))
    found = attention_backward(do, q, k, v, o, x["stats"][..., 0], is_causal=is_causal, scale=scale)
    # dS as the tensor cores read it: wrong scales of the first calls show in dQ and dK.
    ds = rounded(found.grad_scores, x, "dP").float() * x["descale_dP"]
    gradients = {"dQ": scale * ds @ k, "dK": scale * ds.mT @ q, "dV": found.grad_value}
    largest = [gradient.abs().max() for gradient in (*gradients.values(), found.grad_scores)]
    return *(rounded(gradient, x, name) for name, gradient in gradients.items()), *largest


Types = Enum("Types", "FLOAT FP8_E4M3")


class Port(SimpleNamespace):
    """A tensor of a graph, and what was said of it."""

    __hash__ = object.__hash__

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: setattr(self, name.removeprefix("set_"), value) or self


class Graph:
    """A stand-in for cudnn.pygraph, in float32 but for what enters and leaves in E4M3."""

    def __init__(self, **options):
        self.steps = []

    tensor = Port

    def sdpa_fp8(self, *, attn_scale, use_causal_mask, generate_stats, **ports):
        assert generate_stats
        return self.operation(sdpa_fp8, 4, ports, use_causal_mask, attn_scale)

    def sdpa_fp8_backward(self, *, attn_scale, use_causal_mask, **ports):
        return self.operation(sdpa_fp8_backward, 7, ports, use_causal_mask, attn_scale)

    def operation(self, compute, count, ports, *options):
        self.ports, self.outputs = ports, [Port() for _ in range(count)]
        self.compute = lambda x: compute(x, *options)
        return self.outputs

    def __getattr__(self, step):
        return lambda *_: self.steps.append(step)

    def get_workspace_size(self):
        return 16

    def execute(self, pack, workspace, handle):
        assert self.steps == [
            "validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans",
        ]  # fmt: skip
        assert handle == {"stream": 7}
        for port, x in pack.items():
            assert tuple(x.shape) == tuple(port.dim)
            assert x.stride() == tuple(port.stride) or x.numel() == 1
            assert x.dtype == (E4M3 if port.data_type is Types.FP8_E4M3 else torch.float32)
            assert x.data_ptr() % 16 == 0
        for port, value in zip(self.outputs, self.compute({n: pack[x] for n, x in self.ports.items()}), strict=True):
            assert port.output
            pack[port].copy_(value)


@pytest.fixture
def fp8(monkeypatch):
    """cudnn_fp8 over a made-up cudnn; nothing is compiled."""
    made_up = ModuleType("cudnn")
    made_up.data_type, made_up.heur_mode = Types, SimpleNamespace(A="A", FALLBACK="B")
    made_up.create_handle, made_up.pygraph = dict, Graph
    made_up.set_stream = lambda handle, stream: handle.update(stream=stream)
    monkeypatch.setitem(sys.modules, "cudnn", made_up)
    monkeypatch.setattr(cudnn_fp8, "_current_stream", lambda: 7)
    monkeypatch.setattr(cudnn_fp8, "compiled", lambda function: function)
    monkeypatch.setattr(cudnn_fp8.passes_of.__wrapped__, "__defaults__", ("cpu",))
    for cached in (cudnn_fp8._handle, cudnn_fp8.passes_of):
        cached.cache_clear()
    yield PEERS["cudnn_fp8"].required().attention
    for cached in (cudnn_fp8._handle, cudnn_fp8.passes_of):
        cached.cache_clear()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", [lambda x: x, heads_last], ids=["contiguous", "heads last"])
def test_fp8_is_right_up_to_its_rounding_from_the_first_call(fp8, inputs, is_causal, layout):
    query, key, value, grad_output = inputs(96, 96, 128, dtype=torch.bfloat16, heads=4, kv_heads=4)
    query, key, value, grad_output = layout(query), layout(key), layout(5 * value), 1e-4 * grad_output
    exact_leaves = [x.double().requires_grad_() for x in (query, key, value)]
    exact = F.scaled_dot_product_attention(*exact_leaves, is_causal=is_causal)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, grad_output.double())
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = fp8(*leaves, is_causal=is_causal)
        assert output.dtype == torch.bfloat16
        gradients = torch.autograd.grad(output, leaves, grad_output)
        for found, expected in zip((output, *gradients), (exact, *exact_gradients), strict=True):
            assert 0.005 < relative_l2(found, expected) < 0.1


def test_a_later_call_does_not_change_the_scales_of_an_earlier_one(fp8, inputs):
    """Two forward passes, the second with values 100 times as large, then the first one's backward pass."""
    query, key, value, grad_output = inputs(64, 64, 128, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    first = fp8(*leaves, is_causal=False)
    alone = torch.autograd.grad(first, leaves, grad_output, retain_graph=True)
    for _ in range(2):
        fp8(query, key, 100 * value, is_causal=False)
    for found, expected in zip(torch.autograd.grad(first, leaves, grad_output), alone, strict=True):
        assert relative_l2(found, expected) < 0.03


def test_quantising_keeps_the_largest_entry_and_zeros_and_what_a_peer_lacks_is_named(inputs):
    """PyTorch's own lack nothing."""
    x = 1e3 * torch.randn(2, 3, 8, 128)
    found, descale = quantise(x)
    assert found.float().abs().max() == LARGEST
    assert relative_l2(dequantise(found, descale, torch.float32), x) < 0.04
    assert not dequantise(*quantise(torch.zeros(1, 1, 2, 128)), torch.float32).any()
    with pytest.raises(ValueError, match="head_dim: expected 128, got 64"):
        cudnn_fp8.cudnn_fp8(*inputs(16, 16, 64)[:3], False)
    assert PEERS["sdpa_cudnn"].required() is PEERS["sdpa_cudnn"]
    with pytest.raises(ImportError, match="^its-package: ModuleNotFoundError: No module named"):
        PEERS["fa4"]._replace(package="its-package", module="no_module_of_this_name").required()
