"""What a user of sparse attention gets: `sage_ref.sparse_linear_attention` and its peers on one mask, timed in turn.

Peers: PyTorch's SDPA with FlashAttention-2 and with cuDNN over all blocks; FlexAttention and FlashAttention-4 with the
same mask (softmax branch only). The mask chooses blocks of 128 keys, which those two need in their backward passes; to
our kernels, whose blocks have 64, a block of 128 is two. Two masks: "random", and "skewed", where every query also
selects the first key block, so that one list of dK and dV is as long as the sequence.

TOPS = 4 B H Nq Nk D (1 - sparsity) / seconds forward, 2.5 times that backward: the softmax branch's operations.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
from sage_kernels.sla2.ops import forward_level
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from torch import Tensor

import sage_ref
from sage_lab.bench.contenders import OPERATIONS, OURS, Absent, Contender, turn
from sage_lab.bench.sla2_case import DENSE_PEERS, Case, Shape
from sage_lab.bench.sparse_peers import PEER_BLOCK_KV, SPARSE_PEERS
from sage_ref.sla2 import selected_count, top_blocks

SPARSITY = 0.97
MASKS = ("random", "skewed")
SHAPES = tuple(Shape(1, 12, n, 128) for n in (4096, 8192, 16384, 32760))


def draw_mask(shape: Shape, kind: str, device: torch.device) -> Tensor:
    """bool [B, H, Tm, ceil(N / 128)]: as many blocks of 128 keys per row as SPARSITY says, drawn at random."""
    rows, columns = triton.cdiv(shape.n, MASK_BLOCK_Q), triton.cdiv(shape.n, PEER_BLOCK_KV)
    scores = torch.rand(shape.batch, shape.heads, rows, columns, device=device)
    if kind == "skewed":
        scores[..., 0] = 2  # above all others
    return top_blocks(scores, selected_count(SPARSITY, columns))


def bench_shape(shape: Shape, absent: Absent | None = None) -> Iterator[dict]:
    """Rows of one shape, both masks. absent: where missing peers are noted."""
    absent = absent or Absent()
    for kind in MASKS:
        torch.compiler.reset()  # it gives up after eight shapes
        yield from mask_rows(Case(shape, SPARSITY), kind, absent)


def mask_rows(case: Case, kind: str, absent: Absent) -> Iterator[dict]:
    wide_mask = draw_mask(case.shape, kind, case.alpha.device)
    case.count = PEER_BLOCK_KV // MASK_BLOCK_KV * selected_count(SPARSITY, wide_mask.shape[-1])
    where = case.where | {"mask": kind}
    make = {f"{OURS}, {name}": partial(ours, case, wide_mask, name == "INT8") for name in ("INT8", "16 bit")}
    for provider in absent.present((*DENSE_PEERS, *SPARSE_PEERS), where):
        make[provider] = partial(case.peer_contender, provider, wide_mask, PEER_BLOCK_KV)
    found = absent.tried(make, where)
    for direction in OPERATIONS:
        make = {name: partial(contender.entry, direction) for name, contender in found.items()}
        entries = absent.tried(make, where | {"direction": direction})
        yield from turn(entries, partial(case.row, "autograd", direction, mask=kind))


def ours(case: Case, wide_mask: Tensor, quantize: bool) -> Contender:
    """The function with its softmax branch in INT8 or in 16 bit."""
    block_mask = case.narrow(wide_mask, PEER_BLOCK_KV)
    options = {"quantize": quantize, "backend": "triton"}
    level = forward_level(case.alpha.device, case.shape.head_dim, quantize)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sage_ref.sparse_linear_attention(query, key, value, block_mask, case.alpha, **options)

    return case.contender(OURS, attention, case.judge(block_mask), "sla2", level)
