"""Attention that a user could choose instead of our kernels: over all keys, or with the mask that ours has.

Layouts are in the strides: a peer whose own layout is [B, N, H, D] gets and returns views. A masked peer computes the
softmax over the selected blocks, no linear branch; every selected block is full. Its forward pass takes blocks of 64
keys, its backward pass needs blocks of 128.
"""

import functools
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from sage_lab.bench import cudnn_fp8
from sage_lab.bench.judge import LARGEST_ERROR
from sage_lab.bench.measure import Case, Provider, Run, by_autograd
from sage_lab.bench.problem import PEER_BLOCK_KV
from sage_ref.backend import why_not_importable


def require(package: str, module: str) -> None:
    """Raise ImportError, with a reason in one line, if a package can't be imported."""
    if reason := why_not_importable(package, module):
        raise ImportError(reason)


def sdpa(case: Case, backend: SDPBackend) -> Run:
    """Run PyTorch's scaled_dot_product_attention with one backend; choosing it is part of the call."""
    shape = case.problem.shape

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            is_grouped = shape.heads != shape.kv_heads
            return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=is_grouped)

    return by_autograd(case, attention)


FA4 = "flash-attn-4", "flash_attn.cute"  # its package, and its module


def flash_attention_4(case: Case, **options: object) -> Run:
    """Run FlashAttention-4, the fastest 16-bit attention on Hopper and Blackwell: it gets views [B, N, H, D].

    options: further arguments of its own `flash_attn_func`.
    """
    require(*FA4)
    attention, is_causal = import_module(FA4[1]).flash_attn_func, case.problem.shape.causal

    def compute(*heads_first: Tensor) -> Tensor:
        found = attention(*(x.transpose(1, 2) for x in heads_first), causal=is_causal, **options)
        output = found[0] if isinstance(found, tuple) else found  # newer versions return the log-sum-exp too
        return output.transpose(1, 2)

    return by_autograd(case, compute)


def fp8(case: Case) -> Run:
    """Run cuDNN's attention in 8-bit floats."""
    require(cudnn_fp8.PACKAGE, cudnn_fp8.MODULE)
    return by_autograd(case, partial(cudnn_fp8.cudnn_fp8, is_causal=case.problem.shape.causal))


def flex(case: Case) -> Run:
    """Run FlexAttention, which PyTorch compiles for one mask and shape."""
    shape, device = case.problem.shape, case.problem.query.device
    mask = _causal_blocks(shape.n, device) if shape.causal else None
    return by_autograd(case, partial(compiled_flex(), block_mask=mask, enable_gqa=shape.heads != shape.kv_heads))


def sage_attention(case: Case) -> Run:
    """Run SageAttention's forward pass; it has no other. It smooths the keys that it is given in place: a copy."""
    require("sageattention", "sageattention")
    if case.direction != "fwd":
        raise NotImplementedError("it has a forward pass alone")
    key, is_causal = case.problem.key.clone(), case.problem.shape.causal
    attention = import_module("sageattention").sageattn
    return by_autograd(case, lambda query, _, value: attention(query, key, value, is_causal=is_causal))


@functools.cache
def compiled_flex() -> Callable:
    """Return FlexAttention, compiled."""
    torch._functorch.config.donated_buffer = False  # else its backward pass runs once, and we time it many times
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=4)
def _causal_blocks(n: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda batch, head, q, k: q >= k, None, None, n, n, device=device)


