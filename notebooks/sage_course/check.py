"""Cells to fill in: the reader's function is tried at once, and kept for later notebooks if it is right.

Later cells call it through `for_later_cells`, so that they hold however a right function is written.

A notebook begins with `fill_in = lesson("sagebwd_forward")`. Its cells to fill in end with
`psi = fill_in("psi", psi)`. While `...` stands in the function, the course's solution is used, so that a notebook runs
from top to bottom. A right function is saved; `psi = yours("int8_quantization", "psi")` gets it in a later notebook.
`lessons/` has the solutions, with what readers get wrong and a hint for each.
"""

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_course import hints
from sage_course.gaps import Gap, defined, difference, examine, has_gap, plain, source


class NotYetError(AssertionError):
    """A function that isn't right yet. A notebook shows its text alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def lesson(name: str) -> Callable[[str, Callable], Callable]:
    """Return the notebook's `fill_in`. name: a module of `sage_course.lessons`."""
    return partial(fill_in, gaps=import_module(f"sage_course.lessons.{name}").GAPS, folder=saved_functions(name))


def fill_in(name: str, answer: Callable, *, gaps: dict[str, Gap], folder: Path | None = None) -> Callable:
    """Return the reader's function, for later cells, if it is right; the solution while `...` stands in it.

    A right function is saved in `folder`.

    Raises NotYetError with what was expected, what was found and a hint, if the function is not right.
    """
    gap = named(name, gaps)
    if not callable(answer):
        wanted, kind = f"a function, as the cell begins: def {name}(...)", type(answer).__name__
        raise NotYetError(f"{name}: not yet.\nexpected {wanted}\nfound    {kind}")
    text = source(answer)
    if answer is gap.solution or (text and has_gap(text)):
        print(f"{name}: {hints.unfinished(gap, answer)}")
        return gap.solution
    report = examine(gap, answer)
    if not report.is_right:
        hint = hints.hint(gap, report)
        raise NotYetError("\n".join(filter(None, [f"{name}: not yet.", str(report.difference or ""), hint])))
    print(f"{name}: right.")
    own = for_later_cells(gap, answer)
    if folder and text and plain(answer).__name__ == plain(gap.solution).__name__:
        save(answer, text, folder / f"{name}.py")
    return own


def for_later_cells(gap: Gap, answer: Callable) -> Callable:
    """Return a right function that gives later cells the solution's results, where it agrees with them.

    It runs the reader's function, and then the solution on the same inputs. If the two results differ by rounding
    alone, at most by 1% of their length, the solution's is returned, with its dtype and its shape: an INT8 value that
    the last bit of a factor turns over can spoil no later assertion. Else the reader's own result is returned.

    What may have effects is not run twice, and is returned as it is: a Triton program, a function that changes its
    inputs as the solution does, and one that is given functions to call.
    """
    if not inspect.isfunction(answer):
        return answer
    is_given_functions = any(callable(x) for inputs in gap.trials() for x in inputs)
    if is_given_functions or any(outcome.changed for outcome in gap.expected):
        return answer

    @wraps(answer)
    def called(*inputs: Any, **named: Any) -> Any:
        found = answer(*inputs, **named)
        with suppress(Exception):  # what the solution can't do, the reader's may
            expected = gap.solution(*inputs, **named)
            if difference(found, expected, agree=nearly_equal) is None:
                return expected
        return found

    return called


def nearly_equal(found: Tensor, expected: Tensor) -> Tensor:
    """Return whether two tensors differ at most by 1% of their length."""
    x, y = found.double(), expected.double()
    same = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(same, 0.0, x - y)
    return apart.norm() <= 0.01 * torch.where(y.isfinite(), y, 0.0).norm()


def yours(lesson_name: str, gap_name: str) -> Callable:
    """Return the reader's own function if `fill_in` saved it and it is still right, else the solution; print which.

    It runs in the globals of the lesson's module, with the reader's own functions that come before it in the lesson.
    """
    module, folder = import_module(f"sage_course.lessons.{lesson_name}"), saved_functions(lesson_name)
    gap, names = named(gap_name, module.GAPS), dict(vars(module))
    for name in list(module.GAPS)[: list(module.GAPS).index(gap_name) + 1]:
        file = folder / f"{name}.py"
        with suppress(Exception):  # what can't be read or run counts as not saved
            defined(file.read_text(encoding="utf-8"), str(file), names)
    answer = names[plain(gap.solution).__name__]
    if answer is not gap.solution and examine(gap, answer).is_right:
        print(f"{gap_name}: yours, as you wrote it in an earlier notebook.")
        return for_later_cells(gap, answer)
    is_saved = (folder / f"{gap_name}.py").exists()
    why = "yours is saved, but not right here" if is_saved else "no function of yours is saved"
    print(f"{gap_name}: the course's, because {why}.")
    return gap.solution


def named(name: str, gaps: dict[str, Gap]) -> Gap:
    if name not in gaps:
        raise ValueError(f"name: expected one of {sorted(gaps)}, got {name!r}")
    return gaps[name]


def saved_functions(lesson_name: str) -> Path:
    """Return the folder of the reader's right functions, which git ignores."""
    from sage_lab.records import REPOSITORY

    return Path(os.environ.get("SAGE_REF_YOURS", REPOSITORY / "runs" / "yours"), lesson_name)


def save(answer: Callable, text: str, file: Path) -> None:
    """Write a function's source, after imports of what it names and the notebook has imported."""
    from sage_lab.files import write_file

    function, imports = plain(answer), []
    for name in function.__code__.co_names:
        x = function.__globals__.get(name)
        if inspect.ismodule(x):
            imports.append(f"import {x.__name__} as {name}\n")
        elif inspect.isroutine(x) and x.__module__ in sys.modules.keys() - {"__main__", "builtins"}:
            imports.append(f"from {x.__module__} import {x.__name__} as {name}\n")
    with suppress(OSError):  # a later notebook then says that none is saved
        write_file(file, "".join(imports) + text)
