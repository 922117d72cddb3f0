"""Figures: letters can be read, and what is drawn is what was computed."""

import base64
import io
import itertools
import math
import re
from functools import cache, partial

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from PIL import Image
from sage_course import figures
from sage_course.figures import time_line
from sage_course.teaching import letter_inputs

from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sla2 import top_blocks

SHOWN_WIDTH = 9.5  # inches of a notebook's column; a wider figure is made smaller
SCORES = 2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double()
VALUES = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()
CAUSAL = SCORES[:, :8].masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf)
ALL_TILES = torch.ones(3, 3, dtype=torch.bool)
MASK = torch.tensor(
    [[1, 1, 0, 0, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1, 1, 0]]
).bool()
ROW = torch.tensor([1.2, 2.0, 0.4, 1.6], dtype=torch.float64)
QUERY, KEY, VALUE, GRADIENT = (x[0, 0].double() for x in letter_inputs("less precise attention is still attention"))
FEW = [36, 17, 6, 3, 20]  # keys that notebook 01 draws for its last query
FACTORS = (
    torch.tensor([[0.254, -1.27, 0.127], [0.381, 2.54, -0.635]]),
    torch.tensor([[0.5, -0.889], [0.635, 0.3], [-0.21, 0.62]]),
)
LISTED = top_blocks(torch.rand(4, 8, generator=torch.Generator().manual_seed(1)), 3)
FILMS = {
    "softmax": figures.softmax_film(ROW),
    "delta": figures.delta_film((KEY[FEW] @ QUERY[-1] / 8).softmax(0), VALUE[FEW] @ GRADIENT[-1]),
    "scales": figures.scales_film(*FACTORS),
    "forward": figures.forward_film(SCORES, VALUES, 4),
    "backward": figures.backward_film(ALL_TILES),
    "table": figures.table_film(LISTED, 16 * 32 * 2),
    "ring": figures.ring_film(),
}
DRAWINGS = {
    "memory": figures.memory_hierarchy,
    "precision": lambda: figures.precision_map(SageBwdSettings.printed(exact_matmuls=("S", "dP"))),
    "owners": figures.owners,
    "sparse owners": lambda: figures.sparse_owners(MASK, rows=(0, 2), columns=(1, 6)),
    "sparse owner of nothing": lambda: figures.sparse_owners(torch.tensor([[True, False]]), rows=(), columns=(1,)),
    "SLA2": lambda: figures.sla2_flow(MASK),
    "two warps": figures.two_warps_and_a_barrier,
}
DRAWINGS |= {
    f"{name}, picture {i}": partial(film.figure, i)
    for name, film in FILMS.items()
    for i in (0, film.count // 2, film.count - 1)
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def drawn(monkeypatch):
    """drawn(figure) -> the texts that appear in it, with the pixels they take."""
    seen, draw = {}, Text.draw

    def remember(text, renderer, *args, **options):
        if text.get_visible() and text.get_text().strip():
            seen[text] = text.get_window_extent(renderer)
        return draw(text, renderer, *args, **options)

    monkeypatch.setattr(Text, "draw", remember)
    return lambda figure: figure.draw_without_rendering() or seen


def holds(box, extent):
    return box.contains(extent.x0, extent.y0) and box.contains(extent.x1, extent.y1)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_can_be_read(name, drawn):
    figure = DRAWINGS[name]()
    found = drawn(figure)
    assert figure.dpi >= 150
    boxes = [patch.get_window_extent() for patch in figure.findobj(FancyBboxPatch)]
    cells = [patch.get_window_extent() for patch in figure.findobj(Rectangle)]
    for text, extent in found.items():
        assert text.get_fontsize() * min(1, SHOWN_WIDTH / figure.get_figwidth()) >= 9, text
        assert holds(figure.bbox.padded(0.5), extent), f"{text} is cut off"
        for box in boxes:
            assert holds(box, extent) or not box.overlaps(extent), f"{text} lies on the edge of a box"
        middle = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
        for cell in cells:
            assert holds(cell, extent) or not cell.contains(*middle), f"{text} leaves its cell"
    for (one, a), (other, b) in itertools.combinations(found.items(), 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{one} lies on {other}"


@cache
def words(film, i):
    figure = film.figure(i)
    texts = [text.get_text() for axes in figure.axes for text in (axes.title, *axes.texts)]
    return "\n".join([figure.get_suptitle(), *texts])


@pytest.mark.parametrize("scores", [SCORES, CAUSAL])
def test_the_forward_film_ends_with_the_softmax_of_each_block_times_V(scores):
    steps = figures.forward_steps(scores, VALUES[: scores.shape[1]], 4)
    found = torch.cat([step.o for step in steps if step.is_last])
    torch.testing.assert_close(found, torch.softmax(scores, -1) @ VALUES[: scores.shape[1]])
    for i in range(len(steps)):
        assert all(f"{x:.1f}" in words(FILMS["forward"], i) for x in steps[i].m) or scores is CAUSAL


def test_nobody_in_the_ring_begins_before_the_barriers_phase_has_ended():
    jobs = time_line.schedule(7, 2, 3, time_line.READ)
    assert len(jobs) == 7 * 3
    for job in jobs:
        place, phase = job.tile % 3, job.tile // 3 % 2
        before = time_line.place_at(jobs, place, 3, 2, job.start - 0.5)
        now = time_line.place_at(jobs, place, 3, 2, job.start)
        if job.worker == 0:
            assert (before.tile is None or before.tile == job.tile - 3, now.empty) == (True, phase)
        else:
            assert (now.tile, now.is_ready, now.ready) == (job.tile, True, 1 - phase)
    waits = "\n".join(words(FILMS["ring"], i) for i in range(8))
    assert "loading warp waits" in waits
    assert "ends phase 1 of ready" in waits


def test_a_slider_holds_a_picture_for_each_value_and_shows_the_first_where_styles_are_cut_out():
    def draw(turn=2, far=0):
        figure, (axes,) = figures.panels(1, width=1.6, height=1.4, title=f"turn {turn}, far {far}")
        axes.set(xlim=(0, turn), xlabel=r"$\sigma$ | x", ylabel="y")
        return figure

    made = figures.slider(draw, turn=range(1, 4), far=range(0, 3, 2))
    text = made._repr_html_()
    assert text == figures.slider(draw, turn=range(1, 4), far=range(0, 3, 2))._repr_html_()  # nothing is random
    first, strip = (Image.open(io.BytesIO(base64.b64decode(x))) for x in re.findall(r"base64,([^\"')]*)", text))
    assert strip.size == (6 * first.width, first.height)
    assert made.alts[2:4] == ["turn 2, far 0. y over sigma / x", "turn 2, far 2. y over sigma / x"]
    assert plt.get_fignums() == []
    with pytest.raises(ValueError, match="draw: expected a default of turn among range"):
        figures.slider(draw, turn=range(3, 9))
    with pytest.raises(ValueError, match="expected one size"):
        figures.slider(lambda n=1: figures.panels(n)[0], n=range(1, 3))
