"""The documentation as a site: it builds without a network, and has every public name."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "epsilons", "epsilons.accounting", "epsilons.analysis", "epsilons.data", "epsilons.gradients",
    "epsilons.journal", "epsilons.models", "epsilons.noise", "epsilons.release",
    "epsilons.service", "epsilons.training",
)  # fmt: skip
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(site, package):
    page = site / "reference" / f"{package.rpartition('.')[2]}.html"
    anchors = set(re.findall(r' id="([\w.]+)"', page.read_text(encoding="utf-8")))
    names = importlib.import_module(package).__all__
    assert len(names) > 2
    for name in names:  # a function may be in a file of its own name
        assert anchors & {f"{package}.{name}", f"{package}.{name}.{name}"}, name


def test_integrations_and_verbs_are_in_the_reference(site):
    page = (site / "reference" / "integrations.html").read_text(encoding="utf-8")
    for name in ("opacus.attach", "huggingface.PrivateTrainer", "lightning.PrivateLoader"):
        assert f' id="epsilons.integrations.{name}"' in page
    verbs = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    for verb in ("plan", "train", "init", "account", "publish", "owner"):
        assert f"Usage: epsilons {verb}" in verbs


class Requests(HTMLParser):
    """What a browser asks for by itself when it shows a page."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.found.add(named.get("src") or "")
        elif tag == "link" and named.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.found.add(named.get("href") or "")


def test_no_page_asks_others_for_anything(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = Requests()
        parser.feed(page.read_text(encoding="utf-8"))
        assert not [url for url in parser.found if "//" in url], page.name


@pytest.mark.browser
def test_pages_fit_a_desk_and_a_phone(site):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium here")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (1280, 390):
            shown = browser.new_page(viewport={"width": width, "height": 800})
            asked = []
            shown.on("request", lambda request, asked=asked: asked.append(request.url))
            for page in ("index", "guides/own_loop", "reference/epsilons", "reproduction"):
                shown.goto((site / f"{page}.html").as_uri())
                assert shown.evaluate("document.documentElement.scrollWidth") <= width, page
                assert shown.locator("h1").first.is_visible()
            assert not [url for url in asked if not url.startswith("file:")]
        browser.close()
