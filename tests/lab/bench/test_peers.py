"""The peers on the CPU: their packages are made up, and compute what is asked of them in plain PyTorch."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from layouts import heads_last
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from sage_lab.bench import cudnn_fp8, sparse_peers
from sage_lab.bench.cudnn_fp8 import E4M3, LARGEST, dequantise, quantise
from sage_lab.bench.peers import PEERS
from sage_lab.models.flash_attention_4 import flash_attention_4

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.tracing import relative_l2


class Lists(NamedTuple):
    """FlashAttention-4's type of the same name, by its public fields."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]

    def dense(self):
        """bool [B, H, rows, columns]. Its lists ascend, and the rest of a list is never read."""
        mask = torch.zeros(self.full_block_idx.shape, dtype=torch.bool)
        for place in torch.cartesian_prod(*(torch.arange(size) for size in mask.shape[:3])).tolist():
            listed = self.full_block_idx[tuple(place)][: self.full_block_cnt[tuple(place)]]
            assert listed.tolist() == sorted(listed.tolist())
            mask[tuple(place)][listed.long()] = True
        return mask


@pytest.fixture
def fa4_calls(monkeypatch):
    """Arguments of the calls of a made-up flash_attn.cute, whose tensors are [B, N, H, D] and which returns a tuple."""
    calls = []

    def flash_attn_func(q, k, v, causal=False, block_sparse_tensors=None, **options):
        calls.append({"q": q, "lists": block_sparse_tensors, **options})
        seen = None
        if block_sparse_tensors is not None:
            block_q, block_kv = block_sparse_tensors.block_size
            mask = block_sparse_tensors.dense().repeat_interleave(block_q, -2).repeat_interleave(block_kv, -1)
            seen = mask[..., : q.shape[1], : k.shape[1]]
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        output = F.scaled_dot_product_attention(*heads_first, is_causal=causal, attn_mask=seen, enable_gqa=True)
        return output.transpose(1, 2), None

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.cute, module.flash_attn_func = module, flash_attn_func
    lists = ModuleType("flash_attn.cute.block_sparsity")
    lists.BlockSparseTensorsTorch = Lists
    for made_up in (package, module, lists):
        monkeypatch.setitem(sys.modules, made_up.__name__, made_up)
    return calls


def test_flash_attention_4_is_called_with_views(fa4_calls, inputs):
    query, key, value, _ = inputs(24, 24, 16, heads=4, kv_heads=2)
    output = PEERS["fa4"].attention(query, key, value, True)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, exact)
    assert fa4_calls[0]["q"].shape == (1, 24, 4, 16)
    assert fa4_calls[0]["q"].data_ptr() == query.data_ptr()


def test_flash_attention_4_may_return_a_tensor(fa4_calls, inputs, monkeypatch):
    returned = sys.modules["flash_attn.cute"].flash_attn_func
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", lambda *x, **more: returned(*x, **more)[0])
    query, key, value, _ = inputs(24, 24, 16)
    exact = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(flash_attention_4(query, key, value, is_causal=False), exact)


@pytest.mark.parametrize("block_kv", [64, 128])
def test_sparse_peers_see_the_mask_and_nothing_else(fa4_calls, inputs, block_kv, monkeypatch):
    """Three blocks of queries, the last one shorter; one list backward, where there is a backward pass."""

    def flex(query, key, value, block_mask):
        (block_q, block_kv), n = block_mask.BLOCK_SIZE, query.shape[2]
        assert block_mask.seq_lengths == (n, n)
        seen = block_mask.to_dense().bool().repeat_interleave(block_q, -2).repeat_interleave(block_kv, -1)[..., :n, :n]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    monkeypatch.setattr(sparse_peers, "compiled_flex", lambda: flex)
    n = 300
    query, key, value, _ = inputs(n, n, 16, dtype=torch.float32)
    columns = -(-n // block_kv)
    block_mask = torch.rand(1, 2, 3, columns) < 0.5
    block_mask[..., -1] = True
    seen = block_mask.repeat_interleave(MASK_BLOCK_Q, -2).repeat_interleave(block_kv, -1)[..., :n, :n]
    exact = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    for make in sparse_peers.SPARSE_PEERS.values():
        torch.testing.assert_close(make(block_mask, block_kv, n)(query, key, value), exact)
    (call,) = fa4_calls
    assert (call["lists"].dense() == block_mask).all()
    assert call["lists"].mask_block_cnt.sum() == 0
    backward = call.get("block_sparse_tensors_bwd")
    assert (backward is None) == (block_kv == 64)
    if backward is not None:
        assert (backward.dense() == block_mask.mT).all()
        assert backward.block_size == (128, 128)


def quantised(x, scale):
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)


