"""The structure of the code: imports point one way, one module reads the clock, no optional package is needed.

Classes stay small, and callers get aiodelay's errors.
"""

from __future__ import annotations

import ast
import builtins
import getpass
import importlib
import inspect
import pkgutil
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import aiodelay

ROOT = Path(__file__).parents[2]
SOURCE = Path(aiodelay.__file__).parent

LAYERS: dict[str, tuple[set[str], set[str]]] = {
    # layer: its modules and packages, and the layers below it that they may import
    "errors": ({"errors"}, set()),
    "core": ({"core"}, {"errors"}),
    "ports": ({"ports"}, {"errors", "core"}),
    "handlers": ({"handlers"}, {"errors", "core"}),
    "telemetry": ({"telemetry"}, {"errors", "core", "ports"}),
    "backends": ({"backends"}, {"errors", "core", "ports"}),
    "engine": ({"engine"}, {"errors", "core", "ports", "handlers"}),
    "importers": ({"importers"}, {"errors", "core", "ports", "backends"}),
    "scheduler": (
        {"scheduler"},
        {"errors", "core", "ports", "handlers", "telemetry", "backends", "engine"},
    ),
    "blocking": ({"blocking"}, {"errors", "core", "ports", "engine", "scheduler"}),
    "boxes": ({"delay_box"}, {"errors", "core", "ports", "backends", "scheduler"}),
    "package": ({""}, {"errors", "core", "ports", "handlers", "telemetry", "backends", "engine", "scheduler"}),
    "operations": ({"operations"}, {"errors", "core", "ports", "engine", "scheduler", "package"}),
    "testing": (
        {"testing"},
        {"errors", "core", "ports", "handlers", "backends", "engine", "scheduler", "package"},
    ),
    "service": (
        {"service"},
        {*("errors", "core", "ports", "backends", "engine", "scheduler", "boxes", "package", "operations")},
    ),
    "spark": (
        {"spark"},
        {
            *("errors", "core", "ports", "telemetry", "backends", "importers", "scheduler", "blocking", "package"),
            "operations",
        },
    ),
    "cli": (
        {"cli", "__main__"},
        {
            *("errors", "core", "ports", "handlers", "telemetry", "backends", "importers", "boxes", "package"),
            *("operations", "testing", "service", "spark"),
        },
    ),
    "contrib": ({"contrib"}, {"errors", "core", "blocking", "package", "cli"}),
    "paths": (
        {
            "clock",
            "codecs",
            "kafka",
            "memory",
            "model",
            "reactive",
            "recurrence",
            "redis",
            "registry",
            "sinks",
            "sqlite",
            "timeunits",
            "transitions",
            "urls",
        },
        {"errors", "core", "ports", "backends", "importers"},
    ),
}
"""From below: `errors` <- `core` <- `ports`, `handlers` <- `engine`, `backends` <- `scheduler` <- `operations` <-
`service`, `cli`, `spark`, `testing` <- `contrib`. `paths` are public import paths whose modules stand elsewhere."""
CLOCKS = {
    "ports.clock": "it is the clock",
    "testing.servers": "how long a server takes to start",
    "testing.history.events": "orders the events of all processes of a machine",
    "cli.demo": "prints the time of day to a person",
    "cli.signals": "how soon a signal follows another one, while something may block the loop",
    "cli.report": "prints the time of day to a person",
    "cli.traffic": "prints the time of day to a person",
    "spark.pacing": "a pace has no loop; tests give another clock",
}
LOOP_TIMES = {
    "engine.housekeeping": "how long the loop was blocked",
    "engine.idle": "how long a wait until idle has lasted",
    "engine.lifecycle": "how long closing takes",
    "engine.subscriptions": "how long draining takes",
    "engine.patience": "how long opening takes",
    "backends.redis.store.base": "how far the server's clock is ahead of ours",
    "backends.redis.store.glance": "how long ago the keys of the store were looked up",
    "backends.redis.store.transfer": "how long ago the lanes that are moved were looked at",
    "telemetry.instruments": "how long calls and runs take",
    "cli.crew": "how long a worker ran",
    "cli.bench": "how long storing and delivering takes",
    "service.connections": "how long a connection has stood still",
    "service.health": "how long ago a store was asked",
    "service.page.state": "how old an answer is that viewers share",
    "engine.delivery.runs": "how long a handler runs, on the loop whose timers end it",
    "engine.delivery.batch_subscription": "how long a message waits for its batch, on the loop whose timer ends it",
    "engine.delivery.subscription": "how long a handler runs, on the loop whose timers end it",
}
"""Intervals measured on the event loop's own clock, which tests make virtual; never compared with due times."""

