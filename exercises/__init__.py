"""Coursework that grades itself: exercises with tasks, masters and the mistakes that students make.

python -m exercises stubs | grade | check | package: see exercises/README.md.
"""

import os
import sys

# `python -m` finds modules in the current folder first. If that is a submission, its json.py must not become ours.
_REPOSITORY = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
try:
    _CURRENT = os.path.realpath(".")
except FileNotFoundError:  # it was deleted: nothing can be found there
    _CURRENT = _REPOSITORY
if sys.path and not sys.flags.safe_path and os.path.realpath(sys.path[0] or _CURRENT) == _CURRENT != _REPOSITORY:
    del sys.path[0]

import re  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).resolve().parent


def exercise_names() -> list[str]:
    """Return the folders of exercises, in the order of the course: 01_..., 02_..."""
    return sorted(path.parent.name for path in ROOT.glob("*/README.md") if re.fullmatch(r"\d\d_\w+", path.parent.name))
