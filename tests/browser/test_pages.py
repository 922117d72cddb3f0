"""The book as a reader's browser shows it: pages opened, links followed, sliders moved, nothing from elsewhere."""

import functools
import http.server
import importlib
import json
import posixpath
import re
import subprocess
import sys
import threading
from urllib.parse import unquote, urldefrag

import pytest
from sage_lab.records import REPOSITORY

import sage_ref
import sage_ref.parallel

# Complaints about a page once its mathematics is set, the ids that it has, and its links.
LOOK = """async () => {
    if (window.MathJax) await MathJax.startup.promise;
    const all = query => [...document.querySelectorAll(query)];
    await Promise.allSettled(all("img").map(image => image.decode()));
    const complaints = all("img").filter(image => !image.naturalWidth).map(image => "broken image " + image.src);
    const mute = all("img").filter(image => !image.alt || image.alt.endsWith(".png")); // Sphinx puts the file's name
    complaints.push(...mute.map(image => "no alternative text: " + image.src));
    const failed = "mjx-merror, mjx-mtext[style*='color: red']"; // the second: a command that MathJax doesn't know
    complaints.push(...all(failed).map(error => "mathematics: " + error.textContent));
    const bare = all(".math").filter(math => !math.querySelector("mjx-container"));
    complaints.push(...bare.map(math => "mathematics that was not set: " + math.textContent));
    return [complaints, all("[id]").map(element => element.id), all("a[href]").map(link => link.href)];
}"""

# By how much the page and its text are wider than the window and their column.
TOO_WIDE = """() => [document.documentElement, document.querySelector(".content")].filter(Boolean)
    .map(element => element.scrollWidth - element.clientWidth)"""
DECK = "slides/06_tokens_per_step.html"
WIDTHS = 360, 700, 1100  # pixels: a phone; a tablet; a window in which the book's menu still has its place


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for many files

    def log_message(self, *args):
        pass

    def end_headers(self):
        self.send_header("Cache-Control", "max-age=3600")  # MathJax is fetched and compiled once, not for every page
        super().end_headers()


@pytest.fixture(scope="module")
def book(page_at, tmp_path_factory):
    """The folder and the address of the book, built as `make book` does, and served on this machine."""
    folder, doctrees = tmp_path_factory.mktemp("book"), tmp_path_factory.mktemp("doctrees")
    options = ["-b", "html", "-c", "notebooks/book", "-d", str(doctrees), "-E", "-W", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_every_public_name_is_in_the_reference(book):
    from sphinx.util.inventory import InventoryFile

    folder, _ = book
    with open(folder / "objects.inv", "rb") as file:
        found = InventoryFile.load(file, "", posixpath.join)
    names = {name.rpartition(".") for kind in ("function", "class", "data") for name in found[f"py:{kind}"]}
    documented = [getattr(importlib.import_module(module), name, None) for module, _, name in names]
    for package in (sage_ref, sage_ref.parallel, sage_ref.sagebwd, sage_ref.sla2):
        offered = {name: getattr(package, name) for name in package.__all__}
        missing = [name for name, offer in offered.items() if not any(offer is other for other in documented)]
        assert missing == [], package.__name__


def test_every_page_opens_whole_and_every_internal_link_arrives(book, page_at):
    folder, address = book
    page, complaints = page_at(address)
    ids, links = {}, {}
    files = [path.relative_to(folder) for path in folder.rglob("*.html")]
    left_out = {"_static", "slides"}  # decks are alike, and one of them is looked at
    names = sorted(file.as_posix() for file in files if left_out.isdisjoint(file.parts)) + [DECK]
    assert {f"notebooks/{path.stem}.html" for path in REPOSITORY.glob("notebooks/*.ipynb")} <= set(names)
    for name in names:
        page.goto(address + name)
        if name == "index.html":
            page.wait_for_url("**/notebooks/book/index.html")
        found, ids[name], links[name] = page.evaluate(LOOK)
        complaints += [f"{name}: {complaint}" for complaint in found]
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 720})
            too_wide = page.evaluate(TOO_WIDE)
            complaints += [f"{name}: {width} pixels hold all but {too_wide}"] if any(too_wide) else []
    for name, targets in links.items():
        for target in targets:
            if target.startswith(address):
                file, fragment = urldefrag(target.removeprefix(address))
                arrived = (folder / file).is_file() and (not fragment or unquote(fragment) in ids.get(file, ()))
                complaints += [] if arrived else [f"{name}: nothing at {target}"]
    assert not complaints, "\n".join(complaints)