class Port:
    """A tensor of a graph: what was said of it."""

    def __init__(self, **said):
        self.__dict__.update(said)

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value):
            setattr(self, name.removeprefix("set_"), value)
            return self

        return setter


class Graph:
    """cudnn.pygraph with its two operations for FP8, in float32 but for what enters and leaves in E4M3."""

    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        self.steps = []

    def tensor(self, name, dim, stride, data_type):
        return Port(name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa_fp8(self, q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, attn_scale,
                 use_causal_mask, generate_stats):  # fmt: skip
        assert generate_stats
        self.ports = dict(locals())
        self.outputs = [Port(), Port(), Port(), Port()]

        def compute(x):
            q, k, v = (x[name].float() * x[f"descale_{name}"] for name in "qkv")
            forward = attention_forward(q, k, v, is_causal=use_causal_mask, scale=attn_scale)
            p = (forward.scores - forward.log_sum_exp[..., None]).exp()
            # As the tensor cores read it: not normalised yet. What is reported is P.
            largest = p.amax(-1, keepdim=True)
            rounded = quantised(p / largest, x["scale_s"]).float() * x["descale_s"]
            output = (rounded * largest) @ v
            return quantised(output, x["scale_o"]), forward.log_sum_exp[..., None], p.max(), output.abs().max()

        self.compute = compute
        return self.outputs

    def sdpa_fp8_backward(
        self, q, k, v, o, dO, stats, descale_q, descale_k, descale_v, descale_o, descale_dO, descale_s, descale_dP,
        scale_s, scale_dQ, scale_dK, scale_dV, scale_dP, attn_scale, use_causal_mask,
    ):  # fmt: skip
        self.ports = dict(locals())
        self.outputs = [Port() for _ in range(7)]

        def compute(x):
            q, k, v, o, do = (x[name].float() * x[f"descale_{name}"] for name in ("q", "k", "v", "o", "dO"))
            options = {"is_causal": use_causal_mask, "scale": attn_scale}
            found = attention_backward(do, q, k, v, o, x["stats"][..., 0], **options)
            # dS as the tensor cores read it: wrong scales of the first calls show in dQ and dK.
            ds = quantised(found.grad_scores, x["scale_dP"]).float() * x["descale_dP"]
            gradients = {"dQ": attn_scale * ds @ k, "dK": attn_scale * ds.mT @ q, "dV": found.grad_value}
            rounded = [quantised(gradient, x[f"scale_{name}"]) for name, gradient in gradients.items()]
            largest = [gradient.abs().max() for gradient in (*gradients.values(), found.grad_scores)]
            return *rounded, *largest

        self.compute = compute
        return self.outputs

    def validate(self):
        self.steps.append("validate")

    def build_operation_graph(self):
        self.steps.append("graph")

    def create_execution_plans(self, modes):
        assert len(modes) == 2

    def check_support(self):
        self.steps.append("support")

    def build_plans(self):
        self.steps.append("plans")

    def get_workspace_size(self):
        return 16

    def execute(self, pack, workspace, handle):
        assert self.steps == ["validate", "graph", "support", "plans"]
        assert handle == "handle on stream 7"
        for port, x in pack.items():
            assert tuple(x.shape) == tuple(port.dim)
            assert x.stride() == tuple(port.stride) or x.numel() == 1
            assert x.dtype == (E4M3 if port.data_type is Types.FP8_E4M3 else torch.float32)
            assert x.data_ptr() % 16 == 0
        x = {name: pack[port] for name, port in self.ports.items() if isinstance(port, Port)}
        for port, value in zip(self.outputs, self.compute(x), strict=True):
            assert port.output
            pack[port].copy_(value)


Types = Enum("Types", "FLOAT FP8_E4M3")


@pytest.fixture
def fp8(monkeypatch):
    """cudnn_fp8 over a made-up cudnn; `compiled` and the caches are plain."""
    handle = {}

    def set_stream(of, stream):
        assert of is handle
        handle["stream"] = stream

    made_up = ModuleType("cudnn")
    made_up.data_type, made_up.heur_mode = Types, SimpleNamespace(A="A", FALLBACK="B")
    made_up.create_handle, made_up.set_stream = lambda: handle, set_stream

    def pygraph(**options):
        assert options["handle"] is handle
        graph = Graph(**options)
        execute = graph.execute
        graph.execute = lambda pack, workspace, handle: execute(pack, workspace, f"handle on stream {handle['stream']}")
        return graph

    made_up.pygraph = pygraph
    monkeypatch.setitem(sys.modules, "cudnn", made_up)
    monkeypatch.setattr(cudnn_fp8, "_current_stream", lambda: 7)
    monkeypatch.setattr(cudnn_fp8, "compiled", lambda function: function)
    made = {}

    def passes_of(*key):
        return made.setdefault(key, cudnn_fp8.Passes(*key, device="cpu"))

    monkeypatch.setattr(cudnn_fp8, "passes_of", passes_of)
    cudnn_fp8._handle.cache_clear()
    yield made
    cudnn_fp8._handle.cache_clear()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_fp8_is_right_up_to_its_rounding_from_the_first_call(fp8, inputs, is_causal, layout):
    query, key, value, grad_output = inputs(96, 96, 128, dtype=torch.bfloat16, heads=4, kv_heads=4)
    value, grad_output = 5 * value, 1e-4 * grad_output
    if layout == "bnhd":
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    exact_leaves = [x.double().requires_grad_() for x in (query, key, value)]
    exact = F.scaled_dot_product_attention(*exact_leaves, is_causal=is_causal)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, grad_output.double())
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = cudnn_fp8.cudnn_fp8(*leaves, is_causal)
        assert output.dtype == torch.bfloat16
        gradients = torch.autograd.grad(output, leaves, grad_output)
        for found, expected in zip((output, *gradients), (exact, *exact_gradients), strict=True):
            assert 0.005 < relative_l2(found, expected) < 0.1


