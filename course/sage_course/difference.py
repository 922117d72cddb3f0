"""Two functions side by side: what one level of a ladder changes in the one before."""

import difflib
import html
from collections.abc import Callable, Iterator

from sage_course.check import source

COLORS = {"-": "#fbe3d6", "+": "#dcebf7", " ": "transparent"}  # what goes, what comes: also said by a sign


class Difference:
    """Shown by a notebook as two columns; as text, and so by nbval, as a list of lines that go and come."""

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
        """((sign, line) of the one before, the same of the one after), row by row; empty where one has no line."""
        matcher = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False)
        for kind, first, last, start, stop in matcher.get_opcodes():
            left, right = self.before[first:last], self.after[start:stop]
            signs = (" ", " ") if kind == "equal" else ("-", "+")
            for number in range(max(len(left), len(right))):
                yield tuple(
                    (sign, side[number]) if number < len(side) else (" ", "")
                    for sign, side in zip(signs, (left, right), strict=True)
                )