def block_lists(block_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row selects, int32 [B, H, rows], and which, ascending, int32 [B, H, rows, columns].

    What follows the selected blocks in a list is not read.
    """
    counts = block_mask.sum(-1, dtype=torch.int32)
    order = block_mask.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts.contiguous(), order.contiguous()  # of a transposed mask, too


def flex_masked(case: Case) -> Run:
    """Run FlexAttention with the problem's block mask."""
    problem = case.problem
    counts, order = block_lists(problem.peer_mask)
    none = torch.zeros_like(counts), torch.zeros_like(order)
    size = {"BLOCK_SIZE": (MASK_BLOCK_Q, problem.peer_block_kv), "seq_lengths": (problem.shape.n, problem.shape.n)}
    return by_autograd(
        case, partial(compiled_flex(), block_mask=BlockMask.from_kv_blocks(*none, counts, order, **size))
    )


def fa4_masked(case: Case) -> Run:
    """Run FlashAttention-4 with the problem's block mask.

    It reads two lists: the key blocks of every query block, and, backward, the query blocks of every key block. It
    checks the last block of a list for the end of the sequence, so they must ascend.
    """
    require(*FA4)
    mask, block_kv = case.problem.peer_mask, case.problem.peer_block_kv
    lists_type = import_module(f"{FA4[1]}.block_sparsity").BlockSparseTensorsTorch

    def tensors(mask: Tensor):
        counts, order = block_lists(mask)
        return lists_type(
            mask_block_cnt=torch.zeros_like(counts),
            mask_block_idx=torch.zeros_like(order),
            full_block_cnt=counts,
            full_block_idx=order,
            block_size=(MASK_BLOCK_Q, block_kv),
        )

    backward = {"block_sparse_tensors_bwd": tensors(mask.mT)} if block_kv == PEER_BLOCK_KV else {}
    return flash_attention_4(case, block_sparse_tensors=tensors(mask), **backward)


def sla_triton(case: Case) -> Run:
    """Run the Triton kernels of SLA's authors, which FastVideo's package has: as many blocks in every list."""
    require(*FASTVIDEO)
    problem = case.problem
    counts, order = block_lists(problem.block_mask)
    count = int(counts.max())
    if (counts < count).any():
        raise NotImplementedError("it takes lists of one length")
    attention = import_module(f"{FASTVIDEO[1]}.triton_kernels.sla_triton")._attention.apply
    lists = problem.block_mask.to(torch.int8).contiguous(), order[..., :count].contiguous(), count
    return by_autograd(case, lambda *inputs: attention(*inputs, *lists, MASK_BLOCK_Q, MASK_BLOCK_KV))


def vsa(case: Case) -> Run:
    """Run VSA's kernels, which FastVideo's package has: for blocks of 64 queries and 64 keys, all of them full."""
    require(*FASTVIDEO)
    shape = case.problem.shape
    if shape.n % MASK_BLOCK_KV:
        raise NotImplementedError(f"it takes a multiple of {MASK_BLOCK_KV} tokens")
    blocks = shape.n // MASK_BLOCK_KV
    mask = case.problem.block_mask.repeat_interleave(MASK_BLOCK_Q // MASK_BLOCK_KV, -2)[:, :, :blocks]
    counts, order = block_lists(mask)
    sizes = torch.full((blocks,), MASK_BLOCK_KV, dtype=torch.int32, device=counts.device)
    attention = import_module(FASTVIDEO[1]).block_sparse_attn_from_indices
    return by_autograd(case, lambda *inputs: attention(*inputs, order, counts, sizes)[0])


FASTVIDEO = "fastvideo-kernel", "fastvideo_kernel"
PEERS = (
    Provider("sdpa_flash", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)),
    Provider("sdpa_cudnn", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
    Provider("fa4", flash_attention_4),
    # With 3 bits after the point E4M3's own errors are up to twice as large as INT8's.
    Provider("cudnn_fp8", fp8, largest_error=2 * LARGEST_ERROR),
    Provider("flex", flex),
    Provider("sageattention", sage_attention),
)
MASKED_PEERS = (
    Provider("fa4", fa4_masked, "masked"),
    Provider("flex", flex_masked, "masked"),
    Provider("sla_triton", sla_triton, "masked"),
    Provider("vsa", vsa, "masked"),
)
EVERY_BLOCK = PEERS[:2]  # those to which problems with a mask are given without it
