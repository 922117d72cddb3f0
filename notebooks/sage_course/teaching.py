"""Helpers of the notebooks: versions, predictions, the grader, made-up inputs, and where Triton runs."""

import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata, util

import torch
from sage_kernels.common.device import triton_device
from sage_lab.records import REPOSITORY, Record, provenance

_guesses: dict[str, tuple[object, dict[str, str]]] = {}


def versions() -> str:
    """Return one line that names the versions a notebook ran with."""
    names = ("torch", "triton", "numpy", "matplotlib")
    installed = [f"{name} {metadata.version(name)}" for name in names if util.find_spec(name)]
    return f"Python {platform.python_version()}, " + ", ".join(installed)


def predict(question: str, guess: object = ..., choices: Sequence[str] = ()) -> None:
    """Keep the reader's guess, a number or the letter of one of `choices`, until the answer is computed."""
    lettered = dict(zip("abcdefgh", choices, strict=False))
    if lettered and guess is not ... and guess not in lettered:
        raise ValueError(f"guess: expected one of {list(lettered)}, got {guess!r}")
    for letter, choice in lettered.items():
        print(f"  ({letter}) {choice}")
    print(f"{question}: " + ("put your guess in the place of ..." if guess is ... else f"your prediction is {guess}"))
    _guesses[question] = guess, lettered


def compare(question: str, measured: float | str, digits: int = 3) -> None:
    """Print the answer, a measured number or the letter of the right choice, next to the reader's guess."""
    if question not in _guesses:
        raise ValueError(f"question: expected one of {sorted(_guesses)}, got {question!r}")
    guess, lettered = _guesses[question]
    line = f"{question}: " if guess is ... else f"{question}: predicted {guess}, "
    if lettered:
        print(f"{line}it is ({measured}) {lettered[measured]}")
        return
    line += f"measured {measured:.{digits}f}"
    shown = round(measured, digits)
    if isinstance(guess, int | float) and guess * shown > 0:
        ratio = max(guess / shown, shown / guess)
        line += f" (a factor of {ratio:.1f} apart)" if ratio >= 1.05 else " (spot on)"
    elif isinstance(guess, int | float):  # no number is a factor apart from 0
        apart = "the sign differs" if guess * shown else f"{abs(guess - shown):.{digits}f} apart"
        line += " (spot on)" if guess == shown else f" ({apart})"
    print(line)


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
    from sage_lab.bench.dense import LADDER

    shapes = [shape for shape in LADDER.shapes if shape.n == 8192 and not shape.causal]
    rows = [row for shape in shapes for row in LADDER.rows(shape)]
    return Record(provenance("measured_here()"), rows)


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
