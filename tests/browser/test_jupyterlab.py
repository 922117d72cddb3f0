"""A reader's copy in JupyterLab: every cell run, sliders moved, one cell filled in."""

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
from sage_course.copies import make_copies
from sage_lab.records import REPOSITORY

NAME = "00_start_here.ipynb"
CELLS = json.loads((REPOSITORY / "notebooks" / NAME).read_text())["cells"]
TEXTS = ["".join(cell["source"]) for cell in CELLS]
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are drawn, too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
OPEN = """async path => {
    await jupyterapp.restored;
    const panel = await jupyterapp.commands.execute("docmanager:open", {path});
    await panel.context.ready;
    await panel.sessionContext.ready;
}"""
ERRORS = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="module")
def lab(page_at, tmp_path_factory):
    """The address of a JupyterLab with a reader's copy of the notebook."""
    folder = tmp_path_factory.mktemp("lab")
    pictures = REPOSITORY / "notebooks" / "book" / "static"  # which notebooks show
    shutil.copytree(pictures, folder / "notebooks" / "book" / "static")
    list(make_copies([REPOSITORY / "notebooks" / NAME], folder / "my"))
    for name, content in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    own["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    own["PYTHONPATH"] = os.pathsep.join(str(REPOSITORY / part) for part in ("", "kernels", "lab", "notebooks"))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}/"
    try:
        wait_for(f"{address}api", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=120)


def wait_for(address, server):
    """Return when a page answers. RuntimeError if the server ends before, or after 90 seconds."""
    for _ in range(900):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(address):
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab: expected an answer at {address}, got none; exit status {server.poll()}")


def expect_sliders(panel, count):
    """Expect `count` sliders, and a different picture when an arrow key moves one."""
    sliders = panel.get_by_role("slider")
    sliders.nth(count - 1).wait_for()
    assert sliders.count() == count >= 1
    for slider in sliders.all():
        picture = slider.locator("xpath=ancestor::figure").locator("div").last
        before = picture.screenshot()
        slider.press("ArrowRight")
        assert picture.screenshot() != before


def test_a_copy_runs_its_sliders_move_and_what_a_reader_types_is_checked(lab, page_at):
    page, complaints = page_at(lab)
    page.goto(f"{lab}lab?reset")
    page.wait_for_function("window.jupyterapp")
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    page.evaluate(OPEN, f"my/{NAME}")
    assert panel.locator(".jp-OutputArea-output").count() == 0
    page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    last = max(i for i, cell in enumerate(code, 1) if not cell["metadata"].get("jupyter"))  # a folded one has no prompt
    panel.locator(".jp-InputPrompt", has_text=f"[{last}]:").wait_for()
    expect_sliders(panel, sum("\nslider(" in text for text in TEXTS))
    assert panel.locator(ERRORS).all_inner_texts() == []
    place = next(i for i, text in enumerate(TEXTS) if "= fill_in(" in text)
    (solution,) = re.findall(r"```python\n(.*?)```", TEXTS[place + 1], re.DOTALL)
    (name,) = re.findall(r"fill_in\(\"(\w+)\"", TEXTS[place])
    wrong = solution.replace("127", "128", 1)
    assert wrong != solution
    cell = panel.locator(".jp-Cell").nth(place)
    for text, verdict in ((wrong, f"{name}: not yet"), (solution, f"{name}: right")):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(f'{text}\n\n{name} = fill_in("{name}", {name})')
        page.keyboard.press("Control+Enter")
        cell.locator(".jp-OutputArea", has_text=verdict).first.wait_for()
    # The widget draws what the reader's own function computes, here one that is different on purpose.
    cell = panel.locator(".jp-Cell").nth(next(i for i, text in enumerate(TEXTS) if "sentence(" in text))
    pictures = []
    for text, words in (("", "a cab"), ("sentence(lambda q, k: 0 * (q @ k.mT))", "a cab")):
        if text:
            cell.locator(".cm-content").click()
            page.keyboard.press("Control+A")
            page.keyboard.insert_text(text)
            page.keyboard.press("Control+Enter")
            cell.locator(".jp-InputPrompt", has_text="[*]:").wait_for(state="detached")
        picture = cell.locator("img.widget-image")
        picture.wait_for()
        shown = picture.get_attribute("src")
        box = cell.locator(".jp-OutputArea input[type=text]")
        box.fill(words)
        box.press("Enter")
        page.wait_for_function("([image, before]) => image.src !== before", arg=[picture.element_handle(), shown])
        pictures.append(picture.screenshot())
    assert pictures[0] != pictures[1]
    assert not complaints, "\n".join(complaints)
