"""The peers: on a GPU as they are; on a CPU FlashAttention-4 is made up, and computes in plain PyTorch."""

import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from sage_kernels.sla2.routing import MASK_BLOCK_Q
from sage_lab.bench import cudnn_fp8, peers
from sage_lab.bench.cudnn_fp8 import LARGEST, dequantise, quantise
from sage_lab.bench.judge import RESULTS, worst_error
from sage_lab.bench.measure import Case, judged
from sage_lab.bench.peers import MASKED_PEERS, PEERS
from sage_lab.bench.problem import MaskedProblem, Problem, Shape
from sage_lab.bench.timing import Gpu

from sage_ref.tracing import relative_l2


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


class Cpu(Gpu):
    device, dtype = "cpu", torch.float32


def seen(block_mask, block_kv, n):
    return block_mask.repeat_interleave(MASK_BLOCK_Q, -2).repeat_interleave(block_kv, -1)[..., :n, :n]


@pytest.fixture
def fa4_calls(monkeypatch):
    """Arguments of the calls of a made-up flash_attn.cute, whose tensors are [B, N, H, D]."""
    calls = []

    def flash_attn_func(q, k, v, causal=False, block_sparse_tensors=None, **options):
        calls.append({"q": q, "lists": block_sparse_tensors, **options})
        lists, heads_first = block_sparse_tensors, (x.transpose(1, 2) for x in (q, k, v))
        mask = None if lists is None else seen(lists.dense(), lists.block_size[1], q.shape[1])
        output = F.scaled_dot_product_attention(*heads_first, is_causal=causal, attn_mask=mask, enable_gqa=True)
        return output.transpose(1, 2), None

    cute, lists = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")
    cute.flash_attn_func, lists.BlockSparseTensorsTorch = flash_attn_func, Lists
    for made_up in (ModuleType("flash_attn"), cute, lists):
        monkeypatch.setitem(sys.modules, made_up.__name__, made_up)
    return calls


def provider(name, providers=PEERS):
    return next(x for x in providers if x.name == name)


@pytest.mark.no_gpu
@pytest.mark.parametrize(("mask", "block_kv"), [("router", 64), ("random", 128)])
@pytest.mark.parametrize("name", ["flex", "fa4"])
def test_sparse_peers_see_the_mask_and_nothing_else(fa4_calls, mask, block_kv, name, monkeypatch):
    """Three blocks of queries, the last one shorter; one list backward, where there is a backward pass."""

    def flex(query, key, value, block_mask):
        n = query.shape[2]
        assert block_mask.seq_lengths == (n, n)
        mask = seen(block_mask.to_dense().bool(), block_mask.BLOCK_SIZE[1], n)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    monkeypatch.setattr(peers, "compiled_flex", lambda: flex)
    problem = MaskedProblem(Shape(1, 2, 2, 300, 16), 0.5, mask, Cpu())
    assert problem.peer_block_kv == block_kv
    _, error = judged(Case(problem, "fwd"), provider(name, MASKED_PEERS))
    assert error < 1e-5
    if name == "fa4":
        (call,) = fa4_calls
        assert (call["lists"].dense() == problem.peer_mask).all()
        assert call["lists"].mask_block_cnt.sum() == 0
        backward = call.get("block_sparse_tensors_bwd")
        assert (backward is None) == (block_kv == 64)
        assert backward is None or (backward.dense() == problem.peer_mask.mT).all()


@pytest.mark.gpu
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_is_right_on_a_gpu(peer):
    """Also if a call with larger values comes between the two passes; SageAttention has the first alone."""
    problem, larger = (Problem(Shape(1, 4, 4, 512, 128, causal=True)) for _ in range(2))
    larger.inputs = larger.query, larger.key, 100 * larger.value
    direction, results = ("fwd", slice(1)) if peer.name == "sageattention" else ("bwd", slice(1, 4))
    try:
        run, _ = judged(Case(problem, direction), peer)
    except ImportError as missing:
        pytest.skip(str(missing))
    peer.of(Case(larger, "fwd"))(larger.grad_output)
    worst_error(run(), problem.exact("attention")[results], peer.largest_error, RESULTS[results])


@pytest.mark.gpu
@pytest.mark.parametrize("peer", MASKED_PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("mask", ["router", "random"])
def test_a_peer_with_a_mask_is_right_on_a_gpu(peer, mask):
    tokens = 1024 if peer.name == "vsa" else 1000  # VSA takes whole blocks alone
    problem = MaskedProblem(Shape(1, 2, 2, tokens, 128), 0.75, mask)
    for direction in ("fwd", "bwd") if mask == "random" else ("fwd",):
        try:
            judged(Case(problem, direction), peer)
        except ImportError as missing:
            pytest.skip(str(missing))


def test_quantising_keeps_the_largest_entry_and_zeros_and_what_a_peer_lacks_is_named(inputs):
    """PyTorch's own lack nothing."""
    x = 1e3 * torch.randn(2, 3, 8, 128)
    found, descale = quantise(x)
    assert found.float().abs().max() == LARGEST
    assert relative_l2(dequantise(found, descale, torch.float32), x) < 0.04
    assert not dequantise(*quantise(torch.zeros(1, 1, 2, 128)), torch.float32).any()
    with pytest.raises(ValueError, match="head_dim: expected 128, got 64"):
        cudnn_fp8.cudnn_fp8(*inputs(16, 16, 64)[:3], False)
    with pytest.raises(ImportError, match="^its-package: ModuleNotFoundError: No module named"):
        peers.require("its-package", "no_module_of_this_name")
