"""The course on Colab: the first cell of each notebook, and the program that the cell starts.

Links to Colab open the reader's copies, whose outputs are empty, in a branch that holds nothing else.

Colab's PyTorch changes from week to week; the course is made with the versions in constraints.txt. So the cell fetches
the repository and runs this file, which installs the pinned versions of everything that notebooks import. The cell
names no version and needs no change when they do. Jupyter stays Colab's own: its pages expect that.

This file needs nothing but Python, because it runs before anything is installed.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = (".", "lab", "notebooks")
FROM_COLAB = {"jupyterlab"}


def install_cell(address: str) -> str:
    """Return the text of the cell that makes a notebook run on Colab. `address`: that of the public repository."""
    folder = address.rpartition("/")[2]
    return f"""# On Colab this fetches the course and installs the versions it was made with. Elsewhere it does nothing.
import sys

if "google.colab" in sys.modules:
    %cd -q /content
    !test -d {folder} || git clone --quiet --depth 1 {address}
    !{{sys.executable}} {folder}/notebooks/sage_course/colab.py
    sys.path[:0] = [f"/content/{folder}/{{part}}" for part in ("", "kernels", "lab", "notebooks")]
    %cd -q {folder}/notebooks
"""


def pinned(root: Path = ROOT) -> list[str]:
    """Return what notebooks import, as in "torch==2.13.0", with versions from constraints.txt.

    Raises:
        ValueError: constraints.txt has no version of a requirement.
    """
    files = [(root / name / "pyproject.toml").read_text(encoding="utf-8") for name in PROJECTS]
    projects = [tomllib.loads(text)["project"] for text in files]
    wanted = [x for project in projects for x in project["dependencies"]]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in wanted} | {"triton"}
    names -= FROM_COLAB | {"sage-ref", "sage-lab"}
    constraints = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in constraints if line.partition("==")[0] in names]
    if missing := names - {pin.partition("==")[0] for pin in pins}:
        raise ValueError(f"constraints.txt: expected a version of each of {sorted(missing)}, got none")
    return pins


def main() -> None:
    """Install the pinned versions and the course from its folder, without its dependencies; make exercises' files.

    Colab's torchvision is of a different PyTorch, with which transformers imports no model. No notebook needs it.
    """
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *pinned()], check=True)
    editable = [word for name in PROJECTS for word in ("--editable", str(ROOT / name))]
    subprocess.run([*pip, "--no-deps", *editable], check=True)
    subprocess.run([sys.executable, "-m", "exercises", "stubs"], check=True, cwd=ROOT)
    print("Installed. If Colab asks to restart the session, do so, and run this cell again.")


if __name__ == "__main__":
    main()
