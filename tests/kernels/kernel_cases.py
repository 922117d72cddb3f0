"""Cases, oracles and helpers of the kernel tests: where kernels run here, and SageBwd's oracles.

G is exact attention in float64. S is the reference, which simulates the same quantisation in float32. E is attention
as PyTorch's 16-bit operations compute it. On a GPU cases have full sizes and both 16-bit types. Elsewhere a few small
ones run in float16: Triton's programs in its interpreter (whose bfloat16 matmul returns garbage), and Hopper's programs
in our emulator. What a level computes of a case is computed between guards: its inputs are surrounded by NaN, and what
it allocates starts out as NaN.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from sage_kernels import hopper
from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.quantize import SCALE_BLOCK, padded_head_dim
from sage_kernels.common.tiles import TINY
from sage_kernels.sagebwd import ladder, ops
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_lab.emulator import OnCPU
from triton.experimental.gluon._runtime import GluonJITFunction

from sage_ref import Prologue
from sage_ref.attention import AttentionBackward, attention_forward, causal_mask, softmax_scale
from sage_ref.quantization import fake_quantize, quantize
from sage_ref.sagebwd import MATMULS, SageBwdSettings, sagebwd_backward, sagebwd_forward, smooth
from sage_ref.sagebwd.settings import UNBIASED_SETTINGS
from sage_ref.smoothing import key_mean_scores, smooth_key

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MULTIPROCESSORS = 2  # of the GPU that the emulator stands for
# For pytestmark: on a GPU every test of a module runs there. The interpreter warns where a GPU just computes NaN.
MARKS = [pytest.mark.gpu] * ON_GPU + [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning"),
]
on_the_cpu = pytest.mark.skipif(ON_GPU, reason="the GPU tests run the program itself")
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# Hopper's programs on the CPU


@contextmanager
def as_hopper() -> Iterator[None]:
    """Without a GPU, let Hopper's levels run inside: `emulated` starts their programs. On a GPU nothing changes."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            fits = lambda device, head_dim: None if padded_head_dim(head_dim) in hopper.HEAD_DIMS else "head size"  # noqa: E731
            patch.setattr(hopper, "obstacle", fits)
            sheet = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
            patch.setattr(torch.cuda, "get_device_properties", lambda device: sheet)
        yield


def emulated(seed: int = 0, slow_reads: bool = False, **names) -> Start:
    """Return what starts a program as Triton does, but Gluon programs on the CPU where there is no GPU.

    names: what some global names of a program's source mean instead. seed: who is ahead, of the groups of warps.
    slow_reads: of registers, from shared memory.
    """

    def start(program, *arguments):
        if isinstance(program, GluonJITFunction) and not ON_GPU:
            program = OnCPU(program, seed, slow_reads, **{"row_maximum": row_maximum, **names})
        return start_with_triton(program, *arguments)

    return start


def row_maximum(x):
    """Return the largest |x| of every row, passing over NaN as a GPU's maximum does."""
    return x.abs().nan_to_num(0.0, posinf=math.inf).amax(1).clamp(min=TINY.value)


def obstacle_here(level, head_dim: int) -> str | None:
    """Return why a level of a ladder can't run here, not even in the emulator, or None if it can."""
    with as_hopper():
        return ladder.obstacle(level, DEVICE, head_dim)


# Layouts: tensors [B, H, N, D] equal to the given one


