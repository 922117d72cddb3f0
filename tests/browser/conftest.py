"""A browser for the tests here: the system's chromium, driven by Playwright. Without them the tests are skipped."""

import shutil

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
# Root has no sandbox. No name has an address: a request to a different host fails at once, as without a network.
ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


@pytest.fixture(scope="module")  # its event loop, while it runs, lets no test in this process have one of its own
def page_at():
    """page_at(address) -> an empty page, and a list of what goes wrong on it, requests to different hosts included."""
    reason = "needs the extras book and browser: make .venv/book"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    pytest.importorskip("myst_nb", reason=reason)
    executable = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if executable is None:
        pytest.skip(f"needs one of {', '.join(CHROMIUMS)}; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)

        def make(address):
            context = browser.new_context(color_scheme="light")
            context.set_default_timeout(90_000)  # milliseconds: two workers may share two cores with this browser
            page, complaints = context.new_page(), []

            def guard(request):
                if not request.url.startswith((address, "data:", "blob:")):
                    complaints.append(f"a different host: {request.url}")

            page.on("request", guard)  # to route requests through here would switch the browser's cache off
            page.on("console", lambda m: m.type == "error" and complaints.append(f"{page.url}: console: {m.text}"))
            page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
            page.on("response", lambda r: r.status >= 400 and complaints.append(f"{page.url}: {r.status} for {r.url}"))
            return page, complaints

        yield make
        browser.close()
