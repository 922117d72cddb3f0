"""Cases of the SLA2 kernel tests, how a level is run, and what the oracles say of a case.

G is SLA2 in float64, S the reference in float32 (INT8 simulated), E what PyTorch's 16-bit operations make of the same
formula, with its linear branch in the type in which the kernels keep their sums: bfloat16 on a GPU, float32 in the
interpreter. A 16-bit kernel may err twice as much as E. The INT8 kernel is held to S; where S keeps the linear branch
in float32 and the kernel doesn't, E's error of that branch is allowed.
"""

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import kernel_cases
import torch
from kernel_cases import (
    DEVICE,
    KV_HEADS,
    ON_GPU,
    SHAPES,
    as_hopper,
    case_name,
    distance,
    drawn_tensors,
    emulated,
    guarded,
    guarded_allocations,
    shared,
)
from sage_kernels import hopper
from sage_kernels.common.launcher import Start
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.forward.program import Forward
from sage_kernels.sla2.ladder import LEVELS, Prepared, prepare, run_backward, run_forward
from sage_kernels.sla2.ops import LEVEL_16BIT, LEVEL_HOPPER, LEVEL_INT8
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_kernels.sla2.sums import sums_dtype
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.sla2 import (
    BlockSettings,
    block_count,
    divisor,
    from_blocks,
    into_blocks,
    key_block_sums,
    mix,
    per_query,
    selected_count,
    sla2_backward,
    sla2_forward,
    spread_blocks,
    weighted_sums,
)
from sage_ref.sla2.router import Routing
from sage_ref.smoothing import key_mean_scores

TRAINED = (LEVEL_16BIT, LEVEL_INT8)  # portable levels that the registered operation runs, and the backward pass follows
# Levels that run here, on a CPU Hopper's too, in the emulator; a level, and one of the backward pass.
HOPPER_IS_HERE = not ON_GPU or hopper.obstacle(DEVICE, 64) is None
FORWARD = [level for level, chosen in LEVELS.items() if chosen.hopper is None or HOPPER_IS_HERE]
BACKWARD = [(LEVEL_16BIT, 0), (LEVEL_INT8, 0), *[(LEVEL_HOPPER, 1)] * HOPPER_IS_HERE]


class Case(NamedTuple):
    n_q: int
    n_k: int
    selected: str = "half"  # of each row's key blocks, see `drawn_mask`
    head_dim: int = 64
    heads: int = 2
    kv_heads: int = 2
    dtype: torch.dtype = torch.float16
    batch: int = 1
    scale: float | None = None
    alpha: float | None = None  # None: drawn from [0, 1), one per head and block of queries
    std: float = 1.0  # of Q and K
    key_offset: float = 0.0  # times one random vector, added to every key
    matched: bool = False  # the backward pass, after a forward level in INT8
    zero_block: bool = False  # see `drawn_tensors`

    def __str__(self) -> str:
        return case_name(self, f"{self.selected}-D{self.head_dim}-{self.heads}of{self.kv_heads}")

    @property
    def c(self) -> float:
        return softmax_scale(self.scale, self.head_dim)

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Shape of the block mask."""
        return self.batch, self.heads, block_count(self.n_q, MASK_BLOCK_Q), block_count(self.n_k, MASK_BLOCK_KV)

    def settings(self, *, quantize: bool = False) -> BlockSettings:
        backward = "matched" if self.matched else "printed"
        return BlockSettings(MASK_BLOCK_Q, MASK_BLOCK_KV, scale=self.scale, quantize=quantize, backward=backward)


SELECTED = ("none", "one", "half", "all but one", "all")
# Two blocks of queries, three of keys, partial ones; shared keys.
SMALL = Case(150, 140, "mixed", 32 if ON_GPU else 48, 2, 1)
HOPPER_CASES = []  # for the levels of Hopper's alone
if ON_GPU:
    COMPILED = tuple(product((32, 64, 96, 128), (torch.float16, torch.bfloat16)))
    CASES = [  # every pair of values at least once
        Case(*shape, selected, head_dim, 8, KV_HEADS[(i + j + k) % 3], dtype)
        for (i, shape), (j, selected), (k, (head_dim, dtype)) in product(
            enumerate(SHAPES), enumerate(SELECTED), enumerate(COMPILED)
        )
        if (i + j + k) % 4 == 0
    ]
    CASES += [Case(4096, 4096, selected, 128, 4, 4, torch.bfloat16) for selected in ("97%", "popular")]
else:
    CASES = [
        Case(1, 1, "none", 64, batch=2),
        Case(1, 1, "all", 32),
        Case(64, 1, "mixed", 40),
        Case(150, 203, "one", 64, 2, 1),
        Case(3, 3, "mixed", 48, 4, 1),
        Case(70, 203, "none", 32, 1, 1),
        Case(150, 140, "half", 128, 1, 1),
        Case(128, 192, "all but one", 96, 1, 1),
    ]
    HOPPER_CASES = [
        Case(400, 330, "mixed", 64, 2, 1),
        Case(260, 1100, "half", 64, 1, 1),  # lists longer than the places for tiles
        Case(150, 203, "none", 64, 2, 2),
        SMALL._replace(n_q=70, zero_block=True),
    ]
OPTIONS = [
    SMALL._replace(**changed)
    for changed in (
        {"scale": -0.2, "key_offset": 8.0}, {"scale": 0.0, "alpha": 1.5}, {"scale": 1.0, "selected": "half"},
        {"alpha": 0.0, "n_q": 40}, {"alpha": 1.0, "n_q": 70}, {"zero_block": True}, {"zero_block": True, "n_q": 70},
    )
]  # fmt: skip


MATCHED = [
    Case(1, 1, "all", matched=True),
    Case(150, 203, "mixed", 64, 2, 1, matched=True),
    Case(20, 140, "half", 128, 2, 1, std=3.0, matched=True),
    Case(130, 1100, "half", 48, 1, 1, key_offset=8.0, matched=True),  # lists longer than the places for tiles
    Case(70, 200, "none", 96, 1, 1, batch=2, matched=True),
]
if ON_GPU:
    MATCHED += [
        Case(1000, 1500, selected, head_dim, 8, kv_heads, torch.bfloat16, batch=2, matched=True)
        for selected in ("mixed", "popular") for head_dim, kv_heads in ((40, 8), (64, 2), (96, 8), (128, 1))
    ]  # fmt: skip


class Tensors(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    block_mask: Tensor
    alpha: Tensor


class Result(NamedTuple):
    prepared: Prepared
    forward: Forward


class Exact(NamedTuple):
    """O, its linear branch's share of it, and dQ, dK, dV, dalpha."""

    output: Tensor
    linear_share: Tensor
    gradients: tuple[Tensor, ...]


