"""Measured results on disk, with their provenance, written in one step so that a kill leaves no half-written file.

A record is JSON: {"provenance": {gpu, driver, torch, triton, commit, date, command, ...}, "rows": [flat dicts]}.
Only the program that measured something writes a record; prose, figures and tables read it. `archived` in a provenance
is the reason why the record can't be made again as it was: its command is gone, or its commit.

REPOSITORY is the checkout that this file is part of, RECORDED its folder of records.
"""

import glob
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

REPOSITORY = Path(os.environ.get("SAGE_REF_REPOSITORY") or Path(__file__).resolve().parents[2])
RECORDED = REPOSITORY / "notebooks" / "recorded"
Row = dict[str, Any]


class Record(NamedTuple):
    """The rows of a measurement, and where they come from."""

    provenance: dict[str, Any]
    rows: list[Row]

    def select(self, **values: Any) -> list[Row]:
        """Return the rows whose named columns have these values."""
        return [row for row in self.rows if all(row[name] == value for name, value in values.items())]

    @property
    def timed(self) -> str:
        """The protocol of its times, as `how_timed` words it."""
        return how_timed(self.rows)

    @property
    def caption(self) -> str:
        """Devices and date in one line, for a figure. The record itself has the commits, and why it is archived."""
        devices = listed(self.provenance["gpu"] or self.provenance["cpu"])
        archived = ", archived" if "archived" in self.provenance else ""
        return f"measured on {' and '.join(devices)}, {self.provenance['date'][:10]}{archived}"


TIMED = {"alone": "timed alone", "paired": "timed in turn"}


def how_timed(rows: Sequence[Row]) -> str:
    """Return "timed alone", which is what a row without a protocol is, "timed in turn", or both."""
    return ", ".join(sorted({TIMED[row.get("protocol", "alone")] for row in rows}))


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def read_record(name: str | Path) -> Record:
    """Read a record by its name in RECORDED ("table1_sweep") or by its path, a Path or a text with a suffix."""
    is_path = isinstance(name, Path) or Path(name).suffix
    path = Path(name) if is_path else RECORDED / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"name: expected a record at {path}, found none")
    content = read_json(path, "a record")
    if not isinstance(content.get("provenance"), dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"name: expected a record with provenance and rows, got {path}")
    return Record(content["provenance"], content["rows"])


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file; `what` names what was expected in the error."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # no JSON, or brackets in brackets without end
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"path: expected {what} in JSON, got {path}: remove that file or name a different one")
    return content


def write_record(path: Path | None, rows: Sequence[Row], *, command: str, **facts: Any) -> None:
    """Write rows with their provenance; nothing without a path, as where a command has no --json.

    command: reproduces them. facts: seeds and the like, which join the provenance.
    """
    if path is None:
        return
    lines = ",\n  ".join(as_json(row) for row in rows)
    header = as_json(provenance(command) | facts, indent=1)
    write_file(path, f'{{"provenance": {header},\n "rows": [\n  {lines}\n]}}\n')


def as_json(content: Any, indent: int | None = None) -> str:
    """Return JSON. Raises ValueError for NaN and infinity, which JSON lacks and nothing measured should be."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        found = re.search(r"[^{\[,]*(NaN|Infinity)", json.dumps(content))[0].strip()
        raise ValueError(f"record: expected finite numbers, got {found}") from None


def provenance(command: str) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement."""
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


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
    with replaced(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a GitHub table; cells are converted with str."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=REPOSITORY, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    """Return the driver's version, which all GPUs of a machine share."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found and ", ".join(sorted(set(found.splitlines())))


def _commit() -> str:
    """Return SAGE_REF_COMMIT, for copies of a commit; else git's commit, with -dirty if sources differ."""
    if named := os.environ.get("SAGE_REF_COMMIT"):
        return named
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", "sage_ref", "kernels", "lab")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _version(package: str) -> str | None:
    """Return the version of the module in use, which may shadow the installed one."""
    if module := sys.modules.get(package):
        return module.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
