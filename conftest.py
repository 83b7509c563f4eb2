"""Run the Python blocks of docs/ as tests. `tests/conftest.py` configures the tests in tests/."""

import ast
import asyncio
import inspect
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import CodeBlockParser, SkipParser


class PythonBlockParser(CodeBlockParser):
    """Runs a block as `python -m asyncio` does: `await` and `async with` are allowed at the top level."""

    language = "python"

    def evaluate(self, example: Example) -> None:
        source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
        code = compile(source, example.path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        coroutine = eval(code, example.namespace)
        if inspect.iscoroutine(coroutine):
            asyncio.run(coroutine)


def enter_own_folder(namespace: dict[str, Any]) -> None:
    """Make the blocks of a page one module, and run them in a temporary folder."""
    namespace["__name__"] = "__main__"
    folder = TemporaryDirectory()
    namespace["__folder__"] = folder, Path.cwd()
    os.chdir(folder.name)


def leave_own_folder(namespace: dict[str, Any]) -> None:
    folder, before = namespace["__folder__"]
    os.chdir(before)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonBlockParser(), SkipParser()],
    patterns=["docs/*.md", "docs/*/*.md"],
    excludes=[
        *("docs/kafka.md", "docs/delay-box.md", "docs/migration.md"),  # tests/integration run them, on a broker
        *("docs/tutorial.md", "docs/django.md"),  # tests/e2e runs the programs of these pages and of README.md
        "docs/coming-from-*.md",  # tests/unit runs their programs of aiodelay; at night, tests/integration runs all
        "docs/spark/*.md",  # tests/spark runs them
        "docs/examples.md",  # includes the files of examples/, which tests/e2e runs
    ],
    setup=enter_own_folder,
    teardown=leave_own_folder,
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Restore the order of the blocks, which pytest-randomly changes: the blocks of a page build on each other."""
    blocks = [item for item in items if isinstance(item, SybilItem)]
    blocks.sort(key=lambda block: (block.example.path, block.example.line))
    in_order = iter(blocks)
    items[:] = [next(in_order) if isinstance(item, SybilItem) else item for item in items]
