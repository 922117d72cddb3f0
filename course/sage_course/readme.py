"""What the records say in README.md, RESULTS.md and the kernels' pages, the README's figure, and the notebooks' frame.

`python -m sage_lab readme` writes them.

It rewrites what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; all else there is written by hand. In the
notebooks it writes what `notebook_frame` says.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from sage_lab.records import REPOSITORY, markdown_table, read_record, replaced

from sage_course.figures import overview_figure
from sage_course.notebook_frame import rewrite_notebooks
from sage_course.outline import notebooks
from sage_course.results.kernels import (
    BENCH,
    accuracy,
    instructions,
    ladder,
    limits,
    sla2,
    sla2_accuracy,
    sla2_ladder,
    sla2_parts,
)
from sage_course.results.paired import headline, paired_pinned, paired_sparse, paired_speed, paired_ways
from sage_course.results.prediction import gains, predicted, predicted_check, spills
from sage_course.results.tables import TABLE2, parallel, pretraining, pretraining_speed, table1, table2

OVERVIEW = Path("notebooks", "figures", "overview.png")


def courses() -> str:
    """The course map: title and minutes of every notebook. Parts of one number ("08", "08b") share a line."""
    lines: dict[str, tuple[list[str], list[str]]] = {}
    for path, number, title, minutes in notebooks():
        titles, times = lines.setdefault(number[:2], ([], []))
        titles.append(f"[{title}]({path.as_posix()})")
        times.append(str(minutes))
    rows = [(number, ", ".join(titles), " + ".join(times)) for number, (titles, times) in lines.items()]
    return markdown_table(("", "notebook", "minutes"), rows)


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"course": courses, "speed": headline},
    "RESULTS.md": {
        "table1": table1,
        "table2": table2,
        "pretraining": pretraining,
        "pretraining_speed": pretraining_speed,
        "parallel": parallel,
        "paired": lambda: paired_speed("fwd+bwd"),
        "paired_forward": lambda: paired_speed("fwd"),
        "paired_ways": paired_ways,
        "paired_pinned": paired_pinned,
        "forward": lambda: ladder("fwd"),
        "backward": lambda: ladder("bwd"),
        "instructions": instructions,
        "limits": limits,
        "predicted": predicted,
        "predicted_check": predicted_check,
        "accuracy": accuracy,
        "paired_sparse": paired_sparse,
        "sla2": sla2,
        "sla2_ladder": sla2_ladder,
        "sla2_parts": sla2_parts,
        "sla2_accuracy": sla2_accuracy,
    },
    "kernels/README.md": {"gains": gains},
    "kernels/NOTES.md": {"spills": spills},
}


def rewritten(name: str) -> str:
    """The text of SECTIONS' file `name` with its measured parts as the records have them now."""
    text = (REPOSITORY / name).read_text()
    for section, write in SECTIONS[name].items():
        begin, end = f"<!-- begin {section} -->", f"<!-- end {section} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"name: expected one {begin} and one {end} in {name}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{write()}\n{end}{rest.partition(end)[2]}"
    return text


def rewrite() -> list[Path]:
    """Bring every file of SECTIONS up to date; returns those that changed."""
    changed = []
    for name in SECTIONS:
        path, text = REPOSITORY / name, rewritten(name)
        if text != path.read_text():
            path.write_text(text)
            changed.append(path)
    return changed


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace) -> None:
    overview = REPOSITORY / OVERVIEW
    overview.parent.mkdir(exist_ok=True)
    overview_figure(read_record(TABLE2), read_record(BENCH)).savefig(overview)
    changed = [str(path) for path in (*rewrite(), *rewrite_notebooks())]
    print(markdown_table(("rewritten",), [[path] for path in changed] or [["nothing: all up to date"]]))
    if options.json:
        with replaced(options.json) as temporary:
            temporary.write_text(json.dumps(changed) + "\n")
