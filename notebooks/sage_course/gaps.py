"""A gap: a function to write, with its solution, trials and likely mistakes. `examine` says what an answer is worth.

An answer and the solution run on the same trials. Where they differ, the likeliest mistake is the one that gives what
the answer gives: the solution with this mistake made. `examine` returns all of that as a `Report` and prints nothing.

The exercises' grader has its answers in another process: it calls `compare`, by which `examine` does its work, with
results that came from there. Packages of exercises hold this file without the rest of the course.
"""

import ast
import inspect
import linecache
import math
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

ERROR_LIMIT, TEXT_LIMIT = 500, 800  # characters of an error, and of any value, as a reader sees them


class Mistake(NamedTuple):
    """A likely mistake: the solution's source with `old`, which stands in it once, replaced by `new`."""

    old: str
    new: str
    hint: str = ""  # of an exercise: "" for that of the test that finds it
    more: tuple[tuple[str, str], ...] = ()  # further edits, made after the first
    test: str = ""  # of a capstone: the milestone that rejects it

    @property
    def edits(self) -> tuple[tuple[str, str], ...]:
        return (self.old, self.new), *self.more


@dataclass(frozen=True)
class Raised:
    """A failure, in place of a result. Two are alike if their errors are, wherever they were raised."""

    error: str
    line: str = field(compare=False)  # of the reader's function

    def __repr__(self) -> str:
        return f"{self.error}\nin the line: {self.line}" if self.line else self.error


class Outcome(NamedTuple):
    """A trial of a function."""

    result: Any  # or `Raised`
    changed: frozenset[int]  # the numbers of the inputs that it overwrote


def call(function: Callable, *inputs: Any) -> Any:
    return function(*inputs)


@dataclass(frozen=True)
class Gap:
    """A function to write."""

    solution: Callable
    trials: Callable[[], Sequence[tuple]]  # makes the inputs of each trial
    mistakes: tuple[Mistake, ...] = ()
    run: Callable = call  # run(function, *inputs of a trial) -> what is compared; a Triton program must be launched
    right: tuple[tuple[str, str], ...] = ()  # other ways to write the solution: an old text in it, and a new one

    @cached_property
    def text(self) -> str:
        """The solution's."""
        return source(self.solution)

    @cached_property
    def expected(self) -> list[Outcome]:
        """The solution's trials. None of them fails: no failure may count as right."""
        outcomes = self.outcomes(self.solution)
        if failures := [outcome.result for outcome in outcomes if isinstance(outcome.result, Raised)]:
            raise RuntimeError(f"the course's solution fails: {failures[0]}")
        return outcomes

    def outcomes(self, function: Callable) -> list[Outcome]:
        """Try a function on the inputs of every trial."""
        return [self.outcome(function, inputs) for inputs in self.trials()]

    def outcome(self, function: Callable, inputs: tuple) -> Outcome:
        """Run a function on a copy of a trial's inputs."""
        own = deepcopy(inputs)
        try:
            with warnings.catch_warnings():  # Triton's interpreter and `.T` warn; what overflows is wrong anyway
                warnings.simplefilter("ignore")
                result = self.run(function, *own)
        except (Exception, SystemExit) as error:
            result = raised(error, function)
        changed = (number for number, pair in enumerate(zip(own, inputs, strict=True)) if difference(*pair))
        return Outcome(result, frozenset(changed))


class Difference(NamedTuple):
    """The first place where a result is not what was expected, in words."""

    where: str
    expected: str
    found: str
    is_form: bool = False  # the type, the shape, the dtype or the number of parts; else a value

    def __str__(self) -> str:
        return f"{self.where}expected {self.expected}\n{' ' * len(self.where)}found    {self.found}"


@dataclass(frozen=True)
class Report:
    """Everything that is known about an answer after its trials."""

    found: Sequence[Any]  # its results
    expected: Sequence[Any]
    answer: Callable | None = None  # unless it ran in another process
    text: str | None = None  # of the answer, if it has one
    number: int | None = None  # of the first trial with a wrong result
    difference: Any = None  # of that result
    mistake: Mistake | None = None  # the likeliest: it gives that result, if not all of them
    given: Sequence[Any] = ()  # the solution's results with this mistake made
    explains_all: bool = False  # whether these are all of the answer's
    overwritten: frozenset[int] = frozenset()  # the inputs that the answer changes and the solution does not

    @property
    def is_right(self) -> bool:
        return self.number is None and not self.overwritten


def examine(gap: Gap, answer: Callable) -> Report:
    """Try an answer, and find the mistake that it makes if it is wrong."""
    outcomes, text = gap.outcomes(answer), source(answer)
    found, expected = ([outcome.result for outcome in each] for each in (outcomes, gap.expected))
    report = compare(found, expected, possible_mistakes(gap, text), partial(results_with, gap), difference)
    overwritten = (own.changed - right.changed for own, right in zip(outcomes, gap.expected, strict=True))
    return replace(report, answer=answer, text=text, overwritten=frozenset().union(*overwritten))


