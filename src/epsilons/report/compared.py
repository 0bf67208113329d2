"""Two runs side by side, on one page."""

from __future__ import annotations

from pathlib import Path

from epsilons.accounting.printed import epsilon_text
from epsilons.analysis import BoundRow, Comparison, Headline, compare, figures
from epsilons.files import private_file
from epsilons.report.charts import Chart, chart, rows_height
from epsilons.report.page import render
from epsilons.report.sentences import named, percent
from epsilons.runs import Run


def write_comparison(left: Run, right: Run, by: str | None = None) -> Path:
    """Write the comparison into the private half of the first run and say where it is.

    `by`: the column of groups; by default the first that both runs have. `left`: the first,
    `right`: the second.
    """
    if by is None:
        by = next((c for c in left.examples.groups if c in right.examples.groups), None)
    found = compare(left, right, by)
    target = left.path / "private" / f"compared-with-{found.right.name}.html"
    with private_file(target) as file:
        file.write(render_comparison(found).encode())
    return target


def render_comparison(found: Comparison) -> str:
    """The page as text."""
    sides = _sides(found)
    return render(
        "compared.html.j2",
        title=f"{sides[0][0]} and {sides[1][0]}, side by side",
        kicker=f"{sides[0][0]} and {sides[1][0]} compared",
        c=found,
        sides=sides,
        rows=number_rows(found),
        charts=_charts(found),
        groups=_group_rows(found),
        differences={
            name: [_constant(v) for v in pair] for name, pair in found.differences.items()
        },
    )


def number_rows(found: Comparison) -> list[tuple[str, str, str]]:
    """The figures of both runs as text, those left out that neither has."""
    left, right = found.left.numbers(), found.right.numbers()
    return [
        (name, shown(name, left[name], found.left.private),
         shown(name, right[name], found.right.private))
        for name in left
        if left[name] is not None or right[name] is not None
    ]  # fmt: skip


def shown(name: str, value: float | None, private: bool) -> str:
    """A figure as text: a share in %, an ε with three digits."""
    if not private and ("ε" in name or "worst case" in name):
        return "not private"
    if value is None:
        return "–"
    if any(word in name for word in ("share", "accuracy", "success", "positives")):
        return percent(value)
    if "worst case" in name or "≤" in name:
        return epsilon_text(value)
    return f"{value:.1f}\u00a0%" if "%" in name else f"{value:.3f}"


def _sides(found: Comparison) -> list[tuple[str, Headline]]:
    """The runs by name; numbered if they have the same."""
    a, b = found.left, found.right
    if a.name == b.name:
        return [(f"{a.name} (1)", a), (f"{b.name} (2)", b)]
    return [(a.name, a), (b.name, b)]


def _charts(found: Comparison) -> list[Chart]:
    charts = []
    sides = _sides(found)
    rows = [_row(name, side) for name, side in sides if side.private]
    if rows:
        told = "; ".join(
            f"{row.label}: median ε {float(row.epsilons.quantile(0.5)):.3f}, "
            f"{percent(row.at_worst_case)} at the worst case "
            f"{epsilon_text(row.epsilons.worst_case)}"
            for row in rows
        )
        charts.append(
            chart("histograms", "How many examples have which ε", f"{told}.",
                  lambda axes: figures.bound_histograms(axes, rows),
                  height=1.0 + 1.2 * len(rows))
        )  # fmt: skip
    if rows and all(row.group_means for row in rows):
        summary = next(side.summary for _, side in sides if side.private)
        by = summary.by if summary else ()
        charts.append(
            chart("groups", "Mean ε by group", _order(found, rows, by),
                  lambda axes: figures.bound_groups(axes, rows, by),
                  height=rows_height(len(rows[0].group_means)))
        )  # fmt: skip
    attacks = {name: side.attack for name, side in sides if side.attack is not None}
    if attacks:
        told = "; ".join(
            f"{name}: {percent(attack.everyone.success)} right guesses, "
            f"{percent(attack.everyone.true_positives)} of members found at 1 % false alarms"
            for name, attack in attacks.items()
        )
        most = max(len(attack.rows) for attack in attacks.values())
        charts.append(
            chart("attack", "Membership inference by a threshold on the loss",
                  f"{told}. 50 % right guesses is guessing.",
                  lambda axes: figures.attack_success(axes, attacks, _by_epsilon(found)),
                  height=rows_height(most + 1) + 0.3)
        )  # fmt: skip
    return charts


def _by_epsilon(found: Comparison) -> list[str]:
    """Groups by ascending mean ε in the first run that is private."""
    known = [side.summary for _, side in _sides(found) if side.private and side.summary]
    return [row.group for row in known[0]] if known else []


def _row(name: str, side: Headline) -> BoundRow:
    means = {row.group: row.mean_epsilon for row in side.summary} if side.summary else {}
    return BoundRow(
        max_grad_norm=side.plan.max_grad_norm,
        epsilons=side.epsilons,
        group_means=means,
        test_accuracy=side.test_accuracy,
        name=name,
    )


def _order(found: Comparison, rows: list[BoundRow], by: tuple[str, ...]) -> str:
    """Whether the same groups, and the same examples, pay more."""
    tops = [max(row.group_means, key=lambda name: row.group_means[name]) for row in rows]
    text = (
        f"The group that pays most is {named(by, tops[0])} in both."
        if len(set(tops)) == 1 and len(tops) > 1
        else "The group that pays most: "
        + ", ".join(f"{named(by, t)} in {row.label}" for t, row in zip(tops, rows, strict=True))
        + "."
    )
    if found.rank_correlation is not None:
        text += (
            f" Over the {found.shared:,} examples that both have, ε’s have rank correlation "
            f"{found.rank_correlation:.3f}."
        )
    return text


def _constant(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _group_rows(found: Comparison) -> list[tuple[str, list[str]]]:
    """Group, and for each run: mean ε, test accuracy, attack success."""
    sides = [side for _, side in _sides(found)]
    names = [row.group for side in sides if side.summary for row in reversed(side.summary.rows)]
    rows = []
    for name in dict.fromkeys(names):
        cells = []
        for side in sides:
            row = next((r for r in side.summary or () if r.group == name), None)
            attacked = side.attack.rows if side.attack else ()
            hit = next((r for r in attacked if r.group == name), None)
            cells += [
                f"{row.mean_epsilon:.3f}" if row and side.private else "–",
                percent(row.test_accuracy) if row and row.test_accuracy is not None else "–",
                percent(hit.success) if hit else "–",
            ]
        rows.append((name, cells))
    return rows
