"""Figures that answer to the reader: controls in JupyterLab, and a picture drawn beforehand where no kernel runs.

`live(draw, sigma=range(1, 11), words=str)` gives `draw` a control for each of these arguments. It calls functions of
its notebook, so the figure shows what the reader's own functions do. In the book and on GitHub stands what the same
function has drawn: a strip of pictures that a slider moves if the first control counts, else one picture.
"""

import html
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
import traitlets
from ipywidgets import Layout
from matplotlib.figure import Figure

from sage_course.figures.alternative_text import describe
from sage_course.figures.films import as_picture, saved
from sage_course.figures.slider import as_address, slider

MOST_PICTURES = 8  # drawn beforehand
Rows = tuple[tuple[bool, ...], ...]


class Board(ipywidgets.VBox):
    """Squares to switch on and off, a row of them for each row of `value`."""

    value = traitlets.Tuple()

    def __init__(self, value: Rows, description: str):
        square = Layout(width="2em", height="2em", margin="1px", padding="0")
        self._squares = [[ipywidgets.ToggleButton(on, layout=square) for on in row] for row in value]
        super().__init__([ipywidgets.Label(description), *map(ipywidgets.HBox, self._squares)], value=value)
        for row in self._squares:
            for one in row:
                one.observe(self._read, "value")

    def _read(self, change: dict) -> None:
        self.value = tuple(tuple(one.value for one in row) for row in self._squares)

    @traitlets.observe("value")
    def _write(self, change: dict) -> None:
        with self.hold_trait_notifications():
            for squares, row in zip(self._squares, change["new"], strict=True):
                for one, on in zip(squares, row, strict=True):
                    one.value = on


class Live:
    """A figure and controls for its arguments. Tests set `live.controls["sigma"].value` and read `live.figure`."""

    def __init__(self, draw: Callable[..., Figure], choices: dict[str, Any], start: dict[str, Any] | None = None):
        self.start = start or {name: inspect.signature(draw).parameters[name].default for name in choices}
        self.draw, self.choices = draw, choices
        self.controls = {name: _control(name, self.start[name], choice) for name, choice in choices.items()}
        self.picture, self.complaint = ipywidgets.Image(format="png"), ipywidgets.Label()
        self.figure = self._drawn()
        for control in self.controls.values():
            control.observe(self._draw_again, "value")
        self.box = ipywidgets.VBox([*self.controls.values(), self.complaint, self.picture])

    def __repr__(self) -> str:
        return f"live: {', '.join(self.controls)}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """Offer the controls and what was drawn beforehand: whoever shows the output takes the first that it can."""
        return self.box._repr_mimebundle_() | {"text/plain": repr(self), "text/html": self.beforehand()}

    def _drawn(self) -> Figure:
        figure = self.draw(**{name: control.value for name, control in self.controls.items()})
        self.picture.value = saved(as_picture(figure), "PNG")
        self.picture.alt = describe(figure)
        plt.close(figure)
        return figure

    def _draw_again(self, change: dict) -> None:
        try:
            self.figure = self._drawn()
            self.complaint.value = ""
        except Exception as error:  # the reader's function may fail: the last picture stays, and the reader learns why
            self.complaint.value = f"{type(error).__name__}: {error}"

    def beforehand(self) -> str:
        """Return HTML that needs no kernel, with what is drawn where the controls start, and at a few other values."""
        first, choice = next(iter(self.choices.items()))
        if isinstance(choice, range):
            step = math.ceil(len(choice) / MOST_PICTURES)
            few = choice[choice.index(self.start[first]) % step :: step]
            return slider(self.draw, **{first: few})._repr_html_()
        alt, address = html.escape(describe(self.figure)), as_address(as_picture(self.figure))
        return f'<figure style="margin: 0"><img alt="{alt}" src="{address}"></figure>'


def live(draw: Callable[..., Figure], **choices: range | Sequence | type) -> Live:
    """Draw a figure that its reader changes, with a control for each named argument of `draw`.

    Args:
        draw: makes a figure. The defaults of its arguments are where the controls start.
        choices: by argument, a range (a slider), a list (one of several), bool (a box to tick), str (a line of text),
            or Board (squares to switch on and off; the default is a tuple of rows of bools).

    Raises:
        ValueError: a default that its control cannot take, or a choice of another kind.
    """
    return Live(draw, choices)


def _control(name: str, start: Any, choice: range | Sequence | type) -> Any:
    shown = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
    if isinstance(choice, range | list) and start not in choice:
        raise ValueError(f"{name}: expected a default among {choice}, got {start!r}")
    if isinstance(choice, range):
        return ipywidgets.IntSlider(start, choice[0], choice[-1], choice.step, **shown)
    if isinstance(choice, list):
        return ipywidgets.ToggleButtons(options=choice, value=start, **shown)
    if choice is bool:
        return ipywidgets.Checkbox(start, indent=False, **shown)
    if choice is str:
        return ipywidgets.Text(start, continuous_update=False, **shown)
    if choice is Board:
        return Board(start, shown["description"])
    raise ValueError(f"{name}: expected a range, a list, bool, str or Board, got {choice!r}")
