"""Classes stay small: a class with more than 25 methods or 20 attributes holds two ideas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MOST_METHODS, MOST_ATTRIBUTES = 25, 20


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


def test_no_class_is_large() -> None:
    sizes = {name: (len(methods(node)), len(attributes(node))) for name, node in classes()}
    assert len(sizes) > 500
    assert {name: size for name, size in sizes.items() if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES} == {}
