"""What the kernel tests share: where they run, cases, and what the oracles say of a case.

G is exact attention in float64, S the reference simulating the same quantisation in float32, E attention as PyTorch's
16-bit operations compute it. On a GPU cases have full sizes and both 16-bit types; elsewhere Triton's interpreter runs
a few small ones in float16 (its bfloat16 matmul returns garbage).
"""

import fcntl
import math
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from sage_kernels.common.quantize import SCALE_BLOCK
from sage_kernels.sagebwd import ops
from sage_kernels.sagebwd.ladder import (
    BACKWARD_LEVELS,
    FORWARD_LEVELS,
    obstacle,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)

from sage_ref.attention import AttentionBackward, attention_forward, causal_mask, softmax_scale
from sage_ref.quantization import fake_quantize, quantize
from sage_ref.sagebwd import MATMULS, SageBwdSettings, sagebwd_backward, sagebwd_forward, smooth
from sage_ref.sagebwd.settings import UNBIASED_SETTINGS
from sage_ref.smoothing import key_mean_scores, smooth_key

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The levels that run here: those of Hopper's need that GPU.
FORWARD = [level for level, chosen in enumerate(FORWARD_LEVELS) if obstacle(chosen, DEVICE, 64) is None]
BACKWARD = [level for level, chosen in enumerate(BACKWARD_LEVELS) if obstacle(chosen, DEVICE, 128) is None]
EXACT_MATMULS = (MATMULS, ("dP", "O"))  # of forward levels 0 and 1; in the others dP alone is in 16 bit
ONE_PASS, DQ_APART = 5, 6  # the backward levels that keep P and dS in float16; the second not for dQ
STRETCH = 2.0**15  # of that P
PER_BLOCK = 2  # the backward level with one scale per tile of P and dS; level 0 is in 16 bit, others scale by rows
# For pytestmark: on a GPU every test of a module runs there. The interpreter warns where a GPU just computes NaN.
MARKS = [pytest.mark.gpu] * ON_GPU + [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]


def case_name(case: NamedTuple, what: str) -> str:
    """Shape, `what`, dtype, and of the fields after the dtype those that aren't the default."""
    name = f"{case.n_q}x{case.n_k}-{what}-{str(case.dtype).removeprefix('torch.')}"
    values, defaults = case._asdict(), case._field_defaults
    return "-".join(
        [name, *(f"{field}={values[field]}" for field in case._fields[7:] if values[field] != defaults[field])]
    )


def drawn_tensors(case: NamedTuple, generator: torch.Generator) -> list[Tensor]:
    """Gaussian Q, K, V, dO in float32; Q and K of size `std`, and every key `key_offset` times one vector away."""
    q_shape = (case.batch, case.heads, case.n_q, case.head_dim)
    kv_shape = (case.batch, case.kv_heads, case.n_k, case.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape, case.head_dim)
    q, k, v, do, offset = (torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)
    return [q * case.std, k * case.std + offset * case.key_offset, v, do]


class Case(NamedTuple):
    n_q: int
    n_k: int
    head_dim: int = 64
    heads: int = 2
    kv_heads: int = 2
    is_causal: bool = False
    dtype: torch.dtype = torch.float16
    batch: int = 1
    scale: float | None = None
    smooth_k: bool = True
    std: float = 1.0  # of Q and K
    key_offset: float = 0.0  # times one random vector, added to every key
    ramp: float = 0.0  # added to Q, and growing from -ramp to ramp to K: scores rise from key to key
    value_blocks: tuple[float, ...] = ()  # times each block of SCALE_BLOCK values
    value_offset: float = 0.0  # added to every value
    unbiased: bool = False

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return case_name(self, f"D{self.head_dim}-{self.heads}of{self.kv_heads}-{mask}")

    @property
    def c(self) -> float:
        return softmax_scale(self.scale, self.head_dim)

    @property
    def prepared(self) -> dict:
        """Keywords of `prepare_forward`."""
        return {"scale": self.c, "smooth_k": self.smooth_k, "unbiased": self.unbiased}

    @property
    def options(self) -> dict:
        """Keywords of `run_forward` and `run_backward`."""
        return {"is_causal": self.is_causal, "scale": self.c}


