import re
from xml.etree import ElementTree

from epsilons.analysis.figures import style
from epsilons.report.charts import chart


def lines(axes):
    axes.plot([0, 1], [0, 1], color=style.BLUE, marker="o", clip_on=True)
    axes.bar([0, 1], [1, 2], color=style.ORANGE)
    axes.set_xlabel("ε < 1")


def test_drawing_is_one_well_formed_element_with_its_text_as_text():
    svg = str(chart("a", "A heading", "A finding: 1 < 2.", lines).svg)
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "ε &lt; 1" in svg
    assert root.get("aria-label") == "A heading. A finding: 1 < 2."
    assert root.get("role") == "img"


def test_long_labels_of_rows_are_wrapped_and_not_cut():
    """Adult's Amer-Indian-Eskimo ended in an ellipsis."""
    names = ["Amer-Indian-Eskimo *", "Married-civ-spouse × Other-relative × Amer-Indian-Eskimo"]

    def rows(axes):
        axes.set_yticks([0, 1], style.wrapped(names))

    svg = str(chart("a", "h", "f", rows).svg)
    texts = [text.strip() for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)]
    assert names[0] in texts
    assert "".join(names[1].split()) in "".join("".join(texts).split())
    assert "…" not in svg
    height = [float(re.search(r'viewBox="0 0 \S+ (\S+)"', str(s)).group(1)) for s in (
        svg, chart("b", "h", "f", lines).svg)]  # fmt: skip
    assert height[0] > height[1]


def test_ids_of_two_drawings_never_meet():
    ids = [set(re.findall(r'id="([^"]+)"', str(chart(name, "h", "f", lines).svg))) for name in "ab"]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_every_reference_is_to_an_id_of_the_drawing():
    svg = str(chart("a", "h", "f", lines).svg)
    ids = set(re.findall(r'id="([^"]+)"', svg))
    used = re.findall(r'href="#([^"]+)"', svg) + re.findall(r"url\(#([^)]+)\)", svg)
    assert used
    assert set(used) <= ids


def test_colours_are_the_pages_and_no_other():
    svg = str(chart("a", "h", "f", lines).svg)
    assert "var(--blue)" in svg
    assert "var(--ink)" in svg
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)


def test_drawing_names_no_font_and_no_network():
    svg = str(chart("a", "h", "f", lines).svg)
    assert "DejaVu" not in svg
    assert not re.search(r'href="(?!#)', svg)
