"""Notebooks in JupyterLab, as a learner runs them: all cells of 00, and each of its sliders moved once."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from sage_ref.records import REPOSITORY

NOTEBOOK = "00_start_here.ipynb"
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are drawn, too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# The kernel waits for work.
IDLE = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.status === "idle";
}"""
# The picture that shares an output with a slider is another one than before.
REDRAWN = """([slider, before]) => {
    const picture = slider.closest(".jp-OutputArea-output").querySelector("img");
    return picture && picture.src !== before;
}"""
ERRORS = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """The address of a JupyterLab in a folder that has a copy of the notebook."""
    folder = tmp_path_factory.mktemp("lab")
    notebook = json.loads((REPOSITORY / "notebooks" / NOTEBOOK).read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)  # what is there afterwards came from this run
    (folder / NOTEBOOK).write_text(json.dumps(notebook))
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


def test_notebook_00_runs_from_top_to_bottom_and_its_sliders_redraw(lab, page_at):
    page, complaints = page_at(lab)
    page.goto(f"{lab}lab/tree/{NOTEBOOK}?reset")
    page.wait_for_function(IDLE)
    page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    cells = json.loads((REPOSITORY / "notebooks" / NOTEBOOK).read_text())["cells"]
    last = sum(cell["cell_type"] == "code" for cell in cells)
    assert page.locator(".jp-InputPrompt", has_text=f"[{last}]:").count() == 1
    sliders = page.locator(".widget-slider .noUi-handle")
    assert sliders.count() >= 1
    for slider in sliders.all():
        picture = page.locator(".jp-OutputArea-output").filter(has=slider).last.locator("img")
        before = picture.get_attribute("src")
        slider.focus()
        slider.press("ArrowRight")
        page.wait_for_function(REDRAWN, arg=[slider.element_handle(), before])
    assert page.locator(ERRORS).all_inner_texts() == []
    assert not complaints, "\n".join(complaints)