def heads_last(x: Tensor) -> Tensor:
    """Return x as [B, N, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_more_heads(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1, x - 1], 2).flatten(1, 2)[:, ::3]


def head_dim_outermost(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def every_third_number(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1, x - 1], -1)[..., 0]


# Of Q, K, V and dO: as a model has them, and one each.
LAID_OUT = [[heads_last] * 4, [head_dim_outermost, every_third_number, heads_last, part_of_more_heads]]


# Cases
EXACT_MATMULS = (MATMULS, ("dP", "O"))  # of forward levels 0 and 1; in the others dP alone is in 16 bit
ONE_PASS, DQ_APART = 5, 6  # the backward levels that keep P and dS in float16; the second not for dQ
STRETCH = 2.0**15  # of that P
PER_BLOCK = 2  # the backward level with one scale per tile of P and dS; level 0 is in 16 bit, others scale by rows


def case_name(case: NamedTuple, what: str) -> str:
    """Return shape, `what`, dtype, and of the fields after the dtype those that aren't the default."""
    name = f"{case.n_q}x{case.n_k}-{what}-{str(case.dtype).removeprefix('torch.')}"
    values, defaults = case._asdict(), case._field_defaults
    return "-".join(
        [name, *(f"{field}={values[field]}" for field in case._fields[7:] if values[field] != defaults[field])]
    )


def name_of(value) -> str:
    """Name a parameter in a test's id."""
    return "x".join(map(str, value)) if isinstance(value, Launch) else str(value)


def drawn_tensors(case: NamedTuple, generator: torch.Generator) -> list[Tensor]:
    """Draw Gaussian Q, K, V, dO in float32; Q and K of size `std`, every key `key_offset` times one vector away.

    zero_block: all are zero after the first block that shares a scale, as padding may be.
    """
    q_shape = (case.batch, case.heads, case.n_q, case.head_dim)
    kv_shape = (case.batch, case.kv_heads, case.n_k, case.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape, case.head_dim)
    q, k, v, do, offset = (torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)
    drawn = [q * case.std, k * case.std + offset * case.key_offset, v, do]
    if case.zero_block:
        for x in drawn:
            x[..., SCALE_BLOCK:, :] = 0
    return drawn


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
    zero_block: bool = False  # see `drawn_tensors`

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
# Two tiles of queries and of keys, partial ones; shared keys.
SMALL = Case(150, 140, 64, 2, 1, is_causal=True)
OPTIONS = [
    SMALL._replace(scale=-0.2, key_offset=3.0),
    Case(20, 140, scale=0.0),
    SMALL._replace(smooth_k=False),
    SMALL._replace(unbiased=True, value_offset=3.0, heads=1),
    Case(40, 203, 96, 1, 1, unbiased=True, value_offset=3.0),
    Case(40, 203, 96, 1, 1, ramp=4.0),  # the second key tile's scores exceed the first's: 2 to that power is no float32
    Case(150, 140, 64, 1, 1, is_causal=True, smooth_k=False, zero_block=True),
    Case(150, 140, 128, 1, 1, smooth_k=False, zero_block=True),
]
HOPPER_CASES = []  # for the levels of Hopper's alone
if ON_GPU:
    CASES = [
        Case(*shape, head_dim, 8, KV_HEADS[(i + j) % 3], is_causal, dtype)
        for (j, (head_dim, is_causal, dtype)), (i, shape) in product(enumerate(COMPILED), enumerate(SHAPES))
    ]
else:
    CASES = [
        Case(1, 1, 64),
        Case(3, 3, 128, 4, 2, is_causal=True, batch=2),
        Case(113, 203, 40, 2, 1),
        Case(203, 113, 96, 1, 1, is_causal=True),
        Case(128, 128, 32, 1, 1, is_causal=True),
        Case(70, 90, 80, 1, 1),
    ]
    HOPPER_CASES = [
        Case(300, 420, 64, 2, 1),
        Case(420, 300, 128, 1, 1, is_causal=True),  # dV's three warpgroups have different last tiles
        Case(130, 270, 128, 2, 1),
        Case(20, 400, 64, 1, 1, is_causal=True),  # keys that no query sees
        Case(400, 20, 33, 1, 1, is_causal=True),
        Case(150, 140, 64, 1, 1, std=5.0),
        *OPTIONS[-2:],
    ]

