"""Reports in a real browser: nothing breaks, nothing leaves, everything can be read."""

import os
import shutil

import pytest
import torch
from torch import nn

from epsilons import Plan
from epsilons.data import digits, mnist
from epsilons.release import publish
from epsilons.report import write_comparison, write_public_report, write_report
from epsilons.training import correct_class, fit, supervised

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESK = 390, 1280

# Every text of a drawing: how high its letters are, and whether it lies within the drawing.
TEXTS = """
() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
  return [...svg.querySelectorAll('text')].map(text => {
    const box = text.getBoundingClientRect();
    return {
      words: text.textContent.trim(),
      size: parseFloat(getComputedStyle(text).fontSize) * scale,
      inside: box.left > frame.left - 3 && box.right < frame.right + 3
           && box.top > frame.top - 3 && box.bottom < frame.bottom + 3,
    };
  });
})
"""
COLOURS = """
() => ['color', 'backgroundColor'].map(name =>
  getComputedStyle(document.body)[name].match(/[\\d.]+/g).slice(0, 3).map(Number))
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def trained(data, out, network, **plan):
    """A few steps of private training on real pictures."""
    settings = Plan.for_epsilon(4.0, delta=1e-5, n=len(data.examples), max_grad_norm=1.0, **plan)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = network()
    return fit(
        model, torch.optim.SGD(model.parameters(), lr=1.0),
        supervised(nn.CrossEntropyLoss(reduction="none")), data.train, settings, out=out,
        examples=data.examples, test=data.test, test_examples=data.test_examples,
        correct_fn=correct_class, seed=1, follow=50,
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    return trained(
        digits(), tmp_path_factory.mktemp("browser") / "digits", lambda: nn.Linear(64, 10),
        batch_size=256, steps=30, refresh_every=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits_report(digits_run):
    return write_report(digits_run)


class Opened:
    """A page, and what happened while it was opened."""

    def __init__(self, browser, file, width, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.trouble, self.asked = [], []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


def check_legible(browser, file, figures):
    """At both widths, light and dark: no error, no request, every figure seen, every word read."""
    for width, scheme in ((PHONE, "light"), (PHONE, "dark"), (DESK, "light"), (DESK, "dark")):
        with Opened(browser, file, width, scheme) as opened:
            page = opened.page
            assert opened.trouble == []
            assert opened.asked == [file.as_uri()]
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            drawings = page.locator("figure svg")
            assert drawings.count() == figures
            for k in range(figures):
                drawing = drawings.nth(k)
                assert drawing.is_visible()
                box = drawing.bounding_box()
                assert box["x"] >= 0
                assert box["width"] >= 300
                assert box["x"] + box["width"] <= width
                assert box["height"] >= 120
            for text in page.evaluate(TEXTS):
                assert text["size"] >= 9, text
                assert text["inside"], text
            assert contrast(*page.evaluate(COLOURS)) >= 7


def contrast(one, other):
    """The ratio of WCAG 2.2, of two sRGB colours."""

    def luminance(colour):
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_report_of_digits_is_legible_on_phone_and_desk(browser, digits_report):
    check_legible(browser, digits_report, figures=10)


@pytest.mark.data
def test_report_of_mnist_is_legible_on_phone_and_desk(browser, tmp_path):
    if "EPSILONS_DATA" not in os.environ:
        pytest.skip("EPSILONS_DATA names no folder with the public data sets")
    run = trained(
        mnist(os.environ["EPSILONS_DATA"]), tmp_path / "mnist",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), batch_size=2048, steps=30,
        refresh_every=15,
    )  # fmt: skip
    page = write_report(run)
    assert page.stat().st_size <= 3_000_000
    check_legible(browser, page, figures=10)


def test_public_report_and_comparison_are_legible(browser, digits_run, individual, followed):
    publish(digits_run, epsilon=0.9, groups=["class"])
    check_legible(browser, write_public_report(digits_run.path), figures=1)
    check_legible(browser, write_comparison(followed, individual), figures=3)


def test_keyboard_reaches_the_text_and_every_table(browser, digits_report):
    with Opened(browser, digits_report, PHONE) as opened:
        page = opened.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"
        assert page.locator(":focus").bounding_box()["x"] >= 0
        tables = page.locator(".table")
        for k in range(tables.count()):
            tables.nth(k).focus()
            assert page.evaluate("document.activeElement.className") == "table"


def test_print_is_paper_white_in_a_dark_room_and_tears_no_figure(browser, digits_report):
    with Opened(browser, digits_report, DESK, "dark") as opened:
        opened.page.emulate_media(media="print")
        ink, paper = opened.page.evaluate(COLOURS)
        assert paper == [255, 255, 255]
        assert contrast(ink, paper) >= 7
        broken = opened.page.evaluate(
            "() => [...document.querySelectorAll('figure')]"
            ".filter(f => getComputedStyle(f).breakInside !== 'avoid').length"
        )
        assert broken == 0
        printed = opened.page.pdf(format="A4")
        assert printed.startswith(b"%PDF")
        assert 4 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 14
