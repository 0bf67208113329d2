"""What leaves the curator's hands: to the owner, and to everyone; and the budget that guards it."""

from epsilons.release.all_statements import owner_names, owner_statements
from epsilons.release.budget import (
    Budget,
    Cost,
    Entry,
    Limit,
    OverBudget,
    Spent,
    releases_of,
    reserved,
)
from epsilons.release.clip_bound import ClipBound, median_cost, release_median_norm
from epsilons.release.ledger import renew_ledger, verify_ledger, write_ledger
from epsilons.release.owner import Record, Statement, meaningful, owner_statement
from epsilons.release.persons import Persons, person_worst_case, persons
from epsilons.release.quantiles import Estimate
from epsilons.release.statistics import (
    Publication,
    Statistics,
    publish,
    release_mean,
    release_quantiles,
)
from epsilons.release.total import Part, Total, total
from epsilons.release.wording import statement_html, statement_text

__all__ = [
    "Budget",
    "ClipBound",
    "Cost",
    "Entry",
    "Estimate",
    "Limit",
    "OverBudget",
    "Part",
    "Persons",
    "Publication",
    "Record",
    "Spent",
    "Statement",
    "Statistics",
    "Total",
    "meaningful",
    "median_cost",
    "owner_names",
    "owner_statement",
    "owner_statements",
    "person_worst_case",
    "persons",
    "publish",
    "release_mean",
    "release_median_norm",
    "release_quantiles",
    "releases_of",
    "renew_ledger",
    "reserved",
    "statement_html",
    "statement_text",
    "total",
    "verify_ledger",
    "write_ledger",
]
