"""What the figures have in common: few colours, told apart by everyone, and bare axes.

Colours are Okabe and Ito's: they differ for colour-blind readers, and in grey. Where colours alone
would have to tell lines apart, dashes and markers do it as well.
"""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes

INK, GREY, PALE = "#1b1b1b", "#767676", "#d9d9d9"
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
SMALL_TEXT = 0.88  # of the size of the axes' labels


def bare(axes: Axes) -> None:
    """No frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def words(axes: Axes, text: str, at: tuple[float, float], **options: object) -> None:
    """Text beside a point of the data, in the small size."""
    settings: dict[str, object] = {
        "xytext": (3, 0),
        "textcoords": "offset points",
        "fontsize": SMALL_TEXT * float(axes.xaxis.label.get_fontsize()),
        "color": INK,
        **options,
    }
    axes.annotate(text, at, **settings)  # type: ignore[arg-type]


def short(value: float) -> str:
    """A small number as people write it.

    >>> short(1e-5), short(0.0001), short(2.5)
    ('1e-5', '1e-4', '2.5')
    """
    text = f"{value:.0e}" if value < 1e-3 and float(f"{value:.0e}") == value else f"{value:g}"
    return text.replace("e-0", "e-")


def wrapped(labels: list[str], width: int = 22) -> list[str]:
    """Labels in lines of a width that leaves room for the figure; nothing is cut off.

    >>> wrapped(["Amer-Indian-Eskimo *", "Other"]), wrapped(["Amer-Indian-Eskimo *"], 12)
    (['Amer-Indian-Eskimo *', 'Other'], ['Amer-Indian-\\nEskimo *'])
    """
    return ["\n".join(textwrap.wrap(text, width)) or text for text in labels]
