"""A real headless Chromium without network, and its screenshots."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
expect.set_options(timeout=30_000)  # ms; five, as it is, are not enough on a loaded machine
LOCAL = ("file://", "data:", "http://127.0.0.1:")


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium; without it tests are skipped, unless SEEUPO_REQUIRE_BROWSER is set.

    Of a module, not of the session: Playwright's event loop runs in this thread as long as it does,
    and the tests of another file could start none.
    """
    program = shutil.which("chromium")
    if program is None:
        assert not os.environ.get("SEEUPO_REQUIRE_BROWSER"), "got no chromium; it is required here"
        pytest.skip("got no chromium on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@contextlib.contextmanager
def pages(browser):
    """`make(width=..., height=..., **context)` -> a page that sees files and this machine only.

    What a page logs as an error, and what it asks of the network, fails at the end; `page.wrong` is
    the list of that, for a test that expects some.
    """
    contexts, wrong = [], []

    def make(*, width=1280, height=800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)

        def route(handler):
            if handler.request.url.startswith(LOCAL):
                handler.continue_()
            else:
                wrong.append(f"asked the network for {handler.request.url}")
                handler.abort()

        context.route("**/*", route)
        page = context.new_page()
        page.wrong = wrong
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        return page

    yield make
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def new_page(browser):
    with pages(browser) as make:
        yield make


@pytest.fixture(scope="module")
def new_shared_page(browser):
    """As `new_page`, for pages that several tests of a file look at."""
    with pages(browser) as make:
        yield make


@pytest.fixture(scope="module")
def shared_page(new_shared_page):
    return new_shared_page()


@pytest.fixture
def page(shared_page):
    """A page of 1280 x 800, the same for all tests of a file; each opens what it looks at."""
    yield shared_page
    assert not shared_page.wrong


@pytest.fixture
def screenshot(tmp_path):
    """`screenshot(page, name)` -> the picture's path, in $SEEUPO_SCREENSHOTS if that is set."""
    folder = Path(os.environ.get("SEEUPO_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)

    def take(page, name):
        path = folder / f"{name}.png"
        page.screenshot(path=path)
        assert path.stat().st_size > 5000, "the picture shows nothing"
        return path

    return take
