"""The book as a reader's browser shows it: every page opened, every internal link followed, nothing from elsewhere."""

import functools
import http.server
import subprocess
import sys
import threading
from urllib.parse import unquote, urldefrag

import pytest
from sage_lab.records import REPOSITORY

# Complaints about a page once its mathematics is set, the ids that it has, and its links.
LOOK = """async () => {
    if (window.MathJax) await MathJax.startup.promise;
    const all = query => [...document.querySelectorAll(query)];
    await Promise.allSettled(all("img").map(image => image.decode()));
    const complaints = all("img").filter(image => !image.naturalWidth).map(image => "broken image " + image.src);
    const failed = "mjx-merror, mjx-mtext[style*='color: red']"; // the second: a command that MathJax doesn't know
    complaints.push(...all(failed).map(error => "mathematics: " + error.textContent));
    const bare = all(".math").filter(math => !math.querySelector("mjx-container"));
    complaints.push(...bare.map(math => "mathematics that was not set: " + math.textContent));
    return [complaints, all("[id]").map(element => element.id), all("a[href]").map(link => link.href)];
}"""


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
    options = ["-b", "html", "-c", "book", "-d", str(doctrees), "-E", "-W", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_every_page_opens_whole_and_every_internal_link_arrives(book, page_at):
    folder, address = book
    page, complaints = page_at(address)
    ids, links = {}, {}
    files = [path.relative_to(folder) for path in folder.rglob("*.html")]
    names = sorted(file.as_posix() for file in files if "_static" not in file.parts)
    assert {f"notebooks/{path.stem}.html" for path in REPOSITORY.glob("notebooks/*.ipynb")} <= set(names)
    for name in names:
        page.goto(address + name)
        if name == "index.html":
            page.wait_for_url("**/book/index.html")
        found, ids[name], links[name] = page.evaluate(LOOK)
        complaints += [f"{name}: {complaint}" for complaint in found]
    for name, targets in links.items():
        for target in targets:
            if target.startswith(address):
                file, fragment = urldefrag(target.removeprefix(address))
                arrived = (folder / file).is_file() and (not fragment or unquote(fragment) in ids.get(file, ()))
                complaints += [] if arrived else [f"{name}: nothing at {target}"]
    assert not complaints, "\n".join(complaints)


def test_search_finds_a_word_and_dark_mode_stays_on_every_page(book, page_at):
    _, address = book
    page, complaints = page_at(address)

    def brightness():
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color[4:-1].split(",")))

    page.goto(address + "book/index.html")
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
