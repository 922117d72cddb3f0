"""What a task.py is written with: a Task of tests, and their inputs.

A test draws calls of one function. The grader makes them with the submission and with the master, and compares what
comes. If that differs, the hint is that of the mistake with which the master gives the same: see `sage_course.gaps`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from sage_course.gaps import close_entries
from sage_lab.capstones import trials
from torch import Tensor

NO_LAUNCH = "No Triton kernel was launched. The kernel is the exercise: launch it from this function."


class Draw:
    """Seeded inputs of one test: torch tensors and Python numbers."""

    def __init__(self, *names: Any):
        self.seed, self.generator = names[0], trials.generator_of(*names)

    def normal(self, *shape: int) -> Tensor:
        """Draw independent standard normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Any:
        """Draw from [low, high): a tensor of this shape, or a float if there is none."""
        drawn = torch.rand(shape, generator=self.generator) * (high - low) + low
        return drawn if shape else float(drawn)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Any:
        """Draw integers from [low, high): a tensor of this shape, or an int if there is none."""
        drawn = torch.randint(low, high, shape, generator=self.generator)
        return drawn.to(dtype) if shape else int(drawn)

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integers(0, len(options))]

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator)

    def sizes(self, tiles: int, block: int) -> Tensor:
        """Draw how large each row is, [tiles * block, 1]: a power of two, the same in a tile."""
        return (0.5 * 2.0 ** self.permutation(tiles)).repeat_interleave(block)[:, None]


class Call(NamedTuple):
    """One call of a function of the exercise, and what is looked at besides its result."""

    function: str
    arguments: tuple
    outputs: int = 0  # so many last arguments are written to by a Triton kernel: they are looked at, too
    upstream: Tensor | None = None  # the gradients of the arguments for this gradient of the result are looked at
    layouts: dict[str, str] | None = None  # of a capstone: the one argument is a dict, for `sage_lab.capstones.observe`
    judge: Callable[[dict[str, Any]], trials.Verdict] | None = None  # of a capstone: says what is wrong by itself
    device: str = "cpu"  # where a submission's tensors are

    def sent(self) -> dict[str, Any]:
        """Return what a submission's process needs to make the call."""
        return {name: x for name, x in self._asdict().items() if name != "judge"}


class Test(NamedTuple):
    """One line of the table: it passes if all its calls give what the master's do."""

    name: str
    calls: Callable[[Draw], Iterable[Call]]
    hint: str  # for what no mistake explains
    points: float = 1
    parts: tuple[int | str, ...] | None = None  # which results are compared; None: all
    agree: float | str = "entries"  # a relative error of each tensor, or one of `AGREEMENTS`
    listed: bool = False  # of the result's first tensor, row i counts up to its second tensor's number i
    shows: bool = True  # whether a student may see what was expected


class Task:
    """The tests of one exercise, in the order in which a student should solve them.

    agree: how results are compared where a test says nothing else. triton: whether its functions launch Triton kernels.
    """

    def __init__(self, agree: float | str = "entries", triton: bool = False):
        self.agree, self.triton = agree, triton
        self.tests: list[Test] = []
        self.capstone = ""

    def test(self, name: str, **facts: Any) -> Callable:
        """Return the decorator of a function that draws a test's calls. Its docstring is the hint.

        A function may have several: further lines of the table about the same calls.
        """
        number = len(self.tests)
        self.tests.append(None)

        def add(function: Callable) -> Callable:
            self.tests[number] = Test(name, function, function.__doc__, **{"agree": self.agree} | facts)
            return function

        return add


def capstone(name: str) -> Task:
    """Return the task of a capstone of `sage_lab.capstones.trials`: a test for each milestone."""
    task, wanted = Task(triton=True), getattr(trials, name)
    task.capstone = name
    for milestone in wanted.milestones:
        calls = functools.partial(milestone_calls, wanted.function, milestone)
        task.tests.append(Test(milestone.name, calls, milestone.hint, milestone.points))
    return task


def milestone_calls(function: str, milestone: trials.Milestone, draw: Draw) -> Iterable[Call]:
    """Yield the calls of a milestone's trials."""
    for trial in milestone.trials(trials.generator_of(draw.seed, milestone.name)):
        judge = functools.partial(trials.judge, trial, hint=milestone.hint)
        yield Call(function, (trial.arguments,), layouts=trial.layouts, judge=judge)


def form(found: Tensor, expected: Tensor) -> Tensor:
    """Agree on any values: only shapes and dtypes count."""
    return torch.ones((), dtype=torch.bool)


