"""The papers: model card, registry entry, NIST questions, DPIA annex, and the signed statement."""

from __future__ import annotations

import json
import math
import re
import tomllib
from importlib.resources import files
from typing import Any, Literal, get_args

import jinja2
import yaml

from epsilons.accounting.printed import epsilon_text
from epsilons.report.dossier.facts import Facts

Format = Literal["model-card", "registry", "nist", "dpia", "statement"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""The papers there are."""
_OPEN = "Not known from the run; to be stated by the curator."
_HERE = files("epsilons.report.dossier")
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(
        lambda name: _HERE.joinpath("templates", name).read_text(encoding="utf-8")
    ),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # markdown
)


def dossier(facts: Facts, format: Format) -> str:
    """One paper about the run of `facts` as text; `format`: one of `FORMATS`.

    `"statement"` is what `sign` signs, and not signed yet. ValueError for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if format == "registry":
        return _yaml(registry_entry(facts))
    if format == "statement":
        return json.dumps(claims(facts), indent=2, ensure_ascii=False) + "\n"
    values: dict[str, Any] = {"f": facts, "open": _OPEN}
    if format == "model-card":
        values["metadata"] = _yaml(card_metadata(facts))
    if format == "nist":
        values["topics"], values["unanswered"] = nist_answers(facts)
    return _TEMPLATES.get_template(f"{format}.md.j2").render(values)


def card_metadata(facts: Facts) -> dict[str, Any]:
    """The YAML front matter of a model card on the Hugging Face hub."""
    finite = math.isfinite(facts.epsilon)
    tags = ["differential-privacy", "dp-sgd", "epsilons"] if finite else ["epsilons"]
    return {
        "tags": tags,
        "differential_privacy": {
            "guarantee": "(epsilon, delta)-DP" if finite else "none",
            "epsilon": float(epsilon_text(facts.epsilon)) if finite else None,
            "delta": facts.delta,
            "unit": facts.unit,
            "accountant": f"{facts.software}, tight",
            "individual_epsilons": facts.published.kind or "not published",
            "journal_head": facts.published.anchor.get("head"),
        },
    }


def registry_entry(facts: Facts) -> dict[str, Any]:
    """An entry of the OpenDP deployments registry: a draft, with what only curators know open."""
    found = facts.published
    plan = found.plan
    parameters = {"delta": facts.delta}
    if math.isfinite(facts.epsilon):
        parameters = {"epsilon": float(epsilon_text(facts.epsilon)), **parameters}
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-") or "run",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "product": {
                "name": found.name,
                "data_curators": [_OPEN],
                "intended_use": _OPEN,
                "data_product_type": "Machine learning model",
                "data_product_region": _OPEN,
                "description": f"A model trained with DP-SGD on {plan.n} {facts.counted}. {_OPEN}",
                "publication_date": facts.date,
                "data_product_sector": _OPEN,
            },
            "dp_flavor": {
                "name": "Approximate DP",
                "input_metric": f"Symmetric distance, of {facts.counted}; n is public",
                "bound_on_input_distance": "1",
                "output_measure": "Approximate max divergence (ε, δ)",
                "bound_on_output_distance": facts.worst_case,
                "data_domain": f"Data sets of records with the inputs of the model. {_OPEN}",
                "unprotected_quantities": f"The number n of {facts.counted}, and the plan.",
            },
            "privacy_loss": {
                "privacy_unit": facts.published.plan.per.capitalize(),
                "privacy_unit_description": f"{facts.unit[0].upper()}{facts.unit[1:]}. "
                f"{facts.per_person}",
                "privacy_parameters": parameters,
                "privacy_parameters_description": " ".join(
                    (
                        f"Guaranteed (worst case): {facts.worst_case}",
                        f"Promised: {facts.promised}",
                        f"Realised: {facts.realised}",
                        f"Audited: {facts.audited}",
                    )
                ),
            },
            "model": {
                "model_name": "Central",
                "actors": "The curator, who is trusted with the data, the noise and the journal; "
                "everyone who sees the model or what is published, who is not trusted.",
                "release_type": "One release",
                "release_type_description": "Models of one training run, all of them counted as "
                f"seen. {facts.publications}",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Whatever is computed from the released models and statistics "
                "costs nothing more.",
                "composition": facts.composition,
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": "Not covered by the guarantee unless "
                f"counted as runs of their own. {_OPEN}",
                "mechanisms": f"{facts.mechanism} {' '.join(facts.assumptions)}",
                "justification": _OPEN,
            },
            "resources": {
                "sources": f"{facts.software}; head of the journal: "
                f"{found.anchor.get('head', 'not published')}",
                "registry_authors": [_OPEN],
            },
        },
    }


def nist_answers(facts: Facts) -> tuple[list[tuple[str, list[tuple[str, str]]]], list[str]]:
    """Topics with questions and answers from the run, and the questions that it can't answer."""
    answers = {
        "guarantee": facts.worst_case,
        "definition": f"(ε, δ)-differential privacy with δ = {facts.delta:g}, for neighbours that "
        f"differ in one {facts.published.plan.per} (unbounded, n public).",
        "unit": f"{facts.unit[0].upper()}{facts.unit[1:]}. {facts.per_person}",
        "composition": f"{facts.composition} {facts.publications}",
        "mechanism": f"{facts.mechanism} Length: {facts.length}.",
        "implementation": " ".join(facts.assumptions),
        "individual": f"{facts.promised} {facts.realised}",
        "audit": facts.audited,
        "model": "Central: the curator holds the data in the clear, and is trusted with it.",
        "query": "Non-interactive: models of one run, and statistics charged to a budget.",
        "transparency": "Public: plan, guarantee, publications and their cost, head of the journal "
        f"({facts.published.anchor.get('head', 'not published')}).",
    }
    topics, unanswered = [], []
    for topic in tomllib.loads(_HERE.joinpath("nist.toml").read_text("utf-8"))["topic"]:
        rows = []
        for question in topic["questions"]:
            answer = answers.get(question.get("answer", ""))
            if answer is None:
                unanswered.append(f"{topic['name']}: {question['asks']}")
            else:
                rows.append((question["asks"], answer))
        if rows:
            topics.append((topic["name"], rows))
    return topics, unanswered


def claims(facts: Facts) -> dict[str, Any]:
    """What a signed statement says of the run."""
    found = facts.published
    return {
        "type": "epsilons run statement",
        "version": 1,
        "date": facts.date,
        "run": found.name,
        "guaranteed": {
            "epsilon": facts.epsilon if math.isfinite(facts.epsilon) else None,
            "delta": facts.delta,
            "unit": facts.unit,
            "includes": "training, clip bound, publications",
            "says": facts.worst_case,
        },
        "per_person": facts.per_person,
        "promised": facts.promised,
        "realised": facts.realised,
        "audited": facts.audited,
        "assumptions": facts.assumptions,
        "journal": {key: found.anchor.get(key) for key in ("length", "head", "seal")},
        "files": dict(facts.files),
        "software": facts.software,
        **({} if facts.private is None else {"private": dict(facts.private)}),
    }


def _yaml(value: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
    return text