def test_every_slider_is_named_and_moves_its_picture_by_keyboard_and_by_mouse(book, page_at, record_property):
    _, address = book
    page, complaints = page_at(address)
    moved = 0
    for path in sorted(REPOSITORY.glob("notebooks/*.ipynb")):
        outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", [])]
        pages = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
        names = [name for text in pages for name in re.findall(r"<label>([^<]+) <input type=\"range\"", text)]
        if not names:
            continue
        page.goto(f"{address}notebooks/{path.stem}.html")
        assert page.get_by_role("slider").count() == len(names)
        for place, name in enumerate(names):
            slider = page.get_by_role("slider").nth(place)
            assert slider.evaluate("slider => slider.labels[0].innerText.trim()") == name
            figure = slider.locator("xpath=ancestor::figure")
            picture, image = figure.locator("div").last, figure.locator("img")
            shown = [(picture.screenshot(), image.get_attribute("alt"))]
            slider.press("ArrowRight" if slider.input_value() != slider.get_attribute("max") else "ArrowLeft")
            shown.append((picture.screenshot(), image.get_attribute("alt")))
            for end in ("min", "max"):
                drag(page, slider, end)
                assert slider.input_value() == slider.get_attribute(end)
                said = slider.locator("xpath=ancestor::label/following-sibling::output[1]")
                assert said.inner_text() == slider.input_value()
                shown.append((picture.screenshot(), image.get_attribute("alt")))
            assert all(before != after for (before, _), (after, _) in zip(shown, shown[1:], strict=False)), path.stem
            assert len({words for _, words in shown}) >= 2
            moved += 1
    assert moved >= 12
    record_property("sliders moved", moved)
    assert not complaints, "\n".join(complaints)


def test_every_film_rests_where_motion_is_reduced_and_is_closed_by_keyboard(book, page_at, record_property):
    _, address = book
    page, complaints = page_at(address)
    paths = [path for path in sorted(REPOSITORY.glob("notebooks/*.ipynb")) if '"film: ' in path.read_text()]
    for path in paths:
        page.goto(f"{address}notebooks/{path.stem}.html")
        film = page.locator("details.film")
        for motion, kind in (("no-preference", "gif"), ("reduce", "png")):
            page.emulate_media(reduced_motion=motion)
            film.locator("img").evaluate("image => image.decode()")
            assert film.locator("img").evaluate("image => image.currentSrc").startswith(f"data:image/{kind};")
        film.locator("summary").press("Enter")
        assert not film.locator("img").is_visible()
    assert len(paths) == 7
    record_property("films", len(paths))
    assert not complaints, "\n".join(complaints)


def drag(page, slider, end):
    """Drag a slider from the middle of its line, past one end."""
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, y := box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + (box["width"] + 9 if end == "max" else -9), y, steps=4)
    page.mouse.up()


def test_search_finds_a_word_and_dark_mode_stays_on_every_page(book, page_at):
    _, address = book
    page, complaints = page_at(address)

    def brightness():
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color[4:-1].split(",")))

    page.goto(address + "notebooks/book/index.html")
    assert brightness() > 600  # of 3 x 255
    for _ in range(2):  # as the system has it, light, dark
        if page.get_attribute("body", "data-theme") != "dark":
            page.locator(".theme-toggle:visible").first.click()
    assert brightness() < 150
    page.fill("input[name=q]", "binade")
    page.press("input[name=q]", "Enter")
    page.locator("#search-results a", has_text="Glossary").first.click()
    page.locator("dt", has_text="binade").wait_for()
    assert brightness() < 150
    assert not complaints, "\n".join(complaints)
