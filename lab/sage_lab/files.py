"""Files that are written in one step, so that a kill leaves none half written, and by one process at a time."""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an error, that file becomes `path` in one step.

    An OSError, for instance of a full disk, names `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_file(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file in one step, text in UTF-8."""
    with replaced(path) as temporary, temporary.open("wb") as file:
        # `write_bytes` would keep a view of `content` where the disk is full
        file.write(content.encode() if isinstance(content, str) else content)


def remove_leftovers(path: Path) -> None:
    """Remove what `replaced` left beside `path` when its process was killed."""
    for leftover in Path(path).parent.glob(f".{glob.escape(Path(path).name)}.[0-9]*"):
        leftover.unlink()


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold `path` for this process. Raises ValueError if another process holds it: two would undo each other's work.

    The lock belongs to the operating system and ends with the process, however that ends. On Windows there is none.
    """
    if fcntl is None:
        yield
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(file.fileno()), lock.stat())
        except OSError:  # held by another process, or that one has just removed it
            is_held = False
        if not is_held:
            raise ValueError(f"path: expected a file that no other process is writing, got {path}")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file; `what` names what was expected in the error."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # no JSON, or brackets in brackets without end
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"path: expected {what} in JSON, got {path}: remove that file or name a different one")
    return content