def within(allowed: float, found: Tensor, expected: Tensor) -> Tensor:
    """Agree on floats up to this relative error of the whole tensor, in the L2 norm, and on integers exactly."""
    if not expected.is_floating_point():
        return found == expected
    (found, odd), (expected, also) = _finite(found), _finite(expected)
    return (odd == also).all() & ((found - expected).norm() <= allowed * expected.norm())


def int8(found: Tensor, expected: Tensor) -> Tensor:
    """Agree on integers of which fewer than 1 in 100 differ, by 1, and on floats up to 1e-4."""
    if expected.is_floating_point():
        return within(1e-4, found, expected)
    off = (found.int() - expected.int()).abs()
    return (off.amax() <= 1) & ((off > 0).float().mean() < 0.01)


def roundings(found: Tensor, expected: Tensor) -> Tensor:
    """Agree on results [N, D] that differ by flipped roundings alone.

    A rounding to nearest flips when float32 sums in another order, which moves a row or two by a thousandth part or
    more. More rows than that, the median row off by 1e-4, or the whole by 6e-3, as by a missing rounding, is no such
    accident.
    """
    (found, odd), (expected, also) = _finite(found), _finite(expected)
    error, size = (found - expected).norm(dim=-1), expected.norm(dim=-1)
    typical = (error / size.clamp(min=1e-30)).median()
    few = (error > 1e-3 * size).sum() <= 1 + size.numel() / 50
    return (odd == also).all() & few & (typical <= 1e-4) & (error.norm() <= 6e-3 * expected.norm())


AGREEMENTS = {"entries": close_entries, "form": form, "int8": int8, "roundings": roundings}


def agreement(name: float | str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what compares two tensors of one shape and dtype, for `Test.agree`."""
    return AGREEMENTS[name] if isinstance(name, str) else functools.partial(within, name)


def _finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in float64 with zeros for NaN and infinity, and where those are: 1, 2 or 3."""
    x = x.double()
    odd = x.isnan() * 1 + (x == torch.inf) * 2 + (x == -torch.inf) * 3
    return torch.where(odd > 0, 0, x), odd


def quantize(x: Tensor, block: int, largest: int = 127) -> tuple[Tensor, Tensor]:
    """Return psi of x [N, D] with one scale per `block` rows: int8 [N, D] and float32 [ceil(N / block)]."""
    scale = torch.stack([rows.float().abs().amax() for rows in x.split(block)]) / largest
    per_row = scale.repeat_interleave(block)[: len(x), None]
    return torch.round(x.float() / torch.where(per_row > 0, per_row, 1)).to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor, block: int) -> Tensor:
    """Return the float64 numbers that values and scales of `quantize` stand for."""
    return values.double() * scale.double().repeat_interleave(block)[: len(values), None]


def off_ties(x: Tensor, block: int, largest: int = 127) -> Tensor:
    """Return x [N, D] with 0 for entries so close to a tie that x / s and x * (1 / s) may round different ways.

    s is one scale per `block` rows. One such entry of a right operand would move a whole column of the result.
    """
    values, scale = quantize(x, block, largest)
    step = scale.repeat_interleave(block)[: len(x), None]
    return torch.where((x.float() - values * step).abs() > 0.4999 * step, 0, x)


def int8_tiles(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return `quantize` of x as kernels take it: filled up with junk to whole tiles."""
    values, scale = quantize(x, block)
    junk = torch.full((-len(x) % block, x.shape[1]), 101, dtype=torch.int8)
    return torch.cat((values, junk)), scale


def backward_case(
    draw: Draw, n_q: int, n_k: int, block_q: int, block_kv: int, q_sizes: Any = 1, k_sizes: Any = 1, do_sizes: Any = 1
) -> tuple[Tensor, ...]:
    """Draw dO, Q, K and V in float16, and O (float64) and L of attention with rounded Q and K.

    The sizes multiply rows. Most of V is shared by all keys, so that dP - delta is a small difference.
    """
    d = draw.choice((32, 64))
    q, k, v, do = (draw.normal(n, d) for n in (n_q, n_k, n_k, n_q))
    q, do = (off_ties(x.half(), block_q) for x in (1.5 * q * q_sizes, 0.1 * do * do_sizes))
    k, v = off_ties((1.5 * (k - k.mean(0)) * k_sizes).half(), block_kv), (v + 16 * draw.normal(1, d)).half()
    rounded = (dequantize(*quantize(x, block), block) for x, block in ((q, block_q), (k, block_kv)))
    s = next(rounded) @ next(rounded).mT / math.sqrt(d)
    return do, q, k, v, s.softmax(-1) @ v.double(), s.logsumexp(-1).float()
