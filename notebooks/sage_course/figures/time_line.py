"""Time lines of warps with different jobs: one loads, others compute, barriers pass the tiles on."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_course.figures.diagrams import draw_note
from sage_course.figures.films import Film, draw_cell, sheet
from sage_course.figures.style import BLUE, GREEN, ORANGE, RED, SKY, YELLOW, panels


class Step(NamedTuple):
    """A warpgroup's work on a tile. Tensor cores run one step at a time."""

    name: str
    ticks: int
    on_tensor_cores: bool = False


class Job(NamedTuple):
    """A step of one worker, from tick `start` until tick `end`. Worker 0 loads, the others compute."""

    worker: int
    name: str
    tile: int
    start: int
    end: int


LOAD = Step("load", 2)


def schedule(tiles: int, warpgroups: int, places: int, step: Step) -> list[Job]:
    """Compute who does what when, if everyone starts as soon as barriers and tensor cores allow.

    A tile can be read when it is loaded. Its place can be loaded again when all warpgroups have done their step with
    it. Ticks have no length: this shows an order, no speed.
    """
    jobs: list[Job] = []
    queues = [list(range(tiles)) for _ in range(1 + warpgroups)]

    def ended(name: str, tile: int, tick: int) -> int:
        return sum(job.name == name and job.tile == tile and job.end <= tick for job in jobs)

    def may_start(work: Step, tile: int, tick: int) -> bool:
        if work is LOAD:
            return tile < places or ended(step.name, tile - places, tick) == warpgroups
        taken = step.on_tensor_cores and any(job.end > tick for job in jobs if job.name == step.name)
        return ended(LOAD.name, tile, tick) == 1 and not taken

    tick, free = 0, [0] * len(queues)
    while any(queues):
        for worker, queue in enumerate(queues):
            work = step if worker else LOAD
            if queue and free[worker] <= tick and may_start(work, queue[0], tick):
                free[worker] = tick + work.ticks
                jobs.append(Job(worker, work.name, queue.pop(0), tick, free[worker]))
        tick += 1
    return jobs


class Moment(NamedTuple):
    """The completion of a barrier: a tile is "ready" to be read, or its place is "empty" again."""

    kind: str
    tile: int
    tick: int


def moments(jobs: Sequence[Job]) -> list[Moment]:
    """Return when tiles become ready, and when the one place, which all but the last tile leave, becomes empty."""
    loads, others = ([job for job in jobs if (job.name == LOAD.name) == is_load] for is_load in (True, False))
    return [Moment("ready", x.tile, x.end) for x in loads] + [Moment("empty", x.tile, x.end) for x in others[:-1]]


def two_warps_and_a_barrier() -> Figure:
    """Draw who waits for whom if one warp loads tiles, a second one computes, and there is one place for a tile.

    It is schematic: the lengths of the steps are not measured. The bars are those of `schedule`.
    """
    jobs = schedule(3, 1, 1, Step("compute", 3))
    figure, (ax,) = panels(1, width=8.0, height=2.5, title="Schematic: two warps, one place for a tile, two barriers")
    draw_jobs(ax, jobs, ["loading warp", "computing warp"], {"load": SKY, "compute": BLUE})
    for kind, tile, tick in moments(jobs):
        ends = ((tick, 0.3), (tick, 0.7)) if kind == "ready" else ((tick, 0.7), (tick, 0.3))
        ax.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": RED, "shrinkA": 0, "shrinkB": 0})
        ax.text(tick + 0.1, 0.5, f"{kind} {tile}", va="center", fontsize=9, color=RED)
    figure.supxlabel("numbers: tiles; hatched: waits until the barrier completes", fontsize=9.5)
    return figure


