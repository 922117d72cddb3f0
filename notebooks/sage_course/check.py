"""One check for cells to fill in and for exercises: a task, its solution, inputs, and mistakes as edits with hints.

The reader's function is tried on the inputs and compared with the solution. If they differ, the hint belongs to the
mistake whose results are the reader's: the solution with this mistake made.

A notebook begins with `fill_in = lesson("sagebwd_forward")`. Its cells to fill in end with
`psi = fill_in("psi", psi)`. While `...` stands in the function, the course's solution is used, so that a notebook runs
from top to bottom. A right function is saved; `psi = yours("int8_quantization", "psi")` gets it in a later notebook.
`lessons/` has the solutions, with what readers get wrong and a hint for each. `exercises/task.py` has the exercises'
side; their packages hold this file without the rest of the course.
"""

import ast
import inspect
import linecache
import math
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def call(function: Callable, *inputs: Any) -> Any:
    return function(*inputs)


class Gap(NamedTuple):
    solution: Callable
    inputs: Callable[[], Sequence[tuple]]  # makes the arguments of each trial
    mistakes: tuple[Mistake, ...]
    run: Callable = call  # run(function, *arguments of a trial) -> what is compared; a Triton program must be launched


class NotYetError(AssertionError):
    """A function that isn't right yet. A notebook shows its text alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class Raised:
    """A function's failure, in place of a result. Two are alike if their errors are, wherever they were raised."""

    error: str
    line: str = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.error}\nin the line: {self.line}" if self.line else self.error


def lesson(name: str) -> Callable[[str, Callable], Callable]:
    """Return the notebook's `fill_in`. name: a module of `sage_course.lessons`."""
    return partial(fill_in, gaps=import_module(f"sage_course.lessons.{name}").GAPS, folder=_folder(name))


def yours(lesson_name: str, gap_name: str) -> Callable:
    """Return the reader's own function if `fill_in` saved it and it is still right, else the solution; print which.

    It runs in the globals of the lesson's module, with the reader's own functions that come before it in the lesson.
    """
    module, folder = import_module(f"sage_course.lessons.{lesson_name}"), _folder(lesson_name)
    gap, names = _named(gap_name, module.GAPS), dict(vars(module))
    for name in list(module.GAPS)[: list(module.GAPS).index(gap_name) + 1]:
        with suppress(Exception):  # what can't be read or run counts as not saved
            defined((folder / f"{name}.py").read_text(encoding="utf-8"), str(folder / f"{name}.py"), names)
    function = names[plain(gap.solution).__name__]
    if function is not gap.solution and is_right(gap, function):
        print(f"{gap_name}: yours, as you wrote it in an earlier notebook.")
        return function
    saved = (folder / f"{gap_name}.py").exists()
    why = "yours is saved, but not right here" if saved else "no function of yours is saved"
    print(f"{gap_name}: the course's, because {why}.")
    return gap.solution


def fill_in(name: str, function: Callable, *, gaps: dict[str, Gap], folder: Path | None = None) -> Callable:
    """Return the reader's function if it is right, and save it in `folder`; the solution while `...` stands in it.

    Raises NotYetError with what was expected, what was found and a hint, if the function is not right.
    """
    gap = _named(name, gaps)
    from sage_course import feedback

    if function is gap.solution or has_gap(source(function)):
        print(f"{name}: {feedback.unfinished(gap, function)}")
        return gap.solution
    if difference := next(differences(gap, function), None):
        raise NotYetError(f"{name}: not yet.\n{difference}\n{feedback.hint(gap, function)}".rstrip())
    print(f"{name}: right.")
    if folder and plain(function).__name__ == plain(gap.solution).__name__:
        _save(function, folder / f"{name}.py")
    return function


def _named(name: str, gaps: dict[str, Gap]) -> Gap:
    if name not in gaps:
        raise ValueError(f"name: expected one of {sorted(gaps)}, got {name!r}")
    return gaps[name]


