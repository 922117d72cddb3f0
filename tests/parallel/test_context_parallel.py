"""Context parallel over gloo in two processes: outputs and gradients are those of one process.

Bit for bit with the kernels. In float64 to its rounding, which no INT8 grid sees: all else, since PyTorch's matmuls on
CPU add up in an order that depends on where a tensor lies.
"""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from process_cases import run_together
from sage_lab.training.processes import processes
from torch.nn.functional import scaled_dot_product_attention

from sage_ref import SLA2, sagebwd_attention
from sage_ref.parallel import ParallelSLA2, local_tokens, ulysses
from sage_ref.tracing import relative_l2

COUNT = 2
REFERENCE = {"backend": "reference", "enable_gqa": True}


class Case(NamedTuple):
    n_q: int
    n_k: int
    heads: int = 4
    kv_heads: int = 4
    dtype: torch.dtype = torch.float64
    head_dim: int = 16
    options: dict = REFERENCE

    def inputs(self):
        """Q, K, V, dO, and an offset of the keys, so that smoothing matters."""
        generator = torch.Generator().manual_seed(1)
        lengths = (self.heads, self.n_q), (self.kv_heads, self.n_k), (self.kv_heads, self.n_k), (self.heads, self.n_q)
        q, k, v, do = (
            torch.randn(2, *shape, self.head_dim, generator=generator, dtype=torch.float64) for shape in lengths
        )
        return [x.to(self.dtype) for x in (q, k + 4 * torch.randn(self.head_dim, generator=generator), v, do)]

    def one(self):
        return passes(partial(sagebwd_attention, **self.options), *self.inputs())

    def parallel(self):
        attention = partial(ulysses, partial(sagebwd_attention, **self.options))
        return passes(attention, *map(local_tokens, self.inputs()))


CASES = {
    "scales across processes": Case(300, 300, options=REFERENCE | {"is_causal": True, "unbiased": True}),
    "other lengths, three key heads for twelve": Case(132, 204, heads=12, kv_heads=3),
}
KERNELS = Case(  # interpreted, so as short as can be
    40, 40, heads=2, kv_heads=2, dtype=torch.float16, head_dim=32, options={"backend": "triton", "is_causal": True}
)
SLA2_CASES = {"stage 1": (1, 1, 4), "stage 2, four alphas, one key head": (2, 4, 1)}


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


def errors():
    """name -> what a mistake raises in this process; all processes make it."""
    rank, first = dist.get_rank(), dist.new_group([0])
    q, k, v, _ = (local_tokens(x) for x in Case(8, 8).inputs())
    other = q[:, :, : 1 + rank]
    mistakes = {
        "heads": lambda: ulysses(sagebwd_attention, q[:, :1], k[:, :1], v[:, :1]),
        "tokens": lambda: local_tokens(torch.ones(1, 1, 5, 4)),
        "lengths": lambda: ulysses(sagebwd_attention, other, other, other),
        "NaN": lambda: ParallelSLA2(16, 4).initialize_alpha(q * (math.nan if rank == 0 else 1), k),
        "member": lambda: local_tokens(q, group=first),
    }
    found = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            found[name] = "nothing"
        except ValueError as error:
            found[name] = f"ValueError: {error}"
    return found


def compiled():
    """An attention of ours would take seconds to compile, and says no more of what is sent between the graphs."""

    def doubled(query, key, value):
        return 2 * ulysses(scaled_dot_product_attention, 2 * query, key, value)

    return passes(torch.compile(doubled, backend="eager"), *map(local_tokens, Case(8, 12).inputs()))


def everything(folder, interpreted):
    """What this process finds, in a file."""
    with processes("cpu"):
        found = {name: case.parallel() for name, case in CASES.items()}
        for name, arguments in SLA2_CASES.items():
            found[name] = sla2_passes(ParallelSLA2, *arguments, share=local_tokens)
        found["alpha"] = initialized_alpha(ParallelSLA2, local_tokens)
        found["errors"] = errors()
        found["compiled"] = compiled()
        if interpreted:
            import sage_kernels.common.interpreter  # noqa: F401

            found["kernels"] = KERNELS.parallel()
        torch.save(found, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process finds."""
    folder = tmp_path_factory.mktemp("processes")
    run_together(folder, everything, folder, not torch.cuda.is_available(), count=COUNT)
    return [torch.load(folder / f"{rank}.pt") for rank in range(COUNT)]


def assert_close(of_processes, expected, tolerance):
    """O, dQ, dK, dV, with the processes' tokens side by side."""
    together = [torch.cat(parts, 2) for parts in zip(*of_processes, strict=True)]
    for name, x, y in zip(("O", "dQ", "dK", "dV"), together, expected, strict=True):
        assert relative_l2(x, y) <= tolerance, name


@pytest.mark.parametrize("name", CASES)
def test_sagebwd_gives_what_one_process_does(found, name):
    assert_close([one[name] for one in found], CASES[name].one(), 1e-14)


@pytest.mark.no_gpu
def test_the_kernels_give_the_bits_of_one_process(found):
    assert_close([one["kernels"] for one in found], KERNELS.one(), 0)


@pytest.mark.parametrize("name", SLA2_CASES)
def test_sla2_gives_what_one_process_does_and_its_parameters_gradients_add_up(found, name):
    expected, of_parameters = sla2_passes(SLA2, *SLA2_CASES[name])
    assert_close([one[name][0] for one in found], expected, 1e-14)
    for number, gradient in enumerate(of_parameters):
        parts = [one[name][1][number] for one in found]
        torch.testing.assert_close(sum(parts), gradient, rtol=1e-5, atol=1e-6)  # parameters are float32
    alphas = torch.stack([one[name][1][0] for one in found])
    assert (alphas != 0).any(-1).sum(0).eq(1).all()  # each head's has come from one process


def test_alpha_starts_at_the_mass_of_whole_sequences(found):
    for one in found:
        torch.testing.assert_close(one["alpha"], initialized_alpha(SLA2), rtol=1e-6, atol=0)


def test_compiled_code_sends_between_two_graphs(found):
    expected = passes(lambda q, k, v: 2 * scaled_dot_product_attention(2 * q, k, v), *Case(8, 12).inputs())
    assert_close([one["compiled"] for one in found], expected, 1e-14)


def test_every_process_is_told_of_a_mistake(found):
    expected = {
        "heads": "ValueError: query: expected a number of heads that 2 processes divide, got 1",
        "tokens": "ValueError: x: expected a number of tokens that 2 processes divide, got 5 along dimension -2",
        "lengths": "ValueError: query, key: expected the same shapes in every process, "
        "got [2, 4, 1, 16], [2, 4, 1, 16] in process 0 and [2, 4, 2, 16], [2, 4, 2, 16] in process 1 of the group",
        "NaN": "ValueError: query: expected finite numbers, at most 1e+15, got nan",
        "member": "ValueError: group: expected one with this process, got one without process 1",
    }
    assert found[1]["errors"] == expected
    assert found[0]["errors"] == expected | {"member": "nothing"}


@pytest.mark.parametrize(
    "call", [lambda x: ulysses(sagebwd_attention, x, x, x), lambda x: ParallelSLA2(8, 2)(x, x, x), local_tokens]
)
def test_without_processes_the_error_says_how_to_start_them(call):
    with pytest.raises(ValueError, match="group: expected processes that share the sequence .*torchrun.*, got none"):
        call(torch.randn(1, 2, 4, 8))
