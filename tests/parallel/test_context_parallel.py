"""Context parallel over gloo in 2 and 4 processes: outputs and gradients are those of one process.

Bit for bit: Ulysses with the kernels. In float64 to its rounding, which no INT8 grid sees: all else,
since PyTorch's matmuls on CPU add up in an order that depends on where a tensor lies, and the ring in an order of its
own. In 16 bit: the rounding of parts that are added up, and here and there a number that falls to the other side of a
step of its INT8 grid.
"""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from process_cases import run_together
from sage_lab.training.processes import processes
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from sage_ref import SLA2, sagebwd_attention
from sage_ref.parallel import ParallelSLA2, local_tokens, parallel_sagebwd_attention, ulysses
from sage_ref.parallel.exchange import ranks_of
from sage_ref.parallel.shards import RingOptions
from sage_ref.tracing import relative_l2

COUNTS = (2, 4)
NAMES = ("O", "dQ", "dK", "dV")


class Case(NamedTuple):
    n_q: int
    n_k: int
    heads: int = 4
    kv_heads: int = 4
    dtype: torch.dtype = torch.float64
    batch: int = 1
    method: str = "auto"
    head_dim: int = 16
    options: dict = {}  # noqa: RUF012

    def inputs(self):
        """Q, K, V, dO, and an offset of the keys, so that smoothing matters."""
        generator = torch.Generator().manual_seed(1)
        lengths = (self.heads, self.n_q), (self.kv_heads, self.n_k), (self.kv_heads, self.n_k), (self.heads, self.n_q)
        q, k, v, do = (
            torch.randn(self.batch, *shape, self.head_dim, generator=generator, dtype=torch.float64)
            for shape in lengths
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
    "other lengths": Case(132, 204, batch=2, options={"smooth_q": True}),
    "printed scales": Case(260, 260, heads=8, options={"granularity": "block", "scale": 0.3, "smooth_k": False}),
    "unbiased": Case(260, 260, options=CAUSAL | {"unbiased": True}),
    "one key head for all": Case(132, 132, kv_heads=1, options=CAUSAL),
    "three key heads for twelve": Case(132, 132, heads=12, kv_heads=3, batch=2),
}
RING = {
    "one head": Case(512, 512, heads=1, kv_heads=1),
    "causal": Case(512, 512, heads=1, kv_heads=1, options=CAUSAL),
    "groups": Case(512, 512, heads=3, kv_heads=1, batch=2, options=CAUSAL | {"smooth_q": True}),
    "other lengths": Case(512, 1024, heads=1, kv_heads=1, options={"granularity": "block", "scale": 0.3}),
    "asked for": Case(512, 512, heads=4, kv_heads=2, method="ring", options={"smooth_k": False}),
}
DTYPES = (torch.float64, torch.bfloat16)
KERNELS = {  # interpreted, so as short as can be
    "ulysses": Case(40, 40, heads=2, kv_heads=2, dtype=torch.float16, head_dim=32, options=CAUSAL),
    "ring": Case(140, 260, heads=2, kv_heads=1, dtype=torch.float16, head_dim=32),
    "causal ring": Case(140, 140, heads=1, kv_heads=1, dtype=torch.float16, head_dim=32, options=CAUSAL),
}
TRITON = {"backend": "triton"}
HOSTS = Case(512, 512, kv_heads=2, options=CAUSAL)
SHORT_SHARDS = Case(400, 400, heads=1, kv_heads=1)
SLA2_CASES = {
    f"stage {stage}, {alphas} alphas": (stage, alphas, kv_heads)
    for stage, alphas, kv_heads in ((1, 1, 4), (2, 1, 4), (2, 4, 2))
}


def passes(attention, query, key, value, grad_output):
    q, k, v = (x.detach().clone().requires_grad_() for x in (query, key, value))
    output = attention(q, k, v)
    output.backward(grad_output)
    return tuple(x.detach().contiguous() for x in (output, q.grad, k.grad, v.grad))