def _folder(lesson_name: str) -> Path:
    """Return the folder of the reader's right functions, which git ignores."""
    from sage_lab.records import REPOSITORY

    return Path(os.environ.get("SAGE_REF_YOURS", REPOSITORY / "runs" / "yours"), lesson_name)


def _save(function: Callable, file: Path) -> None:
    """Write a function's source, after imports of what it names and the notebook has imported."""
    from sage_lab.records import write_file

    imports = []
    for name in plain(function).__code__.co_names:
        x = plain(function).__globals__.get(name)
        if inspect.ismodule(x):
            imports.append(f"import {x.__name__} as {name}\n")
        elif inspect.isroutine(x) and x.__module__ in sys.modules.keys() - {"__main__", "builtins"}:
            imports.append(f"from {x.__module__} import {x.__name__} as {name}\n")
    with suppress(OSError):  # a later notebook then says that none is saved
        write_file(file, "".join(imports) + source(function))


def has_gap(text: str) -> bool:
    """Whether `...` stands where a value belongs. In `x[..., 0]` it is no gap."""
    tree = ast.parse(text)
    indices = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)
    }
    return any(
        isinstance(node, ast.Constant) and node.value is Ellipsis and id(node) not in indices for node in ast.walk(tree)
    )


def source(function: Callable) -> str:
    """The text of a function or of a Triton program."""
    return textwrap.dedent(inspect.getsource(plain(function)))


def plain(function: Callable) -> Callable:
    """Return the Python function of a Triton program; a Python function as it is."""
    return getattr(function, "fn", function)


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
    text = edited(source(gap.solution), [mistake])
    file = f"<{original.__name__} with {mistake.new!r}>"
    return defined(text, file, dict(original.__globals__))[original.__name__]


def close_entries(found: Tensor, expected: Tensor) -> Tensor:
    """Return which entries of two tensors of one shape agree: integers exactly, floats up to rounding."""
    if not expected.is_floating_point():
        return found == expected
    x, y = found.double(), expected.double()
    tolerance = 1e-5 * y.abs().nan_to_num(0, 0, 0).amax() if y.numel() else 0.0
    return torch.isclose(x, y, rtol=1e-4, atol=float(tolerance), equal_nan=True)


def first_difference(
    found: Any,
    expected: Any,
    where: str = "",
    *,
    agree: Callable[[Tensor, Tensor], Tensor] = close_entries,
    same_dtype: bool = False,
) -> str | None:
    """Return two lines, what was expected and what was found; None if they agree.

    Args:
        found: The reader's result.
        expected: The solution's.
        where: A prefix that names the part of the result.
        agree: Says which entries of two tensors of one shape agree, or one bool for all of them.
        same_dtype: Whether float32 may not stand for float64, nor int64 for int32.
    """
    how = {"agree": agree, "same_dtype": same_dtype}
    if isinstance(expected, tuple | list):
        if not isinstance(found, tuple | list) or len(found) != len(expected):
            return _lines(where, f"{len(expected)} results", _shown(found))
        parts = enumerate(zip(found, expected, strict=True))
        differences = (first_difference(x, y, f"{where}result {number}, ", **how) for number, (x, y) in parts)
        return next((text for text in differences if text is not None), None)
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            keys = f"the keys {list(found)}" if isinstance(found, dict) else _shown(found)
            return _lines(where, f"the keys {list(expected)}", keys)
        differences = (first_difference(found[key], expected[key], f"{where}{key}, ", **how) for key in expected)
        return next((text for text in differences if text is not None), None)
    if isinstance(expected, float) and isinstance(found, Tensor) and found.dim() == 0:
        found = found.item()
    if not isinstance(expected, Tensor):
        same = type(found) is type(expected) and found == expected
        if {type(found), type(expected)} <= {int, float}:
            same = math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-12)
        return None if same else _lines(where, _shown(expected), _shown(found))
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return _lines(where, _shown(expected), _shown(found))
    if found.dtype != expected.dtype and (same_dtype or _kind(found.dtype) != _kind(expected.dtype)):
        return _lines(where, _shown(expected), _shown(found))
    if agree(found, expected).all():
        return None
    x, y = found.double(), expected.double()
    wrong = ~close_entries(found, expected)
    if not wrong.any():  # `agree` is stricter
        wrong = x != y
    place = tuple(wrong.nonzero()[0].tolist())
    where = f"{where}{wrong.sum()} of {wrong.numel()} entries differ, the first at {list(place)}: "
    digits = ".6g" if expected.is_floating_point() else ".0f"
    return _lines(where, f"{y[place]:{digits}}", f"{x[place]:{digits}}")


