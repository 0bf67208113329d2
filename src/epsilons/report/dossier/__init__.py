"""The curator's papers about a run: what forms, registries and auditors ask for.

From the public half of a run folder alone, unless private figures are asked for. A paper says what
is guaranteed, promised, realised and audited, each by its name, and nothing that the run does not
show: what only the curator knows is listed as open.
"""

from epsilons.report.dossier.facts import Facts, read_facts
from epsilons.report.dossier.papers import FORMATS, dossier
from epsilons.report.dossier.signed import check_signed, sign

__all__ = ["FORMATS", "Facts", "check_signed", "dossier", "read_facts", "sign"]
