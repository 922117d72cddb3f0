"""The local board: a record beside a reader's work to which every result is added, and from which none is lost."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import triton

from sage_lab.records import Row, only_writer, read_record, write_record

SECONDS = 30  # that a result waits for another process to add its own
COLUMNS = ("name", "head_dim", "causal", "date")


def board_rows(path: Path) -> list[Row]:
    """Return a board's rows, none if there is no file yet. Raises ValueError for a file that is no board."""
    try:
        rows = read_record(path).rows if path.exists() else []
    except ValueError:  # not even a record
        rows = [None]
    if not all(isinstance(row, dict) and {*COLUMNS} <= row.keys() and {"target", "gpu"} & row.keys() for row in rows):
        raise ValueError(f"board: expected rows of `climb`, got {path}: name another file")
    return rows


def add(path: Path, rows: Sequence[Row], command: str) -> list[Row]:
    """Add rows to a board in one step, after what others have added; return all."""
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    with ExitStack() as held:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                held.enter_context(only_writer(path))
                break
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        everything = board_rows(path) + [row | versions for row in rows]
        write_record(path, everything, command=command)
    return everything
