"""The site is built strictly, and its pages are opened in a browser: console, search, pictures, dark, phone width.

Belongs to `make test-full`, which installs what builds the site: about 2 min, 20 s of them the build.
"""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.helpers import Page, find_browser
from tests.harness.documents import DOCS, ROOT

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on this machine alone."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a browser, of a desktop's size, in light."""
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    opened = Page(browser, tmp_path_factory.mktemp("profile"))
    with contextlib.closing(opened):
        yield opened


@pytest.fixture(autouse=True)
def as_ever(page: Page) -> None:
    """Each test begins so."""
    page.resize(1280, 900)
    page.prefer("light")


def pages_of(site: Path) -> list[str]:
    """All pages, as paths below the address."""
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    built = {name.removesuffix(".html") for name in pages_of(site)}
    assert {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")} <= built
    assert "<!-- setup" not in "".join((site / name).read_text() for name in pages_of(site))


def test_every_public_name_can_be_linked_to(site: Path) -> None:
    import fsdp2

    anchors = {
        each for name in pages_of(site) for each in re.findall(r'id="(fsdp2\.[\w.]+)"', (site / name).read_text())
    }
    assert {f"fsdp2.{name}" for name in fsdp2.__all__ if name != "optim"} <= anchors
    methods = {name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")}
    assert {f"fsdp2.FSDPModule.{name}" for name in methods} <= anchors


def text_of(html_page: str) -> str:
    """What a page says, without markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", html_page.replace("<wbr>", "")))


@pytest.mark.parametrize("name", ["beyond", "parity", "parity-fsdp1", "errors"])
def test_tables_say_what_their_source_says(name: str, site: Path) -> None:
    """Extensions of Markdown take some text for their own: what is in braces, for one."""
    shown = set(text_of((site / f"{name}.html").read_text()).split())
    for row in re.findall(r"^\|.*\|$", (DOCS / f"{name}.md").read_text(), re.MULTILINE):
        for cell in re.split(r"(?<!\\)\|", row.strip("|")):
            plain = html.unescape(
                re.sub(r"[`\\]|\*(?=\*)|(?<=\*)\*", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell))
            )
            assert [
                word for word in plain.split() if word not in shown and not re.fullmatch(r":?-+:?|.*\*.*", word)
            ] == []


PICTURES = """[...document.querySelectorAll('article img')].filter(each => getComputedStyle(each).display !== 'none')
    .map(each => [each.getAttribute('src'), each.naturalWidth > 0 && each.clientWidth > 0])"""


def test_every_page_opens_without_a_complaint_and_fits_a_phone(site: Path, address: str, page: Page) -> None:
    """About 1 min: every page is loaded, and made narrow."""
    wrong = {}
    for name in pages_of(site):
        page.resize(1280, 900)
        page.open(f"{address}/{name}")
        found = [*page.complaints]
        found += [f"{picture} does not show" for picture, shows in page.run(PICTURES) if not shows]
        page.resize(390, 844)
        width = page.run("document.documentElement.scrollWidth")
        found += [f"is {width} pixels wide on a phone of 390"] if width > 390 else []
        if found:
            wrong[name] = found
    assert wrong == {}


def test_the_search_finds(address: str, page: Page) -> None:
    page.open(f"{address}/index.html")
    page.run("document.querySelector('.md-search__input').focus()")
    for words, expected in (
        ("fully_shard", "reference/fully_shard"),
        ("clip_grad_norm_", "reference/training"),
        ("DeepSpeed", "deepspeed"),
    ):
        page.run(
            f"(() => {{ const box = document.querySelector('.md-search__input'); box.value = '{words}';"
            "box.dispatchEvent(new Event('input', {bubbles: true}));"
            "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
        )
        links = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.getAttribute('href'))"
        page.until(f"{links}.some(each => each.includes('{expected}'))", f"{expected} among what {words} finds")
    assert page.complaints == []


def test_tables_are_filtered(address: str, page: Page) -> None:
    rows = "[...document.querySelectorAll('article tbody tr')].filter(each => each.offsetParent).length"
    for name, words in (
        ("parity.html", "reshard after_forward"),
        ("beyond.html", "muon"),
        ("errors.html", "mesh dims"),
    ):
        page.open(f"{address}/{name}")
        box = "document.querySelector('.table-filter input')"
        everything = page.until(f"{box} && {rows}", "the box of the filter")
        page.run(f"{box}.value = '{words}'; {box}.dispatchEvent(new Event('input'))")
        assert 0 < page.run(rows) < everything / 4, name
        shown = page.run(
            "[...document.querySelectorAll('article tbody tr')].filter(each => each.offsetParent)"
            ".map(each => each.textContent.toLowerCase())"
        )
        assert all(word in text for text in shown for word in words.split())
        page.run(f"{box}.value = ''; {box}.dispatchEvent(new Event('input'))")
        assert page.run(rows) == everything


def luminance(colour: str) -> float:
    """Between 0, black, and 1, of ``rgb(r, g, b)``."""
    red, green, blue = (int(each) / 255 for each in re.findall(r"\d+", colour)[:3])
    return 0.21 * red + 0.72 * green + 0.07 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_follow_the_system_and_pictures_follow_the_page(scheme: str, address: str, page: Page) -> None:
    page.prefer(scheme)
    for name in ("index.html", "explanation/step.html", "explanation/memory.html", "explanation/strategies.html"):
        page.open(f"{address}/{name}")
        background = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
        text = luminance(page.run("getComputedStyle(document.querySelector('article p')).color"))
        assert background > 0.9 > 0.3 > text if scheme == "light" else background < 0.2 < 0.6 < text
        shown = [picture for picture, _ in page.run(PICTURES)]
        assert shown and all(f"-{scheme}.svg" in picture for picture in shown)
