"""Variants of an exercise: the files in its folder are the first; variant.toml makes the second of them.

It has a list for each file that differs, of replacements: [old, new], or [old, new, how many times old is there].
"""

import tomllib

from exercises import ROOT


def read_text(name: str, file: str, variant: int = 1) -> str:
    """Return a file of an exercise in one variant. ValueError: there is none, or an old text isn't in the file."""
    text = (ROOT / name / file).read_text(encoding="utf-8")
    for old, new, *times in replacements(name).get(file, ()) if variant != 1 else ():
        expected, found = times[0] if times else 1, text.count(old)
        if found != expected:
            raise ValueError(f"{name}/variant.toml: expected {expected} times {old!r} in {file}, got {found}")
        text = text.replace(old, new)
    return text


def replacements(name: str) -> dict[str, list]:
    """Return what variant.toml of an exercise replaces in each file. ValueError if there is none."""
    try:
        return tomllib.loads((ROOT / name / "variant.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{name}: expected a variant.toml for a second variant, got none") from None
