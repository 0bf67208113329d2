"""The curator's papers: each as its reader expects it, and none says more than the run shows."""

import json
import re
import shutil
import stat
import sys
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from made_runs import make_run

from epsilons import Examples, Plan, Run
from epsilons.accounting.printed import epsilon_text
from epsilons.cli import main
from epsilons.release import publish, releases_of
from epsilons.report.dossier import FORMATS, check_signed, dossier, read_facts, sign
from epsilons.report.dossier.papers import nist_answers

HERE = Path(__file__).parent
TEXTS = [name for name in FORMATS if name != "statement"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run of 1,200 records in households, with published statistics."""
    path = tmp_path_factory.mktemp("dossier") / "clinic"
    make_run(path, n=1200, owners=[f"home-{k // 3}" for k in range(1200)], max_records_per_owner=3)
    publish(Run.checked(path), epsilon=0.9)
    return Run.checked(path)


@pytest.fixture(scope="module")
def public_half(told, tmp_path_factory):
    """A copy that has nothing private."""
    copy = tmp_path_factory.mktemp("copy") / "clinic"
    shutil.copytree(told.path / "public", copy / "public")
    return copy


@pytest.fixture
def keys(tmp_path):
    """PEM files of a private key and its public half."""
    return written_keys(tmp_path, "signer")


def written_keys(folder, name):
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.public.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    private.chmod(0o600)
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def validate(name, value):
    schema = json.loads((HERE / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema_rs.validate(schema, value)


def guarantee(run):
    """The worst case of the whole training with what was published, from the journal."""
    return run.journal.worst_case(until=run.plan.steps, releases=releases_of(run))


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_every_paper_states_the_guarantee_of_the_journal(told, public_half):
    facts = read_facts(public_half)
    assert facts.epsilon == pytest.approx(guarantee(told))
    for name in FORMATS:
        assert f"ε = {epsilon_text(guarantee(told))}" in dossier(facts, name).replace(
            "\n      ", " "
        )


def test_the_model_card_is_one_for_the_hub(told):
    hub = pytest.importorskip("huggingface_hub")
    text = dossier(read_facts(told.path), "model-card")
    metadata = front_matter(text)
    validate("model-card", metadata)
    card = hub.ModelCard(text)
    assert card.data.tags == ["differential-privacy", "dp-sgd", "epsilons"]
    assert metadata["differential_privacy"]["epsilon"] >= guarantee(told)
    assert "| **Guaranteed (worst case)** |" in card.text


def test_the_registry_entry_fits_the_registrys_layout(told):
    entry = yaml.safe_load(dossier(read_facts(told.path), "registry"))
    validate("registry", entry)
    loss = entry["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] >= guarantee(told)
    assert "3 records, the most that one may have" in loss["privacy_unit_description"]


def test_the_schema_finds_what_is_missing(told):
    entry = yaml.safe_load(dossier(read_facts(told.path), "registry"))
    del entry["deployment"]["dp_flavor"]["input_metric"]
    with pytest.raises(jsonschema_rs.ValidationError):
        validate("registry", entry)


def test_every_question_of_nist_is_answered_or_listed(told):
    facts = read_facts(told.path)
    text = dossier(facts, "nist")
    topics, unanswered = nist_answers(facts)
    asked = re.findall(r'asks = "(.*?)"', (nist_file()).read_text(encoding="utf-8"))
    answered = [question for _, rows in topics for question, _ in rows]
    assert len(answered) + len(unanswered) == len(asked) >= 20
    answered_part, _, open_part = text.partition("## Not answered by the run")
    for question in asked:
        assert (f"**{question}**" in answered_part) != (question in open_part)
    assert len(unanswered) >= 5


def nist_file():
    import epsilons.report.dossier

    return Path(epsilons.report.dossier.__file__).parent / "nist.toml"


def test_the_annex_has_the_four_parts_of_article_35(told):
    text = dossier(read_facts(told.path), "dpia")
    for part in ("## (a) ", "## (b) ", "## (c) ", "## (d) ", "## For the controller to complete"):
        assert text.count(part) == 1
    assert "no legal advice" in text


@pytest.mark.parametrize("name", ["nist", "dpia"])
def test_papers_are_laid_out_like_their_committed_examples(told, name):
    """Headings and questions are those of the example; figures and dates differ."""

    def outline(text):
        return [line for line in text.splitlines() if re.match(r"#+ |\*\*", line)]

    example = (HERE / "dossiers" / f"{name}.md").read_text(encoding="utf-8")
    assert outline(dossier(read_facts(told.path), name)) == outline(example)


@pytest.mark.parametrize("name", FORMATS)
def test_public_papers_come_from_the_public_half_alone(told, public_half, name):
    from_copy, from_run = (
        dossier(read_facts(public_half), name),
        dossier(read_facts(told.path), name),
    )
    assert from_copy == from_run
    assert "home-1" not in from_copy
    assert "rivate: for" not in from_copy


def test_private_figures_appear_only_when_asked_for(told, public_half):
    facts, public = read_facts(told.path, private=True), read_facts(told.path)
    exact = epsilon_text(float(told.epsilons().quantile(0.5)))
    assert facts.private["50 % of the records have an individual ε of at most"] == exact
    for name in TEXTS:
        assert exact not in dossier(public, name)
        if name != "registry":  # made for a public registry
            assert "rivate: for the curator alone" in dossier(facts, name)
            assert exact in dossier(facts, name)
    with pytest.raises(ValueError, match="not a run folder"):
        read_facts(public_half, private=True)


def test_what_the_run_does_not_show_is_not_said(tmp_path):
    make_run(tmp_path / "quiet")
    facts = read_facts(tmp_path / "quiet")
    assert "Nothing is published" in facts.realised
    assert "No personal promises" in facts.promised
    assert "No audit is on record" in facts.audited
    assert any("not sealed" in line for line in facts.assumptions)


def test_a_run_without_noise_is_given_no_guarantee(bare, keys, tmp_path):
    facts = read_facts(bare.path)
    for name in TEXTS:
        assert "No" in facts.worst_case
        assert "ε = " not in dossier(facts, name).split("Promised")[0].split("Realised")[0]
    assert "differential-privacy" not in front_matter(dossier(facts, "model-card"))["tags"]
    assert json.loads(sign(facts, keys[0]))["statement"]["guaranteed"]["epsilon"] is None


def test_a_seed_weakens_the_guarantee_in_words(tmp_path):
    plan = Plan(n=400, batch_size=40, steps=40, noise_multiplier=2.0, max_grad_norm=1.0, delta=1e-5)
    Run.create(tmp_path / "seeded", plan, Examples.numbered(400), seed=7)
    facts = read_facts(tmp_path / "seeded")
    assert "Whoever can't compute the noise and guesses" in facts.worst_case
    assert any("seed 7" in line for line in facts.assumptions)


def test_a_run_that_was_tampered_with_gets_no_paper(told, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(told.path, copy)
    file = copy / "public" / "publications.json"
    file.write_text(file.read_text().replace('"answered": 1', '"answered": 2'))
    with pytest.raises(ValueError, match="not what was written"):
        read_facts(copy)


def test_a_signed_statement_is_checked_with_the_public_key(told, public_half, keys, tmp_path):
    private, public = keys
    file = tmp_path / "statement.json"
    file.write_text(sign(read_facts(told.path), private), encoding="utf-8")
    validate("statement", json.loads(file.read_text(encoding="utf-8")))
    found = check_signed(file, public, run=public_half)
    assert found["guaranteed"]["epsilon"] == pytest.approx(guarantee(told))
    laid_out = json.dumps(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(laid_out, encoding="utf-8")  # the same statement, laid out otherwise
    assert check_signed(file, public) == found


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page["statement"]["guaranteed"].update(epsilon=0.1),
        lambda page: page["statement"].update(date="2020-01-01"),
        lambda page: page["statement"].update(more="x"),
        lambda page: page["statement"].pop("audited"),
        lambda page: page["signature"].update(value="A" * 86 + "=="),
        lambda page: page["signature"].update(algorithm="none"),
        lambda page: page.update(comment="x"),
        lambda page: page.pop("signature"),
    ],
)
def test_whatever_was_changed_is_refused(told, keys, tmp_path, change):
    private, public = keys
    page = json.loads(sign(read_facts(told.path), private))
    change(page)
    (tmp_path / "changed.json").write_text(json.dumps(page), encoding="utf-8")
    with pytest.raises(ValueError, match=r"changed since|no signed statement"):
        check_signed(tmp_path / "changed.json", public)


def test_another_ones_key_is_refused_though_it_is_inside(told, keys, tmp_path):
    other, _ = written_keys(tmp_path, "other")
    file = tmp_path / "statement.json"
    file.write_text(sign(read_facts(told.path), other), encoding="utf-8")
    with pytest.raises(ValueError, match="not signed with this key"):
        check_signed(file, keys[1])


def test_files_that_changed_since_are_found(told, public_half, keys, tmp_path):
    file = tmp_path / "statement.json"
    file.write_text(sign(read_facts(told.path), keys[0]), encoding="utf-8")
    copy = tmp_path / "copy"
    shutil.copytree(public_half, copy)
    with (copy / "public" / "plan.json").open("a") as plan:
        plan.write(" ")
    with pytest.raises(ValueError, match="changed since"):
        check_signed(file, keys[1], run=copy)


def test_keys_that_are_none_are_refused(told, keys, tmp_path):
    facts = read_facts(told.path)
    keys[0].chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        sign(facts, keys[0])
    keys[1].chmod(0o600)
    with pytest.raises(ValueError, match="no private key"):
        sign(facts, keys[1])
    other = tmp_path / "ec.pem"
    other.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    other.chmod(0o600)
    with pytest.raises(ValueError, match="no Ed25519 key"):
        sign(facts, other)
    with pytest.raises(ValueError, match="no public Ed25519 key"):
        check_signed(tmp_path / "nothing", other)


def typed(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["epsilons", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_the_verbs(told, keys, tmp_path, monkeypatch, capsys):
    out = tmp_path / "card.md"
    assert typed(monkeypatch, "dossier", told.path, "--format", "model-card", "--out", out) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o644
    exact = tmp_path / "exact.md"
    words = ("dossier", told.path, "--format", "dpia", "--private", "--out", exact)
    assert typed(monkeypatch, *words) == 0
    assert stat.S_IMODE(exact.stat().st_mode) == 0o600
    signed = tmp_path / "signed.json"
    words = ("dossier", told.path, "--format", "statement", "--key", keys[0], "--out", signed)
    assert typed(monkeypatch, *words) == 0
    words = ("check-statement", signed, "--public-key", keys[1], "--run", told.path)
    assert typed(monkeypatch, *words) == 0
    assert "OK: signed with this key, unchanged" in capsys.readouterr().out
    signed.write_text(signed.read_text().replace("clinic", "clinique"))
    assert typed(monkeypatch, *words) == 2
    assert typed(monkeypatch, "dossier", told.path, "--format", "letter") == 2
    assert typed(monkeypatch, "dossier", told.path, "--format", "statement") == 2
    assert typed(monkeypatch, "dossier", told.path, "--format", "nist", "--key", keys[0]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_personal_promises_are_named_and_not_whose_they_are(tmp_path):
    plan = Plan(
        n=400, batch_size=40, steps=40, noise_multiplier=2.0, max_grad_norm=1.0, delta=1e-5,
        budgets=(0.5, 1.0),
    )  # fmt: skip
    assert plan.promises
    examples = Examples(ids=range(400), budgets=[0.5] * 399 + [1.0])
    Run.create(tmp_path / "run", plan, examples)
    facts = read_facts(tmp_path / "run")
    for promise in plan.promises:
        assert epsilon_text(promise.epsilon) in facts.promised
    assert "399" not in dossier(facts, "dpia")
    assert "Who has which is private" in dossier(facts, "dpia")
