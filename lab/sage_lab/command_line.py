"""Commands as dataclasses, what reads the values of their options, and how a command ends.

    @dataclass(frozen=True, kw_only=True)
    class Noise(Arguments):
        checkpoints: Annotated[tuple[Path, ...], POSITIONAL, input_file, "written by `pretrain`"]
        layers: Annotated[tuple[int, ...], from_zero, "which layers"]  # no default: --layers must be given
        batches: Annotated[int, positive, "pairs of gradients"] = 128
        variants: tuple[Literal["bf16", "sagebwd"], ...] = ("bf16",)
        qk_norm: Annotated[bool, "normalise queries and keys"] = False  # --qk-norm
        folder: Annotated[Path, output_folder] = Path("runs/noise")
        device: Annotated[str, device] = field(default_factory=usual_device)

        def run(self, command: str) -> None:
            write_record(self.json, rows(self), command=command)

`python -m sage_lab noise run.pt --layers 0 3` runs Noise(checkpoints=(Path("run.pt"),), layers=(0, 3)), once COMMANDS
in `__main__` names its module; the class is called as the command is, "train-router" for instance is TrainRouter.
`--json FILE` is an option of all. What two options must keep together is asked in __post_init__, by a ValueError of
the form "name: expected ..., got ...". A command "video train" has the class VideoTrain.

A command ends with status 0 when it is done, 2 when an argument, a file or a package is not what it needs (one line
says which), 1 when something else stopped it, and 130 on Ctrl-C. A traceback is a bug of ours.

PyTorch is imported where it is needed: Ctrl-C during an import must find `finish` at work.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
PARENT = "SAGE_REF_PARENT"  # the process that this one ends with
TOO_LARGE = ("memory", "overflow", "too big", "too large")  # in errors about a tensor that can't be made
POSITIONAL = object()  # marks a field whose value stands on the command line without a name


class Failed(RuntimeError):
    """Something stopped a command although its arguments were right; the text is for its user."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see --help)\n")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of a command, which is a subclass; the top of this file has an example."""

    json: Annotated[Path | None, output_file, "also write the result to this file"] = None

    def run(self, command: str) -> int | None:
        """Do what the command is for. command: its line, as records name it."""
        raise NotImplementedError


def add_options(parser: argparse.ArgumentParser, kind: type[Arguments]) -> None:
    """Add an option for each field of a command; `read_arguments` then returns that command."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        names, settings = _option(field, hints[field.name])
        parser.add_argument(*names, **settings)
    parser.set_defaults(kind=kind)


def read_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> Arguments:
    """Return the command that a line means."""
    values = vars(parser.parse_args(arguments))
    kind = values.pop("kind")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _option(field: Field, hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Return what argparse wants to know of a field: its names, and the settings of `add_argument`."""
    told = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    value_type = get_args(hint)[0] if told else hint
    if NoneType in get_args(value_type):
        value_type = next(x for x in get_args(value_type) if x is not NoneType)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    words = next((x for x in told if isinstance(x, str)), "")
    is_positional, is_required = POSITIONAL in told, default is MISSING
    names = [field.name] if is_positional else ["--" + field.name.replace("_", "-")]
    settings: dict[str, Any] = {"help": (words + _shown(default)).replace("%", "%%")}
    if not is_required:
        settings["default"] = str(default) if isinstance(default, Path) else default  # a path is checked, too
    if not is_positional:
        settings["required"] = is_required
    if value_type is bool:
        return names, settings | {"action": "store_true"}
    if get_origin(value_type) is tuple:
        value_type, *others = get_args(value_type)
        fewest = "+" if is_required or not is_positional else "*"
        settings["nargs"] = fewest if others == [...] else 1 + len(others)
    if get_origin(value_type) is Literal:
        choices = get_args(value_type)
        return names, settings | {"choices": choices, "type": type(choices[0])}
    settings["type"] = read = next(filter(callable, told), value_type)
    return names, settings | ({"metavar": METAVARS[read]} if read in METAVARS else {})


def _shown(default: Any) -> str:
    """Return the end of an option's help: its default, if that says anything."""
    if default is MISSING or default is None or default is False or default in ((), ""):
        return ""
    values = default if type(default) is tuple else [default]
    return f" (default: {' '.join(map(str, values))})"


def written(module: str, arguments: list[str]) -> str:
    """Return a command as a record names it. An absolute path loses its folders: a record is read on other machines."""

    def shortened(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        return option + equals + Path(value).name if Path(value).is_absolute() else argument

    return shlex.join(["python", "-m", module, *map(shortened, arguments)])


def finish(program: str, run: Callable[[], int | None]) -> int:
    """Run a command and return the status for its process to end with. An error is one line on stderr."""
    _open_streams()
    os.umask(os.umask(0o022) & 0o077)  # what a command makes, it must be able to use
    try:
        try:
            os.getcwd()  # an error if that folder was deleted
            return run() or DONE
        finally:
            _flush()
    except (KeyboardInterrupt, Exception) as error:
        ending = _ending(error)
        if ending is None:
            raise
    line, status = ending
    if line:
        print(f"{program}: {line}", file=sys.stderr)
    return status


def _ending(error: BaseException) -> tuple[str, int] | None:
    """Return the line that an error deserves, and the status; None for a bug of ours, whose traceback is shown."""
    text = str(error)
    match error:
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case BrokenPipeError():  # the reader of the output has enough, as in `... | head`
            return "", FAILED
        case OSError(errno=errno.ENOSPC, filename=None):
            return f"output: {error.strerror}", FAILED
        case FileNotFoundError(filename=None, errno=errno.ENOENT):
            return "working folder: expected one that exists, got one that was deleted", BAD_INPUT
        case OSError(filename=None):
            return text, BAD_INPUT
        case OSError():
            return f"{error.filename}: {error.strerror}", BAD_INPUT
        case ImportError(name=str(package)) if not package.startswith("sage_"):
            return f"{package}: expected a package that can be imported, got {text}", BAD_INPUT
        case ValueError() | TypeError() if ": expected " in text:
            return text, BAD_INPUT
        case Failed():
            return text, FAILED
        case MemoryError():
            return text.partition("\n")[0] or "out of memory", FAILED
        case OverflowError() | RuntimeError() if any(word in text for word in TOO_LARGE):
            return text.partition("\n")[0], FAILED
    return None


def _open_streams() -> None:
    """Make all three streams usable: a closed one is nowhere, and a letter that a terminal lacks is shown by number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file would get its number, and be written to
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (it stays open)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
zero_to_one = _number(lambda x: 0 <= x <= 1, "a number from 0 to 1")


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


METAVARS = {input_file: "FILE", output_file: "FILE", output_folder: "FOLDER"}


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


def usual_device() -> str:
    """Return the GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
