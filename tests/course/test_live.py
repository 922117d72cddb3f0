"""Figures that answer to the reader: each kind of control moves what the reader's own function draws."""

from sage_course.figures import Board, live, panels


def scaled(x):
    return 2 * x


def draw(turn=2, kind="line", words="a b", on=True, blocks=((True, False), (False, True))):
    figure, (axes,) = panels(1, title="What the controls say")
    axes.plot([0, turn], [0, scaled(turn)])
    axes.set(xlabel=kind, ylabel=words, title=f"{on}, {sum(map(sum, blocks))} blocks")
    return figure


def test_each_kind_of_control_changes_the_figure():
    shown = live(draw, turn=range(1, 5), kind=["line", "bar"], words=str, on=bool, blocks=Board)
    for name, value, look, expected in (
        ("turn", 4, lambda axes: list(axes.lines[0].get_ydata()), [0, 8]),
        ("kind", "bar", lambda axes: axes.get_xlabel(), "bar"),
        ("words", "c", lambda axes: axes.get_ylabel(), "c"),
        ("on", False, lambda axes: axes.get_title(), "False, 2 blocks"),
        ("blocks", ((True, True), (True, False)), lambda axes: axes.get_title(), "False, 3 blocks"),
    ):
        picture = shown.picture.value
        shown.controls[name].value = value
        assert look(shown.figure.axes[0]) == expected
        assert shown.picture.value != picture


def test_a_square_that_is_clicked_is_in_the_value_of_its_board():
    board = live(draw, blocks=Board).controls["blocks"]
    squares = [line.children for line in board.children[1:]]
    squares[0][1].value = True
    assert board.value == ((True, True), (False, True))
    board.value = ((False, False), (True, True))
    assert [[square.value for square in line] for line in squares] == [[False, False], [True, True]]


def test_the_readers_function_draws_and_an_error_of_it_is_told_below_the_last_picture(monkeypatch):
    shown = live(draw, turn=range(1, 5))
    monkeypatch.setitem(draw.__globals__, "scaled", lambda x: 5 * x)  # as a notebook's cell that runs again
    shown.controls["turn"].value = 3
    assert list(shown.figure.axes[0].lines[0].get_ydata()) == [0, 15]
    monkeypatch.setitem(draw.__globals__, "scaled", lambda x: x.shape)
    picture = shown.picture.value
    shown.controls["turn"].value = 4
    assert shown.complaint.value == "AttributeError: 'int' object has no attribute 'shape'"
    assert shown.picture.value == picture
    monkeypatch.setitem(draw.__globals__, "scaled", lambda x: x)
    shown.controls["turn"].value = 1
    assert shown.complaint.value == ""


def test_what_is_drawn_beforehand_needs_no_kernel():
    assert live(draw, turn=range(1, 5))._repr_mimebundle_()["text/html"].count('<input type="range"') == 1
    assert 'min="2" max="37" step="5"' in live(draw, turn=range(40)).beforehand()  # eight pictures, with the first one
    page = live(draw, words=str, turn=range(1, 5))._repr_mimebundle_()["text/html"]
    assert page.startswith('<figure style="margin: 0"><img alt="')
    assert "<input" not in page