def compare(
    found: Sequence[Any],
    expected: Sequence[Any],
    mistakes: Iterable[Mistake],
    results_with: Callable[[Mistake], Sequence[Any]],
    differ: Callable[[Any, Any], Any],
) -> Report:
    """Compare results, one for each trial, with those expected and, if one is wrong, with those of mistakes.

    Args:
        found: An answer's results.
        expected: The solution's results.
        mistakes: Those that may explain wrong results.
        results_with: Returns the solution's results with a mistake made.
        differ: Returns how a result differs from another, None if it doesn't.
    """
    differences = [differ(*pair) for pair in zip(found, expected, strict=True)]
    number = next((number for number, x in enumerate(differences) if x is not None), None)
    if number is None:
        return Report(found, expected)
    report = Report(found, expected, number=number, difference=differences[number])
    for mistake in mistakes:
        given = results_with(mistake)
        if differ(found[number], given[number]) is not None:
            continue
        if all(differ(*pair) is None for pair in zip(found, given, strict=True)):
            return replace(report, mistake=mistake, given=given, explains_all=True)
        if report.mistake is None:
            report = replace(report, mistake=mistake, given=given)
    return report


def is_right(gap: Gap, answer: Callable) -> bool:
    """Whether an answer gives what the solution gives. It stops at the first trial that it fails."""
    trials = zip(gap.trials(), gap.expected, strict=True)
    return all(same(gap.outcome(answer, inputs).result, right.result) for inputs, right in trials)


@cache
def results_with(gap: Gap, mistake: Mistake) -> list:
    """Return the results of the solution with a mistake made. A reader's next attempt takes them again."""
    return [outcome.result for outcome in gap.outcomes(mistaken(gap, mistake))]


def possible_mistakes(gap: Gap, text: str | None) -> Iterator[Mistake]:
    """Yield the mistakes that change no line which an answer's text has as it should be."""
    right_lines = statements(gap.text) & statements(text or "")
    for mistake in gap.mistakes:
        if right_lines <= statements(edited(gap.text, [mistake])):
            yield mistake


# What is the same


def same(found: Any, expected: Any) -> bool:
    return difference(found, expected) is None


def close_entries(found: Tensor, expected: Tensor) -> Tensor:
    """Return which entries of two tensors of one shape agree: integers exactly, floats up to rounding."""
    if not expected.is_floating_point():
        return found == expected
    x, y = found.double(), expected.double()
    tolerance = 1e-5 * y.abs().nan_to_num(0, 0, 0).amax() if y.numel() else 0.0
    return torch.isclose(x, y, rtol=1e-4, atol=float(tolerance), equal_nan=True)


def difference(
    found: Any,
    expected: Any,
    *,
    agree: Callable[[Tensor, Tensor], Tensor] = close_entries,
    same_dtype: bool = False,
    where: str = "",
) -> Difference | None:
    """Return the first place where a result differs from what was expected; None if they agree.

    A tensor without axes, a NumPy number and a Python number may stand for one another, and so may all floats. The
    solution's result goes on to later cells in their place: see `check.for_later_cells`.

    Args:
        found: A reader's result.
        expected: The solution's.
        agree: Says which entries of two tensors of one shape agree, or one bool for all of them.
        same_dtype: Whether float64 may not stand for float32, nor int64 for int32.
        where: Names the part of the result, in front of the words.
    """
    try:
        parts = parts_of(expected)
        if parts is not None:
            if not have_the_same_parts(found, expected):
                if not isinstance(expected, dict):
                    return Difference(where, f"{len(parts)} results", shown(found), is_form=True)
                keys = f"the keys {list(found)}" if isinstance(found, dict) else shown(found)
                return Difference(where, f"the keys {list(expected)}", keys, is_form=True)
            own, how = parts_of(found), {"agree": agree, "same_dtype": same_dtype}
            differences = (difference(own[x], parts[x], **how, where=f"{where}{x}, ") for x in parts)
            return next(filter(None, differences), None)
        if isinstance(expected, Tensor):
            if expected.dim() == 0 and isinstance(found, Real) and not same_dtype:
                found = torch.as_tensor(found)
            return difference_of_tensors(found, expected, agree, same_dtype, where)
        if isinstance(expected, bool | int | float) and getattr(found, "shape", None) == ():
            found = found.item()
        if {type(found), type(expected)} <= {int, float}:
            agrees = numbers_agree(found, expected, agree)
        else:
            agrees = type(found) is type(expected) and bool(found == expected)
        is_form = type(found) is not type(expected)
        return None if agrees else Difference(where, shown(expected), shown(found), is_form)
    except Exception:  # of an odd object's own code, or of a tensor without numbers
        return Difference(where, shown(expected), f"{shown(found)}, which can't be compared", is_form=True)


def numbers_agree(x: float, y: float, agree: Callable) -> bool:
    if agree is close_entries:
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-12)
    return bool(agree(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)).all())


def parts_of(x: Any) -> dict[Any, Any] | None:
    """Return the named parts of a result, None if it is one thing."""
    if isinstance(x, tuple | list):
        return {f"result {number}": part for number, part in enumerate(x)}
    return x if isinstance(x, dict) else None