@lru_cache(maxsize=4)
def draw(case: Case) -> Tensors:
    """Draw seeded Gaussian Q, K, V, dO, a block mask and alpha, surrounded by NaN, or by True."""
    generator = torch.Generator(DEVICE).manual_seed(case.n_q + case.n_k)
    tensors = drawn_tensors(case, generator)
    alpha = torch.rand(case.blocks[:3], generator=generator, device=DEVICE)
    if case.alpha is not None:
        alpha.fill_(case.alpha)
    drawn = *(x.to(case.dtype) for x in tensors), drawn_mask(case, generator), alpha
    return Tensors(*(guarded(x, math.nan)[0] for x in drawn))


def drawn_mask(case: Case, generator: torch.Generator) -> Tensor:
    """Draw a mask whose rows select as many blocks as `case.selected` says; mixed: any number, none and all among them.

    popular: one of its own, and the middle block, which all rows select.
    """
    columns = case.blocks[3]
    if case.selected == "popular":
        mask = drawn_mask(case._replace(selected="one"), generator)
        mask[..., columns // 2] = True
        return mask
    count = {
        "none": 0,
        "one": 1,
        "half": columns // 2,
        "97%": selected_count(0.97, columns),
        "all but one": columns - 1,
        "all": columns,
    }.get(case.selected)
    if count is None:
        counts = torch.randint(columns + 1, case.blocks[:3], generator=generator, device=DEVICE)
        counts.view(-1)[-1], counts.view(-1)[0] = columns, 0
        count = counts[..., None]
    return torch.rand(case.blocks, generator=generator, device=DEVICE).argsort(-1) < count


def altered(case: Case, **alter) -> Tensors:
    """Return copies of a case's tensors; alter: name -> function that changes that tensor where it is."""
    tensors = Tensors(*(x.clone() for x in draw(case)))
    for name, function in alter.items():
        function(getattr(tensors, name))
    return tensors


def takes(case: Case, level: int, level_of_backward: int = 0) -> bool:
    """Return whether the levels can run a case: those of Hopper's need a head size of more than 32."""
    return case.head_dim > 32 or not (LEVELS[level].hopper or level_of_backward)


def run_level(
    case: Case, level: int, tensors: Tensors | None = None, *, start: Start | None = None, save=None
) -> Result:
    """Return what a level makes of a case, or of other tensors; `start` may change programs for Hopper."""
    query, key, value, _, block_mask, alpha = tensors or draw(case)
    prepared = prepare(query, key, value, block_mask, alpha, level, scale=case.c)
    save = level > 0 if save is None else save
    with as_hopper():
        return Result(prepared, run_forward(prepared, level, start or emulated(case.n_q), scale=case.c, save=save))


def run_gradients(
    case: Case,
    level: int,
    tensors: Tensors | None = None,
    result: Result | None = None,
    level_of_backward: int = 0,
    start: Start | None = None,
) -> tuple[Tensor, ...]:
    """Return dQ, dK, dV, dalpha after forward level `level`."""
    query, key, value, grad_output, _, alpha = tensors or draw(case)
    prepared, forward = result or forward_level(case, level)
    inputs = BackwardInputs(
        grad_output, query, key, value, alpha, prepared.inputs.sums, forward.sparse_output, forward.log_sum_exp,
        prepared.k_mean,
    )  # fmt: skip
    if case.matched:
        inputs = inputs._replace(k_mean=None, q_hat=prepared.inputs.q_hat, k_hat=prepared.inputs.k_hat)
    with as_hopper():
        start = start or emulated(case.n_q)
        return run_backward(inputs, prepared.choice, start, scale=case.c, level=level_of_backward)


@lru_cache(maxsize=12)
def forward_level(case: Case, level: int) -> Result:
    """Return what a level makes of a case, between guards."""
    with guarded_allocations():
        return run_level(case, level)


@lru_cache(maxsize=6)
def gradients_after(case: Case, level: int, level_of_backward: int = 0) -> tuple[Tensor, ...]:
    """Return dQ, dK, dV, dalpha of a case after forward level `level`, computed between guards."""
    result = forward_level(case, level)
    with guarded_allocations():
        return run_gradients(case, level, result=result, level_of_backward=level_of_backward)


def drawn_router(case: Case, count: int) -> Routing:
    """Draw projections that are not the identity."""
    generator = torch.Generator(DEVICE).manual_seed(case.head_dim)
    shape = (2, case.head_dim, case.head_dim)
    return Routing(*torch.randn(shape, generator=generator, device=DEVICE), count)


def summed(case: Case, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return dQ, dK, dV, dalpha with dK and dV of the repeated heads summed over those that share one."""
    dq, dk, dv, dalpha = gradients
    return dq, kernel_cases.summed(case, dk), kernel_cases.summed(case, dv), dalpha


@lru_cache(maxsize=2)
def exact(case: Case) -> Exact:
    """Compute G, in float64."""
    query, key, value, grad_output, block_mask, alpha = draw(case)
    q, k, v, do, alpha = (x.double() for x in (query, shared(case, key), shared(case, value), grad_output, alpha))
    forward = sla2_forward(q, k, v, block_mask, alpha, case.settings())
    gradients = sla2_backward(do, q, k, v, block_mask, alpha, forward[1], forward.log_sum_exp, case.settings())
    linear_share = (1 - per_query(alpha, case.n_q, case.settings())) * forward.linear_output
    return Exact(forward.output, linear_share, summed(case, gradients))


@lru_cache(maxsize=2)
def eager(case: Case) -> Exact:
    """Compute E: matmuls and softmax in 16 bit, gradients by autograd."""
    query, key, value, grad_output, block_mask, alpha = draw(case)
    leaves = [x.detach().requires_grad_() for x in (query, key, value, alpha)]
    q, k, v = leaves[0], shared(case, leaves[1]), shared(case, leaves[2])
    settings, dtype = case.settings(), sums_dtype(query)
    seen = spread_blocks(block_mask, case.n_q, case.n_k, settings)
    sees_any = seen.any(-1, keepdim=True)
    scores = (q @ k.mT * case.c).masked_fill(~seen & sees_any, -math.inf)
    o_s = torch.softmax(scores, -1) @ v * sees_any
    q_phi, k_phi = (x.softmax(-1, dtype=torch.float32).to(dtype) for x in (q, k))
    h_i, z_i = weighted_sums((~block_mask).to(dtype), *key_block_sums(k_phi, v.to(dtype), settings))
    q_i = into_blocks(q_phi, MASK_BLOCK_Q)
    o_l = from_blocks(q_i @ h_i / divisor(q_i @ z_i[..., None]), case.n_q)
    share = per_query(leaves[3], case.n_q, settings)
    output = mix(o_s, o_l, share).to(case.dtype)
    return Exact(output.detach(), ((1 - share) * o_l).detach(), torch.autograd.grad(output, leaves, grad_output))


@lru_cache(maxsize=6)
def simulated(case: Case, level: int) -> tuple[Tensor, Tensor]:
    """Compute S: O, and L (natural, of the unsmoothed scores; -inf without a key)."""
    query, key, value, _, block_mask, alpha = draw(case)
    q, k, v = query.float(), shared(case, key).float(), shared(case, value).float()
    forward = sla2_forward(q, k, v, block_mask, alpha, case.settings(quantize=bool(LEVELS[level].int8)))
    return forward.output, forward.log_sum_exp


def natural_log_sum_exp(case: Case, result: Result) -> Tensor:
    """Return a level's L, [B, H, Nq, 1]: natural instead of log2, of the scores instead of the smoothed ones."""
    log_sum_exp = result.forward.log_sum_exp[..., : case.n_q, None] * math.log(2)
    if result.prepared.k_mean is None:
        return log_sum_exp
    mean = shared(case, result.prepared.k_mean)[:, :, None]
    return log_sum_exp + key_mean_scores(draw(case).query.float(), mean, case.c)


@lru_cache(maxsize=4)
def simulated_gradients(case: Case, level: int) -> tuple[Tensor, ...]:
    """Compute dQ, dK, dV, dalpha from the kernel's own O_s and L, so that one pass is judged alone.

    Matched, in float32, in which ties of Q^ and K^ are rounded as the kernel does; printed, in float64.
    """
    dtype = torch.float32 if case.matched else torch.float64
    query, key, value, grad_output, block_mask, alpha = draw(case)
    q, k, v, do, alpha = (x.to(dtype) for x in (query, shared(case, key), shared(case, value), grad_output, alpha))
    result = forward_level(case, level)
    saved = result.forward.sparse_output.to(dtype), natural_log_sum_exp(case, result).to(dtype)
    settings = case.settings(quantize=bool(LEVELS[level].int8))
    return summed(case, sla2_backward(do, q, k, v, block_mask, alpha, *saved, settings))


@lru_cache(maxsize=2)
def sizes(case: Case) -> tuple[float, ...]:
    """Return the sizes that rounding errors of O, dQ, dK, dV, dalpha are measured by.

    dalpha's sum adds products that nearly cancel.
    """
    query, key, value, grad_output, block_mask, alpha = draw(case)
    q, k, v = query.float(), shared(case, key).float(), shared(case, value).float()
    forward = sla2_forward(q, k, v, block_mask, alpha, case.settings())
    products = grad_output * (forward.sparse_output.abs() + forward.linear_output.abs())
    *gradients, _ = exact(case).gradients
    floor = 1e-2 * grad_output.norm()
    return *(max(x.norm(), floor).item() for x in (exact(case).output, *gradients)), products.norm().item()


def assert_as_good_as_eager(case: Case, found: Tensor, exact: Tensor, error: float, size: float) -> None:
    """Assert an error against the exact tensor of at most twice E's, plus the dtype's rounding."""
    assert distance(found, exact) <= 2 * error + torch.finfo(case.dtype).eps * size


def assert_close(case: Case, found: Tensor, simulated: Tensor, allowed: float = 0.0) -> None:
    """Assert a relative L2 against S of at most 2e-3; hold what is zero but for rounding against dO's size instead."""
    expected = simulated.to(found.dtype).double()
    assert distance(found, expected) <= 2e-3 * expected.norm() + 1e-5 * draw(case).grad_output.norm() + allowed


def assert_forward(case: Case, level: int, output: Tensor) -> None:
    """Hold a forward level's O against the oracles."""
    g, e, s = exact(case), eager(case), simulated(case, level)[0]
    if LEVELS[level].int8:
        assert_close(case, output, s, distance(e.linear_share, g.linear_share))
        return
    assert_as_good_as_eager(case, output, g.output, distance(e.output, g.output), sizes(case)[0])
    if not ON_GPU:  # there the linear branch's sums, in bfloat16, are what limits the output
        assert_close(case, output, s)


def assert_gradients(case: Case, level: int, gradients: tuple[Tensor, ...]) -> None:
    """Hold dQ, dK, dV, dalpha after a level against the oracles."""
    expected = simulated_gradients(case, level)
    errors = [distance(*pair) for pair in zip(eager(case).gradients, exact(case).gradients, strict=True)]
    for found, s, error, size in zip(gradients, expected, errors, sizes(case)[1:], strict=True):
        assert_as_good_as_eager(case, found, s, error, size)
        if not ON_GPU:
            assert_close(case, found, s)
