"""Time lines of warps with different jobs: one loads, others compute, barriers pass the tiles on."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_course.figures.style import BLUE, ORANGE, RED, SKY, panels


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


def schedule(tiles: int, warpgroups: int, places: int, steps: Sequence[Step]) -> list[Job]:
    """Compute who does what when, if everyone starts as soon as barriers and tensor cores allow.

    A tile can be read when it is loaded. Its place can be loaded again when all warpgroups have done their last step
    with it. Ticks have no length: this shows an order, no speed.
    """
    jobs: list[Job] = []
    work = [[(step, tile) for tile in range(tiles) for step in steps] for _ in range(warpgroups)]
    queues = [[(LOAD, tile) for tile in range(tiles)], *work]

    def ended(name: str, tile: int, tick: int) -> int:
        return sum(job.name == name and job.tile == tile and job.end <= tick for job in jobs)

    def may_start(step: Step, tile: int, tick: int) -> bool:
        if step is LOAD:
            return tile < places or ended(steps[-1].name, tile - places, tick) == warpgroups
        taken = step.on_tensor_cores and any(job.end > tick for job in jobs if is_on_tensor_cores(job, steps))
        return ended(LOAD.name, tile, tick) == 1 and not taken

    tick, free = 0, [0] * len(queues)
    while any(queues):
        for worker, queue in enumerate(queues):
            if queue and free[worker] <= tick and may_start(*queue[0], tick):
                step, tile = queue.pop(0)
                free[worker] = tick + step.ticks
                jobs.append(Job(worker, step.name, tile, tick, free[worker]))
        tick += 1
    return jobs


def is_on_tensor_cores(job: Job, steps: Sequence[Step]) -> bool:
    return any(step.on_tensor_cores and step.name == job.name for step in steps)


class Moment(NamedTuple):
    """The completion of a barrier: a tile is "ready" to be read, or its place is "empty" again."""

    kind: str
    tile: int
    tick: int


def moments(jobs: Sequence[Job], places: int, steps: Sequence[Step]) -> list[Moment]:
    """Return when tiles become ready, and when places that are loaded again become empty."""
    loads = [job for job in jobs if job.name == LOAD.name]
    found = [Moment("ready", load.tile, load.end) for load in loads]
    for load in loads[places:]:
        tile = load.tile - places
        released = max(job.end for job in jobs if job.name == steps[-1].name and job.tile == tile)
        found.append(Moment("empty", tile, released))
    return found


def two_warps_and_a_barrier(tiles: int = 3) -> Figure:
    """Draw who waits for whom if one warp loads tiles, a second one computes, and there is one place for a tile.

    It is schematic: the lengths of the steps are not measured. The bars are those of `schedule`.
    """
    steps = (Step("compute", 3),)
    jobs = schedule(tiles, 1, 1, steps)
    figure, (ax,) = panels(1, width=8.0, height=2.5, title="Schematic: two warps, one place for a tile, two barriers")
    draw_jobs(ax, jobs, ["loading warp", "computing warp"], {"load": SKY, "compute": BLUE})
    for kind, tile, tick in moments(jobs, 1, steps):
        ends = ((tick, 0.3), (tick, 0.7)) if kind == "ready" else ((tick, 0.7), (tick, 0.3))
        ax.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": RED, "shrinkA": 0, "shrinkB": 0})
        ax.text(tick + 0.1, 0.5, f"{kind} {tile}", va="center", fontsize=9, color=RED)
    figure.supxlabel("numbers: tiles; hatched: waits until the barrier completes", fontsize=9.5)
    return figure


def draw_jobs(axes: Axes, jobs: Sequence[Job], names: Sequence[str], colors: dict[str, str]) -> None:
    """Draw a line per worker, the first at the top: its jobs with their tile's number, hatched where it waits."""
    for worker, name in enumerate(names):
        time = 0
        for job in sorted((job for job in jobs if job.worker == worker), key=lambda job: job.start):
            if job.start > time and name != "tensor cores":
                axes.barh(worker, job.start - time, left=time, height=0.6, fc="white", ec="0.75", hatch="////")
            bar = {"height": 0.6, "color": colors[job.name], "ec": "white"}
            axes.barh(worker, job.end - job.start, left=job.start, **bar)
            ink = "black" if colors[job.name] in (SKY, ORANGE) else "white"
            label = f"${job.name}_{job.tile}$" if len(job.name) == 1 else f"{job.name} {job.tile}"
            axes.text((job.start + job.end) / 2, worker, label, ha="center", va="center", fontsize=9, color=ink)
            time = job.end
    axes.set_yticks(range(len(names)), names, fontsize=9.5)
    axes.set(xlim=(0, max(job.end for job in jobs)), ylim=(len(names) - 0.5, -0.6), xticks=[])
    axes.set_xlabel("time", loc="right")
    axes.tick_params(length=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
