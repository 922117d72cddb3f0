"""Plans of many runs that can be stopped at any time: by a deadline, by Ctrl-C, by kill -9 or by a power cut.

An experiment names its runs in the order of what they decide (`Plan`), and a function that measures one of them. `Work`
measures every run that is not finished yet, on one device or on several at once. It keeps the rows of each run on disk
as soon as the run ends, so that the same command continues where the last one stopped. A long training continues from
its own checkpoint (`Work.checkpoint`, `sage_lab.training.loop`).

    @dataclass(frozen=True)
    class LossRun(Run):
        arm: str
        seed: int

    plan = Plan("losses", [LossRun(arm, seed) for seed in (0, 1, 2) for arm in ("exact", "sagebwd")])
    with opened(plan, Path("runs"), arguments=settings, is_over=deadline(self.minutes)) as work:
        left = work.finish(lambda run, device: [{"arm": run.arm, "loss": train(run)}])
    work.record(self.json, command)
"""

import hashlib
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from sage_lab.command_line import Failed
from sage_lab.files import only_writer, read_json, write_file
from sage_lab.records import Row, as_json, provenance, write_record

COMMITS = "commits"  # among the finished parts: not of a run, but of all of them


class OutOfTime(RuntimeError):
    """The time is over: this run goes on another time, from its checkpoint."""


def deadline(minutes: float | None) -> Callable[[], bool]:
    """Return a function that says whether so many minutes from now are over; None is no deadline."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    return lambda: time.monotonic() > end


@dataclass(frozen=True)
class Run:
    """One run of a plan. A subclass, a frozen dataclass, has the fields that tell a run from all others."""

    @property
    def name(self) -> str:
        """All fields as the name of a file."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        parts = [value if isinstance(value, str) else f"{name}{value}" for name, value in values]
        return "_".join(re.sub(r"[^\w.-]+", "_", part).strip("_") for part in parts)

    @property
    def facts(self) -> Row:
        """All fields, for a row."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: Row) -> Self:
        """Return the run whose `facts` are in a row."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Plan:
    """Runs in the order of what they decide; with less time, the last ones are cut first."""

    name: str
    runs: Sequence[Run]

    def __post_init__(self):
        names = [run.name for run in self.runs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"runs: expected a different name for each, got {name} twice")


class FinishedParts:
    """The finished parts of a long measurement, in a file: name -> rows.

    path: its end is replaced by a digest of `arguments` and .partial, so that a measurement with other arguments
    neither reads nor removes them.
    """

    def __init__(self, path: Path, arguments: Any):
        digest = hashlib.sha256(repr(arguments).encode()).hexdigest()[:12]
        self.path = Path(path).with_suffix(f".{digest}.partial")
        self.parts: dict[str, list[Row]] = {}
        if self.path.exists():
            self.parts = read_json(self.path, "finished parts of a measurement")

    def rows(self, name: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Return the rows of one part: from the file, or measured now and kept there."""
        if name not in self.parts:
            self.keep(name, measure())
        return self.parts[name]

    def keep(self, name: str, rows: list[Row]) -> None:
        """Write the rows of one part to the file, in one step."""
        parts = self.parts | {name: rows}
        write_file(self.path, as_json(parts))
        self.parts[name] = rows

    def remove(self) -> None:
        """Remove the file: all is recorded elsewhere."""
        self.path.unlink(missing_ok=True)


class Work:
    """A plan being worked off in a folder.

    arguments: everything that the rows depend on besides their run; with other arguments nothing is taken over.
    devices: each one works on one run at a time. With several of them `measure` is called in threads.
    is_over: asked before a run begins. A run may ask it at its checkpoints, and raise `OutOfTime`.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        arguments: Any,
        devices: Sequence[Any] = (None,),
        is_over: Callable[[], bool] = lambda: False,
    ):
        self.plan, self.folder, self.devices, self.is_over = plan, Path(folder), devices, is_over
        self.parts = FinishedParts(self.folder / plan.name, arguments)

    @property
    def finished(self) -> dict[Run, list[Row]]:
        """The rows of every finished run, in the plan's order."""
        return {run: self.parts.parts[run.name] for run in self.plan.runs if run.name in self.parts.parts}

    @property
    def left(self) -> list[Run]:
        """The runs that are not finished."""
        return [run for run in self.plan.runs if run.name not in self.parts.parts]

    @property
    def rows(self) -> list[Row]:
        """The rows of all finished runs, in the plan's order."""
        return [row for rows in self.finished.values() for row in rows]

    def record(self, path: Path | None, command: str, **facts: Any) -> None:
        """Write the rows as a record, with the names of the runs that are left and every commit that measured rows."""
        commits = self.parts.parts.get(COMMITS, [])
        facts |= {"unfinished": [run.name for run in self.left]} | ({"commit": commits} if len(commits) > 1 else {})
        write_record(path, self.rows, command=command, **facts)

    def keep(self, run: Run, rows: list[Row]) -> None:
        """Put the rows of a finished run on disk, then remove its checkpoint."""
        commits = self.parts.parts.setdefault(COMMITS, [])
        commits += [commit for commit in [provenance("")["commit"]] if commit not in commits]
        self.parts.keep(run.name, rows)
        self.checkpoint(run).unlink(missing_ok=True)

    def checkpoint(self, run: Run) -> Path:
        """Return where a run keeps what it needs to go on. The file is removed once the run's rows are kept."""
        return self.parts.path.with_suffix(f".{run.name}.pt")

    def finish(
        self, measure: Callable[[Run, Any], list[Row]], after_each: Callable[[Run], None] = lambda run: None
    ) -> list[Run]:
        """Measure every run that is not finished; return those that are left because the time is over.

        Args:
            measure: takes a run and a device, and returns the run's rows.
            after_each: called when the rows of a run are on disk.

        Raises:
            Failed: a run raised it; all other runs were measured first.
        """
        tried: set[Run] = set()
        working: dict[Future, tuple[Run, Any]] = {}
        failures: list[Failed] = []
        free = deque(self.devices)
        executor = _Here() if len(free) == 1 else ThreadPoolExecutor(len(free))
        with executor, tqdm(unit="run", initial=len(self.finished)) as bar:
            while True:
                waiting = deque(run for run in self.left if run not in tried)
                bar.total = bar.n + len(waiting) + len(working)
                while waiting and free and not self.is_over():
                    run, device = waiting.popleft(), free.popleft()
                    bar.set_postfix_str(run.name)
                    tried.add(run)
                    working[executor.submit(measure, run, device)] = run, device
                if not working:
                    break
                for future in wait(working, return_when=FIRST_COMPLETED).done:
                    run, device = working.pop(future)
                    free.append(device)
                    try:
                        self.keep(run, future.result())
                    except OutOfTime:
                        continue
                    except Failed as failure:
                        failures.append(failure)
                        continue
                    bar.update()
                    after_each(run)
        if failures:
            raise failures[0]
        return self.left


class _Here(Executor):
    """Calls a function at once, in this thread: the main one, which gets Ctrl-C."""

    def submit(self, function: Callable, /, *arguments: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def opened(
    plan: Plan,
    folder: Path,
    arguments: Any,
    devices: Sequence[Any] = (None,),
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Work]:
    """Return the plan's `Work`, which no other process does at the same time: that is a ValueError."""
    with only_writer(Path(folder) / plan.name):
        yield Work(plan, folder, arguments, devices, is_over)
