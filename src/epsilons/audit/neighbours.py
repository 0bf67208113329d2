"""Does nothing but the sum depend on an example, and does it move that by at most its bound?

The training is played four times with the same coins and, played back, the same releases, so that
all see the same models: with the example, without it, with nobody else, and with it again. What
differs besides the recorded sums, or by more than the bound, contradicts the claim; no statistics
are needed (Re:cord-play, arXiv:2602.17454).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset

from epsilons.accounting import checks
from epsilons.audit.checks import Check, at_most, together
from epsilons.noise import Keystream, Noise
from epsilons.noise.grid import GridNoise

Array = NDArray[np.float64]
Watch = Callable[[nn.Module, torch.optim.Optimizer], None]
Bound = float | ArrayLike | Callable[[], ArrayLike]

_LAST_BITS = 2e-6  # of sums, relatively
_NEIGHBOURS, _LARGE = "neighbours", "neighbours, a huge example"
_HUGE = 1e9
_WORD = 8  # bytes of a coin


class Play(Protocol):
    """A training from a fresh start, for as many steps as its loop has."""

    def __call__(
        self, train: Dataset[Any], *, sampling: Keystream, noise: Noise, watch: Watch
    ) -> None: ...


def check_neighbours(
    play: Play,
    train: Dataset[Any],
    index: int,
    bound: Bound,
    steps: int,
    *,
    most: int | None = None,
    huge: bool = True,
    seed: int = 0,
) -> tuple[Check, ...]:
    """Whether the example at `index` enters each step's sum alone, by at most its `bound`.

    `play(train, sampling=, noise=, watch=)`: trains from a fresh start, the same each time, on the
    data set it is given; it draws its batches by `PoissonLoader(train, plan, generator=sampling)`,
    one coin for each example and step, gives `noise` to `private_step`, and calls
    `watch(model, optimizer)` after every step. A sample rate of 1 can't be played; dropout is to be
    off, since it draws by the batch's shape.

    `train`: a map-style data set. `bound`: what the example is charged for in the first `steps`
    steps, z_t: a number, an array (steps,), or a function that returns them after the plays.
    `most`: the largest batch that the loop takes; by default everybody. `huge`: whether all is done
    once more with the example's numbers 10⁹ times as large. `seed`: of the coins.

    Coins are the example alone, nobody, everybody, the example alone, then random ones with it.
    Inconclusive: two plays with the same example differ, or it has no gradient; a huge example
    without gradient is left out. ValueError for an
    index that is not in the data.
    """
    n = len(train)  # type: ignore[arg-type]
    checks.whole("steps", steps, 1)
    if not 0 <= checks.whole("index", index, 0) < n or n < 2:
        raise ValueError(f"index={index}; expected one of the {n} examples, of at least 2")
    coins = _coins(n, index, steps, n if most is None else min(most, n), seed)
    found = _played(play, train, index, bound, coins, _NEIGHBOURS)
    if huge and together(found) != "inconclusive":
        for factor in (_HUGE, -_HUGE):
            large = _changed(train, index, partial(_magnified, factor))
            more = _played(play, large, index, bound, coins, _LARGE)
            if together(more) != "inconclusive":
                found += more
                break  # else a model is sure of it, and right
    return tuple(found)


def _played(
    play: Play,
    train: Dataset[Any],
    index: int,
    bound: Bound,
    coins: NDArray[np.bool_],
    instrument: str,
) -> list[Check]:
    """The four plays, and what they show."""
    others = coins.copy()
    others[:, index] = False
    only = np.zeros_like(coins)
    only[:, index] = coins[:, index]
    overwritten = _changed(train, index, None)
    first = _transcript(play, train, coins, None)
    if not first.releases:
        return [_inconclusive(instrument, "it trains", "no step released anything")]
    plays = {
        "without": _transcript(play, overwritten, others, first.releases),
        "alone": _transcript(play, train, only, first.releases),
        "again": _transcript(play, train, coins, first.releases),
    }
    if not _same_sums(first, plays["again"]) or first.states != plays["again"].states:
        why = "two plays with the same example and coins differ: something random is left on"
        return [_inconclusive(instrument, "the same again", why)]
    steps = len(coins)
    found = [
        _one_of_each(instrument, name, each, steps, coins.shape[1])
        for name, each in {"with": first, **plays}.items()
        if name != "again"
    ]
    if together(found) != "kept":
        return found
    z = np.broadcast_to(np.asarray(bound() if callable(bound) else bound, np.float64), (steps,))
    with_, without, alone = (
        np.stack(each.sums) for each in (first, plays["without"], plays["alone"])
    )
    drawn = coins[:, index]
    size = np.linalg.norm(alone, axis=1)
    if not (size[drawn] > 0).any():
        return [_inconclusive(instrument, "it has a gradient", "the example's gradient is 0")]
    scale = np.linalg.norm(with_, axis=1) + size + np.finfo(float).tiny
    rest = np.linalg.norm(with_ - without - alone, axis=1) / scale
    moved = np.linalg.norm(with_ - without, axis=1)
    rounding = _LAST_BITS * scale  # of two sums that are subtracted
    limit = np.maximum(z, np.finfo(float).tiny)
    found += [
        at_most(instrument, "it is added to the others' sum", _worst(rest), _LAST_BITS),
        at_most(instrument, "alone it adds at most its bound", _worst(size / limit), 1.0),
        at_most(
            instrument, "with others it adds at most its bound",
            _worst((moved - rounding) / limit), 1.0,
        ),
        at_most(
            instrument, "it adds nothing where it isn't drawn",
            _worst(np.where(drawn, 0.0, np.maximum(size, moved))), 0.0,
        ),
    ]  # fmt: skip
    for name, each in plays.items():
        if name != "again":
            found += list(_same_else(instrument, name, first, each))
    return found


@dataclass
class _Transcript:
    """One play: the sums and releases of its steps, and all that must not depend on an example."""

    sums: list[Array] = field(default_factory=list)
    releases: list[dict[str, Tensor]] = field(default_factory=list)
    constants: list[tuple[float, float]] = field(default_factory=list)  # noise, divisor
    states: list[dict[str, bytes]] = field(default_factory=list)
    coins: int = 0


def _transcript(
    play: Play,
    train: Dataset[Any],
    coins: NDArray[np.bool_],
    releases: list[dict[str, Tensor]] | None,
) -> _Transcript:
    found = _Transcript()
    sampling = _ScriptedCoins(coins)
    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        play(
            train,
            sampling=sampling,
            noise=_PlayedBack(found, releases),
            watch=lambda model, optimizer: found.states.append(_state(model, optimizer)),
        )
    finally:
        torch.set_rng_state(random_state)
    found.coins = sampling.asked
    return found


class _ScriptedCoins(Keystream):
    """Coins that fall as was written beforehand, in whatever pieces they are asked for."""

    def __init__(self, coins: NDArray[np.bool_]) -> None:
        super().__init__(os.urandom(32), b"sampling")
        self._coins = coins.reshape(-1)
        self.asked = 0

    def fill(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        start = self._position // _WORD
        drawn = self._coins[start : start + words.size]
        words[:] = np.uint64(2**64 - 1)
        words[: drawn.size][drawn] = 0
        self._position += words.nbytes
        self.asked += words.size
        return words


class _PlayedBack:
    """Noise that records the sums, and releases what was released before if there is such."""

    def __init__(self, found: _Transcript, releases: list[dict[str, Tensor]] | None) -> None:
        self._found, self._releases = found, releases
        self._noise = GridNoise(Keystream.secret(b"noise"))

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        found, step = self._found, len(self._found.sums)
        flat = [total.detach().to("cpu", torch.float64).reshape(-1) for total in sums.values()]
        found.sums.append(torch.cat(flat).numpy().copy() if flat else np.zeros(0))
        found.constants.append((float(std), float(divisor)))
        if self._releases is None:
            released = self._released(sums, std, divisor)
            found.releases.append({name: value.clone() for name, value in released.items()})
            return released
        if step < len(self._releases):
            return {name: value.clone() for name, value in self._releases[step].items()}
        return {name: torch.zeros_like(total) for name, total in sums.items()}

    def _released(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        try:
            return self._noise.added_to(dict(sums), std, divisor)
        except ValueError:  # a sum too large for any noise: it is recorded, and judged
            nothing = {name: torch.zeros_like(total) for name, total in sums.items()}
            return self._noise.added_to(nothing, std, divisor)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """Digests of all that a step leaves behind."""
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return {
        "weights": _digest(dict(model.named_parameters())),
        "buffers": _digest(dict(model.named_buffers())),
        "optimizer state": _digest(state["state"]),
        "learning rate and other constants": _digest(groups),
    }


def _digest(value: Any) -> bytes:
    hasher = hashlib.sha256()
    for part in _parts(value):
        hasher.update(part)
    return hasher.digest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().reshape(-1)
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    else:
        yield repr(value).encode()


def _coins(n: int, index: int, steps: int, most: int, seed: int) -> NDArray[np.bool_]:
    """Who is drawn (steps, n): the example alone, nobody, everybody, it alone, random ones."""
    generator = np.random.default_rng(seed)
    coins = np.zeros((steps, n), dtype=bool)
    for step in range(steps):
        if step == 2:
            coins[step, np.arange(n)[: most + 1] % n] = True
        elif step > 3:
            size = generator.integers(0, min(n, most))
            coins[step, generator.permutation(n)[:size]] = True
        if step != 1:
            coins[step, index] = True
        over = int(coins[step].sum()) - most
        if over > 0:
            drop = np.flatnonzero(coins[step] & (np.arange(n) != index))[-over:]
            coins[step, drop] = False
    return coins


def _changed(train: Dataset[Any], index: int, change: Callable[[Any], Any] | None) -> Dataset[Any]:
    """The data with the example's record changed, or overwritten by another's if `change` is None.

    Tensors stay tensors: a loop may look at them.
    """
    n = len(train)  # type: ignore[arg-type]
    other = (index + 1) % n
    if isinstance(train, TensorDataset):
        columns = [tensor.clone() for tensor in train.tensors]
        for column in columns:
            column[index] = column[other] if change is None else change(column[index])
        return TensorDataset(*columns)
    return _OneChanged(train, index, other, change)


class _OneChanged(Dataset[Any]):
    """A data set one of whose records is another's, or changed."""

    def __init__(
        self, train: Dataset[Any], index: int, other: int, change: Callable[[Any], Any] | None
    ) -> None:
        self._train, self._index, self._other, self._change = train, index, other, change

    def __len__(self) -> int:
        return len(self._train)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if index != self._index:
            return self._train[index]
        if self._change is None:
            return self._train[self._other]
        return tree_map(self._change, self._train[index])


