"""A Sphinx extension that makes slides of each notebook, from its own headings, questions and figures.

A deck is one HTML file in the book's folder `slides`, a screen for each slide: scroll, press Page Down, or print it.
The directive `slide-map` lists all decks. What a slide shows is what the notebook's committed outputs show.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from sage_course.outline import notebooks
from sage_lab.records import REPOSITORY
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,">
<script>MathJax = {{tex: {{inlineMath: [["\\\\(", "\\\\)"]]}}}}</script>
<script defer src="../_static/mathjax/tex-chtml.js"></script>
<style>
  html {{ scroll-snap-type: y mandatory; font: 1.6rem/1.4 sans-serif; }}
  body {{ margin: 0; }}
  section {{ box-sizing: border-box; min-height: 100vh; padding: 4vh 6vw; scroll-snap-align: start; break-after: page;
    display: flex; flex-direction: column; justify-content: center; overflow-wrap: anywhere; }}
  img {{ max-width: 100%; max-height: 72vh; object-fit: contain; align-self: center; }}
  figcaption {{ font-size: 1rem; color: #555; margin-top: 2vh; }}
  figure {{ margin: 0; display: flex; flex-direction: column; }}
  mjx-container, table {{ max-width: 100%; overflow-x: auto; overflow-y: hidden; }}
  mjx-assistive-mml {{ max-width: 1px; }}
  .ask {{ border-left: .3rem solid #c60; padding-left: 1.5rem; }}
  @page {{ size: landscape; margin: 1cm; }}
</style></head><body>
{slides}
</body></html>
"""


def rendered(text: str) -> str:
    """Return Markdown as HTML, with formulas for MathJax; links lead nowhere from a slide, so only their words stay."""
    markdown = MarkdownIt().enable("table")
    markdown.use(dollarmath_plugin, renderer=lambda formula, _: f"\\({html.escape(formula)}\\)")
    return markdown.render(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text))


def slides(path: Path) -> Iterator[str]:
    """Yield the slides of a notebook: its title, each section's heading, each question and each figure."""
    first, *cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title, _, text = "".join(first["source"]).partition("\n\n")
    yield rendered(f"{title}\n\n{text.partition('**Pairs with**')[0]}")
    question = ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            question = re.sub(r"<details>.*?</details>", "", source, flags=re.DOTALL).strip().split("\n\n")[-1]
            for heading in re.findall(r"^## .+$", source, re.MULTILINE):
                if heading == "## Exercises":
                    return
                yield rendered(heading)
        elif re.search(r"^predict\(", source, re.MULTILINE) and not question.startswith("#"):
            yield f'<div class="ask">{rendered(question)}</div>'
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                alt = html.escape(output.get("metadata", {}).get("image/png", {}).get("alt", ""))
                image = f'<img alt="{alt}" src="data:image/png;base64,{"".join(picture)}">'
                yield f"<figure>{image}<figcaption>{alt}</figcaption></figure>"


class SlideMap(SphinxDirective):
    """A list of all decks."""

    def run(self) -> list[nodes.Node]:
        items = []
        for notebook in notebooks():
            address = f"../../slides/{notebook.path.stem}.html"
            link = nodes.reference("", f"{notebook.number} · {notebook.title}", refuri=address)
            items.append(nodes.list_item("", nodes.paragraph("", "", link)))
        return [nodes.bullet_list("", *items)]


def write_slides(app: Sphinx, error: Exception | None) -> None:
    """Handle the event build-finished: write the decks."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir, "slides")
        folder.mkdir(exist_ok=True)
        for notebook in notebooks():
            parts = "\n".join(f"<section>{slide}</section>" for slide in slides(REPOSITORY / notebook.path))
            page = PAGE.format(title=html.escape(notebook.title), slides=parts)
            (folder / f"{notebook.path.stem}.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write_slides)
    app.add_directive("slide-map", SlideMap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
