"""Notebook 13: what it shows of a record, of one that the program itself wrote of a tiny model; and its pictures."""

import io
import shutil
from dataclasses import asdict, replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from sage_course import figures
from sage_course.results import video as video_results
from sage_course.results.video import (
    ARMS,
    PICTURES,
    SPEED,
    above_full,
    comparison,
    pictures,
    record_of,
    samples,
    speed,
)
from sage_lab.experiments.video import plan as plan_module
from sage_lab.experiments.video.plan import AFTERWARDS, FULL, facts_of, planned
from sage_lab.experiments.video.runs import VideoRuns, all_rows
from sage_lab.experiments.video.speed import VideoSpeedPlan, length_rows
from sage_lab.records import write_record
from video_cases import CONFIG, PLAN, made_up_digits, start_in

RUNS = (FULL, "SLA2", "SLA2, 16 bit", "sparse only")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder as that of the records, with everything in it."""
    folder = tmp_path_factory.mktemp("recorded")
    plan = replace(PLAN, steps=1, stage1_steps=1, reports=1, seeds=(0, 1), videos=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "DECISIVE", RUNS)
        patch.setattr(plan_module, "SINGLE", ("SLA2 at 90%",))
        runs = VideoRuns(plan, start_in(folder / "work"), torch.zeros(2, 3, 4, 8, 8))
        assert runs.work(planned(plan), lambda: None) == []
        rows = all_rows(runs)
    rows += [row | {"arm": "random router", "diverged": "at once", "loss_by_video": None} for row in rows[:1]]
    write_record(folder / ARMS, rows, command="none", unfinished=["later_seed0"], **facts_of(plan))
    shutil.copytree(folder / "work" / "pictures", folder / PICTURES)
    speed_plan = VideoSpeedPlan((4,), 1, 1, 2, 2, 1, autocast=False, compile=False)
    rows = length_rows(speed_plan, replace(CONFIG, frames=4), made_up_digits(), torch.device("cpu"), ("sla2", "exact"))
    write_record(folder / SPEED, rows, command="none", plan=asdict(speed_plan), not_timed={"flex": "no GPU"})
    return folder


@pytest.fixture
def recorded(written, tmp_path, monkeypatch):
    """A copy of it, which the functions read."""
    copy = shutil.copytree(written, tmp_path / "recorded")
    monkeypatch.setattr(video_results, "recorded_file", lambda name: copy / name)
    return copy


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


@pytest.mark.parametrize(
    ("show", "name", "others"),
    [(comparison, ARMS, 3), (pictures, ARMS, 3), (pictures, PICTURES, 3), (speed, SPEED, 1)],
)
def test_what_is_missing_is_said_in_place_of_it(recorded, show, name, others):
    assert len(show()) == others
    (recorded / name).rename(recorded / "elsewhere")
    (said,) = show()
    assert said.startswith(f"Nothing is recorded yet: there is no {name}.")
    assert (samples() == {}) == (name in (ARMS, PICTURES))
    assert "python -m sage_lab video" in said._repr_markdown_()


def test_every_arm_has_its_difference_to_full_attention_and_the_papers_score(recorded):
    text, figure, _ = comparison()
    record = record_of(ARMS)
    lines = {line[0]: line for line in cells(text)[2:]}
    assert list(lines) == list(dict.fromkeys(row["arm"] for row in record.rows))
    assert lines["SLA2"][1] == "2"
    assert lines["SLA2"][-1] == "0.1039"
    assert lines["sparse only"][-1] == lines[FULL][3] == lines[FULL][-1] == ""
    assert lines["random router"][3] == "diverged"
    by_seed = [[row["loss"] for row in record.select(arm=arm)] for arm in ("SLA2", FULL)]
    difference = above_full(record, "SLA2")
    assert difference.mean == pytest.approx(sum(by_seed[0]) / 2 - sum(by_seed[1]) / 2, abs=1e-5)  # rows have six digits
    assert difference.low <= difference.mean <= difference.high
    assert lines["SLA2"][3].startswith(f"{1000 * difference.mean:+.3f} ({1000 * difference.low:+.3f} to")
    assert "1 of the plan's runs left; the record names them." in text
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["SLA2", "SLA2, 16 bit", AFTERWARDS, "sparse only", "SLA2 at 90%"]


def test_every_claim_that_has_its_arms_has_a_verdict_on_every_measure(recorded):
    *_, text = comparison()
    lines = cells(text)
    half = next(number for number, line in enumerate(lines) if line[0] == "claim" and number)
    decided, everywhere = lines[2:half], lines[half + 2 :]
    claims = ["QAT helps", "alpha matters", "full attention beats SLA2 at 97%", "less sparsity is better"]
    assert [line[0] for line in decided] == [*claims, "a learned router beats a random one"]
    assert decided.pop()[4] == "supported: random router diverged"
    assert decided[0][-1] == "0.1039 against 0.0850"
    for line in decided:
        (same,) = (other for other in everywhere if other[0] == line[0])
        assert same[1] == line[4]
        assert set(same[1:]) <= {"supported", "contradicted", "not decided"}


def test_pictures_are_those_of_the_runs(recorded):
    drawn = [FULL, "SLA2", "sparse only"]
    restored, films, selected = pictures()
    assert repr(restored) == f"films: truth, {', '.join(drawn)}"
    # Every arm has pictures of its own, of every second frame in the strip.
    assert len(set(restored.gifs.values())) == 1 + len(drawn)
    with (
        Image.open(io.BytesIO(restored.gifs["truth"])) as film,
        Image.open(recorded / PICTURES / "restored_truth.png") as strip,
    ):
        assert (film.size, film.n_frames) == ((4, 4), strip.width // 16)
        first, wanted = (
            np.array(x.convert("RGB")).astype(int) for x in (film, strip.crop((0, 0, 8, 8)).convert("RGB").reduce(2))
        )
    assert np.abs(first - wanted).max() <= 8  # a film has 64 colours
    assert {arm: tuple(video.shape) for arm, video in samples().items()} == dict.fromkeys(drawn, (3, 4, 4, 4))
    assert films._repr_html_().count("<img") == 2
    assert repr(films) == "films: full, SLA2"
    assert isinstance(selected, Figure)
    # Two of 8 blocks, in both slices of the video together, of the last layer.
    light = [ax.images[0].get_array().shape for ax in selected.axes]
    assert light == [(8, 8, 3)] * 2


def test_times_are_those_of_the_record(recorded):
    (text,) = speed()
    assert [line[0] for line in cells(text)[2:]] == ["step", "step", "sampling", "sampling"]
    assert "Not timed: flex, no GPU." in text
    assert "timed in turn" in text


def test_dimmed_is_what_is_not_selected():
    frames = torch.ones(3, 2, 4, 4)
    selected, asks = torch.zeros(2, 2, 2, 2, dtype=torch.bool)
    selected[0, 1, 0] = asks[1, 0, 1] = True
    figure = figures.selected_figure(frames, {"one": selected}, asks, title="")
    first, second = (torch.tensor(ax.images[0].get_array().data) for ax in figure.axes)
    assert (first[2:, :2] == 1).all()
    assert (first[:2] < 0.5).all()
    assert (second < 0.5).all()
    assert [len(collection.get_segments()) for collection in figure.axes[0].collections] == [4]
    assert [len(collection.get_segments()) for collection in figure.axes[1].collections] == [0, 4]


def test_an_interval_that_holds_zero_is_grey_and_one_seed_an_open_circle():
    differences = {"worse": (2e-3, 1e-3, 3e-3, 3), "alike": (1e-3, -1e-3, 2e-3, 1)}
    figure = figures.arms_figure(differences, title="")
    _, worse, worse_mean, alike, alike_mean = figure.axes[0].lines
    assert list(worse.get_xdata()) == [1, 3]
    assert worse.get_color() != alike.get_color() == "0.5"
    assert alike_mean.get_markerfacecolor() == "white" != worse_mean.get_markerfacecolor()


def test_a_strip_shows_frames_spread_over_the_video():
    video = torch.linspace(-1, 1, 8).view(1, 8, 1, 1).expand(3, 8, 2, 2)
    figure = figures.film_strips_figure({"one": video}, title="", frames=2)
    first, last = figure.axes
    assert (first.images[0].get_array() == 0).all()
    assert (last.images[0].get_array() == 1).all()
    assert last.get_xlabel() == "frame 7"
