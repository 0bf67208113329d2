"""The pages in a real browser: on a phone, by keyboard, in the dark, on paper, for a reader."""

import re
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from served import Service, issued

from epsilons.service import Keys, Store, issue, refresh, revoke, rotate

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class Opened:
    """A page of the service, and what happened while it was open."""

    def __init__(self, browser, url, width=DESK, scheme="light", script=True):
        self.url = url
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, locale="en-GB",
            java_script_enabled=script,
        )  # fmt: skip
        self.page = self.context.new_page()
        self.trouble, self.asked = [], []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def enter(self, token):
        self.page.fill("#token", token)
        with self.page.expect_navigation():
            self.page.click("button")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def check(self, width=None):
        """No error, no request to anyone else, nothing beside the screen."""
        assert [text for text in self.trouble if "401" not in text] == []
        assert {address.startswith(self.url) for address in self.asked} == {True}
        if width is not None:
            assert self.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("script", [True, False])
def test_token_in_statement_out(browser, live, script):
    with Opened(browser, live.url, script=script) as opened:
        opened.enter(live.tokens["household"])
        page = opened.page
        assert re.fullmatch(rf"{live.url}/statement\?lang=en", page.url)
        assert "For household alone." in page.inner_text("main")
        assert page.locator("svg.scale").is_visible()
        assert live.tokens["household"] not in page.content()
        assert not [address for address in opened.asked if live.tokens["household"] in address]
        cookies = opened.context.cookies()
        assert [cookie["name"] for cookie in cookies] == ["epsilons_session"]
        assert (cookies[0]["httpOnly"], cookies[0]["sameSite"]) == (True, "Strict")
        with page.expect_download() as found:
            page.click("text=Save as data")
        assert '"owner": "household"' in found.value.path().read_text(encoding="utf-8")
        with page.expect_navigation():
            page.click("text=End the session")
        assert page.locator("#token").is_visible()
        assert opened.context.cookies() == []
        page.goto(f"{live.url}/statement")
        assert "household" not in page.content()
        opened.check()


def test_wrong_revoked_and_expired_tokens_look_the_same(browser, run, tmp_path):
    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    keys = Keys.of_run(run)
    with Store.of_run(run, where) as store:
        refresh(run.path, store)
        issue(store, keys, tmp_path / "first.csv")
        rotate(store, keys, tmp_path / "short.csv", owners=["person-2"], days=1e-6)
        revoke(store, owners=["person-1"])
    tokens = [
        "x" * 43,
        issued(tmp_path / "first.csv")["person-1"],
        issued(tmp_path / "short.csv")["person-2"],
    ]
    seen = set()
    with Service(run.path, tmp_path, "--store", where) as service:
        for token in tokens:
            with Opened(browser, service.url) as opened:
                opened.enter(token)
                assert opened.page.locator("[role=alert]").is_visible()
                assert opened.page.get_attribute("#token", "aria-invalid") == "true"
                seen.add(opened.page.content())
                opened.check()
    assert len(seen) == 1


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_everything_fits(browser, live, width, scheme):
    with Opened(browser, live.url, width, scheme) as opened:
        for _ in ("the form", "a refusal"):
            assert violations(opened.page) == []
            opened.check(width)
            opened.enter("x")
        opened.enter(live.tokens["household"])
        for language in ("en", "de"):
            opened.page.goto(f"{live.url}/statement?lang={language}")
            assert violations(opened.page) == []
            opened.check(width)


def violations(page):
    """What axe-core has against the page, by all rules of WCAG 2.2 A and AA and best practice."""
    found = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


def test_by_keyboard_alone(browser, live):
    with Opened(browser, live.url) as opened:
        page = opened.page
        assert page.evaluate("document.activeElement.id") == "token"
        page.keyboard.type(live.tokens["person-1"])
        page.keyboard.press("Enter")
        page.wait_for_url("**/statement*")
        reached = []
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"
        assert page.locator(":focus").bounding_box()["x"] >= 0
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            reached.append(page.evaluate("document.activeElement.textContent.trim()"))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid"
        assert {"Deutsch", "Save as data (JSON)", "End the session"} <= set(reached)
        page.keyboard.press("Shift+Tab")
        page.locator("button").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#token")
        opened.check()


def test_a_reader_hears_the_scale_and_the_figures(browser, live):
    with Opened(browser, live.url) as opened:
        page = opened.enter(live.tokens["household"]).page
        heard = page.locator("main").aria_snapshot()
        assert re.search(r'img "A scale from 0 to [\d.]+. Along this training: [\d.]+; Guar', heard)
        assert 'heading "Your privacy statement" [level=1]' in heard
        assert re.search(r'region "Along this training"', heard)
        assert re.search(r"paragraph: ε = \d", heard)


def test_print_is_paper_white_in_a_dark_room_and_tears_no_figure(browser, live):
    with Opened(browser, live.url, scheme="dark") as opened:
        page = opened.enter(live.tokens["household"]).page
        page.emulate_media(media="print", color_scheme="dark")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(255, 255, 255)"
        assert not page.locator(".actions").is_visible()
        assert not page.locator("header").is_visible()
        printed = page.pdf(format="A4", print_background=True)
        assert 1 <= len(re.findall(rb"/Type /Page\b", printed)) <= 3
