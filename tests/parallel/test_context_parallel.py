"""Context parallel over gloo in 2 and 4 processes: outputs and gradients are those of one process.

Bit for bit: Ulysses, where no head's keys go to several processes. With float64 to its rounding: the ring, whose
algebra is exact and whose blocks are one process's if a shard has whole ones. Else to what rounding does, as said where
a tolerance stands.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from process_cases import run_together

from sage_ref import SLA2, sagebwd_attention
from sage_ref.parallel import ParallelSLA2, local_tokens, parallel_sagebwd_attention, ulysses
from sage_ref.parallel.exchange import ranks_of
from sage_ref.parallel.ulysses import whole_sequences
from sage_ref.tracing import relative_l2
from sage_ref.training.pretrain import processes

COUNTS = (2, 4)
NAMES = ("O", "dQ", "dK", "dV")


class Case(NamedTuple):
    n_q: int
    n_k: int
    heads: int = 4
    kv_heads: int = 4
    dtype: torch.dtype = torch.float32
    batch: int = 1
    method: str = "auto"
    head_dim: int = 16
    options: dict = {}  # noqa: RUF012

    def inputs(self):
        """Q, K, V, dO, and an offset of the keys, so that smoothing matters."""
        generator = torch.Generator().manual_seed(1)
        lengths = (self.heads, self.n_q), (self.kv_heads, self.n_k), (self.kv_heads, self.n_k), (self.heads, self.n_q)
        q, k, v, do = (
            torch.randn(self.batch, *shape, self.head_dim, generator=generator, dtype=torch.float64) for shape in lengths
        )
        return [x.to(self.dtype) for x in (q, k + 4 * torch.randn(self.head_dim, generator=generator), v, do)]

    def one(self):
        return passes(partial(sagebwd_attention, **self.arguments), *self.inputs())

    def parallel(self):
        attention = partial(parallel_sagebwd_attention, method=self.method, **self.arguments)
        return passes(attention, *(local_tokens(x) for x in self.inputs()))

    @property
    def arguments(self):
        return {"enable_gqa": True, "backend": "reference"} | self.options


CAUSAL = {"is_causal": True}
ULYSSES = {
    "blocks across processes": Case(300, 300, options=CAUSAL),
    "other lengths": Case(132, 204, batch=2),
    "16 bit": Case(132, 132, dtype=torch.bfloat16, options=CAUSAL | {"smooth_q": True}),
    "printed scales": Case(260, 260, heads=8, options={"granularity": "block", "scale": 0.3, "smooth_k": False}),
}
# Keys that several processes need: the gradients of their copies are added up, in 16 bit rounded once more.
COPIED = {
    "one key head": Case(132, 132, kv_heads=1, dtype=torch.float64, options=CAUSAL),
    "three of twelve": Case(132, 132, heads=12, kv_heads=3, dtype=torch.float64, batch=2),
    "16 bit": Case(132, 132, kv_heads=1, dtype=torch.bfloat16),
}
RING = {
    "one head": Case(512, 512, heads=1, kv_heads=1),
    "causal": Case(512, 512, heads=1, kv_heads=1, options=CAUSAL),
    "groups": Case(512, 512, heads=3, kv_heads=1, batch=2, options=CAUSAL | {"smooth_q": True}),
    "other lengths": Case(512, 1024, heads=1, kv_heads=1, options={"granularity": "block", "scale": 0.3}),
    "asked for": Case(512, 512, heads=4, kv_heads=2, method="ring", options={"smooth_k": False}),
}
SHORT_SHARDS = Case(400, 400, heads=1, kv_heads=1, dtype=torch.float64)
SLA2_CASES = {
    f"stage {stage}, {alphas} alphas": (stage, alphas, kv_heads)
    for stage, alphas, kv_heads in ((1, 1, 4), (2, 1, 4), (2, 4, 2))
}


def passes(attention, query, key, value, grad_output):
    q, k, v = (x.detach().clone().requires_grad_() for x in (query, key, value))
    output = attention(q, k, v)
    output.backward(grad_output)
    return tuple(x.detach().contiguous() for x in (output, q.grad, k.grad, v.grad))


def sla2(kind, stage, alphas):
    torch.manual_seed(3)
    model = kind(16, 4, sparsity=0.5, block_q=32, block_kv=16, query_blocks=alphas, backend="reference").stage(stage)
    with torch.no_grad():
        model.alpha_logit.normal_()
        model.router.proj_q.weight.normal_()
    return model


def sla2_passes(kind, stage, alphas, kv_heads, share=lambda x: x):
    model, case = sla2(kind, stage, alphas), Case(128, 192, kv_heads=kv_heads)
    found = passes(model, *map(share, case.inputs()))
    projections = [x.grad for x in model.router.parameters() if x.grad is not None]
    return found, [model.alpha_logit.grad, *projections]


def initialized_alpha(kind, share=lambda x: x):
    model = sla2(kind, 2, 1)
    query, key, *_ = Case(128, 192).inputs()
    model.initialize_alpha(share(query), share(key))
    return model.alpha_logit.detach().clone()


def seen(attention):
    """What `attention` makes, and the shapes and layout that the inner one gets."""
    shapes = []

    def watched(q, k, v):
        shapes.append((tuple(q.shape), tuple(k.shape), q.stride(1) < q.stride(2)))
        return q

    case = Case(8, 12, heads=8, kv_heads=2)
    q, k, v, _ = (local_tokens(x) for x in case.inputs())
    back = attention(watched, q, k, v)
    return shapes, back.equal(q)


def errors():
    """name -> what a mistake raises in this process; all processes make it."""
    rank, count = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = (local_tokens(x) for x in Case(8, 8).inputs())
    other = q[:, :, : 1 + (rank > 0)]
    first = dist.new_group([0])
    mistakes = {
        "heads": lambda: parallel_sagebwd_attention(q[:, :1], k[:, :1], v[:, :1], method="ulysses"),
        "heads of any attention": lambda: ulysses(lambda *x: x[0], q[:, :1], k[:, :1], v[:, :1]),
        "heads of SLA2": lambda: ParallelSLA2(16, 1)(q[:, :1], k[:, :1], v[:, :1]),
        "tokens": lambda: local_tokens(torch.ones(1, 1, 2 * count + 1, 4)),
        "dimension": lambda: local_tokens(torch.ones(4, 4), 2),
        "lengths": lambda: parallel_sagebwd_attention(other, other, other, backend="reference"),
        "causal ring": lambda: parallel_sagebwd_attention(q[:, :1], q[:, :1, :1], q[:, :1, :1], **CAUSAL, method="ring"),
        "method": lambda: parallel_sagebwd_attention(q, k, v, method="spiral"),
        "member": lambda: ranks_of(first if rank else "all"),
    }
    found = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            found[name] = "nothing"
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Model(torch.nn.Module):
    """Projections, SageBwd and SLA2 in turn, a loss per token."""

    def __init__(self, sagebwd, kind):
        super().__init__()
        self.project, self.sagebwd = torch.nn.Linear(32, 96), sagebwd
        self.sla2 = kind(8, 4, sparsity=0.5, block_q=16, block_kv=16, backend="reference")

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = self.sagebwd(q, k, v, is_causal=True, backend="reference")
        return self.sla2(x, k, v).transpose(1, 2).flatten(2).square().mean()


def model_gradients(sagebwd, kind, share, wrap):
    torch.manual_seed(5)
    model = wrap(Model(sagebwd, kind))
    model(share(torch.randn(2, 64, 32))).backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.sla2)
    return fully_shard(model)


WRAPS = {
    "ddp": torch.nn.parallel.DistributedDataParallel,
    "fsdp": sharded,
    "compiled ddp": lambda model: torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="aot_eager")),
}


def everything(folder):
    """What this process finds, in a file."""
    with processes("cpu"):
        found = {("ulysses", name): case.parallel() for name, case in ULYSSES.items()}
        found |= {("copied", name): case.parallel() for name, case in COPIED.items()}
        for name, case in RING.items():
            for dtype in (torch.float64, torch.bfloat16):
                found["ring", name, dtype] = case._replace(dtype=dtype).parallel()
        found["short shards"] = SHORT_SHARDS.parallel()
        for name, arguments in SLA2_CASES.items():
            found["sla2", name] = sla2_passes(ParallelSLA2, *arguments, share=local_tokens)
        found["alpha"] = initialized_alpha(ParallelSLA2, local_tokens)
        share = partial(local_tokens, dim=1)
        for name, wrap in WRAPS.items():
            found["model", name] = model_gradients(parallel_sagebwd_attention, ParallelSLA2, share, wrap)
        found["seen"], found["errors"] = seen(ulysses), errors()
        found["keys that go round"] = whole_sequences(ranks_of(None), *(torch.ones(1, 12, 3, 1), torch.ones(1, 3, 3, 1)))
        torch.save(found, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module", params=COUNTS)
def found(request, tmp_path_factory):
    """What each process finds."""
    folder = tmp_path_factory.mktemp("processes")
    run_together(folder, everything, folder, count=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def together(found, *name):
    """The processes' tokens, side by side."""
    return [torch.cat(parts, 2) for parts in zip(*(one[name] for one in found), strict=True)]