def have_the_same_parts(found: Any, expected: Any) -> bool:
    """Whether both are dictionaries with the same keys, or sequences of one length."""
    own, parts = parts_of(found), parts_of(expected)
    if own is None or parts is None or isinstance(found, dict) != isinstance(expected, dict):
        return False
    return own.keys() == parts.keys()


def difference_of_tensors(
    found: Any, expected: Tensor, agree: Callable, same_dtype: bool, where: str
) -> Difference | None:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return Difference(where, shown(expected), shown(found), is_form=True)
    if found.dtype != expected.dtype and (same_dtype or kind(found.dtype) != kind(expected.dtype)):
        return Difference(where, shown(expected), shown(found), is_form=True)
    if agree(found, expected).all():
        return None
    x, y = found.double(), expected.double()
    wrong = ~close_entries(found, expected)
    if not wrong.any():  # `agree` is stricter
        wrong = x != y
    place = tuple(wrong.nonzero()[0].tolist())
    digits = ".6g" if expected.is_floating_point() else ".0f"
    where = f"{where}{wrong.sum()} of {wrong.numel()} entries differ, the first at {list(place)}: "
    return Difference(where, f"{y[place]:{digits}}", f"{x[place]:{digits}}")


def kind(dtype: torch.dtype) -> torch.dtype | str:
    """Return the same for dtypes that may stand for each other: all floats, and all integers but int8 and bool."""
    if dtype.is_floating_point:
        return "float"
    return dtype if dtype in (torch.int8, torch.bool) else "integer"


def shown(x: Any) -> str:
    """Return anything in a few words, also what can't be printed."""
    try:
        if not isinstance(x, Tensor):
            text = repr(x)
            return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}..."
        dtype = str(x.dtype).removeprefix("torch.")
        if x.is_meta or x.layout != torch.strided:
            return f"{dtype} {list(x.shape)}, a tensor that is {'meta' if x.is_meta else 'sparse'}"
        numbers = ", ".join(f"{number:.4g}" for number in x.flatten()[:4].tolist())
        return f"{dtype} {list(x.shape)}: {numbers}{', ...' if x.numel() > 4 else ''}"
    except Exception:
        return f"a {type(x).__name__} that can't be shown"


# Programs as text


def plain(function: Callable) -> Callable:
    """Return the Python function of a Triton program, or the one that a decorator wraps."""
    return inspect.unwrap(getattr(function, "fn", function))


def source(function: Callable) -> str | None:
    """Return the text of a function or of a Triton program; None of what has none, as `torch.exp` and a lambda."""
    try:
        text = textwrap.dedent(inspect.getsource(plain(function)))
        return text if isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.ClassDef) else None
    except Exception:  # whatever an odd object does when it is looked at
        return None


def has_gap(text: str) -> bool:
    """Whether `...` stands where a value belongs. In `x[..., 0]` it is no gap."""
    nodes = list(ast.walk(ast.parse(text)))
    indices = {id(inner) for node in nodes if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)}
    return any(isinstance(x, ast.Constant) and x.value is Ellipsis and id(x) not in indices for x in nodes)


def statements(text: str) -> set[str]:
    """Return a program's lines, each written in one way; of a loop, its first line."""
    return {ast.unparse(x).splitlines()[0] for x in ast.walk(ast.parse(text)) if isinstance(x, ast.stmt)}


def variants(gap: Gap) -> list[Callable]:
    """Return the solution in its other right forms."""
    return [mistaken(gap, Mistake(*edit)) for edit in gap.right]


def edited(text: str, mistakes: Iterable[Mistake]) -> str:
    """Return the text with these mistakes made, one after the other; ValueError if an old text isn't there once."""
    for old, new in (edit for mistake in mistakes for edit in mistake.edits):
        if text.count(old) != 1:
            raise ValueError(f"mistake: expected {old!r} once in the solution, found it {text.count(old)} times")
        text = text.replace(old, new)
    return text


def defined(text: str, file: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a program's text in `names` and return them. Tracebacks and Triton find its lines."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
    return names


def mistaken(gap: Gap, mistake: Mistake) -> Callable:
    """Return the solution with this mistake made."""
    original = plain(gap.solution)
    text = edited(gap.text, [mistake])
    file = f"<{original.__name__} with {mistake.edits}>"  # its own: source() finds the text by it
    return defined(text, file, dict(original.__globals__))[original.__name__]


def raised(error: BaseException, function: Callable) -> Raised:
    """Return the first cause of a failure and the line of the reader's function. Triton wraps errors in its own."""
    file = getattr(getattr(plain(function), "__code__", None), "co_filename", None)
    lines = []
    while True:
        lines += [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if (text := getattr(error, "src", None)) and text in source(function):  # it did not compile: no frames
            lines.append(text.splitlines()[error.node.lineno - 1].strip())
        if not (error.__cause__ and type(error).__module__.startswith("triton.")):
            break
        error = error.__cause__
    try:
        message = str(getattr(error, "error_message", None) or error)[:ERROR_LIMIT]
    except Exception:  # of its own __str__
        message = "an error that can't be shown"
    return Raised(f"{type(error).__name__}: {message}", lines[-1] if lines else "")
