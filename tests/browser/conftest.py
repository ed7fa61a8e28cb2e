"""One Chromium for all tests of pages."""

import os
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

from analysis import report

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = f"none of {', '.join(NAMES)} is on the path: make browser"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=QUIET) as chromium,
    ):
        yield chromium


@contextmanager
def pages(browser):
    """Opens files; in the end nothing may have gone wrong, and nothing but them have been asked for."""
    opened = []

    def open_file(path):
        page, said, asked = browser.new_page(viewport={"width": 1280, "height": 900}), [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        opened.append((page, said, asked, path.as_uri()))
        return page

    yield open_file
    for page, said, asked, address in opened:
        page.close()
        assert said == []
        assert [url for url in asked if url != address] == []


@pytest.fixture
def open_page(browser):
    with pages(browser) as open_file:
        yield open_file


@pytest.fixture(scope="module")
def open_pages(browser):
    with pages(browser) as open_file:
        yield open_file


@pytest.fixture
def show(open_page, tmp_path):
    """Opens the page of some views."""

    def opened(*views):
        (tmp_path / "page.html").write_text(report.page(views), encoding="utf-8")
        return open_page(tmp_path / "page.html")

    return opened
