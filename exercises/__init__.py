"""Coursework that grades itself: exercises with stubs, graders, wrong answers they must catch, and a sandbox.

python -m exercises stubs | grade | check | package: see exercises/README.md.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def exercise_names() -> list[str]:
    """Folders of exercises, in the order of the course: 01_..., 02_..."""
    return sorted(path.parent.name for path in ROOT.glob("*/grader.py") if re.fullmatch(r"\d\d_\w+", path.parent.name))
