"""Measured results on disk, with their provenance.

A record is JSON: {"provenance": {gpu, driver, torch, triton, commit, date, command, ...}, "rows": [flat dicts]}.
Only the program that measured something writes a record; prose, figures and tables read it. `archived` in a provenance
is the reason why the record can't be made again as it was: its command is gone, or its commit.

REPOSITORY is the checkout that this file is part of, RECORDED its folder of records.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sage_lab.files import read_json, write_file

REPOSITORY = Path(os.environ.get("SAGE_REF_REPOSITORY") or Path(__file__).resolve().parents[2])
RECORDED = REPOSITORY / "notebooks" / "recorded"
Row = dict[str, Any]
TIMED = {"alone": "timed alone", "paired": "timed in turn"}


class Record(NamedTuple):
    """The rows of a measurement, and where they come from."""

    provenance: dict[str, Any]
    rows: list[Row]

    def select(self, **values: Any) -> list[Row]:
        """Return the rows whose named columns have these values."""
        return [row for row in self.rows if all(row[name] == value for name, value in values.items())]

    @property
    def timed(self) -> str:
        """The protocol of its times: "timed alone", which is what a row without one is, "timed in turn", or both."""
        return ", ".join(sorted({TIMED[row.get("protocol", "alone")] for row in self.rows}))

    @property
    def caption(self) -> str:
        """Devices and date in one line, for a figure. The record itself has the commits, and why it is archived."""
        devices = listed(self.provenance["gpu"] or self.provenance["cpu"])
        archived = ", archived" if "archived" in self.provenance else ""
        return f"measured on {' and '.join(devices)}, {self.provenance['date'][:10]}{archived}"


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
