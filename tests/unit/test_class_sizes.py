"""Classes stay small: a class with more than 25 methods or 20 attributes holds two ideas, unless it is listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MOST_METHODS, MOST_ATTRIBUTES = 25, 20
SUITE = "a conformance suite: one method for each rule that a backend proves"
LARGE = {
    "aiodelay.testing.conformance.dispatching.DispatchRules": SUITE,
    "aiodelay.testing.conformance.safety.SafetyRules": SUITE,
    "aiodelay.testing.conformance.stage.Stage": "the steps that the rules of the conformance suites are written in",
    "aiodelay.testing.conformance.transferring.TransferConformance": SUITE,
}
"""Classes that may be larger, each with the reason."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", node


def methods(node: ast.ClassDef) -> set[str]:
    """Names of the functions in a class body: a property with a setter, or a function with overloads, counts once."""
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class body annotates, and names that its methods set on `self`."""
    annotated = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return annotated | assigned


def is_large(node: ast.ClassDef) -> bool:
    return len(methods(node)) > MOST_METHODS or len(attributes(node)) > MOST_ATTRIBUTES


def test_only_listed_classes_are_large() -> None:
    found = {
        name: f"{len(methods(node))} methods, {len(attributes(node))} attributes"
        for name, node in classes()
        if is_large(node)
    }
    assert {name: size for name, size in found.items() if name not in LARGE} == {}
    assert LARGE.keys() - found.keys() == set(), "these are not large any more: take them off the list"
