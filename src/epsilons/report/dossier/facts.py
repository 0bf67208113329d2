"""What the papers say of a run, as one object, in the words of every paper."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from epsilons.accounting.printed import epsilon_text, percent_text
from epsilons.accounting.sums import NOT_COVERED
from epsilons.release import meaningful, persons, verify_ledger
from epsilons.report.published import WORTH, Published, read_published
from epsilons.report.sentences import drawn_together, guess, per_person_published
from epsilons.runs import Run

_SIGNED_FILES = ("plan.json", "anchor.json", "publications.json")
_QUANTILES = (0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class Facts:
    """A run as its papers have it.

    `published`: what its public half tells. `date`: of the papers. `files`: SHA-256 of the public
    files by name. `private`: exact figures for the curator alone, by name; None where they were not
    asked for.
    """

    published: Published
    date: str
    files: Mapping[str, str]
    private: Mapping[str, str] | None

    @property
    def epsilon(self) -> float:
        """The run's guarantee: worst case of training, clip bound and publications; ∞ if none."""
        return self.published.worst_case

    @property
    def delta(self) -> float:
        """The δ of the guarantee."""
        return self.published.plan.delta

    @property
    def holds(self) -> bool:
        """Whether the guarantee says anything."""
        return math.isfinite(self.epsilon) and meaningful(self.epsilon, self.delta)

    @property
    def software(self) -> str:
        """Name and version of what accounted for the run, and wrote its papers."""
        return f"epsilons {version('epsilons')}"

    @property
    def unit(self) -> str:
        """The unit of privacy, in a few words."""
        what = "all records of one person" if self._person else "one training record"
        return f"{what} added or removed (n is public)"

    @property
    def counted(self) -> str:
        """What n counts, in the plural."""
        return "persons" if self._person else "records"

    @property
    def _person(self) -> bool:
        return self.published.plan.unit == "owner"

    @property
    def worst_case(self) -> str:
        """The guarantee in a sentence."""
        if not math.isfinite(self.epsilon):
            return "None: the run has no differential-privacy guarantee."
        at = f"(ε = {epsilon_text(self.epsilon)}, δ = {self.delta:g})-differential privacy"
        nothing = "" if self.holds else " So large an ε is no meaningful guarantee."
        who = (
            "Whoever" if self.published.randomness.secret else "Whoever can't compute the noise and"
        )
        return (
            f"{at} for {self.unit}; training, clip bound and publications together. {who} "
            f"guesses from even odds whether {self._used} used is right at most "
            f"{percent_text(guess(self.epsilon, self.delta))} of the time.{nothing}"
        )

    @property
    def _used(self) -> str:
        return "a person's data were" if self._person else "a record was"

    @property
    def per_person(self) -> str:
        """The guarantee for someone with several records."""
        if self._person:
            return drawn_together(self.published.plan)
        return per_person_published((self.published.ledger or {}).get("per_person"))

    @property
    def promised(self) -> str:
        """Personal promises, made before training."""
        promises = self.published.plan.promises
        if not promises:
            return "No personal promises are stated: the worst case is promised to everyone alike."
        each = ", ".join(epsilon_text(promise.epsilon) for promise in promises)
        return (
            f"Before training, each of the {self.counted} was promised a guarantee of its own, at "
            f"δ = {self.delta:g} one of ε = {each}, whatever its content. Who has which is private."
        )

    @property
    def realised(self) -> str:
        """What is published of the individual ε's along the training."""
        found = self.published
        parts = [
            f"{100 * q:g} % of the {self.counted} are below {n.value:.3f} "
            f"({n.low:.3f}–{n.high:.3f})"
            for q, n in sorted(found.quantiles.items())
        ]
        if found.mean is not None:
            n = found.mean
            parts.append(f"the mean is {n.value:.3f} ({n.low:.3f}–{n.high:.3f})")
        if not parts:
            return "Nothing is published of the individual ε's along this training."
        return (
            "Individual ε's along the training that was observed, published under differential "
            f"privacy, 95 % intervals: {'; '.join(parts)}. {WORTH[found.kind][1]} They describe "
            "this training and guarantee nothing."
        )

    @property
    def audited(self) -> str:
        """Lower bounds found by attacks."""
        return "No audit is on record in the public half of the run."

    @property
    def assumptions(self) -> list[str]:
        """What the guarantee rests on, and where it does not hold."""
        found = self.published
        lines = [f"Randomness: {found.randomness}."]
        if found.seed is not None:
            lines.append(f"Made with seed {found.seed}: whoever knows it can take the noise off.")
        elif not found.randomness.secret:
            lines.append("The guarantee is against whoever can't compute noise and coins.")
        if not found.sums_covered:
            lines.append(f"Arithmetic: {NOT_COVERED}.")
        if not found.anchor.get("seal"):
            lines.append("The journal is not sealed: the training has not ended.")
        lines.append(
            "Not included: other runs on the same data, and anything released by other means."
        )
        return lines

    @property
    def mechanism(self) -> str:
        """What was done to the gradients."""
        plan = self.published.plan
        clipping = {
            "max": "clipped to C", "individual": "clipped to a threshold of its own, at most C",
            "none": "not clipped",
        }  # fmt: skip
        whose = "person's summed" if self._person else "per-example"
        changes = f", changed in {len(plan.phases)} later phases" if plan.phases else ""
        if plan.adaptive is not None:
            changes = (
                f"; C moves every {plan.adaptive.update_every} steps by a count of unclipped "
                f"examples, released with noise of {plan.adaptive.unclipped_num_std:g}"
            )
        return (
            f"DP-SGD: Poisson sampling with rate {plan.sample_rate:.4g}, each {whose} gradient "
            f"{clipping.get(plan.clipping, plan.clipping)} (C = {plan.max_grad_norm:g}), Gaussian "
            f"noise of {plan.noise_multiplier:g} · C on the sum{changes}."
        )

    @property
    def length(self) -> str:
        """How long the training is."""
        plan, repeated = self.published.plan, self.published.repeated
        steps = "of no fixed length" if plan.endless else f"{plan.steps} planned steps"
        return steps + (
            f", and {repeated} that were repeated and are paid for again" if repeated else ""
        )

    @property
    def publications(self) -> str:
        """What was let out beside the models."""
        ledger = self.published.ledger
        if not ledger or not ledger["questions"]:
            return "Nothing was let out beside the training."
        at = ledger["releases"]
        return (
            f"Releases beside the training (clip bound, statistics): {ledger['questions']}, "
            f"together ε = {epsilon_text(at['epsilon'])} at δ = {at['delta']:g}. They are in the "
            "total."
        )

    @property
    def composition(self) -> str:
        """How costs are added up."""
        known = (self.published.ledger or {}).get("total", {}).get("composition", "")
        return (
            "Steps compose by their cumulants (tight accountant: ε from δ(ε) by a contour integral "
            f"with certified error; never below the exact value). {known}"
        ).strip()


