"""A browser for the tests here: the system's chromium, driven by Playwright. Without them the tests are skipped."""

import shutil

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    """Chromium, without a window. Playwright's own download of a browser is not used."""
    reason = "needs the extras book and browser: make .venv/book"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    pytest.importorskip("myst_nb", reason=reason)
    executable = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if executable is None:
        pytest.skip(f"needs one of {', '.join(CHROMIUMS)}; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@pytest.fixture
def page_at(browser):
    """page_at(address) -> (page, complaints): an empty page that reaches `address` only, and what went wrong so far."""
    contexts = []

    def make(address):
        context = browser.new_context(color_scheme="light")
        contexts.append(context)
        context.set_default_timeout(90_000)  # milliseconds: two workers may share two cores with this browser
        page, complaints = context.new_page(), []

        def guard(route):
            if route.request.url.startswith((address, "data:", "blob:")):
                route.continue_()
            else:
                complaints.append(f"another host: {route.request.url}")
                route.abort()

        page.route("**/*", guard)
        page.on("console", lambda m: m.type == "error" and complaints.append(f"{page.url}: console: {m.text}"))
        page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
        page.on("response", lambda r: r.status >= 400 and complaints.append(f"{page.url}: {r.status} for {r.url}"))
        return page, complaints

    yield make
    for context in contexts:
        context.close()
