"""Every public name says what it is, and what its arguments are: the reference is made of it."""

import ast
import importlib
import inspect
import re
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn

import epsilons

PACKAGES = (
    "epsilons",
    *(
        f"epsilons.{name}"
        for name in (
            "accounting", "analysis", "audit", "data", "gradients", "journal", "models", "noise",
            "release", "report", "report.dossier", "service", "training",
            "integrations.huggingface", "integrations.lightning", "integrations.opacus",
        )
    ),
)  # fmt: skip


def names(package):
    """What `__all__` has; of a module without one, the public classes and functions it defines."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return module.__all__
    return [
        name
        for name, found in vars(module).items()
        if not name.startswith("_") and getattr(found, "__module__", None) == package
    ]


def defined_here(found):
    return str(getattr(found, "__module__", "")).split(".")[0] == "epsilons"


def of_a_framework(owner, name):
    """Whether torch, Lightning or transformers says what this method is."""
    return any(name in vars(base) for base in owner.__mro__ if not defined_here(base))


def members(owner):
    """Public methods and properties of a class and of its bases in this package."""
    for base in filter(defined_here, owner.__mro__):
        for name, found in vars(base).items():
            if isinstance(found, classmethod | staticmethod):
                found = found.__func__
            elif isinstance(found, property):
                found = found.fget
            elif isinstance(found, cached_property):
                found = found.func
            if name.startswith("_") or of_a_framework(owner, name):
                continue
            if inspect.isfunction(found) and defined_here(found):
                yield name, found


def own_attributes(owner):
    """Public attributes that `__init__` sets, but for the layers of a model."""
    if "__init__" not in vars(owner) or issubclass(owner, nn.Module):
        return set()
    if hasattr(owner, "__dataclass_fields__"):
        return set()
    source = inspect.cleandoc("\n" + inspect.getsource(owner.__init__))
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and not node.attr.startswith("_")
    }


def arguments(found):
    """Names of the parameters; none of a class that takes those of a library's or is a protocol."""
    if inspect.isclass(found):
        made_here = [base for base in found.__mro__ if defined_here(base)]
        own = any("__init__" in vars(base) or "__new__" in vars(base) for base in made_here)
        if not own or getattr(found, "_is_protocol", False):
            return set()
    given = set(inspect.signature(found).parameters)
    return {name for name in given if not name.startswith("_")} - {"self", "cls"}


def faults(found, text, owner=None):
    """What the docstring of a class or function leaves out."""
    if not text or text.startswith(f"{found.__name__}("):  # a dataclass is given its signature
        return ["no docstring"]
    lines = text.splitlines()
    wrong = []
    sentence = re.match(r"[^a-z\s].*[.…]$", lines[0]) and " " in lines[0]
    if not sentence or lines[1:2] not in ([], [""]):
        wrong.append(f"not a sentence on a line of its own: {lines[0]}")
    named = {
        word for quoted in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", quoted)
    }
    needed = arguments(found) | (own_attributes(found) if inspect.isclass(found) else set())
    return wrong + [f"not in backticks: {name}" for name in sorted(needed - named)]


def is_documented_alias(package, name):
    """Whether a string follows the assignment of a constant or of the name of a type."""
    path = Path(epsilons.__file__).parent.joinpath(*package.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8")).body
    for node in tree:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return is_documented_alias(str(node.module), name)
    for node, following in pairwise(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    module = importlib.import_module(package)
    found = [f"{package}: no docstring"] * (not module.__doc__)
    for name in names(package):
        public = getattr(module, name)
        if not (inspect.isclass(public) or inspect.isfunction(public)) or not defined_here(public):
            if not is_documented_alias(package, name):
                found.append(f"{name}: no docstring below its assignment")
            continue
        found += [
            f"{name}: {fault}" for fault in faults(public, inspect.cleandoc(public.__doc__ or ""))
        ]
        if inspect.isclass(public):
            for member, function in members(public):
                text = inspect.cleandoc(function.__doc__ or "")
                found += [f"{name}.{member}: {fault}" for fault in faults(function, text)]
    assert not found, "\n" + "\n".join(found)
