"""The owners' page: everyone whose records were used sees their own statement, and nobody else's.

Statements are computed once and kept in a table; the journal is only read. Who holds a token sees
the statement of its owner, as a page or as JSON.
"""

from epsilons.service.app import create_app
from epsilons.service.limits import Limits
from epsilons.service.server import serve
from epsilons.service.statements import refresh
from epsilons.service.store import Store
from epsilons.service.tokens import Issued, Keys, issue, revoke, rotate

__all__ = [
    "Issued",
    "Keys",
    "Limits",
    "Store",
    "create_app",
    "issue",
    "refresh",
    "revoke",
    "rotate",
    "serve",
]