# What decides how a kernel is compiled, every pair of values at least once: D, causal or not, dtype.
COMPILED = (
    (32, True, torch.float16), (32, False, torch.bfloat16), (64, True, torch.float16), (64, False, torch.bfloat16),
    (96, False, torch.float16), (96, True, torch.bfloat16), (128, True, torch.float16), (128, False, torch.bfloat16),
)  # fmt: skip
SHAPES = ((1, 1), (3, 3), (64, 1), (113, 203), (239, 1), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048))
KV_HEADS = (8, 2, 1)  # of 8 heads: one each, grouped 4:1, all together
if ON_GPU:
    CASES = [
        Case(*shape, head_dim, 8, KV_HEADS[(i + j) % 3], is_causal, dtype)
        for (i, shape), (j, (head_dim, is_causal, dtype)) in product(enumerate(SHAPES), enumerate(COMPILED))
    ]
else:
    CASES = [
        Case(1, 1, 32),
        Case(3, 3, 128, 8, 2, is_causal=True, batch=2),
        Case(64, 1, 64),
        Case(113, 203, 32, 4, 2),
        Case(203, 113, 64, 2, 1, is_causal=True),
        Case(113, 203, 96, 1, 1, is_causal=True),
        Case(128, 128, 64, is_causal=True),
        Case(70, 90, 80),
    ]
# Two tiles of queries and of keys, partial ones; shared keys. A level of Hopper's needs a head size of more than 32.
SMALL = Case(150, 140, 64 if ON_GPU else 32, 2, 1, is_causal=True)
OPTIONS = [
    SMALL._replace(scale=0.3),
    SMALL._replace(scale=-0.2),
    SMALL._replace(scale=0.0),
    SMALL._replace(smooth_k=False),
    SMALL._replace(key_offset=3.0),
    SMALL._replace(unbiased=True, value_offset=3.0),
    Case(113, 203, 96, 1, 1, unbiased=True),
]

# Four blocks of values; some are zeros, or next to nothing beside others.
VALUE_BLOCKS = [
    Case(300, 4 * SCALE_BLOCK - 12, 64, *([2, 2] if ON_GPU else [1, 1]), is_causal, value_blocks=blocks)
    for blocks in ((0, 1, 0, 1), (1, 1e-4, 1e-3, 1)) for is_causal in (False, True)
]  # fmt: skip
if ON_GPU:
    VALUE_BLOCKS += [
        Case(300, 4 * SCALE_BLOCK - 12, is_causal=is_causal, value_blocks=blocks, dtype=torch.bfloat16)
        for blocks in ((1, 1e-15, 1, 1e-15), (1e12, 1e4, 1, 1e-8), (1e-8, 1, 1e4, 1e12)) for is_causal in (False, True)
    ]  # fmt: skip


class Forward(NamedTuple):
    inputs: object  # ForwardInputs
    output: Tensor
    log_sum_exp: Tensor


