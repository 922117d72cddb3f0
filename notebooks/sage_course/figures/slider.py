"""Sliders whose pictures travel in a notebook's output: they move in the book and on any page, without a kernel.

All pictures stand side by side in one PNG, the strip, behind a window as wide as one of them. The strip is the
background of an image element, which has no room to show its own content. Where scripts run, sliders move the strip: in
the book, and in JupyterLab once the notebook is trusted or the cell was run. JupyterLab cuts scripts out of an
untrusted notebook, but not the scroll bar, so the reader scrolls the strip. Where styles are cut out too, the image
element shows its own content: the picture of the values at which the sliders start. So it should be on GitHub, and on
nbviewer and Colab sliders should move; we could not try these three.
"""

import base64
import html
import inspect
from collections.abc import Callable
from itertools import product

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from sage_course.figures.alternative_text import describe
from sage_course.figures.films import as_picture, beside, saved

WIDEST = 32_767  # pixels that Firefox draws
OWN_KEYS = 'data-lm-suppress-shortcuts="true"'  # JupyterLab leaves the arrow keys to the sliders
# In the picture's `onload`: sliders take the place of the note and of the scroll bar.
START = """const f = this.closest('figure'), [controls, note] = f.children; this.onload = null;
controls.style.display = ''; note.style.display = 'none'; this.parentElement.style.overflow = 'hidden'; f.oninput();"""
# In the figure's `oninput`: the last slider counts one picture a value, the one before it a row of them, and so on.
MOVE = """let k = 0; const image = this.querySelector('img');
for (const i of this.querySelectorAll('input')) {
k = k * ((i.max - i.min) / i.step + 1) + (i.value - i.min) / i.step;
i.parentElement.nextElementSibling.value = i.value; }
image.style.marginLeft = -100 * k + '%'; image.alt = image.dataset.alts.split('|')[k];"""


class Slider:
    """Pictures for all values of one slider or more. A notebook shows them as HTML; as text, the sliders' names."""

    def __init__(self, draw: Callable[..., Figure], values: dict[str, range]):
        start = {name: inspect.signature(draw).parameters[name].default for name in values}
        for name, value in start.items():
            if value not in values[name]:
                raise ValueError(f"{draw.__name__}: expected a default of {name} among {values[name]}, got {value}")
        self.values, self.start = values, start
        cases = [dict(zip(values, case, strict=True)) for case in product(*values.values())]
        self.pictures, self.alts = [], []
        for case in cases:
            figure = draw(**case)
            self.pictures.append(as_picture(figure))
            self.alts.append(describe(figure).replace("|", "/"))
            plt.close(figure)
        self.first = cases.index(start)
        sizes = {picture.size for picture in self.pictures}
        if len(sizes) > 1 or len(cases) * self.pictures[0].width > WIDEST:
            raise ValueError(f"{draw.__name__}: expected one size, {WIDEST} pixels in a row at most, got {sizes}")

    def __repr__(self) -> str:
        return f"slider: {', '.join(self.values)}"

    def _repr_html_(self) -> str:
        (width, height), count = self.pictures[0].size, len(self.pictures)
        controls = "".join(
            f'<label>{name.replace("_", " ")} <input type="range" min="{x[0]}" max="{x[-1]}" step="{x.step}" {OWN_KEYS}'
            f' value="{self.start[name]}" style="width: 16em; max-width: 60%; vertical-align: middle"></label>'
            f" <output>{self.start[name]}</output><br>"
            for name, x in self.values.items()
        )
        span = ", ".join(f"{name} from {x[0]} to {x[-1]}" for name, x in self.values.items())
        style = f"width: {100 * count}%; max-width: none; height: 0; padding: 0 0 {100 * height / width:.3f}%; "
        style += f"background: url({as_address(beside(self.pictures, count))}) 0 0 / 100% 100%"
        return (
            f'<figure style="margin: 0; max-width: {width}px" oninput="{MOVE}">'
            f'<div style="display: none">{controls}</div>'
            f"<p>A slider for {span}. In JupyterLab, scroll the picture, or run the cell for the slider.</p>"
            f'<div style="overflow-x: auto"><img alt="{html.escape(self.alts[self.first])}" onload="{START}"'
            f' data-alts="{html.escape("|".join(self.alts))}" src="{as_address(self.pictures[self.first])}"'
            f' style="{style}"></div></figure>'
        )


def slider(draw: Callable[..., Figure], **values: range) -> Slider:
    """Draw a figure for each combination of values, one slider a name.

    draw: makes a figure from these names. Its defaults are where the sliders start.
    """
    return Slider(draw, values)


def as_address(picture: Image.Image) -> str:
    """Return a PNG with a palette of 256 colours, as a data: address."""
    png = saved(picture.quantize(dither=Image.Dither.NONE), "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
