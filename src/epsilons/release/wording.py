"""The owner's statement in words: as text and as one HTML page that needs no network."""

from __future__ import annotations

from html import escape

from epsilons.accounting.printed import epsilon_text, percent_text
from epsilons.accounting.sums import NOT_COVERED
from epsilons.release.owner import FALSE_ALARMS, Record, Statement, meaningful

_MODELS = "the model and all intermediate models"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 42rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; }
td { font-variant-numeric: tabular-nums; }
"""


def statement_text(statement: Statement) -> str:
    """The `statement` as text for a terminal or a letter; it belongs to its owner alone."""
    lines = [_title(statement), ""]
    for heading, sentences in _sections(statement):
        lines += [heading, *(f"  {sentence}" for sentence in sentences), ""]
    lines += ["Figures", *(f"  {name:<54} {value}" for name, value in _figures(statement))]
    return "\n".join(lines) + "\n"


def statement_html(statement: Statement) -> str:
    """The `statement` as one HTML page that needs no network; it belongs to its owner alone."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(_title(statement))}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{escape(_title(statement))}</h1>",
    ]
    for heading, sentences in _sections(statement):
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts += [f"<p>{escape(sentence)}</p>" for sentence in sentences]
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in _figures(statement)
    )
    parts += ["<h2>Figures</h2><table>", *rows, "</table></main></body></html>"]
    return "\n".join(parts) + "\n"


def _what(statement: Statement) -> str:
    if statement.unit == "owner":
        return "your records together"
    count = len(statement.records)
    return f"your {count} records together" if count > 1 else "your record"


def _title(statement: Statement) -> str:
    return f"Privacy statement for {statement.owner}, {statement.date}"


def _sections(statement: Statement) -> list[tuple[str, list[str]]]:
    several = statement.together
    what = _what(statement)
    per = "per person" if several else "per record"
    secret = statement.randomness.secret
    if statement.meaningful:
        nobody = "nobody who sees" if secret else "whoever can't compute the noise and sees"
        models = "all models of all these runs" if statement.others else _MODELS
        first = (
            f"At a false-alarm rate of {100 * FALSE_ALARMS:g} %, {nobody} {models} detects {what} "
            f"with a probability {'' if secret else 'not '}above "
            f"{percent_text(statement.guarantee, 2)}."
        )
    else:
        first = (
            f"There is no meaningful guarantee for {what}: at a false-alarm rate of "
            f"{100 * FALSE_ALARMS:g} %, the bound on the probability of detecting "
            f"{'them' if several else 'it'} is {percent_text(statement.guarantee, 2)}."
        )
    whatever = f"whatever {'your records contain' if several else 'your record contains'}"
    guarantee = [
        first,
        f"This is the worst case {per}, and holds whatever the record{'s' if several else ''} "
        f"contain{'' if several else 's'}: ε = {epsilon_text(statement.worst_case)} at "
        f"δ = {statement.delta:g}.",
    ]
    if statement.promised is not None:
        at = f"ε = {epsilon_text(statement.promised)} at δ = {statement.delta:g}"
        if statement.others:
            guarantee.insert(0, f"Promised before the training of this run, {whatever}: {at}.")
        else:
            guarantee = [
                f"Promised before training, {whatever}: {at}.",
                first,
                "The worst case of this run, for whoever has the largest budget, is "
                f"ε = {epsilon_text(statement.worst_case)} {per} at δ = {statement.delta:g}.",
            ]
    roughly = " approximately" if statement.kind == "estimate" else ""
    nothing = (
        "" if meaningful(statement.individual, statement.delta) else ", which rules nothing out"
    )
    observed = [
        f"Along the training that took place, with its models held fixed and the sampling and the "
        f"noise drawn anew, the bound for {what} would be{roughly} "
        f"{percent_text(statement.along_trajectory, 2)}{nothing}: "
        f"ε = {epsilon_text(statement.individual)} {per} at δ = {statement.delta:g}.",
        "This describes the training observed. It is not a guarantee about what someone who has "
        "seen the models can find out; only the figure above is.",
    ]
    if statement.kind == "estimate":
        observed.append(
            "It is approximate: gradient norms were measured now and then and not at every step, "
            "or with other random draws (dropout, augmentation) than the steps had. This is the "
            "cautious of two readings: a step between two measurements counts with the larger of "
            "both. It is rarely far too low, and may be."
        )
    if len(statement.records) > 1:
        observed.append("Your records are bounded together by taking them out one after the other.")
    others = statement.others
    added = f", the training of {', '.join(others)}" if others else ""
    folders = "these runs' folders" if others else "this run's folder"
    includes = [
        f"Included: the training of this run, {_steps(statement)}{added}, and the clip bounds and "
        f"publications in {folders} up to {statement.date}: {statement.releases} in number. "
        "Further training or publications raise the figures.",
        "Not included: other runs on the same data, and anything else released from it, which "
        f"{folders} know{'' if others else 's'} nothing of. Several runs are added up by epsilons "
        "total, and in a statement by epsilons owner --with.",
    ]
    if statement.unmatched:
        includes.append(
            f"Records of yours, {statement.unmatched} in number, could not be found in all of "
            "these runs by id and content: along the training, only this run's part is counted "
            "for them."
        )
    if statement.elsewhere:
        includes.append(
            f"Records of yours in the other runs, {statement.elsewhere} in number, are not in this "
            "one: they are part of the guarantee, and not of the figures along the training."
        )
    if not secret:
        guarantee.insert(
            1,
            "Against whoever can compute it, nothing here holds: "
            f"{'one of these runs' if statement.others else 'this run'} has "
            f"{statement.randomness}.",
        )
    if not statement.sums_covered:
        which = "one of these runs" if others else "this run"
        guarantee.append(
            f"Of {which}, {NOT_COVERED}: rounding may let a "
            f"{'person' if statement.unit == 'owner' else 'record'} weigh more than these figures "
            "say."
        )
    return [
        ("What is guaranteed", guarantee),
        ("What this training did", observed),
        ("What the figures include", includes),
    ]


