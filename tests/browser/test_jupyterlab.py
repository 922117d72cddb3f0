"""Notebooks in JupyterLab, as a learner uses them: every cell run, every slider moved, one cell filled in."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from sage_lab.records import REPOSITORY

NOTEBOOKS = ("notebooks/00_start_here.ipynb", "notebooks/04_sagebwd_forward.ipynb")
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are drawn, too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# Opens notebooks and runs all cells of each, side by side.
RUN_ALL = """async paths => {
    await jupyterapp.restored;
    const runs = [];
    for (const path of paths) {
        const panel = await jupyterapp.commands.execute("docmanager:open", {path});
        await panel.context.ready;
        await panel.sessionContext.ready;
        runs.push(jupyterapp.commands.execute("notebook:run-all-cells"));
    }
    await Promise.all(runs);
}"""
SHOW = "async path => { await jupyterapp.commands.execute('docmanager:open', {path}); }"
# The picture that shares an output with a slider, once it is there; and once it is another one than before.
PICTURE = "slider => slider.closest('.jp-OutputArea-output').querySelector('img')?.src"
REDRAWN = f"([slider, before]) => {{ const now = ({PICTURE})(slider); return now && now !== before; }}"
ERRORS = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """The address of a JupyterLab in a folder that has copies of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    shutil.copytree(REPOSITORY / "book" / "static", folder / "book" / "static")  # pictures that notebooks show
    for name in NOTEBOOKS:
        notebook = json.loads((REPOSITORY / name).read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)  # what is there afterwards came from this run
        (folder / name).write_text(json.dumps(notebook))
    for name, settings in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    own["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    own["SAGE_REF_REPOSITORY"] = str(REPOSITORY)
    own["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(f"{address}api", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)


def _wait_for(address, server):
    """Return when a page answers. RuntimeError if the server ends before, or after 90 seconds."""
    for _ in range(900):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(address):
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab: expected an answer at {address}, got none; exit status {server.poll()}")


def cells_of(name):
    return json.loads((REPOSITORY / name).read_text())["cells"]


@pytest.fixture(scope="module")
def opened(lab, page_at):
    """The page with both notebooks run from top to bottom, and what went wrong so far."""
    page, complaints = page_at(lab)
    page.goto(f"{lab}lab?reset")
    page.wait_for_function("window.jupyterapp")
    page.evaluate(RUN_ALL, NOTEBOOKS)
    return page, complaints


def show(page, name):
    """The panel of a notebook that is open, brought to the front."""
    page.evaluate(SHOW, name)
    return page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom_and_its_sliders_redraw(opened, name):
    page, complaints = opened
    panel = show(page, name)
    last = sum(cell["cell_type"] == "code" for cell in cells_of(name))
    panel.locator(".jp-InputPrompt", has_text=f"[{last}]:").wait_for()
    sliders = panel.locator(".widget-slider .noUi-handle")
    assert sliders.count() == sum("Slider(" in "".join(cell["source"]) for cell in cells_of(name)) >= 1
    for slider in sliders.all():
        handle = slider.element_handle()
        before = page.wait_for_function(PICTURE, arg=handle).json_value()
        slider.focus()
        slider.press("ArrowRight")
        page.wait_for_function(REDRAWN, arg=[handle, before])
    assert panel.locator(ERRORS).all_inner_texts() == []
    assert not complaints, "\n".join(complaints)


def test_what_a_reader_types_into_a_cell_is_checked(opened):
    page, complaints = opened
    panel = show(page, NOTEBOOKS[0])
    texts = ["".join(cell["source"]) for cell in cells_of(NOTEBOOKS[0])]
    place = next(i for i, text in enumerate(texts) if "= fill_in(" in text)
    (solution,) = re.findall(r"```python\n(.*?)```", texts[place + 1], re.DOTALL)
    (name,) = re.findall(r"fill_in\(\"(\w+)\"", texts[place])
    wrong = solution.replace("127", "128", 1)
    assert wrong != solution
    cell = panel.locator(".jp-Cell").nth(place)
    for text, verdict in ((wrong, f"{name}: not yet"), (solution, f"{name}: right")):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(f'{text}\n\n{name} = fill_in("{name}", {name})')
        page.keyboard.press("Control+Enter")
        cell.locator(".jp-OutputArea", has_text=verdict).first.wait_for()
    assert not complaints, "\n".join(complaints)