# Blocks of values; some are zeros, or tiny compared with others.
VALUE_BLOCKS = [
    Case(20, 500, 64, 1, 1, value_blocks=(0, 1, 0, 1)),
    Case(300, 372, 64, 1, 1, is_causal=True, value_blocks=(1, 1e-4, 1e-3)),
]
if ON_GPU:
    VALUE_BLOCKS += [
        Case(300, 500, is_causal=is_causal, value_blocks=blocks, dtype=torch.bfloat16)
        for blocks in ((1, 1e-15, 1, 1e-15), (1e12, 1e4, 1, 1e-8), (1e-8, 1, 1e4, 1e12)) for is_causal in (False, True)
    ]  # fmt: skip


class Forward(NamedTuple):
    inputs: object  # ForwardInputs
    output: Tensor
    log_sum_exp: Tensor


@lru_cache(maxsize=4)
def draw(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw seeded Gaussian Q, K, V, dO, surrounded by NaN."""
    q, k, v, do = drawn_tensors(case, torch.Generator(DEVICE).manual_seed(case.n_q + case.n_k))
    q, k = q + case.ramp, k + torch.linspace(-case.ramp, case.ramp, case.n_k, device=DEVICE)[:, None]
    if case.value_blocks:
        v *= torch.tensor(case.value_blocks, device=DEVICE).repeat_interleave(SCALE_BLOCK)[: case.n_k, None]
    return tuple(guarded(x.to(case.dtype), math.nan)[0] for x in (q, k, v + case.value_offset, do))


def altered(case: Case, **alter) -> tuple[Tensor, ...]:
    """Return copies of Q, K, V, dO of a case; alter: name -> function that changes that tensor where it is."""
    tensors = dict(zip(("query", "key", "value", "grad_output"), (x.clone() for x in draw(case)), strict=True))
    for name, function in alter.items():
        function(tensors[name])
    return tuple(tensors.values())


def times(factor, *where):
    """Return a function that multiplies what `where` selects."""
    return lambda x: x[where].mul_(factor)


def prologue_for(case: Case, with_norm: bool) -> Prologue:
    """Draw angles and gains that differ from token to token and feature to feature."""
    generator = torch.Generator(DEVICE).manual_seed(case.head_dim)
    tokens = max(case.n_q, case.n_k) + 5
    angle = 6 * torch.rand(tokens, case.head_dim // 2, generator=generator, device=DEVICE)
    gains = 0.5 + torch.rand(2, case.head_dim, generator=generator, device=DEVICE) if with_norm else ()
    return Prologue(angle.cos(), angle.sin(), *gains, eps=1e-3 if with_norm else 1e-6)


# The levels that run here, on a CPU the levels of Hopper's too
FORWARD = [level for level, chosen in FORWARD_LEVELS.items() if obstacle_here(chosen, 128) is None]
BACKWARD = [level for level, chosen in BACKWARD_LEVELS.items() if obstacle_here(chosen, 128) is None]


def takes(level: int, case: Case, levels=FORWARD_LEVELS) -> bool:
    """Return whether level `level` of a ladder can run a case here."""
    unable = levels is FORWARD_LEVELS and case.unbiased and not levels[level].takes_unbiased
    return not unable and obstacle_here(levels[level], case.head_dim) is None


def run_forward_level(case: Case, level: int, tensors=None, *, start: Start | None = None) -> Forward:
    """Return what a forward level makes of a case, or of other tensors; `start` may change programs for Hopper."""
    if not takes(level, case):
        pytest.skip(f"forward level {level} doesn't take {case}")
    query, key, value, _ = tensors or draw(case)
    start = start or emulated(case.n_q)
    inputs = ladder.prepare_forward(query, key, value, level, **case.prepared)
    with as_hopper():
        return Forward(inputs, *ladder.run_forward(inputs, level, start, **case.options))


def run_backward_level(case: Case, level: int, tensors=None, forward=None, start: Start | None = None):
    """Return dQ, dK, dV of backward level `level` after the forward level that feeds it."""
    if not takes(level, case, BACKWARD_LEVELS):
        pytest.skip(f"backward level {level} doesn't take head size {case.head_dim}")
    query, key, value, grad_output = tensors or draw(case)
    feeder = feeding(level, case)
    forward = forward or (run_forward_level(case, feeder, tensors) if tensors else forward_level(case, feeder))
    options = {name: getattr(forward.inputs, name) for name in ("q_hat", "k_hat", "v_range")}
    inputs = ladder.prepare_backward(
        grad_output, query, key, value, forward.output, forward.log_sum_exp, level, is_causal=case.is_causal, **options
    )
    with as_hopper():
        return ladder.run_backward(inputs, level, start or emulated(case.n_q), **case.options)


@lru_cache(maxsize=12)
def forward_level(case: Case, level: int) -> Forward:
    """Return what a forward level makes of a case, between guards."""
    with guarded_allocations():
        return run_forward_level(case, level)


@lru_cache(maxsize=12)
def backward_level(case: Case, level: int) -> tuple[Tensor, ...]:
    """Return dQ, dK, dV of a case, computed between guards."""
    forward = forward_level(case, feeding(level, case))
    with guarded_allocations():
        return run_backward_level(case, level, forward=forward)


def feeding(backward_level: int, case: Case) -> int:
    """Return the forward level whose O, L, Q^ and K^ a backward level gets."""
    return ops.forward_level(DEVICE, case.head_dim) if backward_level else 0


def shared(case: Case, x: Tensor) -> Tensor:
    """Repeat K or V for the query heads that share it."""
    return x.repeat_interleave(case.heads // case.kv_heads, dim=1)


def summed(case: Case, x: Tensor) -> Tensor:
    """Sum the gradients of the repeated K or V over those heads."""
    return x.unflatten(1, (case.kv_heads, -1)).sum(2)


@lru_cache(maxsize=2)
def exact(case: Case) -> tuple[Tensor, ...]:
    """Compute G: O, dQ, dK, dV in float64."""
    query, key, value, grad_output = (x.double() for x in draw(case))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = attention_forward(query, shared(case, key), shared(case, value), **case.options).output
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


@lru_cache(maxsize=2)
def eager(case: Case) -> tuple[Tensor, ...]:
    """Compute E: O, dQ, dK, dV as PyTorch's 16-bit matmuls and softmax give them."""
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
    """Compute S: O and L (natural, of the unsmoothed scores) of a forward level; level 0 quantises nothing."""
    query, key, value, _ = (x.float() for x in draw(case))
    options = settings(case, exact_matmuls=EXACT_MATMULS[level] if level < 2 else ("dP",))
    output, log_sum_exp, _ = sagebwd_forward(query, shared(case, key), shared(case, value), options)
    return output, log_sum_exp


def natural_log_sum_exp(case: Case, level: int) -> Tensor:
    """Return a forward level's L [B, H, Nq]: natural instead of log2, of the scores instead of the smoothed ones."""
    query, key, _, _ = draw(case)
    log_sum_exp = forward_level(case, level).log_sum_exp[..., : case.n_q] * math.log(2)
    if level == 0 or not case.smooth_k:
        return log_sum_exp
    _, mean = smooth_key(shared(case, key).float())
    return log_sum_exp + key_mean_scores(query.float(), mean, case.c).squeeze(-1)


@lru_cache(maxsize=12)
def simulated_backward(case: Case, level: int) -> tuple[Tensor, ...]:
    """Compute S: dQ, dK, dV of an INT8 backward level, from the kernel's own O and L to judge one pass alone."""
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
    """Compute gradients from P, dP - delta and their product in float16, each times a power of two."""
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
    """Return the power of two [B, H, Nq, 1] by which dP - delta of a block of queries surely fits in float16."""
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
    """Round to float16 and keep within it."""
    return x.clamp(-65504, 65504).half().float()


def rounded_rows(x: Tensor) -> Tensor:
    """Round float16 x [..., R, C] to an INT8 grid per row and 128 columns, whose inverse scale / 64 is a float16."""
    tiles = torch.nn.functional.pad(x, (0, -x.shape[-1] % SCALE_BLOCK)).unflatten(-1, (-1, SCALE_BLOCK))
    largest = tiles.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-15)
    inverse = 64 * (127 / 64 / largest).half().double()
    return ((tiles.double() * inverse).round() / inverse).flatten(-2)[..., : x.shape[-1]]


