"""The measured parts of README.md, RESULTS.md and pages of the book, their pictures, and the notebooks' frame.

`python -m sage_course` writes them: in a page, what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. All
else there is written by hand.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from sage_lab.files import write_file
from sage_lab.records import REPOSITORY, as_json, markdown_table, read_record

from sage_course.figures import Film, forward_film, overview_figure
from sage_course.outline import (
    colab_address,
    framed,
    homework_minutes,
    notebook_files,
    notebooks,
    project,
    public_address,
)
from sage_course.results import count, elsewhere, first_page, kernels, paired, tables, video

FIGURES = REPOSITORY / "notebooks" / "figures"


def course_map() -> str:
    """Return the table of all notebooks: title and minutes. Parts of one number ("08", "08b") share a line."""
    lines: dict[str, list[tuple[str, str]]] = {}
    for path, number, title, minutes in notebooks():
        part = f"[{title}]({path.as_posix()})", f"{minutes} ({homework_minutes(path)})"
        lines.setdefault(number[:2], []).append(part)
    rows = [
        (number, ", ".join(title for title, _ in parts), " + ".join(minutes for _, minutes in parts))
        for number, parts in lines.items()
    ]
    return markdown_table(("", "notebook", "minutes of the lesson (of its homework)"), rows)


FILM_DATA = (((4, 8), 3), ((8, 3), 4))  # size and seed of scores and values
# Time -> the notebooks of a way in (none: all but the optional ones), and what a reader can do afterwards.
WAYS_IN: dict[str, tuple[tuple[str, ...], str]] = {
    "an hour": (("00",), "You have seen what 8 bits do to attention, and repaired it."),
    "a day": (("00", "01", "02", "04", "05"), "You have written both passes of INT8 attention, tile by tile."),
    "a week": ((), "You know both papers, their kernels, and what our experiments say about them."),
}


def ways_in() -> str:
    """Return the table of three ways into the course, with the minutes of their lessons and of their homework."""
    lines = []
    for time, (numbers, result) in WAYS_IN.items():
        chosen = [x for x in notebooks() if (x.number in numbers if numbers else "optional" not in x.title.lower())]
        links = [f"[{number}]({path.as_posix()})" for path, number, _, _ in chosen]
        names = ", ".join(links) if numbers else f"{links[0]} to {links[-1]}, all {len(links)} that aren't optional"
        minutes = sum(x.minutes for x in chosen), sum(homework_minutes(x.path) for x in chosen)
        lines.append((time, f"notebook{'s' * (len(links) > 1)} {names}", *map(in_hours, minutes), result))
    table = markdown_table(("you have for lessons", "take", "lessons", "homework, if you like", "afterwards"), lines)
    return f"""{table}

An hour, a day and a week count the lessons alone. The exercises at a notebook's end are homework: a second sitting for
each notebook, which you can leave out."""


def in_hours(minutes: int) -> str:
    """Return minutes as in "55 min" or "5 h 30", which no line break divides."""
    text = f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"
    return text.replace(" ", "\u00a0")


def badges() -> str:
    """Return the first page's badges: CI, Python, licence, and notebook 00 on Colab."""
    address = public_address()
    python, licence = project()["requires-python"].removeprefix(">="), project()["license"]
    first = notebook_files()[0].relative_to(REPOSITORY)
    return (
        f"[![tests]({address}/actions/workflows/test.yml/badge.svg)]({address}/actions/workflows/test.yml) "
        f"[![Open in Colab](notebooks/book/static/colab.svg)]({colab_address(first)}) "
        f"Python {python} or later · [{licence}](LICENSE)"
    )


def start() -> str:
    """Return the commands with which a stranger begins, in a block of shell."""
    address = public_address()
    return f"""```
git clone {address} && cd {address.rpartition("/")[2]}
make lab     # install everything into .venv and open your own copy of notebook 00 in JupyterLab
make test    # run what CI runs: lint, tests, the compile check of all kernels, every notebook
# Or only the library, to train with:
pip install "sage-ref[kernels] @ git+{address}"
```"""


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "badges": badges,
        "start": start,
        "ways": ways_in,
        "verdicts": first_page.verdicts,
        "course": course_map,
    },
    "RESULTS.md": {
        "speed": paired.at_a_glance,
        "table1": tables.table1,
        "table2": tables.table2,
        "pretraining": tables.pretraining,
        "pretraining_scales": tables.pretraining_scales,
        "pretraining_gpt": tables.pretraining_gpt,
        "pretraining_speed": tables.pretraining_speed,
        "video": video.results,
        "video_speed": video.speed,
        "paired": paired.paired_speed,
        "ladders": kernels.ladders,
        "paired_sparse": paired.paired_sparse,
        "accuracy": kernels.accuracy,
    },
    "notebooks/book/int8_backward.md": {"backward_ratios": paired.backward_ratios},
    "notebooks/book/count.md": {"count_levels": count.levels, "count_orders": count.orders},
    "notebooks/book/your_gpu.md": {"predictions": elsewhere.predictions},
    "notebooks/book/many_gpus.md": {"parallel": tables.parallel},
}


def with_sections(text: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text with its measured parts as the records have them now.

    Raises:
        ValueError: a section has no place in the text, or more than one.
    """
    for name, write in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"text: expected one {begin} and one {end} in it")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{write()}\n{end}{rest.partition(end)[2]}"
    return text


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every file that this program writes, and the text that it should have."""
    for name, sections in SECTIONS.items():
        yield REPOSITORY / name, with_sections((REPOSITORY / name).read_text(encoding="utf-8"), sections)
    for path in notebook_files():
        yield path, framed(path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY), public_address())


def first_film() -> Film:
    """Return the film of notebook 04, which the first page shows."""
    scores, values = (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) for size, seed in FILM_DATA)
    return forward_film(2 * scores, values, 2)


def write_pages(json: Path | None = None) -> None:
    """Write the pictures, and every file whose text is not as it should be."""
    FIGURES.mkdir(exist_ok=True)
    overview_figure(read_record(tables.TABLE2), read_record(paired.PAIRED)).savefig(FIGURES / "overview.png")
    film = first_film()
    (FIGURES / "forward.gif").write_bytes(film.gif)
    film.pictures[-1].save(FIGURES / "forward.png", optimize=True)
    changed = []
    for path, text in texts():
        if text != path.read_text(encoding="utf-8"):
            write_file(path, text)
            changed.append(str(path))
    print(markdown_table(("rewritten",), [[path] for path in changed] or [["nothing: all up to date"]]))
    if json:
        write_file(json, as_json(changed) + "\n")
