"""Where a run's noise and coins come from: the guarantee is against whoever doesn't know them.

It is recorded when a run is made, and said wherever its guarantee is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

Source = Literal["secret", "system", "seeded", "torch", "torch seeded", "unknown"]

_SECRET = ("secret", "system")
_WORDS: dict[Source, str] = {
    "secret": "AES-256 in counter mode, with a key from the operating system",
    "system": "the operating system's generator",
    "seeded": "a seed that is on record: whoever knows it can compute them",
    "torch": "torch's generator, which is not cryptographic: whoever learns enough of its numbers "
    "can compute the others; whether it was seeded is not known",
    "torch seeded": "torch's generator, which is not cryptographic, and was given a seed: whoever "
    "knows or guesses it can compute them",
    "unknown": "where the training loop took them from, which was not recorded",
}


@dataclass(frozen=True)
class Randomness:
    """The sources of a run's noise and of the coins that draw its batches.

    >>> Randomness.of_fit(None)
    Randomness(noise='secret', coins='secret')
    >>> Randomness.of_fit(7).secret
    False
    """

    noise: Source = "unknown"
    coins: Source = "unknown"

    def __post_init__(self) -> None:
        for source in (self.noise, self.coins):
            if source not in get_args(Source):
                raise ValueError(f"{source!r} is no source; expected {', '.join(get_args(Source))}")

    @classmethod
    def of_fit(cls, seed: int | None) -> Self:
        """What `fit` draws from."""
        source: Source = "secret" if seed is None else "seeded"
        return cls(source, source)

    @classmethod
    def recorded(cls, opening: Mapping[str, Any]) -> Self:
        """As a journal's opening has it; journals from before it was recorded know a seed at most.

        >>> Randomness.recorded({"seed": None})
        Randomness(noise='unknown', coins='unknown')
        """
        known = opening.get("randomness")
        if known is not None:
            return cls(**known)
        return cls() if opening.get("seed") is None else cls.of_fit(opening["seed"])

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @property
    def secret(self) -> bool:
        """Whether nobody can compute noise or coins, as far as is known."""
        return self.noise in _SECRET and self.coins in _SECRET

    def __str__(self) -> str:
        if self.noise == self.coins:
            return f"noise and coins from {_WORDS[self.noise]}"
        return f"noise from {_WORDS[self.noise]}; coins from {_WORDS[self.coins]}"