def draw_jobs(axes: Axes, jobs: Sequence[Job], names: Sequence[str], colors: dict[str, str]) -> None:
    """Draw a line per worker, the first at the top: its jobs with their tile's number, hatched where it waits."""
    for worker in range(len(names)):
        time = 0
        for job in sorted((job for job in jobs if job.worker == worker), key=lambda job: job.start):
            if job.start > time:
                axes.barh(worker, job.start - time, left=time, height=0.6, fc="white", ec="0.75", hatch="////")
            bar = {"height": 0.6, "color": colors[job.name], "ec": "white"}
            axes.barh(worker, job.end - job.start, left=job.start, **bar)
            ink, label = "black" if colors[job.name] == SKY else "white", f"{job.name} {job.tile}"
            axes.text((job.start + job.end) / 2, worker, label, ha="center", va="center", fontsize=9, color=ink)
            time = job.end
    axes.set_yticks(range(len(names)), names, fontsize=9.5)
    axes.set(xlim=(0, max(job.end for job in jobs)), ylim=(len(names) - 0.5, -0.6), xticks=[])
    axes.set_xlabel("time", loc="right")
    axes.tick_params(length=0)
    axes.spines[["left", "right", "top"]].set_visible(False)


READ = Step("read", 2, on_tensor_cores=True)


class Place(NamedTuple):
    """A place of a ring at one moment, and the phases that its barriers are in."""

    tile: int | None  # None: empty
    is_ready: bool
    ready: int
    empty: int


def place_at(jobs: Sequence[Job], place: int, places: int, readers: int, tick: int) -> Place:
    """Return the state of a place of the ring."""
    mine = [job for job in jobs if job.tile % places == place]
    started = sum(job.worker == 0 and job.start <= tick for job in mine)
    loaded = sum(job.worker == 0 and job.end <= tick for job in mine)
    released = sum(job.worker > 0 and job.end <= tick for job in mine) // readers
    tile = None if released == started else place + places * (started - 1)
    return Place(tile, loaded == started, loaded % 2, released % 2)


def doing(jobs: Sequence[Job], worker: int, places: int, tick: int) -> str:
    """Return what a worker does or waits for."""
    job = next((job for job in jobs if job.worker == worker and job.end > tick), None)
    if job is None:
        return "has finished"
    if job.start <= tick:
        return f"{job.name}s tile {job.tile}"
    phase, place = job.tile // places % 2, job.tile % places
    if worker == 0:
        return f"waits until place {place} ends phase {1 - phase} of empty"
    if any(load.worker == 0 and load.tile == job.tile and load.end <= tick for load in jobs):
        return "waits for the tensor cores"
    return f"waits until place {place}\nends phase {phase} of ready"


def ring_film() -> Film:
    """Draw one warp that loads tiles into a ring of places, and two warpgroups that read each of them.

    The pictures are the first eight moments of `schedule` at which something begins. Its ticks have no length.
    """
    readers, places = 2, 3
    jobs = schedule(7, readers, places, READ)
    ticks = sorted({job.start for job in jobs})[:8]

    def draw(figure: Figure, i: int) -> None:
        axes = sheet(figure, 18, 10.3, f"moment {i + 1}")
        for place in range(places):
            state, left = place_at(jobs, place, places, readers, ticks[i]), 0.5 + 5.8 * place
            fill = "white" if state.tile is None else GREEN if state.is_ready else YELLOW
            text = "empty" if state.tile is None else f"tile {state.tile}" + ("" if state.is_ready else " on its way")
            draw_note(axes, (left + 2.7, 3.4), f"place {place}")
            draw_cell(axes, (left, 3.9), (5.4, 1.6), text, fill)
            draw_note(axes, (left + 2.7, 6.1), f"ready {state.ready}, empty {state.empty}", fontsize=9)
        for worker in range(readers + 1):
            what = doing(jobs, worker, places, ticks[i])
            name = f"warpgroup {worker - 1}\n" if worker else "the loading warp "
            corner, size = ((0.5 + 8.7 * (worker - 1), 7.4), (8.3, 2.8)) if worker else ((0.5, 0.4), (17, 1.7))
            fill = "white" if "waits" in what or "finished" in what else ORANGE if worker else SKY
            draw_cell(axes, corner, size, name + what, fill)

    return Film("ring", draw, len(ticks), 2.5)
