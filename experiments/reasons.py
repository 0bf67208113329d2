"""Why a claim does not hold at our scale, as found by looking; by (where, claim)."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[tuple[str, str], str] = {}
