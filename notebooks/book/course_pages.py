"""A Sphinx extension that turns the repository's notebooks and pages into a book.

- Each notebook gets badges in place of its link and cell for Colab; its figures get their alternative texts.
- A link to a file of the repository that is no page, or its name, leads to its public address.
- A name of the library in code leads to its place in the library's reference.
- A link such as `notebooks/book/glossary.md#term-scale` leads to that term of the glossary.
- Directives make tables from notebooks' first cells and exercises' masters: `course-map`, `exercise-map`, `way`.
- The directive `misconceptions` lists the mistakes that notebooks recognise.
- MathJax is copied from its package, and the folder's index.html leads to the home page.
"""

import json
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from sage_course.outline import INSTALL, ON_COLAB, colab_address, file_address, homework_minutes, notebooks
from sage_lab.records import REPOSITORY, markdown_table
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

from exercises import exercise_names
from exercises.stubs import header_of

MATHJAX_PARTS = ("tex-chtml.js", "output/chtml/fonts", "input/tex/extensions")
HOME = """<!doctype html>
<meta charset="utf-8"><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url=notebooks/book/index.html">
<title>sage_ref</title>
"""


# Notebooks


def notebook_head(path: Path) -> str:
    """Return Markdown in place of the link and the cell for Colab: badges for Colab and for the notebook's file."""
    return f"""[![Open in Colab](/notebooks/book/static/colab.svg)]({colab_address(path)}) \
[![The notebook's file](/notebooks/book/static/file.svg)]({file_address(path)})"""


def with_head_and_descriptions(app: Sphinx, docname: str, content: list[str]) -> None:
    """Handle the event source-read: put a head in place of the cell for Colab, and tell MyST-NB what figures show."""
    path = Path(f"{docname}.ipynb")
    if not (REPOSITORY / path).exists():
        return
    notebook = json.loads(content[0])
    for cell in notebook["cells"]:
        figures = [output.get("metadata", {}).get("image/png", {}) for output in cell.get("outputs", [])]
        if described := " ".join(figure["alt"] for figure in figures if "alt" in figure):
            cell["metadata"]["mystnb"] = {"image": {"alt": described}}
    head = {"cell_type": "markdown", "id": "head", "metadata": {}, "source": notebook_head(path)}
    first, *cells = notebook["cells"]
    first["source"] = ON_COLAB.sub("", "".join(first["source"]))
    notebook["cells"] = [first, head, *(cell for cell in cells if cell["id"] != INSTALL)]
    content[0] = json.dumps(notebook)


# Links to files of the repository


class LinksToTheRepository(SphinxTransform):
    """Links to the repository's public address, for files that are no page of the book."""

    default_priority = 400

    def apply(self) -> None:
        here = Path(self.env.doc2path(self.env.docname)).parent
        for node in list(self.document.findall(addnodes.download_reference)):
            _into_link(node, here / node["reftarget"])
        for node in list(self.document.findall(addnodes.pending_xref)):
            if file := self._no_page(node, here):
                _into_link(node, file)
        for node in list(self.document.findall(nodes.literal)):
            if not isinstance(node.parent, nodes.reference | addnodes.pending_xref) and (file := _named(node.astext())):
                _into_link(node, file, keep=True)

    def _no_page(self, node: addnodes.pending_xref, here: Path) -> Path | None:
        """Return the file or folder that MyST took for a page, or the folder that it took for a label."""
        target = node["reftarget"]
        if node.get("refdomain") == "doc" and target not in self.env.found_docs:
            return Path(self.env.doc2path(target))
        return here / target if node.get("reftype") == "myst" and (here / target).is_dir() else None


def _named(text: str) -> Path | None:
    """Return the file or folder that `text` names, from the root, or from the kernels' folder as their pages do."""
    folders = [REPOSITORY, REPOSITORY / "kernels" / "sage_kernels"] if "/" in text.lstrip("/.") else []
    return next((folder / text for folder in folders if (folder / text).exists() and not text.startswith("/")), None)


def _into_link(node: nodes.Element, path: Path, keep: bool = False) -> None:
    """Replace `node` by a link to the repository's file `path`, around `node` itself or its children."""
    address = file_address(path.resolve().relative_to(REPOSITORY))
    link = nodes.reference("", "", refuri=address, internal=False)
    node.replace_self(link)
    link += node if keep else node.children


class LinksToTerms(SphinxPostTransform):
    """Links to single terms of a glossary. MyST takes such an address for that of a heading, and finds none."""

    default_priority = 5  # before MyST's, which is 9

    def run(self) -> None:
        glossary = set(self.env.domains.standard_domain._terms.values())  # of pairs: the page, and the term's id
        for node in list(self.document.findall(addnodes.pending_xref)):
            page, term = place = node["reftarget"], node.get("reftargetid")
            if place in glossary:
                link = make_refnode(self.app.builder, self.env.docname, page, term, nodes.inline())
                link.children = node.children
                node.replace_self(link)


# The library's reference


