"""Pictures in folders: by class, or with names that say who is in them (UTKFace)."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from epsilons.data.split import Data, Part, split
from epsilons.examples import Examples

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
GENDERS = ("male", "female")
RACES = ("White", "Black", "Asian", "Indian", "Others")
# [age]_[gender]_[race]_[date].jpg, and .jpg.chip.jpg for the cropped faces
_UTK_NAME = re.compile(r"(\d{1,3})_([01])_([0-4])_(\d+)\.jpe?g(\.chip\.jpg)?", re.IGNORECASE)
_OLDEST = 116  # by the publisher
_YOUNG = 30


def image_folder(
    folder: str | os.PathLike[str], *, size: int = 32, test_share: float = 0.2, seed: int = 0
) -> Data:
    """Pictures (3, size, size) in [−1, 1] whose class is the folder they lie in.

    `folder` has one folder per class, or `train` and `test` that have them. Without `test`, a
    `test_share` is held out by `seed`. Ids are paths below the folder. All pictures are held in
    memory, 12·size² bytes each. `size`: to which width and height they are scaled, by default 32.
    ValueError where there are no pictures.
    """
    root = _folder(folder)
    apart = (root / "train").is_dir() and (root / "test").is_dir()
    place = root / "train" if apart else root
    classes = tuple(sorted(entry.name for entry in place.iterdir() if entry.is_dir()))
    if not classes:
        raise ValueError(f"{place} has no folders; expected one folder of pictures per class")
    sums: dict[str, str] = {}
    train = _part_by_class(place, classes, size, sums)
    test = _part_by_class(root / "test", classes, size, sums) if apart else None
    return split(train, test, classes=classes, checksums=sums, test_share=test_share, seed=seed)


def utkface(
    folder: str | os.PathLike[str],
    *,
    task: str = "gender",
    size: int = 32,
    test_share: float = 0.2,
    seed: int = 0,
    balanced: bool = False,
    races: Sequence[str] = RACES,
) -> Data:
    """Faces (3, size, size) in [−1, 1], grouped by race and gender; `task` is gender or age.

    Files are named `[age]_[gender]_[race]_[date].jpg` (https://susanqq.github.io/UTKFace), in
    `folder` or below it; a file with another name is skipped and counted. Age asks for under 30.
    `balanced` leaves out faces at random until both labels are equally many within each race.
    `races`: faces of others are left out.
    `size`: width and height, by default 32. `test_share`: held out, by default 0.2, drawn by
    `seed`.
    """
    if task not in ("gender", "age"):
        raise ValueError(f"task={task!r}; expected 'gender' or 'age'")
    unknown = [race for race in races if race not in RACES]
    if unknown or not races:
        raise ValueError(f"races={list(races)}; expected some of {', '.join(RACES)}")
    root = _folder(folder)
    files = _pictures(root)
    named = [(file, facts) for file in files if (facts := _utk_facts(file.name))]
    if not named:
        raise ValueError(
            f"none of the {len(files)} pictures in {root} is named [age]_[gender]_[race]_[date].jpg"
        )
    age, gender, race = np.array([facts for _, facts in named]).T
    y = gender if task == "gender" else (age < _YOUNG).astype(np.int64)
    kept = np.flatnonzero(np.isin(np.array(RACES)[race], races))
    if not len(kept):
        raise ValueError(f"none of the {len(named)} faces in {root} is of races={list(races)}")
    if balanced:
        kept = kept[_balanced(race[kept], y[kept], seed)]
    groups = {
        "race": np.array(RACES)[race[kept]],
        "gender": np.array(GENDERS)[gender[kept]],
        "age": np.array([f"{decade}0s" for decade in age[kept] // 10]),
    }
    sums: dict[str, str] = {}
    part = _part(root, [named[i][0] for i in kept], y[kept], groups, size, sums)
    classes = GENDERS if task == "gender" else (f"{_YOUNG} or older", f"under {_YOUNG}")
    data = split(part, None, classes=classes, checksums=sums, test_share=test_share, seed=seed)
    return replace(data, skipped=len(files) - len(named))


def _utk_facts(name: str) -> tuple[int, int, int] | None:
    """Age, gender and race; None if the name is not of the form."""
    match = _UTK_NAME.fullmatch(name)
    if match is None or int(match[1]) > _OLDEST:
        return None
    return int(match[1]), int(match[2]), int(match[3])


def _balanced(races: NDArray[Any], labels: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """Ascending positions such that each race has equally many of both labels."""
    generator = np.random.default_rng(seed)
    kept = []
    for race in np.unique(races):
        places = [np.flatnonzero((races == race) & (labels == label)) for label in (0, 1)]
        fewer = min(map(len, places))
        kept += [generator.permutation(place)[:fewer] for place in places]
    return np.sort(np.concatenate(kept))


def _part_by_class(root: Path, classes: tuple[str, ...], size: int, sums: dict[str, str]) -> Part:
    files = [file for file in _pictures(root) if file.parent != root]
    names = np.array([file.relative_to(root).parts[0] for file in files], dtype=str)
    strange = sorted(set(names.tolist()) - set(classes))
    if strange:
        raise ValueError(f"{root} has the class {strange[0]}; expected one of {', '.join(classes)}")
    y = np.searchsorted(np.array(classes), names)
    return _part(root, files, y, {"class": names}, size, sums)


def _part(
    root: Path,
    files: Sequence[Path],
    y: NDArray[np.int64],
    groups: dict[str, NDArray[Any]],
    size: int,
    sums: dict[str, str],
) -> Part:
    if not files:
        raise ValueError(f"{root} has no pictures; expected {', '.join(ENDINGS)}")
    ids = np.array([file.relative_to(root).as_posix() for file in files])
    x = torch.stack([_pixels(file, size, sums) for file in files])
    return Part(x, y, Examples(ids=ids, groups=groups))


def _folder(folder: str | os.PathLike[str]) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected a folder of pictures")
    return root


def _pictures(root: Path) -> list[Path]:
    return sorted(file for file in root.rglob("*") if file.suffix.lower() in ENDINGS)


def _pixels(file: Path, size: int, sums: dict[str, str]) -> Tensor:
    sums[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    try:
        with Image.open(file) as picture:
            small = picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{file} is not a readable picture: {error}") from error
    pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1).float()
    return pixels.div_(127.5).sub_(1)