def by_hosts():
    """Ulysses in each of two hosts with two processes, and a ring between the hosts, as the book advises."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    between, inside = (mesh[name].get_group() for name in mesh.mesh_dim_names)
    ring = partial(parallel_sagebwd_attention, method="ring", group=between, **HOSTS.arguments)
    return passes(partial(ulysses, ring, group=inside), *(local_tokens(x) for x in HOSTS.inputs()))


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


def errors():
    """name -> what a mistake raises in this process; all processes make it."""
    rank, count = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = (local_tokens(x) for x in Case(8, 8).inputs())
    other = q[:, :, : 1 + (rank > 0)]
    first = dist.new_group([0])
    mistakes = {
        "heads": lambda: parallel_sagebwd_attention(q[:, :1], k[:, :1], v[:, :1], method="ulysses"),
        "heads of SLA2": lambda: ParallelSLA2(16, 1)(q[:, :1], k[:, :1], v[:, :1]),
        "tokens": lambda: local_tokens(torch.ones(1, 1, 2 * count + 1, 4)),
        "lengths": lambda: parallel_sagebwd_attention(other, other, other, backend="reference"),
        "causal ring": lambda: parallel_sagebwd_attention(
            q[:, :1], q[:, :1, :1], q[:, :1, :1], **CAUSAL, method="ring"
        ),
        "unbiased ring": lambda: parallel_sagebwd_attention(q[:, :1], k[:, :1], v[:, :1], unbiased=True),
        "method": lambda: parallel_sagebwd_attention(q, k, v, method="spiral"),
        "NaN": lambda: ParallelSLA2(16, 4).initialize_alpha(q * (math.nan if rank == 0 else 1), k),
        "member": lambda: ranks_of(first),
        "kind": lambda: ranks_of("all"),
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


def model_gradients(sagebwd, kind, share=lambda x: x, wrap=lambda model: model):
    torch.manual_seed(5)
    model = wrap(Model(sagebwd, kind))
    model(share(torch.randn(2, 64, 32))).backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.sla2)
    return fully_shard(model)


WRAPS = {"ddp": torch.nn.parallel.DistributedDataParallel, "fsdp": sharded}


def doubled(attention, query, key, value):
    return 2 * attention(2 * query, key, value)


def compiled():
    """An attention of ours would take seconds to compile, and says no more of what is sent between the graphs."""
    attention = partial(ulysses, scaled_dot_product_attention)
    tensors = map(local_tokens, Case(8, 12).inputs())
    return passes(torch.compile(partial(doubled, attention), backend="eager"), *tensors)


def value_bounds():
    """The bound of V that the kernels' backward pass gets, where process 1 has larger values than process 0."""
    from sage_kernels.sagebwd import ring

    ranks, x = ranks_of(None), torch.ones(1, 1, 4, 32, dtype=torch.float16)
    bounds = []
    for is_causal in (False, True):
        options = RingOptions(is_causal, 1.0, smooth_k=True, smooth_q=False, granularity="row")
        _, for_backward = ring.prepare(x, x, x * (1 + 4 * ranks.rank), ranks, options)
        bounds.append(round(127 * for_backward.here[-1].item(), 3))
    return bounds