def read_facts(run: str | os.PathLike[str], *, private: bool = False) -> Facts:
    """The facts of the run in folder `run`, or of a copy that has its public half alone.

    Where its journal is at hand the public files are checked against it. `private`: with exact
    figures from the journal, for the curator alone. ValueError if a file was changed, or private
    figures are asked for and there is no journal.
    """
    folder = Path(run)
    opened = None
    if private or (folder / "private" / "journal.sqlite").is_file():
        opened = Run.checked(folder)
        verify_ledger(opened)
    files = {
        name: hashlib.sha256((folder / "public" / name).read_bytes()).hexdigest()
        for name in _SIGNED_FILES
        if (folder / "public" / name).is_file()
    }
    return Facts(
        published=read_published(folder),
        date=datetime.now(UTC).date().isoformat(),
        files=files,
        private=_private(opened) if private and opened is not None else None,
    )


def _private(run: Run) -> dict[str, str]:
    """Exact figures: for the curator alone."""
    found = run.epsilons()
    figures = {
        f"{100 * q:g} % of the records have an individual ε of at most": epsilon_text(
            float(found.quantile(q))
        )
        for q in _QUANTILES
    }
    figures["kind of the individual ε's"] = found.kind
    figures["records at the worst case"] = f"{found.at_worst_case.mean():.1%}"
    owners = None if found.kind == "none" else persons(run, found)
    if owners is not None:
        figures["owners"] = str(len(owners))
        figures["ε of all records of an owner together, at most"] = epsilon_text(
            owners.quantile(1.0)
        )
    test = run.test
    if test is not None and test.correct is not None:
        figures["test accuracy"] = f"{test.correct.mean():.1%} of {len(test)} held-out examples"
    return figures
