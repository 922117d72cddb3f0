"""The commands' parser, the types of their arguments, the options that several share, and how a command ends.

A command ends with status 0 when it is done, 2 when an argument or a file is not what it needs (one line says which), 1
when something else stopped it, and 130 on Ctrl-C. A traceback is a bug of ours.

PyTorch is imported where it is needed: Ctrl-C during an import must find `finish` at work.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
PARENT = "SAGE_REF_PARENT"  # the process that this one ends with
TOO_LARGE = ("memory", "overflow", "too big", "too large")  # in errors about a tensor that can't be made


class Failed(RuntimeError):
    """Something stopped a command although its arguments were right; the text is for its user."""


class Parser(argparse.ArgumentParser):
    """A parser whose help names every default, and whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see --help)\n")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        default = options.get("default")
        if names[0].startswith("-") and default not in (None, False, (), argparse.SUPPRESS):
            values = default if isinstance(default, list | tuple | range) else [default]
            text = " ".join("x".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values)
            action.help = f"{options.get('help', '')} (default: {text.replace('%', '%%')})".strip()
        return action


def written(module: str, arguments: list[str]) -> str:
    """Return a command as a record names it. An absolute path loses its folders: a record is read on other machines."""

    def shortened(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        return option + equals + Path(value).name if Path(value).is_absolute() else argument

    return shlex.join(["python", "-m", module, *map(shortened, arguments)])


def finish(program: str, run: Callable[[], int | None]) -> int:
    """Run a command and return the status for its process to end with. An error is one line on stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file would get its number, and be written to
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (it stays open)
    os.umask(os.umask(0o022) & 0o077)  # what a command makes, it must be able to use
    try:
        try:
            return run() or DONE
        finally:
            _flush()
    except KeyboardInterrupt:
        line, status = "interrupted", INTERRUPTED
    except OSError as error:
        line, status = f"{error.filename}: {error.strerror}" if error.filename else str(error), BAD_INPUT
        if error.errno == errno.EPIPE:  # the reader of the output has enough, as in `... | head`
            return FAILED
        if error.errno == errno.ENOSPC and not error.filename:
            line, status = f"output: {error.strerror}", FAILED
    except (ValueError, TypeError) as error:
        if ": expected " not in str(error):
            raise
        line, status = str(error), BAD_INPUT
    except (MemoryError, OverflowError, RuntimeError) as error:
        if isinstance(error, Failed):
            line = str(error)
        elif isinstance(error, MemoryError) or any(word in str(error) for word in TOO_LARGE):
            line = str(error).partition("\n")[0] or "out of memory"
        else:
            raise
        status = FAILED
    print(f"{program}: {line}", file=sys.stderr)
    return status


def _flush() -> None:
    """Write what was printed. A stream that can't be written is no more, or Python ends with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            raise


def process_pool(count: int, **options: Any) -> ProcessPoolExecutor:
    """Return a pool of processes that end with this one, also when it is killed."""
    return ProcessPoolExecutor(count, initializer=end_with, **options)


def imported(name: str) -> ModuleType:
    """Import a module. Ctrl-C waits for its end: an import may swallow the error, or leave half a module."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return importlib.import_module(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return importlib.import_module(name)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with(parent: int | None = None) -> None:
    """End this process soon after its parent has ended. parent: its number; None: the one that is it now."""
    parent = parent or os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
        if number >= 2**63:
            raise argparse.ArgumentTypeError(f"expected less than 2^63, got {text}")
        return number

    return parse


def _number(fits: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return parse


positive, from_zero = _whole(1), _whole(0)
positive_number = _number(lambda x: 0 < x < math.inf, "a number above 0")
number_from_zero = _number(lambda x: 0 <= x < math.inf, "a number, 0 or more")
zero_to_one = _number(lambda x: 0 <= x <= 1, "a number from 0 to 1")
percentage = _number(lambda x: 0 < x < 100, "a number above 0 and below 100")


def tile_size(text: str) -> tuple[int, int]:
    try:
        block_q, block_kv = text.split("x")
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers such as 128x64, got {text!r}") from None
    return positive(block_q), positive(block_kv)


def input_file(text: str) -> Path:
    """Return the path of a file that can be read. A pipe is refused: without a writer it would be waited for."""
    path = Path(text)
    try:
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"expected a file that can be read, got {text!r}")
        path.open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"expected a file that can be read, got {text!r}: {reason}") from None
    return path


def output_file(text: str) -> Path:
    """Return the path of a file that can be written. A device is refused: /dev/null would be replaced by a file."""
    return _output_path(text, "file", Path.is_file, inside=0)


def output_folder(text: str) -> Path:
    """Return the path of a folder that can be made, or written to."""
    return _output_path(text, "folder", Path.is_dir, inside=1)


def _output_path(text: str, kind: str, is_kind: Callable[[Path], bool], inside: int) -> Path:
    """Return a path. inside: 1 if files are made in it, 0 if it is made in a folder."""
    path = Path(text)
    try:
        if not text or "\0" in text or (path.exists() and not is_kind(path)):
            raise argparse.ArgumentTypeError(f"expected the name of a {kind}, got {text!r}")
        places = [path, *path.absolute().parents][1 - inside :]
        folder = next(place for place in places if place.exists())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected the name of a {kind}, got {text!r}: {error}") from None
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise argparse.ArgumentTypeError(f"expected a {kind} where files can be written, got {text!r}: not in {folder}")
    return path


def device(text: str) -> str:
    """Return the name of a device that this machine has."""
    import torch

    try:
        found = torch.device(text)
        if found.type == "cuda":  # asked for no memory: each of torchrun's processes would hold some on the first GPU
            is_here = torch.cuda.is_available() and (found.index or 0) < torch.cuda.device_count()
        else:
            is_here = torch.ones(1, device=found).item() == 1
    except (RuntimeError, NotImplementedError):
        is_here = False
    if not is_here:
        raise argparse.ArgumentTypeError(f"expected a device of this machine, such as cpu or cuda, got {text!r}")
    return text


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the result to FILE")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    import torch

    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")


def add_minutes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=positive_number, help="stop at the first report after this time; a rerun continues"
    )


def add_corpus_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=input_file, metavar="PATH", help="text, or a .bin file of uint16 tokens")