LOOSE_TASKS = {
    "engine.delivery.runners": "a group would wait for ever for a handler that outlives its cancellation",
    "service.api.plans": "a bulk operation outlives the request that began it; `Operations.aclose` ends it",
    "testing.loop": "`run_until_complete` of any loop makes one",
}


# --- the source, read -------------------------------------------------------------------------------------


@dataclass
class Source:
    """One module, as text."""

    name: str  # within the package; "" is the package itself
    path: Path
    tree: ast.Module
    nodes: list[ast.AST]
    at_run_time: set[str] = field(default_factory=set)
    for_types: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"aiodelay.{self.name}".rstrip(".")

    @property
    def layer(self) -> str:
        return next(layer for layer, (members, _) in LAYERS.items() if self.name.partition(".")[0] in members)


@cache
def sources() -> dict[str, Source]:
    """Read every module, at the first call: a run that only collects this file does not wait for it."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = Source(name, path, tree, list(ast.walk(tree)))
    for source in found.values():
        for_types = {id(node) for node in nodes_for_types(source.nodes)}
        for node in source.nodes:
            modules = set(imported(node, source, found))
            (source.for_types if id(node) in for_types else source.at_run_time).update(modules)
    return found


def nodes_for_types(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                yield from ast.walk(statement)


def imported(node: ast.AST, source: Source, known: Container[str]) -> Iterator[str]:
    """Modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parts = ["aiodelay", *source.name.split(".")] if source.name else ["aiodelay"]
        if source.path.name != "__init__.py":
            parts = parts[:-1]
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        base = ".".join(filter(None, (base, node.module)))
        names = [f"{base}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        if name.split(".")[0] == "aiodelay":
            inner = name.removeprefix("aiodelay").removeprefix(".")
            while inner not in known:
                inner = inner.rpartition(".")[0]
            yield inner


def report(offences: Iterable[str]) -> None:
    """Fail with every offence in one text: each names its module, so one run shows all that there is to mend."""
    found = sorted(offences)
    assert not found, "\n".join(["the architecture forbids:", *found])


def unlike(source: Source, listed: Container[str], names: list[str], what: str) -> Iterator[str]:
    """Yield an offence if a module has such names without being listed, or is listed without having any."""
    if names and source.name not in listed:
        yield f"{source}: {what}: {', '.join(sorted(set(names)))}"
    if not names and source.name in listed:
        yield f"{source}: is listed, but {what} nowhere: take it off the list"


# --- imports ----------------------------------------------------------------------------------------------


def test_imports_point_one_way() -> None:
    report(offence for source in sources().values() for offence in upward_imports(source))


def upward_imports(source: Source) -> Iterator[str]:
    allowed = LAYERS[source.layer][1] | {source.layer}
    for names, when in ((source.at_run_time, "at run time"), (source.for_types, "for types")):
        for name in names:
            if sources()[name].layer not in allowed:
                yield f"{source} ({source.layer}): imports {sources()[name]} ({sources()[name].layer}) {when}"


def test_every_module_has_a_layer_and_every_layer_a_module() -> None:
    members = [member for members, _ in LAYERS.values() for member in members]
    assert sorted(members) == sorted({name.partition(".")[0] for name in sources()})


def test_layers_are_listed_from_below() -> None:
    listed: set[str] = set()
    for layer, (_, below) in LAYERS.items():
        assert below <= listed
        listed.add(layer)


def test_imports_form_no_circle() -> None:
    """Not for annotations either: two modules that need each other are one module."""
    graph = {name: (source.at_run_time | source.for_types) - {name} for name, source in sources().items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("backend", ["memory", "sqlite", "redis", "kafka"])
def test_backends_do_not_know_each_other(backend: str) -> None:
    """That they do not know the engine is a matter of layers."""
    others = {"memory", "sqlite", "redis", "kafka"} - {backend}
    own = [source for source in sources().values() if source.name.startswith(f"backends.{backend}")]
    report(
        f"{source}: imports aiodelay.{name}"
        for source in own
        for name in source.at_run_time | source.for_types
        if name.startswith("backends.") and name.split(".")[1] in others
    )


def test_nothing_imports_by_a_path_that_is_kept_for_users() -> None:
    report(
        f"{source}: imports {sources()[name]}, which is a path for users"
        for source in sources().values()
        if source.layer != "paths"
        for name in source.at_run_time | source.for_types
        if sources()[name].layer == "paths"
    )


CHECKED = {"errors", "core", "ports", "handlers", "telemetry", "scheduler", "package", "operations"}
"""Layers whose public names all have docstrings."""
MOST_ROOMS, MOST_FLOORS, MOST_ARROWS = 20, 9, 86


def test_the_house_stays_small() -> None:
    """Count packages and modules of the top level as rooms, their imports as arrows, and floors from below."""
    arrows: dict[str, set[str]] = {}
    for source in sources().values():
        room = source.name.partition(".")[0]
        if source.layer != "paths":
            found = {name.partition(".")[0] for name in source.at_run_time | source.for_types}
            arrows.setdefault(room, set()).update(found - {room})
    floors: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        floors[room] = 1 + max((floors[below] for below in arrows[room]), default=0)
    assert len(arrows) <= MOST_ROOMS
    assert max(floors.values()) <= MOST_FLOORS
    assert sum(map(len, arrows.values())) <= MOST_ARROWS


MOST_METHODS, MOST_ATTRIBUTES = 25, 20


def test_no_class_is_large() -> None:
    """A class with more methods or attributes holds two ideas."""
    sizes = {
        f"{source}.{node.name}": (len(methods(node)), len(attributes(node)))
        for source in sources().values()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    assert len(sizes) > 500
    assert {name: size for name, size in sizes.items() if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES} == {}


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


def test_no_module_imports_a_private_name_of_another() -> None:
    """Ruff's SLF001 says the same of attributes."""
    report(offence for source in sources().values() for offence in private_imports(source))


def private_imports(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("aiodelay")):
            for name in (alias.name for alias in node.names):
                if name.startswith("_") and not name.endswith("__"):
                    yield f"{source}: imports {name} from {node.module}"


def test_nothing_imports_the_test_kit_or_the_command_line() -> None:
    outside = {"testing", "cli", "service", "contrib"}
    users = [source for source in sources().values() if source.layer not in outside]
    assert {name for source in users for name in source.at_run_time if sources()[name].layer in outside} == set()


KAFKA_VALUES = {
    "aiokafka",
    "aiokafka.admin",
    "aiokafka.admin.config_resource",
    "aiokafka.coordinator.assignors.range",
    "aiokafka.errors",
    "aiokafka.structs",
}
"""Modules of aiokafka from which all may import values and errors, but no class that connects."""


def test_one_package_makes_kafka_clients_and_reaches_into_aiokafka() -> None:
    others = [source for source in sources().values() if not source.name.startswith("backends.kafka.client")]
    report(offence for source in others for offence in reaches_into_aiokafka(source))


def reaches_into_aiokafka(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (f"{source}: imports {each.name}" for each in node.names if each.name.startswith("aiokafka"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "aiokafka":
            clients = [each.name for each in node.names if each.name.startswith("AIOKafka")]
            if clients or node.module not in KAFKA_VALUES:
                yield f"{source}: imports {', '.join(each.name for each in node.names)} from {node.module}"


def test_nothing_imports_pandas() -> None:
    """The data source works without: PySpark itself asks for pandas in the jobs alone."""
    report(
        f"{source}: imports pandas" for source in sources().values() for node in source.nodes if imports_pandas(node)
    )


def imports_pandas(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "pandas" for name in names)


# --- one clock, no loose task -----------------------------------------------------------------------------


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; empty if it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


CLOCK_CALL = re.compile(
    r"(^|\.)(time\.(time|monotonic|perf_counter|process_time|localtime|gmtime)(_ns)?|datetime\.(now|utcnow|today)|date\.today)$"
)


def names_in(source: Source, pattern: re.Pattern[str]) -> list[str]:
    return [name for node in source.nodes if pattern.search(name := dotted(node))]


def test_only_the_clock_reads_a_clock() -> None:
    report(offence for source in sources().values() for offence in clock_reads(source))


def clock_reads(source: Source) -> Iterator[str]:
    yield from unlike(source, CLOCKS, names_in(source, CLOCK_CALL), "reads a clock")
    of_loop = [] if source.layer == "testing" else names_in(source, re.compile(r"loop\.time$"))
    yield from unlike(source, LOOP_TIMES, of_loop, "reads the loop's clock")
    if any(isinstance(node, ast.ImportFrom) and node.module == "time" for node in source.nodes):
        yield f"{source}: imports from `time`, which hides clocks from this test: import the module"


def test_no_promise_needs_an_assertion() -> None:
    """`python -O` removes assertions, so they only narrow types. The conformance suite's assertions are pytest's."""
    report(
        f"{source}: assert {ast.unparse(node.test)}"
        for source in sources().values()
        if not source.name.startswith("testing.conformance")
        for node in source.nodes
        if isinstance(node, ast.Assert) and not narrows(node.test)
    )


def narrows(test: ast.expr) -> bool:
    """Return whether a condition tells a type checker the type of a value, and calls nothing else."""
    match test:
        case ast.BoolOp(values=values):
            return all(map(narrows, values))
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return narrows(inner)
        case ast.Call(func=ast.Name(id="isinstance"), args=[checked, _]):
            return is_value(checked)
        case ast.Compare(left=checked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return is_value(checked)
    return False


def is_value(node: ast.expr) -> bool:
    return not any(isinstance(each, ast.Call | ast.Await | ast.NamedExpr) for each in ast.walk(node))


def test_every_task_has_a_group() -> None:
    report(offence for source in sources().values() for offence in loose_tasks(source))


def loose_tasks(source: Source) -> Iterator[str]:
    made = names_in(source, re.compile(r"(^|\.)(create_task|ensure_future)$"))
    loose = [name for name in made if not re.search(r"(^|\.)_?tasks\.\w+$", name)]
    yield from unlike(source, LOOSE_TASKS, loose, "starts a task outside a group")


# --- errors -----------------------------------------------------------------------------------------------


def test_every_error_is_used() -> None:
    defined = {node.name for node in sources()["errors"].nodes if isinstance(node, ast.ClassDef)}
    used = {
        node.id
        for source in that_raise()
        for node in source.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert defined - used == set()


BUILTIN_ERRORS = {
    ("", "AttributeError"),  # of a name that the package does not have
    ("backends.kafka.client._overrides.rebound", "ImportError"),  # a version of aiokafka that was not tested
    ("backends.redis.connection.login", "TypeError"),  # of a credential provider; the caller maps it
    ("core.event_codecs", "TypeError"),  # what msgspec expects of a hook
    ("core.record_codec", "ValueError"),  # the caller maps it to RecordFormatError
    ("core.recurrence", "TypeError"),  # the caller maps it to RecordFormatError
    ("core.recurrence", "ValueError"),  # the caller maps it to ScheduleTimeError
    ("engine.delivery.message_stream", "TypeError"),  # of a subscriber that is None (rule D6)
    ("engine.delivery.subscription", "RuntimeError"),  # a handler's failure, with the text that a coroutine's has
}
"""Modules that raise an error of Python, and the error."""


def test_no_builtin_error_is_raised_for_callers() -> None:
    raised = {
        (source.name, node.exc.func.id)
        for source in that_raise()
        for node in source.nodes
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    assert {(name, error) for name, error in raised if hasattr(builtins, error)} == BUILTIN_ERRORS


def that_raise() -> list[Source]:
    """All modules but those of the errors themselves and of the test kit."""
    return [source for source in sources().values() if source.layer not in ("errors", "testing")]


# --- what an import brings --------------------------------------------------------------------------------

PROBE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED, asked, before = set(sys.argv[1].split(",")), [], set(sys.modules)
sys.meta_path.insert(0, Blocked())
import aiodelay
light = sorted(name for name in sys.modules if name.startswith("aiodelay."))
assert light == ["aiodelay.core", "aiodelay.core.version"], light
for name in aiodelay.__all__:
    getattr(aiodelay, name)
inner = sorted(name for name in sys.modules if name.startswith("aiodelay."))
import aiodelay.memory, aiodelay.sqlite, aiodelay.sinks
print(*asked)
print(*inner)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def required(*extras: str) -> set[str]:
    """Import names of what the package needs, or an extra of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [line for extra in extras for line in project["optional-dependencies"][extra]] or project["dependencies"]
    projects = {Requirement(line).name.lower().replace("_", "-") for line in lines}
    imports = {
        name
        for name, distributions in packages_distributions().items()
        if projects & {distribution.lower().replace("_", "-") for distribution in distributions}
    }
    return imports | {project.replace("-", "_") for project in projects}


OPTIONAL = required("cli", "redis", "kafka", "service", "spark", "spark-local", "telemetry") - {"aiodelay"} | {
    *(
        "attr",
        "attrs",
        "hypothesis",
        "nox",
        "opentelemetry",
        "pydantic",
        "pytest",
        "rich",
        "starlette",
        "sybil",
        "uvloop",
    ),
    *("litestar", "django", "django_tasks", "faststream"),
}


def test_import_needs_nothing_optional() -> None:
    program = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{PROBE}"]
    run = subprocess.run([*program, ",".join(OPTIONAL)], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    asked, inner, loaded = (set(line.split()) for line in run.stdout.splitlines())
    assert asked & OPTIONAL == set()
    assert loaded & OPTIONAL == set()
    assert {sources()[name.removeprefix("aiodelay.")].layer for name in inner} <= LAYERS["package"][1]
    third_party = loaded & set(packages_distributions())
    assert third_party <= {"aiodelay"} | required() | {"idna", "sniffio", "typing_extensions"}


SPARK_PROBE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyspark":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import pyspark_aiodelay
assert not hasattr(pyspark_aiodelay, "DefaultSource")
"""


def test_the_module_that_spark_looks_for_can_be_imported_without_spark() -> None:
    program = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{SPARK_PROBE}"
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=60)


# --- what is public ---------------------------------------------------------------------------------------


def modules() -> list[ModuleType]:
    """The public modules that can be imported here."""
    names = [info.name for info in pkgutil.walk_packages([str(SOURCE)], "aiodelay.")]
    public = [name for name in names if not any(part.startswith("_") for part in name.split("."))]
    apart: tuple[str, ...] = ("aiodelay.cli", "aiodelay.contrib.django.")  # Django's models need settings
    apart += () if find_spec("pyspark") else ("aiodelay.spark",)
    return [importlib.import_module(name) for name in public if not name.startswith(apart)]


def source_of(module: ModuleType) -> Source:
    return sources()[module.__name__.removeprefix("aiodelay.")]


def defined(module: ModuleType) -> set[str]:
    """Classes, functions and type aliases that a module defines without an underscore; of a package, its imports."""
    found: set[str] = set()
    for node in source_of(module).tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and dotted(node.annotation) == "TypeAlias"
        ):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and hasattr(module, "__path__") and node.module != "__future__":
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if not name.startswith(("_", "pytest_"))}


def test_all_names_what_is_defined() -> None:
    report(offence for module in modules() for offence in wrong_in_all(module))


def wrong_in_all(module: ModuleType) -> Iterator[str]:
    if not hasattr(module, "__all__"):
        yield f"{module.__name__}: has no __all__"
        return
    named = set(module.__all__)
    imported_here = {
        alias.asname or alias.name
        for node in source_of(module).nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    wrong = {
        "named twice": {name for name in named if module.__all__.count(name) > 1},
        "defined, not named": defined(module) - named,
        "named, not there": named - vars(module).keys(),
        "only imported here": set()
        if hasattr(module, "__path__") or source_of(module).layer == "paths"
        else named & imported_here - RE_EXPORTED.get(module.__name__, set()),
    }
    for what, names in wrong.items():
        if names:
            yield f"{module.__name__}.__all__: {what}: {', '.join(sorted(names))}"


RE_EXPORTED = {
    "aiodelay.core.values": {"FIELDS", "FORMAT_VERSION", "Field"},
    "aiodelay.spark.jobs.backfill": {"OnConflict", "PastDue"},
    "aiodelay.spark.jobs.report": {"By", "report"},
    "aiodelay.spark.jobs.simulate": {"Overdue"},
    "aiodelay.spark.jobs.snapshot": {"Kept"},
    "aiodelay.spark.writing": {"Counts"},
    "aiodelay.testing.clock": {"VirtualLoop", "WaitingForeverError"},
}


def test_all_of_the_package_is_sorted_and_complete() -> None:
    assert sorted(aiodelay.__all__) == aiodelay.__all__
    for_types = {
        alias.name: node.module
        for node in sources()[""].nodes
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert for_types == aiodelay._HOMES | {"__version__": "core.version"}
    assert for_types.keys() == set(aiodelay.__all__)
    assert set(aiodelay.__all__) <= set(dir(aiodelay))
    with pytest.raises(AttributeError, match="no attribute 'Schedular'"):
        aiodelay.Schedular  # type: ignore[attr-defined]  # noqa: B018


def test_errors_that_calls_raise_can_be_imported_from_the_package() -> None:
    errors = {name for name in importlib.import_module("aiodelay.errors").__all__ if name.endswith("Error")}
    assert errors <= set(aiodelay.__all__)


def documented(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Public names with whether a docstring, or a string below, says what they are."""
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.ClassDef):
            yield one.name, ast.get_docstring(one) is not None
            if not one.name.startswith("_"):
                yield from ((f"{one.name}.{name}", ok) for name, ok in documented(one) if name[:1] != "_")
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any(dotted(decorator).endswith("overload") for decorator in one.decorator_list):
                yield one.name, ast.get_docstring(one) is not None
        elif isinstance(one, ast.AnnAssign) and dotted(one.annotation) == "TypeAlias":
            has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            yield dotted(one.target), has_text


def test_every_public_name_has_a_docstring() -> None:
    for name in set(aiodelay.__all__) - {"__version__", "Duration"}:
        thing = getattr(aiodelay, name)
        assert thing.__doc__, name
        for attribute, value in vars(thing).items() if isinstance(thing, type) else ():
            if not attribute.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(thing, attribute)), f"{name}.{attribute}"


def test_docstrings() -> None:
    report(offence for source in sources().values() for offence in missing_docstrings(source))


def missing_docstrings(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source}: the module has no docstring"
    if source.layer in CHECKED and not source.name.startswith("core.dict_table"):  # core/table.py says it once
        missing = {name for name, ok in documented(source.tree) if not ok and not name.startswith("_")}
        yield from (f"{source}: {name} has no docstring" for name in missing - UNDOCUMENTED)


UNDOCUMENTED = {"Command", "DeadReason", "Outcome", "RetryDecision", "Rule", "SendOutcome"}
"""Unions whose members say it all."""


# --- nothing of the machine it was written on -------------------------------------------------------------


def test_no_path_and_no_name_of_a_machine() -> None:
    here = {socket.gethostname(), f"{getpass.getuser()}@", str(ROOT), str(Path.home())} - {"localhost", "/"}
    for path in SOURCE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8")
            assert re.findall(r"(?<![\w:/.~-])/(?:home|root|tmp|work|usr|opt|Users|mnt)\b", text) == [], path
            assert {word for word in here if len(word) > 3 and word in text} == set(), path