def everything(folder):
    """What this process finds, in a file."""
    with processes("cpu"):
        found = {("ulysses", name): case.parallel() for name, case in ULYSSES.items()}
        for name, case in RING.items():
            found |= {("ring", name, dtype): case._replace(dtype=dtype).parallel() for dtype in DTYPES}
        found["short shards"] = SHORT_SHARDS.parallel()
        for name, arguments in SLA2_CASES.items():
            found["sla2", name] = sla2_passes(ParallelSLA2, *arguments, share=local_tokens)
        found["alpha"] = initialized_alpha(ParallelSLA2, local_tokens)
        share = partial(local_tokens, dim=1)
        for name, wrap in WRAPS.items():
            found["model", name] = model_gradients(parallel_sagebwd_attention, ParallelSLA2, share, wrap)
        found["errors"] = errors()
        if dist.get_world_size() == 2:  # both take seconds
            import sage_kernels.common.interpreter  # noqa: F401

            found["compiled"] = compiled()
            found["bounds"] = value_bounds()
            for name, case in KERNELS.items():
                case = case._replace(method=name.split()[-1])
                found["reference", name] = case.parallel()
                found["kernels", name] = case._replace(options=case.options | TRITON).parallel()
        else:
            found["hosts"] = by_hosts()
        torch.save(found, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module", params=COUNTS)
def found(request, tmp_path_factory):
    """What each process finds."""
    folder = tmp_path_factory.mktemp("processes")
    run_together(folder, everything, folder, count=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def together(found, name):
    """O, dQ, dK, dV with the processes' tokens side by side."""
    return [torch.cat(parts, 2) for parts in zip(*(one[name] for one in found), strict=True)]


def distances(found, expected):
    return {name: relative_l2(*pair) for name, pair in zip(NAMES, zip(found, expected, strict=True), strict=True)}


def assert_close(found, expected, tolerance):
    for name, distance in distances(found, expected).items():
        assert distance <= tolerance, name


@pytest.mark.parametrize("name", ULYSSES)
def test_ulysses_gives_what_one_process_does(found, name):
    assert_close(together(found, ("ulysses", name)), ULYSSES[name].one(), 1e-14)


@pytest.mark.parametrize("name", RING)
def test_the_ring_gives_what_one_process_does(found, name):
    """In bfloat16, whose sums here are float32's: 1e-3, a quarter of what a step of bfloat16 may be wrong by."""
    for dtype, tolerance in zip(DTYPES, (1e-13, 1e-3), strict=True):
        assert_close(together(found, ("ring", name, dtype)), RING[name]._replace(dtype=dtype).one(), tolerance)


@pytest.mark.parametrize("found", [4], indirect=True)
def test_ulysses_inside_hosts_calls_a_ring_between_them(found):
    assert_close(together(found, "hosts"), HOSTS.one(), 1e-13)


def test_shards_without_whole_blocks_quantise_otherwise_and_as_well(found):
    """Errors against exact attention: 5% more than one process's at most. Blocks that end earlier are less."""
    case, exact = SHORT_SHARDS, passes(scaled_dot_product_attention, *SHORT_SHARDS.inputs())
    ring, one = together(found, "short shards"), case.one()
    assert min(distances(ring, one).values()) > 1e-3
    for name, error in distances(ring, exact).items():
        assert error < 1.05 * distances(one, exact)[name], name


@pytest.mark.parametrize("name", SLA2_CASES)
def test_sla2_gives_what_one_process_does_and_its_parameters_gradients_add_up(found, name):
    expected, of_parameters = sla2_passes(SLA2, *SLA2_CASES[name])
    tensors = [torch.cat(parts, 2) for parts in zip(*(one["sla2", name][0] for one in found), strict=True)]
    assert_close(tensors, expected, 1e-14)
    for number, gradient in enumerate(of_parameters):
        parts = [one["sla2", name][1][number] for one in found]
        torch.testing.assert_close(sum(parts), gradient, rtol=1e-5, atol=1e-6)  # parameters are float32
    alphas = torch.stack([one["sla2", name][1][0] for one in found])
    assert (alphas != 0).any(-1).sum(0).eq(1).all()  # each head's has come from one process


def test_alpha_starts_at_the_mass_of_whole_sequences(found):
    for one in found:
        torch.testing.assert_close(one["alpha"], initialized_alpha(SLA2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", WRAPS)
def test_a_model_under_ddp_and_fsdp_gets_the_gradients_of_one_process(found, name):
    expected = model_gradients(sagebwd_attention, SLA2)
    for one in found:
        for parallel, single in zip(one["model", name], expected, strict=True):
            assert relative_l2(parallel, single) < 1e-5


@pytest.mark.parametrize("found", [2], indirect=True)
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_give_what_the_reference_does_and_with_ulysses_the_bits_of_one_process(found, name):
    """4e-3, as for the kernels in one process; the interpreter is mended here as it is there."""
    both = together(found, ("kernels", name))
    assert_close(both, together(found, ("reference", name)), 4e-3)
    if name == "ulysses":
        expected = KERNELS[name]._replace(options=KERNELS[name].options | TRITON).one()
        assert all(x.equal(y) for x, y in zip(both, expected, strict=True))


@pytest.mark.parametrize("found", [2], indirect=True)
def test_the_backward_pass_knows_how_large_all_visible_values_are(found):
    """Level 5 keeps dP - delta in float16, of which delta has met the values of all shards."""
    assert [one["bounds"] for one in found] == [[5, 1], [5, 5]]


@pytest.mark.parametrize("found", [2], indirect=True)
def test_compiled_code_sends_between_two_graphs(found):
    expected = passes(partial(doubled, scaled_dot_product_attention), *Case(8, 12).inputs())
    assert_close(together(found, "compiled"), expected, 1e-14)


def test_every_process_is_told_of_a_mistake(found):
    count = len(found)
    divide = f"ValueError: query: expected a number of heads that {count} processes divide, got 1"
    tokens = f"ValueError: x: expected a number of tokens that {count} processes divide, got {2 * count + 1} along"
    expected = {
        "heads": divide, "heads of SLA2": divide, "tokens": tokens,
        "lengths": "ValueError: query, key: expected as many queries in every process, got 1 in process 0 and 2 in",
        "causal ring": f"ValueError: key: expected as many keys as queries for a causal ring, {8 // count}, got 1",
        "unbiased ring": "ValueError: unbiased: expected False in a ring, which rounds P to nearest, got True",
        "method": "ValueError: method: expected one of ('auto', 'ulysses', 'ring'), got 'spiral'",
        "NaN": "ValueError: query: expected finite numbers",
        "member": "ValueError: group: expected one with this process, got one without process ",
        "kind": "TypeError: group: expected a torch.distributed.ProcessGroup or None, got str",
    }  # fmt: skip
    for one in found[1:]:
        assert one["errors"].keys() == expected.keys()
        for name, text in expected.items():
            assert one["errors"][name].startswith(text), name
    assert {name for name in expected if found[0]["errors"][name] == "nothing"} == {"member"}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: parallel_sagebwd_attention(x, x, x), lambda x: ulysses(sagebwd_attention, x, x, x),
        lambda x: ParallelSLA2(8, 2)(x, x, x), local_tokens,
    ],
)  # fmt: skip
def test_without_processes_the_error_says_how_to_start_them(call):
    with pytest.raises(ValueError, match="group: expected processes that share the sequence .*torchrun.*, got none"):
        call(torch.randn(1, 2, 4, 8))
