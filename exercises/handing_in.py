"""What was handed in for an exercise, by a student or by a class, and the seeds it is graded on."""

import json
import os
import re
import secrets
import stat
import zipfile
from pathlib import Path
from typing import Any

from sage_lab.files import replaced

from exercises import ROOT

VISIBLE_SEED = 0
HIDDEN_SEEDS = 2
NO_HIDDEN = "visible"  # what hidden_seeds.json holds if a package should have no hidden inputs
FILE_LIMIT = 2**20  # bytes of a submission
ENTRIES = 50_000  # of a submission's folders that are searched
COPY = r"(?: ?\(\d+\)|[-_ ]\d+)?\.py"  # "exercise (1).py" is what a browser makes of a second download


def read_submission(folder: Path, name: str, *, alone: bool, stub: str = "") -> tuple[bytes | None, str]:
    """Return what was handed in for an exercise, or None and why there is nothing.

    It may be NAME/exercise.py or NAME.py in any folder, or exercise.py if `alone`; a number of a copy doesn't matter.
    A file that still is the stub counts only if there is no other. Links are no submission: the grader may read files
    that a student may not.
    """
    found, seen, reasons, stubs = [], 0, [], []
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(x for x in folders if not x.startswith((".", "__MACOSX")))
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
            reasons.append(f"exercise.py wasn't found among the first {ENTRIES:,} files")
            break
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


def unpack(archive: Path, folder: Path) -> None:
    """Write what a student's zip holds of Python to a folder: of each file a little more than FILE_LIMIT at most.

    A file that can't be unpacked isn't there. Nothing is written outside of the folder, and a link is a file.
    """
    with zipfile.ZipFile(archive) as content:
        for entry in content.infolist()[:ENTRIES]:
            parts = [part for part in re.split(r"[/\\]", entry.filename) if part not in ("", ".", "..")]
            if entry.is_dir() or not entry.filename.endswith(".py"):
                continue
            target = folder.joinpath(*parts)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with content.open(entry) as file:
                    target.write_bytes(file.read(FILE_LIMIT + 1))
            except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, EOFError):
                continue  # a name that no file can have, a password, a broken part


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file that nobody else can read, in one step."""
    with replaced(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def seeds_of_grading(seed: int | None = None) -> list[Any]:
    """Return the visible seed, then hidden ones: of `seed`, of hidden_seeds.json if it is there, or fresh ones."""
    recorded = ROOT / "hidden_seeds.json"
    if seed is not None:
        return [VISIBLE_SEED, *(f"{seed}.{i}" for i in range(HIDDEN_SEEDS))]
    return [VISIBLE_SEED, *(read_seeds(recorded) if os.path.lexists(recorded) else fresh_seeds())]


def read_seeds(path: Path) -> list[str]:
    """Return the hidden seeds of a file. ValueError if it holds anything else, since nothing would be hidden then."""
    try:
        seeds = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON list of hidden seeds, got an error: {error}") from error
    if seeds == NO_HIDDEN:
        return []
    strings = isinstance(seeds, list) and all(isinstance(seed, str) and seed for seed in seeds)
    if not strings or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"{path}: expected a JSON list of one or more different texts, got {str(seeds)[:100]}")
    return seeds


def fresh_seeds() -> list[str]:
    """Draw hidden seeds that nobody can guess."""
    return [secrets.token_hex(16) for _ in range(HIDDEN_SEEDS)]