def distance(x: Tensor, y: Tensor) -> float:
    return (x.double() - y.double()).norm().item()


def assert_simulated(case: Case, found: Tensor, simulated: Tensor, allowed: Tensor | float = 0.0) -> None:
    """Assert a relative L2 against S of at most 2e-3; hold what is zero but for rounding against dO's size instead."""
    simulated = simulated.to(case.dtype).float()
    error, limit = distance(found, simulated), 2e-3 * simulated.norm() + 1e-5 * draw(case)[3].norm() + allowed
    assert error <= limit, f"{error:.3g} from what the reference computes, {limit:.3g} allowed"


def assert_as_good_as_eager(case: Case, found: Tensor, exact: Tensor, eager: Tensor) -> None:
    """Assert an error against G of at most twice E's, plus the dtype's rounding."""
    size = max(exact.norm(), 1e-2 * draw(case)[3].norm())
    assert distance(found, exact) <= 2 * distance(eager, exact) + torch.finfo(case.dtype).eps * size


def assert_forward(case: Case, level: int, output: Tensor) -> None:
    """Hold a forward level's O against its oracle."""
    if level == 0:
        assert_as_good_as_eager(case, output, exact(case)[0], eager(case)[0])
    else:
        # S keeps P of level 1 in float32; the kernel rounds it to 16 bit, as eager attention does.
        in_16_bit = distance(eager(case)[0], exact(case)[0]) if level == 1 else 0.0
        assert_simulated(case, output, simulated_forward(case, level)[0], in_16_bit)


