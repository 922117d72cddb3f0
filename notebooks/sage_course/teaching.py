"""Helpers of the notebooks: versions, predictions, the grader, made-up inputs, and where Triton runs."""

import math
import platform
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from sage_kernels.common.device import triton_device
from sage_lab.records import REPOSITORY, Record, provenance

REASONS = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))
_guesses: dict[str, tuple[float | str | None, dict[str, str]]] = {}


def versions() -> str:
    """Return one line that names the versions a notebook ran with."""
    names = ("torch", "triton", "numpy", "matplotlib")
    installed = [f"{name} {metadata.version(name)}" for name in names if util.find_spec(name)]
    return f"Python {platform.python_version()}, " + ", ".join(installed)


def predict(question: str, guess: object = ..., choices: Sequence[str] = ()) -> None:
    """Keep the reader's guess, a number or one of `choices`, until the answer is computed.

    A choice is named by its letter, a for the first. Nothing is printed while `...` stands in the place of the guess. A
    guess that cannot be understood gets a line, and counts as none: the rest of the cell runs.
    """
    lettered = dict(zip("abcdefgh", choices, strict=False))
    understood = None if guess is ... else letter_of(guess, lettered) if lettered else number_of(guess)
    _guesses[question] = understood, lettered
    if understood is not None:
        print(f"{question}: your prediction is {shown(understood, lettered)}")
    elif guess is not ...:
        wanted = ", ".join(shown(letter, lettered) for letter in lettered) or "a number, as in 0.05 or 5%"
        print(f"{question}: expected {wanted}; got {guess!r}")


def letter_of(guess: object, lettered: dict[str, str]) -> str | None:
    """Return the letter of a choice, given as b, B, (b) or in its own words; None if it is none of them."""
    text = str(guess).strip().strip("().").lower()
    named = {choice.lower(): letter for letter, choice in lettered.items()}
    return text if text in lettered else named.get(text)


def number_of(guess: object) -> float | None:
    """Return a finite number, given as one or as in "5%"; None for anything else."""
    text = str(guess).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def shown(guess: float | str, lettered: dict[str, str]) -> str:
    return f"({guess}) {lettered.get(guess, '')}".rstrip() if isinstance(guess, str) else f"{guess:g}"


def compare(question: str, measured: Any, digits: int = 3) -> None:
    """Print the answer, a number or the letter of the right choice, next to the reader's guess if there is one.

    Next to a wrong choice stands the reason, from reasons.toml.
    """
    guess, lettered = _guesses.get(question, (None, {}))
    line = f"{question}: " if guess is None else f"{question}: predicted {shown(guess, lettered)}, "
    if isinstance(measured, str):
        reason = "" if guess == measured else REASONS.get(question, {}).get(guess, "")
        print(f"{line}it is {shown(measured, lettered)}" + (f"\n{reason}" if reason else ""))
        return
    rounded = round(float(measured), digits)
    line += f"measured {rounded:.{digits}f}"
    print(line if guess is None else f"{line} ({distance(guess, rounded, digits)})")


def distance(guess: float, measured: float, digits: int) -> str:
    """Return in words how far a guess is from a measured number."""
    if guess * measured > 0:
        ratio = max(guess / measured, measured / guess)
        return f"a factor of {ratio:.1f} apart" if ratio >= 1.05 else "spot on"
    if guess * measured < 0:
        return "the sign differs"
    return "spot on" if guess == measured else f"{abs(guess - measured):.{digits}f} apart"  # no factor leads to 0


def grade(exercise: str) -> None:
    """Print the result of `python -m exercises grade NAME`, from any folder.

    The grader is a program of its own, so it runs in its own process.

    Raises:
        RuntimeError: the grader itself failed, or there is no such exercise.
    """
    command = [sys.executable, "-m", "exercises", "grade", exercise]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(
            f"grade: expected the grader of {exercise!r} to run, got exit status {done.returncode}: {done.stderr}"
        )


def measured_here() -> Record | None:
    """Measure what `python -m sage_lab bench --levels` does at N=8192 on this machine's GPU; None without one."""
    if triton_device() != "cuda":
        return None
    from sage_lab.bench.dense import ladder_shapes, ladder_turns
    from sage_lab.bench.measure import measure

    shapes = [shape for shape in ladder_shapes((8192,)) if not shape.causal]
    rows = [row for shape in shapes for row in measure(ladder_turns(shape))]
    return Record(provenance("measured_here()"), [row for row in rows if "missing" not in row])


def letter_inputs(text: str) -> list[torch.Tensor]:
    """Make Q, K, V and dO, float32 [1, 1, N, 64], of a made-up head with one token per letter of `text`.

    A query matches the keys of the same letter, best where the letter before agrees too, so a repeated word finds
    itself. V and dO are random.
    """
    generator = torch.Generator().manual_seed(0)
    letters = sorted(set(text))
    here = torch.tensor([letters.index(letter) for letter in text])
    embedding, embedding_before = torch.randn(2, len(letters), 64, generator=generator)
    token = (embedding[here] + 0.8 * embedding_before[here.roll(1)]) / 1.3
    query_noise, key_noise, value, grad_output = torch.randn(4, len(text), 64, generator=generator)
    query = 0.5 * (token + 0.5 * query_noise)
    key = token + 0.5 * key_noise
    return [x[None, None] for x in (query, key, value, grad_output)]


def bytes_kept_for_backward(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> int:
    """Count the bytes that autograd keeps between function(*inputs) and its backward pass, each storage once."""
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _output = function(*(x.detach().requires_grad_() for x in inputs))  # alive, so that no address is used twice
    return sum(kept.values())