def _magnified(factor: float, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf * factor if leaf.is_floating_point() else leaf
    return leaf * factor if isinstance(leaf, float | np.floating) else leaf


def _same_sums(one: _Transcript, other: _Transcript) -> bool:
    return len(one.sums) == len(other.sums) and all(
        np.array_equal(a, b) for a, b in zip(one.sums, other.sums, strict=True)
    )


def _one_of_each(instrument: str, name: str, found: _Transcript, steps: int, n: int) -> Check:
    """Whether each step asked for n coins, released once and was watched once."""
    counts = (len(found.sums), len(found.states), found.coins)
    expected = (steps, steps, steps * n)
    wrong = counts != expected
    reason = (
        f"{counts[0]} releases, {counts[1]} steps and {counts[2]} coins; expected {steps}, "
        f"{steps} and {steps}·{n}"
        if wrong
        else ""
    )
    claim = f"{name} it: one release and n coins a step"
    return at_most(instrument, claim, float(wrong), 0.0, reason)


def _same_else(
    instrument: str, name: str, first: _Transcript, other: _Transcript
) -> Iterator[Check]:
    """Whether noise, divisor and all that is left behind are the same to the last bit."""
    same = [a == b for a, b in zip(first.constants, other.constants, strict=True)]
    yield at_most(
        instrument, f"{name} it: the same noise and divisor", float(not all(same)), 0.0,
        "" if all(same) else "they depend on the example",
    )  # fmt: skip
    for part in first.states[0]:
        pairs = zip(first.states, other.states, strict=True)
        differs = [k for k, (a, b) in enumerate(pairs) if a[part] != b[part]]
        yield at_most(
            instrument, f"{name} it: the same {part}", float(len(differs)), 0.0,
            f"they depend on the example from step {differs[0]} on" if differs else "",
        )  # fmt: skip


def _worst(values: ArrayLike) -> float:
    """The largest; NaN if one is."""
    return float(np.max(np.asarray(values, dtype=np.float64)))


def _inconclusive(instrument: str, name: str, reason: str) -> Check:
    return Check(instrument, name, "inconclusive", reason=reason)
