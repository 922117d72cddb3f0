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
from sage_lab.bench.case import Case, Shape
from sage_lab.bench.cudnn_fp8 import LARGEST, dequantise, quantise
from sage_lab.bench.judge import worst_error
from sage_lab.bench.peers import PEERS

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


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_right_on_a_gpu(name):
    """`Case.peer` compares it; then a call with larger values comes before an earlier one's backward pass."""
    case = Case(Shape(1, 4, 4, 512, 128, causal=True))
    try:
        peer = case.peer(name)
    except ImportError as missing:
        pytest.skip(str(missing))
    query, key, value = peer.leaves
    output = peer.attention(query, key, value)
    peer.attention(query, key, 100 * value)
    gradients = torch.autograd.grad(output, peer.leaves, peer.grad_output)
    worst_error((output.detach(), *gradients), case.exact, peer.largest_error)


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