def _figures(statement: Statement) -> list[tuple[str, str]]:
    """Everything of the person together first, then the single records."""
    rows, first = [], []
    if statement.promised is not None:
        per = "per person" if statement.together else "per record"
        first = [(f"{per}: promised ε, before training", epsilon_text(statement.promised))]
    if (count := len(statement.records)) > 1:
        together = f"all {count} records together"
        rows = [
            (f"per person, {together}: worst case ε", epsilon_text(statement.worst_case)),
            (f"per person, {together}: ε", epsilon_text(statement.individual)),
        ]
    else:
        rows.append(("per record: worst case ε, all included", epsilon_text(statement.worst_case)))
    training = epsilon_text(statement.training_worst_case)
    if statement.unit == "owner":
        (own,) = statement.records
        rows = [
            ("per person: worst case ε, all included", epsilon_text(statement.worst_case)),
            ("per person: worst case ε, training alone", training),
            ("your records together: ε, all included", epsilon_text(own.epsilon)),
            ("your records together: ε, training alone", epsilon_text(own.training_epsilon)),
        ]
    else:
        rows.append(("per record: worst case ε, training alone", training))
        for record in statement.records:
            rows += _record(record)
    return [
        *first,
        *rows,
        ("δ", f"{statement.delta:g}"),
        ("kind", statement.kind),
        ("method", statement.method),
        ("noise and coins", "secret" if statement.randomness.secret else "not secret, see above"),
        ("steps", _steps(statement)),
        ("date", statement.date),
    ]


def _steps(statement: Statement) -> str:
    planned, repeated = statement.planned_steps, statement.repeated_steps
    text = f"{statement.steps} steps" + ("" if planned is None else f" of {planned}")
    return text + (f" and {repeated} more that were repeated after a restart" if repeated else "")


def _record(record: Record) -> list[tuple[str, str]]:
    return [
        (f"record {record.id}: ε, all included", epsilon_text(record.epsilon)),
        (f"record {record.id}: ε, training alone", epsilon_text(record.training_epsilon)),
    ]