def _kind(dtype: torch.dtype) -> torch.dtype | str:
    """The same for dtypes that may stand for each other: all floats, and all integers but int8 and bool."""
    if dtype.is_floating_point:
        return "float"
    return dtype if dtype in (torch.int8, torch.bool) else "integer"


def differences(gap: Gap, function: Callable) -> Iterator[str]:
    """Yield `first_difference` of every trial in which the function is wrong."""
    for trial in gap.inputs():
        found, expected = tried(gap, function, trial), _run(gap, gap.solution, trial)
        if (difference := first_difference(found, expected)) is not None:
            yield difference


def is_right(gap: Gap, function: Callable) -> bool:
    return next(differences(gap, function), None) is None


def _run(gap: Gap, function: Callable, trial: tuple) -> Any:
    """Return the function's result for a copy of the trial, which the function may overwrite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of Triton's interpreter: what overflows is wrong anyway
        return gap.run(function, *deepcopy(trial))


def tried(gap: Gap, function: Callable, trial: tuple) -> Any:
    """Return the function's result for a copy of the trial; `Raised` if it fails."""
    try:
        return _run(gap, function, trial)
    except Exception as error:
        return _raised(error, function)


def _raised(error: BaseException, function: Callable) -> Raised:
    """Return the first cause of a failure and the line of the reader's function. Triton wraps errors in its own."""
    file, lines = plain(function).__code__.co_filename, []
    while True:
        lines += [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if (text := getattr(error, "src", None)) and text in source(function):  # it did not compile: no frames
            lines.append(text.splitlines()[error.node.lineno - 1].strip())
        if not (error.__cause__ and type(error).__module__.startswith("triton.")):
            message = getattr(error, "error_message", None) or error
            return Raised(f"{type(error).__name__}: {message}", lines[-1] if lines else "")
        error = error.__cause__


def explained(
    found: Sequence,
    expected: Sequence,
    mistakes: Iterable[Mistake],
    results: Callable[[Mistake], Iterable],
    same: Callable[[Any, Any], bool],
) -> Mistake | None:
    """Return the mistake that gives what was found in every trial, else in the first trial that is wrong.

    Args:
        found: A wrong function's results, one for each trial.
        expected: The solution's results.
        mistakes: Those that may explain them.
        results: Returns the results of the solution with a mistake made, in the order of the trials.
        same: Whether two results agree.
    """
    wrong = [same(x, y) for x, y in zip(found, expected, strict=True)].index(False)
    likely = None
    for mistake in mistakes:
        given = list(results(mistake))
        if not same(found[wrong], given[wrong]):
            continue
        if all(same(x, y) for x, y in zip(found, given, strict=True)):
            return mistake
        likely = likely or mistake
    return likely


def _lines(where: str, expected: str, found: str) -> str:
    return f"{where}expected {expected}\n{' ' * len(where)}found    {found}"


def _shown(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    kind = str(x.dtype).removeprefix("torch.")
    numbers = ", ".join(f"{number:.4g}" for number in x.flatten()[:4].tolist())
    return f"{kind} {list(x.shape)}: {numbers}{', ...' if x.numel() > 4 else ''}"