def assert_forward_by_blocks(case: Case, level: int, output: Tensor) -> None:
    """Hold an INT8 level's O against S for every block of queries: small rows don't hide behind large ones.

    A block scatters more than a whole tensor.
    """
    simulated = simulated_forward(case, level)[0].to(case.dtype)
    for rows, expected in zip(output.split(SCALE_BLOCK, 2), simulated.split(SCALE_BLOCK, 2), strict=True):
        assert distance(rows, expected) <= 3e-3 * expected.double().norm()


def assert_backward(case: Case, level: int, gradients: tuple[Tensor, ...]) -> None:
    """Hold a backward level's dQ, dK, dV against its oracle."""
    if level == 0:
        for found, g, e in zip(gradients, exact(case)[1:], eager(case)[1:], strict=True):
            assert_as_good_as_eager(case, found, g, e)
    else:
        for found, simulated in zip(gradients, simulated_backward(case, level), strict=True):
            assert_simulated(case, found, simulated)


def all_equal(results, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


class Calls(TorchDispatchMode):
    """The operations that run inside: (function, arguments, results)."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        self.made.append((function, arguments, results))
        return results

    @property
    def ours(self) -> list[tuple]:
        """Return those of sage_kernels."""
        return [call for call in self.made if call[0].namespace == "sage_kernels"]


def opcheck(kernel, arguments: tuple) -> None:
    """Hold a registered operation against its schema and its fake results."""
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(kernel, plain, test_utils=("test_schema", "test_faketensor"))


GUARD = 1 << 14  # elements on either side of a tensor


def guarded(x: Tensor, fill: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return (a view equal to x into a larger buffer, the two parts of the buffer around it, full of `fill`)."""
    buffer = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
    view = buffer[GUARD:-GUARD].view(x.shape).copy_(x)
    return view, (buffer[:GUARD], buffer[-GUARD:])


@contextmanager
def guarded_allocations() -> Iterator[list[Tensor]]:
    """Let new tensors start out as NaN (77 in integers) between two guards, which must be untouched at the end."""
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
