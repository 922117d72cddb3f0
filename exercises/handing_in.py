"""What was handed in for an exercise, and the seeds it is graded on."""

import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from exercises import ROOT

VISIBLE_SEED = 0
HIDDEN_SEEDS = 2
FILE_LIMIT = 2**20  # bytes of a submission
ENTRIES, DEPTH = 2000, 4  # of a submission's folders that are searched
COPY = r"(?: ?\(\d+\)|[-_ ]\d+)?\.py"  # "exercise (1).py" is what a browser makes of a second download


def read_submission(folder: Path, name: str, *, alone: bool, stub: str = "") -> tuple[bytes | None, str]:
    """Return what was handed in for an exercise, or None and why there is nothing.

    It may be NAME/exercise.py or NAME.py in any folder, or exercise.py if `alone`; a number of a copy doesn't matter.
    A file that still is the stub counts only if there is no other. Links are no submission: the grader may read files
    that a student may not.
    """
    found, seen = [], 0
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(x for x in folders if not x.startswith((".", "__MACOSX")) and depth < DEPTH)
        for file in sorted(files):
            kinds = (
                Path(place).name == name and re.fullmatch("exercise" + COPY, file),
                re.fullmatch(re.escape(name) + COPY, file),
                alone and not re.match(r"\d\d_", Path(place).name) and re.fullmatch("exercise" + COPY, file),
            )
            if any(kinds):
                found.append(([bool(kind) for kind in kinds].index(True), depth, len(file), Path(place, file)))
        seen += len(folders) + len(files)
        if seen > ENTRIES:
            break
    reasons, stubs = [], []
    for *_, path in sorted(found):
        try:
            source = read_file(path)
        except OSError as error:
            reasons.append(f"{path.name} can't be read: {error.strerror}")
            continue
        if not stub or source.decode("utf-8", errors="replace").split() != stub.split():
            return source, ""
        stubs.append(source)
    return (stubs[0], "") if stubs else (None, (reasons or ["exercise.py wasn't handed in"])[0])


def read_file(path: Path) -> bytes:
    """Return a regular file's bytes, a little more than FILE_LIMIT at most. OSError for links and for anything else."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(None, "it is no file")
        if facts.st_nlink > 1:
            raise OSError(None, "it is a hard link")
        return file.read(FILE_LIMIT + 1)


def seeds_of_grading(seed: int | None = None) -> list[Any]:
    """Return the visible seed, then hidden ones: of `seed`, of hidden_seeds.json if it is there, or fresh ones."""
    recorded = ROOT / "hidden_seeds.json"
    if seed is not None:
        return [VISIBLE_SEED, *(f"{seed}.{i}" for i in range(HIDDEN_SEEDS))]
    return [VISIBLE_SEED, *(read_seeds(recorded) if recorded.exists() else fresh_seeds())]


def read_seeds(path: Path) -> list[str]:
    """Return the hidden seeds of a file. ValueError if it holds anything else, since nothing would be hidden then."""
    try:
        seeds = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON list of hidden seeds, got an error: {error}") from error
    strings = isinstance(seeds, list) and all(isinstance(seed, str) and seed for seed in seeds)
    if not strings or len(set(seeds)) < len(seeds):
        raise ValueError(f"{path}: expected a JSON list of different texts, got {str(seeds)[:100]}")
    return seeds


def fresh_seeds() -> list[str]:
    """Draw hidden seeds that nobody can guess."""
    return [secrets.token_hex(16) for _ in range(HIDDEN_SEEDS)]
