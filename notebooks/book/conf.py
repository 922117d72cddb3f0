"""Sphinx's configuration of the book: pages from the notebooks as committed, never executed. `make book` uses it.

The sources are the repository's own files, so the source folder is the repository's root; only the home page, the
glossary and the pages about ways through the course are in this folder. A page needs no network: mathematics is set by
the MathJax of the package sphinx-mathjax-offline, and search runs in the reader's browser.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from sage_course.outline import BRANCH, public_address  # noqa: E402 (after the path)

project = "sage_ref"
author = "the sage_ref authors"
copyright = "the sage_ref authors; text and figures CC BY 4.0, code Apache-2.0"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "course_pages",
    "slide_pages",
]
root_doc = "notebooks/book/index"
include_patterns = [
    "notebooks/book/*.md",
    "notebooks/*.ipynb",
    "exercises/README.md",
    "exercises/*/README.md",
    "exercises/solutions/*.md",
    "kernels/*.md",
    "RESULTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [
    *(".*", "**/.*", "*.egg-info"),
    *("build", "dist", "runs", "my", "tests", "sage_ref", "kernels/sage_kernels"),
]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
default_role = "literal"  # `x` in a docstring is code, as everywhere here
suppress_warnings = []  # `make book` stops at any warning

html_theme = "furo"
html_title = "Trainable low-bit attention"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_favicon = "static/icon.svg"
html_copy_source = False
html_last_updated_fmt = None
html_theme_options = {
    "source_repository": public_address(),
    "source_branch": BRANCH,
    "source_directory": "",
    "top_of_page_buttons": ["view"],
}
pygments_style = "friendly"
pygments_dark_style = "monokai"
mathjax_path = "mathjax/tex-chtml.js"  # course_pages puts it there
