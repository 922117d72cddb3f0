"""Alternative texts of figures, for screen readers: what a figure's titles, axes and legends say."""

import re
from collections.abc import Iterator

import matplotlib.pyplot as plt
from IPython import get_ipython
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LONGEST = 500  # letters


def describe(figure: Figure) -> str:
    """Return what stands in a figure: its title, then each of its axes, then what is below them all."""
    parts = [figure.get_suptitle(), *(", ".join(_words(axes)) for axes in figure.axes), figure.get_supxlabel()]
    parts += [", ".join(text.get_text() for text in legend.get_texts()) for legend in figure.legends]
    words = re.sub(r"[${}\\]", "", ". ".join(dict.fromkeys(filter(None, parts)))).split()
    text = " ".join(words)
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rpartition(' ')[0]} ..."


def _words(axes: Axes) -> Iterator[str]:
    """Yield the title of one axes, what is along its sides and in its legend; of a diagram, which has no sides, all."""
    legend = axes.get_legend()
    yield from filter(None, (axes.get_title(), " over ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))))
    texts = legend.get_texts() if legend else [] if axes.axison else axes.texts
    yield from filter(None, (text.get_text() for text in texts))


def keep_descriptions() -> None:
    """Keep the description of each figure that a notebook shows from now on, in the metadata of the output.

    The book looks for it there, and so does nbconvert's classic template.
    """
    plt.switch_backend(plt.get_backend())  # loads the backend, which tells IPython how to draw figures
    formatter = get_ipython().display_formatter.formatters["image/png"]
    if Figure in formatter:  # in a notebook, but not in IPython's shell
        draw = formatter.for_type(Figure)
        formatter.for_type(Figure, lambda figure: (draw(figure), {"alt": describe(figure)}))