@lru_cache(maxsize=4)
def draw(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seeded Gaussian Q, K, V, dO."""
    q, k, v, do = drawn_tensors(case, torch.Generator(DEVICE).manual_seed(case.n_q + case.n_k))
    q, k = q + case.ramp, k + torch.linspace(-case.ramp, case.ramp, case.n_k, device=DEVICE)[:, None]
    if case.value_blocks:
        v *= torch.tensor(case.value_blocks, device=DEVICE).repeat_interleave(SCALE_BLOCK)[: case.n_k, None]
    return tuple(x.to(case.dtype) for x in (q, k, v + case.value_offset, do))


def takes(level: int, case: Case, levels=FORWARD_LEVELS) -> bool:
    """Whether level `level` of a ladder can run a case here."""
    unable = levels is FORWARD_LEVELS and case.unbiased and not levels[level].takes_unbiased
    return not unable and obstacle(levels[level], DEVICE, case.head_dim) is None


def run_forward_level(case: Case, level: int, tensors=None, **launch) -> Forward:
    if not takes(level, case):
        pytest.skip(f"forward level {level} doesn't take {case}")
    query, key, value, _ = tensors or draw(case)
    inputs = prepare_forward(query, key, value, level, **case.prepared)
    return Forward(inputs, *run_forward(inputs, level, **case.options, **launch))


def run_backward_level(case: Case, level: int, tensors=None, forward: Forward | None = None) -> tuple[Tensor, ...]:
    """dQ, dK, dV of backward level `level` after the forward level that feeds it."""
    if not takes(level, case, BACKWARD_LEVELS):
        pytest.skip(f"backward level {level} doesn't take head size {case.head_dim}")
    query, key, value, grad_output = tensors or draw(case)
    inputs, output, log_sum_exp = forward or forward_level(case, feeding(level, case))
    options = {name: getattr(inputs, name) for name in ("q_hat", "k_hat", "v_range")} | {"is_causal": case.is_causal}
    prepared = prepare_backward(grad_output, query, key, value, output, log_sum_exp, level, **options)
    return run_backward(prepared, level, **case.options)


forward_level = lru_cache(maxsize=12)(run_forward_level)
backward_level = lru_cache(maxsize=12)(run_backward_level)


def feeding(backward_level: int, case: Case) -> int:
    """The forward level whose O, L, Q^ and K^ a backward level gets."""
    return ops.forward_level(DEVICE, case.head_dim) if backward_level else 0


def shared(case: Case, x: Tensor) -> Tensor:
    """K or V repeated for the query heads that share it."""
    return x.repeat_interleave(case.heads // case.kv_heads, dim=1)


def summed(case: Case, x: Tensor) -> Tensor:
    """Gradients of the repeated K or V summed over those heads."""
    return x.unflatten(1, (case.kv_heads, -1)).sum(2)


@lru_cache(maxsize=2)
def exact(case: Case) -> tuple[Tensor, ...]:
    """G: O, dQ, dK, dV in float64."""
    query, key, value, grad_output = (x.double() for x in draw(case))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = attention_forward(query, shared(case, key), shared(case, value), **case.options).output
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


@lru_cache(maxsize=2)
def eager(case: Case) -> tuple[Tensor, ...]:
    """E: O, dQ, dK, dV as PyTorch's 16-bit matmuls and softmax give them."""
    query, key, value, grad_output = draw(case)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    scores = leaves[0] @ shared(case, leaves[1]).mT * case.c
    if case.is_causal:
        scores = scores.masked_fill(~causal_mask(case.n_q, case.n_k, DEVICE), -math.inf)
    output = torch.softmax(scores, -1) @ shared(case, leaves[2])
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


def settings(case: Case, **options) -> SageBwdSettings:
    plain = SageBwdSettings(is_causal=case.is_causal, scale=case.scale, smooth_k=case.smooth_k, **options)
    return replace(plain, **UNBIASED_SETTINGS) if case.unbiased else plain


@lru_cache(maxsize=12)
def simulated_forward(case: Case, level: int) -> tuple[Tensor, Tensor]:
    """S: O and L (natural, of the unsmoothed scores) of a forward level; level 0 quantises nothing."""
    query, key, value, _ = (x.float() for x in draw(case))
    options = settings(case, exact_matmuls=EXACT_MATMULS[level] if level < 2 else ("dP",))
    output, log_sum_exp, _ = sagebwd_forward(query, shared(case, key), shared(case, value), options)
    return output, log_sum_exp


def natural_log_sum_exp(case: Case, level: int) -> Tensor:
    """A forward level's L [B, H, Nq]: from log2 to natural, from the smoothed scores to the scores themselves."""
    query, key, _, _ = draw(case)
    log_sum_exp = forward_level(case, level).log_sum_exp[..., : case.n_q] * math.log(2)
    if level == 0 or not case.smooth_k:
        return log_sum_exp
    _, mean = smooth_key(shared(case, key).float())
    return log_sum_exp + key_mean_scores(query.float(), mean, case.c).squeeze(-1)


@lru_cache(maxsize=12)
def simulated_backward(case: Case, level: int) -> tuple[Tensor, ...]:
    """S: dQ, dK, dV of an INT8 backward level, from the kernel's own O and L, so that one pass is judged alone."""
    query, key, value, grad_output = (x.float() for x in draw(case))
    forward = forward_level(case, feeding(level, case))
    gradients = sagebwd_backward(
        grad_output, query, shared(case, key), shared(case, value),
        forward.output.float(), natural_log_sum_exp(case, feeding(level, case)),
        settings(case, granularity="block" if level == PER_BLOCK else "row"),
    )  # fmt: skip
    if level in (ONE_PASS, DQ_APART):
        of_pairs = one_pass_gradients(case, gradients)
        gradients = of_pairs if level == ONE_PASS else of_pairs._replace(grad_query=gradients.grad_query)
    return gradients.grad_query, summed(case, gradients.grad_key), summed(case, gradients.grad_value)


def one_pass_gradients(case: Case, gradients: AttentionBackward) -> AttentionBackward:
    """P, dP - delta and their product in float16, each times a power of two."""
    query, key, value, grad_output = (x.float() for x in draw(case))
    q, k = smooth(query, shared(case, key), settings(case))[:2]
    q, do = (fake_quantize(x, (SCALE_BLOCK, None)).double() for x in (q, grad_output))
    k = fake_quantize(k, (SCALE_BLOCK, None)).double()
    fit = fits(case, value, grad_output)
    p = in_float16(gradients.probabilities * STRETCH)
    ds = in_float16(p * in_float16((gradients.grad_probabilities - gradients.delta) * fit))
    factor = case.c / (STRETCH * fit).double()
    dq = rounded_rows(ds) @ k * factor
    dk = (factor * rounded_rows(ds.mT).mT).mT @ q
    dv = rounded_rows(p.mT) / STRETCH @ do
    return gradients._replace(grad_query=dq.float(), grad_key=dk.float(), grad_value=dv.float())


def fits(case: Case, value: Tensor, grad_output: Tensor) -> Tensor:
    """The power of two [B, H, Nq, 1] by which dP - delta of a block of queries surely fits in float16."""
    largest_do = 127 * quantize(grad_output, (SCALE_BLOCK, None)).scale  # [B, H, blocks, 1]
    n_k, blocks = -(-case.n_k // SCALE_BLOCK), largest_do.shape[2]
    v = torch.nn.functional.pad(shared(case, value).abs().amax(-1), (0, n_k * SCALE_BLOCK - case.n_k))
    largest_v = v.unflatten(-1, (n_k, SCALE_BLOCK)).amax(-1).cummax(-1).values  # of a block of keys and all before it
    last = torch.full((blocks,), n_k - 1, device=DEVICE)  # that these queries see
    if case.is_causal:
        last = last.minimum(torch.arange(blocks, device=DEVICE))
    largest_v = largest_v[..., last, None]
    bound = (2 * case.head_dim * largest_do.double() * largest_v).clamp(1e-30, 1e37)
    return torch.exp2(torch.floor(1 - bound.log2())).float().repeat_interleave(SCALE_BLOCK, 2)[:, :, : case.n_q]


def in_float16(x: Tensor) -> Tensor:
    """Rounded to float16 and kept within it."""
    return x.clamp(-65504, 65504).half().float()


def rounded_rows(x: Tensor) -> Tensor:
    """float16 numbers x [..., R, C] on an INT8 grid per row and 128 columns, whose inverse scale / 64 is a float16."""
    tiles = torch.nn.functional.pad(x, (0, -x.shape[-1] % SCALE_BLOCK)).unflatten(-1, (-1, SCALE_BLOCK))
    largest = tiles.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-15)
    inverse = 64 * (127 / 64 / largest).half().double()
    return ((tiles.double() * inverse).round() / inverse).flatten(-2)[..., : x.shape[-1]]


def distance(x: Tensor, y: Tensor) -> float:
    return (x.double() - y.double()).norm().item()


def assert_simulated(case: Case, found: Tensor, simulated: Tensor, allowed: Tensor | float = 0.0) -> None:
    """Relative L2 against S at most 2e-3; what is zero but for rounding is held against dO's size instead."""
    simulated = simulated.to(case.dtype).float()
    error, limit = distance(found, simulated), 2e-3 * simulated.norm() + 1e-5 * draw(case)[3].norm() + allowed
    assert error <= limit, f"{error:.3g} from what the reference computes, {limit:.3g} allowed"


def assert_as_good_as_eager(case: Case, found: Tensor, exact: Tensor, eager: Tensor) -> None:
    """Error against G at most twice E's, plus the dtype's rounding."""
    size = max(exact.norm(), 1e-2 * draw(case)[3].norm())
    assert distance(found, exact) <= 2 * distance(eager, exact) + torch.finfo(case.dtype).eps * size


def assert_forward(case: Case, level: int, output: Tensor) -> None:
    """The oracle's verdict on a forward level's O."""
    if level == 0:
        assert_as_good_as_eager(case, output, exact(case)[0], eager(case)[0])
    else:
        # S keeps P of level 1 in float32; the kernel rounds it to 16 bit, as eager attention does.
        in_16_bit = distance(eager(case)[0], exact(case)[0]) if level == 1 else 0.0
        assert_simulated(case, output, simulated_forward(case, level)[0], in_16_bit)


def assert_forward_by_blocks(case: Case, level: int, output: Tensor) -> None:
    """As `assert_forward` of an INT8 level, for every block of queries: small rows don't hide behind large ones.

    A block scatters more than a whole tensor.
    """
    simulated = simulated_forward(case, level)[0].to(case.dtype)
    for rows, expected in zip(output.split(SCALE_BLOCK, 2), simulated.split(SCALE_BLOCK, 2), strict=True):
        assert distance(rows, expected) <= 3e-3 * expected.double().norm()


def assert_backward(case: Case, level: int, gradients: tuple[Tensor, ...]) -> None:
    """The oracle's verdict on a backward level's dQ, dK, dV."""
    if level == 0:
        for found, g, e in zip(gradients, exact(case)[1:], eager(case)[1:], strict=True):
            assert_as_good_as_eager(case, found, g, e)
    else:
        for found, simulated in zip(gradients, simulated_backward(case, level), strict=True):
            assert_simulated(case, found, simulated)


def all_equal(results, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


class Calls(TorchDispatchMode):
    """The names of PyTorch's operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Constant(torch.autograd.Function):
    """x, through which no gradient flows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


GUARD = 1 << 14  # elements on either side of a tensor


def guarded(x: Tensor, fill: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(a view equal to x into a larger buffer, the two parts of the buffer around it, full of `fill`)."""
    buffer = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
    view = buffer[GUARD:-GUARD].view(x.shape).copy_(x)
    return view, (buffer[:GUARD], buffer[-GUARD:])


@contextmanager
def guarded_allocations() -> Iterator[list[Tensor]]:
    """Inside, new tensors start out as NaN (77 in integers) between two guards; afterwards these must be untouched."""
    guards = []
    owners = {"empty": torch, "empty_like": torch, "new_empty": Tensor}

    def allocator(original):
        def allocate(*arguments, **options):
            x = original(*arguments, **options)
            if x.numel() == 0:
                return x
            view, around = guarded(x.fill_(math.nan if x.is_floating_point() else 77), 55)
            guards.extend(around)
            return view

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for name, owner in owners.items():
            patch.setattr(owner, name, allocator(getattr(owner, name)))
        yield guards
    assert guards
    for guard in guards:
        assert (guard == guard.new_full((), 55)).all()


def fill_cache(jobs: list[tuple]) -> None:
    """Call every (function, *arguments) in parallel processes: what they compile stays in Triton's cache.

    One after the other, the compilations would take most of the tests' time. Errors are left for the tests to meet.
    Of several workers of pytest the first to come does it for all, one module at a time: each process has a share
    of the GPU's memory.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process {os.getpid()}")
    modules = Path(tempfile.gettempdir()) / f"sage_kernels_compiled_{run}"
    with modules.open("a+") as compiled:
        fcntl.flock(compiled, fcntl.LOCK_EX)
        compiled.seek(0)
        work = f"{len(jobs)} {[(job[0].__name__, *job[1:]) for job in jobs[:1]]}\n"
        if work in compiled.read():
            return
        with ProcessPoolExecutor(min(12, os.cpu_count()), mp_context=get_context("spawn")) as pool:
            wait([pool.submit(*job) for job in jobs])
        compiled.write(work)