def test_a_later_call_does_not_change_the_scales_of_an_earlier_one(fp8, inputs):
    """Two forward passes, the second with values 100 times as large, then the first one's backward pass."""
    query, key, value, grad_output = inputs(64, 64, 128, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    first = cudnn_fp8.cudnn_fp8(*leaves, False)
    alone = torch.autograd.grad(first, leaves, grad_output, retain_graph=True)
    for _ in range(2):
        cudnn_fp8.cudnn_fp8(query, key, 100 * value, False)
    for found, expected in zip(torch.autograd.grad(first, leaves, grad_output), alone, strict=True):
        assert relative_l2(found, expected) < 0.03


def test_fp8_takes_one_head_size(inputs):
    query, key, value, _ = inputs(16, 16, 64)
    with pytest.raises(ValueError, match="head_dim: expected 128, got 64"):
        cudnn_fp8.cudnn_fp8(query, key, value, False)


@pytest.mark.parametrize("layout", [lambda x: x, heads_last], ids=["contiguous", "heads last"])
def test_quantising_keeps_the_largest_entry_and_the_layout(layout):
    x = layout(1e3 * torch.randn(2, 3, 8, 128))
    rounded, descale = quantise(x)
    assert rounded.dtype == E4M3
    assert rounded.stride() == x.stride()
    assert rounded.float().abs().max() == LARGEST
    assert relative_l2(dequantise(rounded, descale, torch.float32), x) < 0.04
    zeros, descale = quantise(torch.zeros(1, 1, 2, 128))
    assert not dequantise(zeros, descale, torch.float32).any()
