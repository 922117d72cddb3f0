"""Launch tables: which settings a GPU's kernels get, from the table that knows the GPU best.

In this order: the user's own, measured by `bench --tune` on a GPU of this very name; the packaged ones, measured on
Hopper; the packaged one that was chosen by compiling for the GPU's compute capability. What no table has gets DEFAULTS.

A table is a record, {"provenance": {...}, "rows": [...]}. A user's table may be damaged or old: then a warning says so
once, and the next table is taken. One of a different Triton is old: the compiler decides what is fast and right.
"""

import json
import os
import re
import warnings
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from sage_kernels.common.candidates import Launch, candidates

PACKAGED = ("launch_hopper.json", "launch_hopper_sla2.json")
COMPILED = "launch_compiled.json"
SAME_CODE = {89: 86}  # compute capability -> the one whose compiled table it takes: same instructions, same limits
OPERATIONS = ("sagebwd", "sla2")


class Case(NamedTuple):
    """One kernel for which a launch is chosen."""

    kernel: str  # a key of DEFAULTS
    level: int
    head_dim: int  # padded: 64, for all up to it, or 128
    causal: bool


Row = dict[str, Any]
Table = dict[Case, Launch]


@cache
def table_for(device: torch.device) -> Table:
    """Return all launches known for a CUDA device, the best known of each case."""
    major, minor = torch.cuda.get_device_capability(device)
    measured = measured_launches() if (major, minor) == (9, 0) else {}
    users = [users_launches(torch.cuda.get_device_name(device), operation) for operation in OPERATIONS]
    return compiled_launches(10 * major + minor) | measured | users[0] | users[1]


@cache
def measured_launches() -> Table:
    """Return the packaged tables that were measured on Hopper."""
    rows = [row for name in PACKAGED for row in _packaged_rows(name)]
    return {Case(*map(row.get, Case._fields)): launch_of(row) for row in rows}


@cache
def compiled_launches(capability: int) -> Table:
    """Return the packaged table compiled for this compute capability, such as 86; one launch for both masks."""
    wanted = SAME_CODE.get(capability, capability)
    rows = [row for row in _packaged_rows(COMPILED) if row["capability"] == wanted]
    return {
        Case(row["kernel"], row["level"], row["head_dim"], causal): launch_of(row)
        for row in rows for causal in (False, True)
    }  # fmt: skip


def _packaged_rows(name: str) -> list[Row]:
    path = resources.files(__package__) / name
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def launch_of(row: Row) -> Launch:
    """Return a row's launch; rows written before max_registers existed have no limit."""
    return Launch(*map(row.get, Launch._fields))


def users_table(gpu: str, operation: str) -> Path:
    """Return where `bench --tune` keeps what it measured on a GPU of that name. operation: "sagebwd" or "sla2"."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache")).expanduser()
    return cache_folder / "sage_kernels" / f"launch_{re.sub('[^A-Za-z0-9]+', '_', gpu)}_{operation}.json"


def users_launches(gpu: str, operation: str) -> Table:
    """Return the user's table for this GPU; an empty one, after a warning, if it cannot be used."""
    again = f"python -m sage_lab bench --tune{' --op sla2' if operation == 'sla2' else ''}"
    path = None
    try:
        path = users_table(gpu, operation)
        return read_users_table(path, gpu) if path.exists() else {}
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        warnings.warn(
            f"launch table {path} is not used, other launch settings are: {error}. Make it anew: {again}", stacklevel=2
        )
        return {}


def read_users_table(path: Path, gpu: str) -> Table:
    """Read a user's table, in which every launch must be one that the tests know to be right.

    Raises:
        ValueError: Says what is wrong with it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        provenance, rows = record["provenance"], record["rows"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"path: expected a record with provenance and rows, got {path}") from None
    for name, expected in (("gpu", gpu), ("triton", triton.__version__)):
        if provenance.get(name) != expected:
            raise ValueError(f"{name}: expected {expected}, got {provenance.get(name)}")
    table = {}
    for row in rows:
        try:
            case, launch = (kind(*(row[name] for name in kind._fields)) for kind in (Case, Launch))
            allowed = candidates(case.kernel, case.level)
            hash(case)
        except (KeyError, TypeError):
            raise ValueError(f"rows: expected kernels and columns of this version, got {row}") from None
        if launch not in allowed:
            raise ValueError(f"launch: expected one of this version's candidates of {case.kernel}, got {tuple(launch)}")
        table[case] = launch
    return table