def plain_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Handle the event autodoc-process-docstring: in ours, * multiplies and |x| is a size. Modules have none here."""
    lines[:] = [] if what == "module" else [line.replace("*", r"\*").replace("|", r"\|") for line in lines]


class LinksToTheReference(SphinxPostTransform):
    """Links to the library's reference, from names in code: `SLA2(...)`, `sage_ref.sdpa()`, `fake_quantize`.

    A single small word, such as `divisor`, may be anybody's variable: it needs its module.
    """

    default_priority = 5

    def run(self) -> None:
        documented = self.env.domains.python_domain.objects
        short = Counter(full.rpartition(".")[2] for full in documented)
        places = {full.rpartition(".")[2]: place for full, place in documented.items()}
        telling = (name for name in places if short[name] == 1 and ("_" in name or name != name.lower()))
        places = {name: places[name] for name in telling} | documented
        for node in list(self.document.findall(nodes.literal)):
            found = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", node.astext())
            place = places.get(found[1]) if found else None
            if place and place.objtype in ("function", "class") and not isinstance(node.parent, nodes.reference):
                link = make_refnode(self.app.builder, self.env.docname, place.docname, place.node_id, node.deepcopy())
                node.replace_self(link)


# Tables of the course


class CourseMap(SphinxDirective):
    """The table of all notebooks with the minutes of lesson and homework."""

    def run(self) -> list[nodes.Node]:
        rows = [
            (
                number,
                f"[{title}](/{path.as_posix()})",
                minutes,
                homework_minutes(path),
                f"[Colab]({colab_address(path)})",
            )
            for path, number, title, minutes in notebooks()
        ]
        return self.parse_text_to_nodes(markdown_table(("", "notebook", "minutes", "homework", ""), rows))


class ExerciseMap(SphinxDirective):
    """The table of all exercises with difficulty and minutes."""

    def run(self) -> list[nodes.Node]:
        headers = [(name, header_of(name)) for name in exercise_names()]
        rows = [
            (name[:2], f"[{header.title}](/exercises/{name}/README.md)", header.difficulty, header.minutes)
            for name, header in headers
        ]
        return self.parse_text_to_nodes(markdown_table(("", "exercise", "difficulty", "minutes"), rows))


def steps(lines: list[str]) -> list[tuple[str, int]]:
    """Return (link, minutes) for each line, such as "notebook 02" or "exercise 05".

    Raises:
        ValueError: a line is neither.
    """
    known = {
        f"notebook {number}": (f"[{title}](/{path.as_posix()})", minutes)
        for path, number, title, minutes in notebooks()
    }
    for name in exercise_names():
        header = header_of(name)
        known[f"exercise {name[:2]}"] = (f"[{header.title}](/exercises/{name}/README.md)", header.minutes)
    for line in lines:
        if line not in known:
            raise ValueError(f"way: expected lines among {sorted(known)}, got {line!r}")
    return [known[line] for line in lines]


class Way(SphinxDirective):
    """One way through the course: a line per step, and a table with minutes and their sum as the result."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        lines = [line for line in self.content if line.strip()]
        try:
            found = steps(lines)
        except ValueError as error:
            raise self.error(str(error)) from None
        rows = [(line, link, minutes) for line, (link, minutes) in zip(lines, found, strict=True)]
        total = sum(minutes for _, minutes in found)
        rows.append(("**together**", f"**{total // 60} hours {total % 60} minutes**", f"**{total}**"))
        return self.parse_text_to_nodes(markdown_table(("", "title", "minutes"), rows))


class Misconceptions(SphinxDirective):
    """List of what readers get wrong, from the mistakes that notebooks recognise: a line a hint, with one example."""

    def run(self) -> list[nodes.Node]:
        found = []
        for path in sorted(REPOSITORY.glob("notebooks/sage_course/lessons/*.toml")):
            text = path.read_text(encoding="utf-8")
            lines = {hint: (old, new) for old, new, hint, *_ in _mistakes(tomllib.loads(text)) if hint}
            items = [f"- {hint} ({_code(new)} for {_code(old)})" for hint, (old, new) in lines.items()]
            found.append((re.search(r"# Notebook (\w+)", text)[1], items))
        titles = {number: title for _, number, title, _ in notebooks()}
        text = "\n\n".join("\n".join((f"**{x} · {titles[x]}**", "", *items)) for x, items in sorted(found))
        return self.parse_text_to_nodes(text)


def _mistakes(lesson: dict) -> Iterator[list]:
    """Yield the mistakes of every gap of a lesson."""
    for gap in lesson.values():
        yield from gap.get("mistakes", [])


def _code(text: str) -> str:
    """Return code in one line for Markdown; what isn't there is said in words."""
    return f"`{' '.join(text.split())}`" if text.strip() else "nothing"


# Files beside the pages


def add_files(app: Sphinx, error: Exception | None) -> None:
    """Handle the event build-finished: copy MathJax, and write the folder's index.html."""
    if error is None and app.builder.format == "html":
        package = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
        for part in MATHJAX_PARTS:
            source, target = package / part, Path(app.outdir, "_static", "mathjax", part)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, target)
        Path(app.outdir, "index.html").write_text(HOME, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", with_head_and_descriptions)
    app.connect("build-finished", add_files)
    app.connect("autodoc-process-docstring", plain_docstring)
    app.add_transform(LinksToTheRepository)
    app.add_post_transform(LinksToTerms)
    app.add_post_transform(LinksToTheReference)
    app.add_directive("course-map", CourseMap)
    app.add_directive("exercise-map", ExerciseMap)
    app.add_directive("way", Way)
    app.add_directive("misconceptions", Misconceptions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
