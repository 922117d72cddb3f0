"""Two functions side by side, to show what one level of a ladder changes in the level before."""

import difflib
import html
from collections.abc import Callable, Iterator

from sage_course.gaps import source

# Of lines that were removed or added, on white and on black; signs say it, too.
COLORS = {"-": "rgba(213, 94, 0, 0.25)", "+": "rgba(0, 114, 178, 0.25)", " ": "transparent"}


class Difference:
    """Two texts that a notebook shows as two columns; as text, and so for nbval, it lists removed and added lines."""

    def __init__(self, before: Callable, after: Callable):
        self.before, self.after = (source(function).splitlines() for function in (before, after))

    def __repr__(self) -> str:
        lines = difflib.unified_diff(self.before, self.after, lineterm="", n=1)
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))

    def _repr_html_(self) -> str:
        style = "text-align: left; vertical-align: top; white-space: pre; font-family: monospace; padding: 0 1em"
        rows = [
            "".join(
                f'<td style="{style}; background: {COLORS[sign]}">{sign} {html.escape(line)}</td>'
                for sign, line in pair
            )
            for pair in self.pairs()
        ]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"

    def pairs(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """Yield ((sign, line) before, (sign, line) after), row by row; a line is empty where a side has none."""
        matcher = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False)
        for kind, first, last, start, stop in matcher.get_opcodes():
            left, right = self.before[first:last], self.after[start:stop]
            signs = (" ", " ") if kind == "equal" else ("-", "+")
            for number in range(max(len(left), len(right))):
                yield tuple(
                    (sign, side[number]) if number < len(side) else (" ", "")
                    for sign, side in zip(signs, (left, right), strict=True)
                )
