"""Select test files by the files that they use: the tests that a change can break, and the tests that need no server.

noxfile.py uses this module in the sessions `changed` and `quick`. To see a selection without running the tests:
python3 .ci/changed_tests.py [--since REV] [--why]

File A uses file B in these cases, also when the statement is in a function or under `TYPE_CHECKING`:

- A imports B, or a package whose `__init__` is B. If `__init__` loads a name on demand, A uses the module of that name.
- A names B as a program or an import: `-m tests.spark.program`, `crew.start("worker", ...)`, `"aiodelay.sqlite"`, and
  `"demo:demo"` within a package.
- A contains a URL whose scheme pyproject.toml registers for B: `redis://`, `kafka:topic`.
- A is in tests or examples and contains the path of B or of its folder: `ROOT / "docs" / "kafka.md"`.
- A is a module of a package, and B is data in the folder of that package: Lua scripts, `schema.sql`, templates.
- A asks for a fixture that a conftest.py, or the pytest plugin of this project, makes with B.

A docs page with blocks that run as tests is also a test file.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

MODULE_ROOTS = ("src/", ".ci/", "examples/custom_backend/src/", "")
PROGRAMS = "tests/faults/programs"
CONCERN_ALL = ("conftest.py", "noxfile.py", "pyproject.toml")
SERVERS = (
    "src/aiodelay/testing/servers.py",
    "tests/support/chromium.py",
    "tests/support/kafka.py",
    "tests/support/spark_cluster.py",
)
"""Modules that find or start a server. `nox -s quick` leaves out the test files that use one of them."""
QUICK_FOLDERS = ("tests/conformance", "tests/regressions", "tests/unit")
SPARK_FOLDER = "tests/spark"

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+(:[\w.]+)?")
_PLACE = re.compile(r"[A-Za-z_][\w.]*:\w+")
_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Use(NamedTuple):
    """The reason why a file uses another file, and the path of the used file."""

    path: str
    how: str
    kind: Literal["imports", "reads", "conftest"] = "imports"


class Selection(NamedTuple):
    """The test files to run. For each test file: the steps from a changed file to the test file."""

    because: dict[str, list[str]]
    left_out: list[str]
    without_tests: list[str]


# --- git ----------------------------------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> list[str]:
    """Return the NUL-separated names that git prints."""
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"changed_tests: git {arguments[0]}: {run.stderr.strip()}")
    return [name for name in run.stdout.replace("\n", "\0").split("\0") if name]


def base_of(root: Path, since: str = "") -> str:
    """Return the commit to compare with: the merge base of HEAD and `since`, or of HEAD and main, or HEAD itself."""
    (branch,) = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    if not since and (branch == "main" or "main" not in git(root, "branch", "--format=%(refname:short)")):
        since = "HEAD"
    return git(root, "merge-base", since or "main", "HEAD")[0]


def changes(root: Path, base: str) -> set[str]:
    """Return the files that differ from a commit, and the untracked files.

    A file differs if a later commit, the index or the work tree has changed it.
    A renamed file counts twice, under both names.
    """
    differing = git(root, "diff", "--name-only", "--no-renames", "-z", base)
    return {*differing, *git(root, "ls-files", "--others", "--exclude-standard", "-z")}


def files_of(root: Path) -> list[str]:
    """Return all existing files that git does not ignore."""
    names = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return sorted({name for name in names if (root / name).is_file()})


# --- the tree -----------------------------------------------------------------------------------------------------


class Tree:
    """The files of a project, and the files that each of them uses.

    Args:
        root: The folder of the project.
        files: Paths below the root. They may include deleted files: a file may still use a deleted file.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root = root
        self.files = sorted(set(files))
        self.folders: dict[str, list[str]] = defaultdict(list)
        for path in self.files:
            for folder in Path(path).parents[:-1]:
                self.folders[folder.as_posix()].append(path)
        self.modules = {name: path for path in self.files if (name := module_name(path))}
        project = self._toml("pyproject.toml").get("project", {})
        self.schemes: dict[str, set[str]] = defaultdict(set)
        self.plugins: set[str] = set()
        for group, points in project.get("entry-points", {}).items():
            for name, place in points.items():
                modules = self.resolve(place.partition(":")[0])
                if group == "pytest11":
                    self.plugins |= modules & {self.modules.get(place)}
                else:
                    self.schemes[name] |= modules

    def _toml(self, path: str) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
        file = self.root / path
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def resolve(self, dotted: str) -> set[str]:
        """Return the files that run when a dotted name is imported: the module and the packages around it."""
        return {self.modules[name] for name in prefixes(dotted) if name in self.modules}

    def source(self, path: str) -> ast.Module:
        """Return the code of a Python file, or of the Python blocks of a docs page. Any other file has no code."""
        try:
            text = (self.root / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ast.Module([], [])
        texts = _PYTHON_BLOCK.findall(text) if path.endswith(".md") else [text] if path.endswith(".py") else []
        body: list[ast.stmt] = []
        for each in texts:
            try:
                body += compile(each, path, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT).body
            except SyntaxError:  # pytest will report it
                continue
        return ast.Module(body, [])

    @cache  # noqa: B019 - a tree lives as long as the program
    def code(self, path: str) -> Code:
        """Return the parts of a file's code that may name other files."""
        return Code(self.source(path))

    @cache  # noqa: B019 - a tree lives as long as the program
    def homes(self, package: str) -> Mapping[str, str]:
        """Return the names that a package loads on demand, with their dotted names.

        A package with a module-level `__getattr__` imports these names under `TYPE_CHECKING`.
        """
        path = self.modules.get(package, "")
        nodes = self.code(path).nodes if path.endswith("/__init__.py") else []
        if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in nodes):
            return {}
        return {
            alias.asname or alias.name: f"{dotted_base(node, path)}.{alias.name}"
            for statement in nodes
            if is_type_checking(statement)
            for node in ast.walk(statement)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def imports(self, node: ast.Import | ast.ImportFrom, path: str) -> Iterator[tuple[str, set[str]]]:
        """Yield the names that an import statement binds, each with the files that it uses."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], self.resolve(alias.name)
        else:
            base = dotted_base(node, path)
            homes = self.homes(base)
            for alias in node.names:
                found = self.resolve(f"{base}.{alias.name}".strip("."))
                for home in homes.values() if alias.name == "*" else filter(None, [homes.get(alias.name)]):
                    found |= self.resolve(home)
                yield alias.asname or alias.name, found

    def uses(self, path: str) -> set[Use]:
        """Return the files that a file uses, with the reasons."""
        code = self.code(path)
        found = set(self._imported(code, path))
        found |= set(self._named(code, path))
        if path.startswith("src/") and path.endswith(".py"):
            found |= {Use(data, "package data") for data in self._data(path.rpartition("/")[0])}
        if path.startswith("tests/"):
            found |= set(self._fixtures_used(code, path))
        return {use for use in found if use.path != path}

    def _imported(self, code: Code, path: str) -> Iterator[Use]:
        on_demand = bool(path.endswith("/__init__.py") and self.homes(module_name(path)))
        guarded = filter(is_type_checking, code.nodes) if on_demand else ()
        skipped = {id(inner) for node in guarded for inner in ast.walk(node)}
        local: dict[str, str] = {}  # the name of a module in this file: its dotted name
        for node in code.imports:
            if id(node) in skipped:
                continue
            for _, files in self.imports(node, path):
                yield from (Use(file, "imports") for file in files)
            if isinstance(node, ast.Import):
                for alias in node.names:
                    known = [name for name in prefixes(alias.name) if name in self.modules]
                    local |= {alias.asname: alias.name} if alias.asname else dict(zip(known, known, strict=True))
        for attribute in code.nodes if local else ():
            if not isinstance(attribute, ast.Attribute) or (module := local.get(dotted(attribute.value))) is None:
                continue
            if home := self.homes(module).get(attribute.attr):
                yield from (Use(file, f"names {module}.{attribute.attr}") for file in self.resolve(home))
            if attribute.attr == "__file__" and (file := self.modules.get(module, "")).endswith("/__init__.py"):
                folder = file.rpartition("/")[0]
                yield from (Use(file, f"reads {folder}", "reads") for file in self.folders[folder])

    def _named(self, code: Code, path: str) -> Iterator[Use]:
        in_src = path.startswith("src/")
        names_paths = path.startswith(("examples/", "tests/"))
        package = module_name(path) if path.endswith("/__init__.py") else module_name(path).rpartition(".")[0]
        for text in code.texts:
            if ":" in text:
                yield from self._by_scheme(text, only_at_start=in_src)
                if in_src and package and _PLACE.fullmatch(text):
                    module = f"{package}.{text.partition(':')[0]}"
                    yield from (Use(file, f"names {text}") for file in self.resolve(module) if module in self.modules)
            if not in_src and _DOTTED.fullmatch(text):
                files = self.resolve(text.partition(":")[0])
                yield from (Use(file, f"names {text}") for file in files if len(files) > 1)
            if names_paths and ("/" in text or "." in text):
                yield from self._by_path(text)
        inner = set[int]()
        for node in code.nodes if names_paths else ():
            if isinstance(node, ast.BinOp) and id(node) not in inner:
                nodes, runs = chain(node)
                inner |= nodes
                for run in runs:
                    yield from self._by_path(run)
        for sequence in code.sequences:
            yield from self._programs(sequence)

    def _by_scheme(self, text: str, *, only_at_start: bool) -> Iterator[Use]:
        for match in self._scheme.finditer(text):
            if not only_at_start or match.start() == 0:
                yield from (Use(file, f"names {match[1]}:") for file in self.schemes[match[1]])

    @cached_property
    def _scheme(self) -> re.Pattern[str]:
        names = "|".join(map(re.escape, sorted(self.schemes, key=len, reverse=True)))
        return re.compile(rf"(?<![\w.+-])({names}):(?!\s)" if names else r"(?!)()")

    def _by_path(self, text: str) -> Iterator[Use]:
        if text in self.folders:
            yield from (Use(file, f"reads {text}", "reads") for file in self.folders[text])
        elif text in self._files:
            yield Use(text, f"reads {text}", "reads")

    @cached_property
    def _files(self) -> set[str]:
        return set(self.files)

    def _programs(self, node: ast.Call | ast.List | ast.Tuple) -> Iterator[Use]:
        elements = node.args if isinstance(node, ast.Call) else node.elts
        texts = [text_of(each) for each in elements]
        for flag, module in pairwise(texts):
            if flag == "-m":
                files = self.resolve(module) | self.resolve(f"{module}.__main__")
                yield from (Use(file, f"runs {module}") for file in files)
        if not isinstance(node, ast.Call) or not elements:
            return
        function = dotted(node.func)
        if function.endswith(".start") and (program := f"{PROGRAMS}/{texts[0]}.py") in self._files:
            yield Use(program, f"starts {texts[0]}")
        if function.endswith("import_module") and isinstance(elements[0], ast.JoinedStr):
            prefix = text_of(elements[0].values[0])
            for module, file in self.modules.items():
                if "." in prefix.rstrip(".") and module.startswith(prefix):
                    yield Use(file, f"imports {prefix}…")

    def _data(self, folder: str) -> Iterator[str]:
        """Yield the files of a package folder that are not Python and do not belong to a package inside it."""
        for path in self.folders[folder]:
            owner = path.rpartition("/")[0]
            while not self._has_modules(owner):
                owner = owner.rpartition("/")[0]
            if owner == folder and not path.endswith(".py"):
                yield path

    @cache  # noqa: B019 - a tree lives as long as the program
    def _has_modules(self, folder: str) -> bool:
        return any(path.endswith(".py") and path.rpartition("/")[0] == folder for path in self.folders[folder])

    # --- fixtures -------------------------------------------------------------------------------------------------

    def conftests(self, path: str) -> list[str]:
        """Return the files whose fixtures and hooks a test file gets: the plugins, and each conftest.py above it."""
        folders = [folder.as_posix() for folder in Path(path).parents[:-1]]
        return [*sorted(self.plugins), *(name for each in folders if (name := f"{each}/conftest.py") in self._files)]

    def _fixtures_used(self, code: Code, path: str) -> Iterator[Use]:
        if not is_test(path):
            return
        wanted = deque(code.asks_for())
        seen = set(wanted)
        for place in self.conftests(path):
            yield Use(place, "has the fixtures and hooks of", "conftest")
            wanted.extend(name for name, fixture in self.fixtures(place).items() if fixture.is_automatic)
        while wanted:
            name = wanted.popleft()
            for place in self.conftests(path):
                if fixture := self.fixtures(place).get(name):
                    yield from (Use(file, f"asks for the fixture {name}, which uses") for file in fixture.files)
                    wanted.extend(fixture.asks_for - seen)
                    seen |= fixture.asks_for

    @cache  # noqa: B019 - a tree lives as long as the program
    def fixtures(self, path: str) -> Mapping[str, Fixture]:
        """Return the fixtures of a conftest.py. Each names only the files that this fixture uses itself."""
        code = self.code(path)
        bound: dict[str, set[str]] = defaultdict(set)
        for statement in code.imports:
            for name, files in self.imports(statement, path):
                bound[name] |= files
        defined = {name: node for node in self.source(path).body for name in names_bound(node)}
        found = {}
        for name, node in defined.items():
            decorators = node.decorator_list if isinstance(node, _FUNCTION) else []
            if not any("fixture" in ast.unparse(each) for each in decorators):
                continue
            used, wanted = set[str](), [name]
            while wanted:
                each = wanted.pop()
                used.add(each)
                names = {inner.id for inner in ast.walk(defined[each]) if isinstance(inner, ast.Name)}
                wanted += [other for other in names & defined.keys() if other not in used]
                used |= names
            files = set[str]().union(*(bound.get(each, set()) for each in used))
            is_automatic = any("autouse=True" in ast.unparse(each) for each in decorators)
            found[name] = Fixture(files, set(Code(node).asks_for()), is_automatic)
        return found

    # --- tests ----------------------------------------------------------------------------------------------------

    @cached_property
    def pages(self) -> list[str]:
        """The docs pages whose Python blocks are tests, as the root conftest.py configures them."""
        names: dict[str, list[str]] = {"patterns": [], "excludes": []}
        for node in self.code("conftest.py").nodes:
            if isinstance(node, ast.keyword) and node.arg in names:
                names[node.arg] += [
                    each.value
                    for each in ast.walk(node.value)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                ]
        return [
            path for path in self.files if matches(path, names["patterns"]) and not matches(path, names["excludes"])
        ]

    @cached_property
    def tests(self) -> list[str]:
        """The existing test files, including docs pages."""
        found = [*filter(is_test, self.files), *self.pages]
        return sorted(path for path in found if (self.root / path).is_file())

    @cached_property
    def used(self) -> dict[str, set[Use]]:
        """The uses of each file."""
        return {path: self.uses(path) for path in self.files}

    def select(self, changed: Collection[str]) -> Selection:
        """Select the tests that use a changed file, directly or through other files."""
        users: dict[str, list[tuple[str, Use]]] = defaultdict(list)
        for path, uses in self.used.items():
            for use in sorted(uses):
                users[use.path].append((path, use))
        steps: dict[str, list[str]] = {path: [f"{path} has changed"] for path in sorted(changed)}
        queue = deque(steps)
        while queue:
            path = queue.popleft()
            for user, use in users[path]:
                # Do not follow two uses of a file that is not changed itself. A test depends on the fixtures that it
                # asks for, not on all of a conftest.py. And a test that reads sources as text does not depend on the
                # imports of those sources.
                is_indirect = path not in changed and (
                    use.kind == "conftest" or (use.kind == "reads" and path.startswith(("src/", "tests/")))
                )
                if user not in steps and not is_indirect:
                    steps[user] = [*steps[path], f"{user} {use.how}" + (f" {path}" if path not in use.how else "")]
                    queue.append(user)
        because = {path: steps[path] for path in self.tests if path in steps}
        reached = {path for path in changed for each in because.values() if each[0] == f"{path} has changed"}
        return Selection(
            because,
            [path for path in self.tests if path not in because],
            sorted(path for path in set(changed) - reached if not users[path] and path not in CONCERN_ALL),
        )

    def without_servers(self) -> list[str]:
        """Return the test files of `QUICK_FOLDERS` that use no module that finds or starts a server."""
        return [path for path in self.tests if path.startswith(QUICK_FOLDERS) and not self._needs_server(path)]

    def _needs_server(self, path: str) -> bool:
        wanted, seen = [path], {path}
        while wanted:
            for use in self.uses(wanted.pop()):
                if use.kind != "imports":
                    continue
                if use.path in SERVERS:
                    return True
                if use.path not in seen and not use.path.startswith("src/"):
                    seen.add(use.path)
                    wanted.append(use.path)
        return False


class Code:
    """The parts of a file's code that may name other files."""

    def __init__(self, source: ast.AST) -> None:
        self.nodes = list(ast.walk(source))
        self.imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self.functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.sequences = [node for node in self.nodes if isinstance(node, ast.Call | ast.List | ast.Tuple)]
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        self.texts = {
            node.value
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        }

    def asks_for(self) -> Iterator[str]:
        """Yield the names of fixtures that functions ask for: parameters, `usefixtures`, `getfixturevalue`."""
        for function in self.functions:
            yield from (each.arg for each in [*function.args.args, *function.args.kwonlyargs])
        for node in self.sequences:
            if isinstance(node, ast.Call) and dotted(node.func).endswith(("usefixtures", "getfixturevalue")):
                yield from filter(None, map(text_of, node.args))


class Fixture(NamedTuple):
    """A fixture of a conftest.py: the files that it uses, and the fixtures that it asks for."""

    files: set[str]
    asks_for: set[str]
    is_automatic: bool


# --- reading code -------------------------------------------------------------------------------------------------


def is_test(path: str) -> bool:
    return path.startswith("tests/") and fnmatch.fnmatch(path.rpartition("/")[2], "test_*.py")


def matches(path: str, patterns: Iterable[str]) -> bool:
    return any(Path(path).match(each) and path.count("/") == each.count("/") for each in patterns)


def module_name(path: str) -> str:
    """Return the dotted name of a Python module; "" for other files."""
    if not path.endswith(".py"):
        return ""
    root = next(root for root in MODULE_ROOTS if path.startswith(root))
    return path.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def prefixes(name: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def dotted_base(node: ast.ImportFrom, path: str) -> str:
    """Return the absolute dotted name of the module or package after `from`."""
    if not node.level:
        return node.module or ""
    parts = module_name(path).split(".")
    up = node.level - path.endswith("/__init__.py")
    return ".".join(filter(None, [*parts[: len(parts) - up], node.module]))


def dotted(node: ast.AST) -> str:
    """Return the expression `a.b.c` as text; `.c` if another kind of expression is before `.c`."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING"


def chain(node: ast.BinOp) -> tuple[set[int], list[str]]:
    """Return the ids of the inner nodes of an expression with `/`, and the paths in the expression.

    For example, `x / "a" / "b" / name / "c"` has the paths `a/b` and `c`.
    """
    inner, parts = set[int](), list[str]()
    left: ast.expr = node
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
        inner.add(id(left))
        parts.append(text_of(left.right))
        left = left.left
    runs, run = [], list[str]()
    for part in [*reversed(parts), ""]:
        if part:
            run.append(part)
        elif run:
            runs.append("/".join(run))
            run = []
    return inner, runs


def text_of(node: ast.expr) -> str:
    """Return the text of a string literal; "" for other expressions."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def names_bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


# --- reports ------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The test files to run, and the lines of a report that explain the selection."""

    tests: list[str]
    report: list[str]


def plan(root: Path, since: str = "", *, why: bool = False) -> Plan:
    """Plan a run of the tests that the changes since a commit can break."""
    base = base_of(root, since)
    changed = changes(root, base)
    tree = Tree(root, {*files_of(root), *changed})
    selection = tree.select(changed)
    because = dict(selection.because)
    concern_all = sorted(changed.intersection(CONCERN_ALL))
    if concern_all:
        for path in tree.without_servers():
            because.setdefault(path, [f"{', '.join(concern_all)} can affect every test; this one needs no server"])
    tests = sorted(because)
    left_out = Counter(folder_of(path) for path in tree.tests if path not in because)
    report = [f"{len(changed)} files differ from {base[:10]}", f"runs {len(tests)} of {len(tree.tests)} test files"]
    if left_out:
        report[-1] += f"; left out: {', '.join(f'{folder} {n}' for folder, n in sorted(left_out.items()))}"
    if concern_all:
        report.append(
            f"{', '.join(concern_all)} can affect every test: also runs the tests without servers; all: nox -s tests"
        )
    if selection.without_tests:
        report.append(f"no test uses: {', '.join(selection.without_tests)}")
    if why:
        report += [f"{path}: {' < '.join(reversed(because[path]))}" for path in tests]
    return Plan(tests, report)


def quick(root: Path) -> Plan:
    """Plan a run of the tests that need no server."""
    tree = Tree(root, files_of(root))
    tests = tree.without_servers()
    left_out = Counter(folder_of(path) for path in tree.tests if path not in tests)
    counts = ", ".join(f"{folder} {n}" for folder, n in sorted(left_out.items()))
    return Plan(tests, [f"runs {len(tests)} of {len(tree.tests)} test files; left out: {counts}"])


def folder_of(path: str) -> str:
    return "/".join(path.split("/")[:2]) if path.startswith("tests/") else "docs"


def options_of(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options `since` and `why`, and the other arguments."""
    parser = argparse.ArgumentParser(description="Print the test files that a change can break.", allow_abbrev=False)
    parser.add_argument("--since", default="", metavar="REV", help="compare with where HEAD left REV (default: main)")
    parser.add_argument("--why", action="store_true", help="print for each test file how it uses a changed file")
    return parser.parse_known_args(arguments)


def main() -> None:
    options, unknown = options_of(sys.argv[1:])
    if unknown:
        sys.exit(f"changed_tests: unknown arguments: {' '.join(unknown)}")
    planned = plan(Path(__file__).parents[1], options.since, why=options.why)
    print(*planned.report, *([] if options.why else planned.tests), sep="\n")


if __name__ == "__main__":
    main()
