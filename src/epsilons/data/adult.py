"""Adult (UCI, Becker and Kohavi 1996): does a person of the US census of 1994 earn over $50,000?

Inputs are scaled by constants and encoded by the published lists of categories, never by
statistics of the data: those would be a release that nobody pays for.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from epsilons.data.official import Publication, below, sha256
from epsilons.data.split import Data, labelled
from epsilons.examples import Examples

ADULT = Publication(
    "Adult",
    "https://archive.ics.uci.edu/dataset/2/adult",
    {
        "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
        "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
    },
)
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip
_INCOMES = ("<=50K", ">50K")
# Largest possible values by the documentation of the census; the capital columns go by logarithm.
_SCALES = {"age": 90.0, "education-num": 16.0, "hours-per-week": 99.0}
_LOG_SCALES = {"capital-gain": 99_999.0, "capital-loss": 99_999.0}
# From the published adult.names.
_CATEGORIES = {
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov "
    "Without-pay Never-worked ?",
    "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th "
    "12th Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed "
    "Married-spouse-absent Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
    "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
    "Priv-house-serv Protective-serv Armed-Forces ?",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "native-country": "United-States Cambodia England Puerto-Rico Canada Germany "
    "Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran Honduras Philippines "
    "Italy Poland Jamaica Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador "
    "Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
    "Trinadad&Tobago Peru Hong Holand-Netherlands ?",
}


def adult(folder: str | os.PathLike[str], *, verified: bool = True) -> Data:
    """32,561 training and 16,281 held-out persons as vectors (107,); groups race, sex and class.

    `folder` holds `adult.data` and `adult.test`, or has them in `adult`. Numbers are scaled to
    [0, 1], categories one-hot with `?` as one of them; the census weight `fnlwgt` is left out.
    Ids are line numbers from 0. `verified=False` reads other lines of the same format.
    """
    place = below(folder, ["adult"], ADULT.md5)
    sums: dict[str, str] = {}
    train, examples = _part(place / "adult.data", verified, sums)
    test, test_examples = _part(place / "adult.test", verified, sums)
    return Data(train, examples, test, test_examples, _INCOMES, sums)


def _part(path: Path, verified: bool, sums: dict[str, str]) -> tuple[TensorDataset, Examples]:
    content = ADULT.read(path, verified=verified)
    sums[path.name] = sha256(content)
    table = _table(content, path)
    numbers = [_numbers(table[name], name, path) / scale for name, scale in _SCALES.items()]
    logs = [
        np.log1p(_numbers(table[name], name, path)) / np.log1p(scale)
        for name, scale in _LOG_SCALES.items()
    ]
    hot = [
        _one_hot(table[name], name, values.split(), path) for name, values in _CATEGORIES.items()
    ]
    x = np.concatenate([np.stack([*numbers, *logs], axis=1), *hot], axis=1)
    incomes = np.char.rstrip(table["income"], ".")
    y = _one_hot(incomes, "income", list(_INCOMES), path).argmax(axis=1)
    groups = {"race": table["race"], "sex": table["sex"], "class": incomes}
    examples = Examples(ids=np.arange(len(y)), groups=groups)
    return labelled(torch.from_numpy(x.astype(np.float32)), y), examples


def _table(content: bytes, path: Path) -> dict[str, NDArray[np.str_]]:
    """Columns by name; lines that are empty or begin with | are comments of the publisher."""
    rows = []
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("|"):
            continue
        row = [value.strip() for value in line.split(",")]
        if len(row) != len(COLUMNS):
            raise ValueError(
                f"{path}, line {number}: {len(row)} values; expected {len(COLUMNS)} "
                f"({', '.join(COLUMNS)})"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no lines of data")
    return {
        name: np.array(column)
        for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)
    }


def _numbers(column: NDArray[np.str_], name: str, path: Path) -> NDArray[np.float64]:
    try:
        found = column.astype(np.float64)
    except ValueError as error:
        raise ValueError(f"{path}, column {name}: a value is not a number") from error
    if not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError(f"{path}, column {name}: a value is negative or not finite")
    return found


def _one_hot(
    column: NDArray[np.str_], name: str, values: list[str], path: Path
) -> NDArray[np.float64]:
    hot: NDArray[np.bool_] = column[:, None] == np.array(values)
    strange = np.flatnonzero(~hot.any(axis=1))
    if len(strange):
        raise ValueError(f"{path}, column {name}: a value is none of {', '.join(values)}")
    return hot.astype(np.float64)
