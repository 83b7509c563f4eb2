"""The tests that a change selects: each rule on a small tree in a git repository, and some modules of this tree."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
from changed_tests import Tree, base_of, changes, files_of, options_of, plan, quick

ROOT = Path(__file__).parents[2]
PROJECT = """
[project.entry-points."aiodelay.stores"]
sqlite = "aiodelay.sqlite:open_store"

[project.entry-points."aiodelay.sinks"]
redis-list = "aiodelay.redis:open_list_sink"

[project.entry-points.pytest11]
aiodelay = "aiodelay.plugin"
"""
SMALL = {
    "pyproject.toml": PROJECT,
    "src/aiodelay/__init__.py": "",
    "src/aiodelay/plugin.py": "",
    "src/aiodelay/sqlite/__init__.py": "",
    "src/aiodelay/redis/__init__.py": "",
}


class Project:
    """A git repository with a few files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.root, check=True, capture_output=True)

    def write(self, **files: str) -> None:
        """Write files; a name is a path with `__` for `/` and without `.py`."""
        self.files({f"{name.replace('__', '/')}.py": text for name, text in files.items()})

    def files(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git(
            "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "-q", "--allow-empty", "-m", "a change"
        )

    def selected(self, *changed: str) -> list[str]:
        """Return the names of the test files that a change selects."""
        because = Tree(self.root, {*files_of(self.root), *changed}).select(changed).because
        return [Path(path).name for path in because]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.files(SMALL)
    return project


# --- what uses what ----------------------------------------------------------------------------------------------


def test_an_import_counts_through_other_modules(project: Project) -> None:
    project.write(src__aiodelay__a="", src__aiodelay__b="from . import a", tests__unit__test_b="import aiodelay.b")
    project.write(tests__unit__test_other="import aiodelay")
    assert project.selected("src/aiodelay/a.py") == ["test_b.py"]


@pytest.mark.parametrize(
    "source",
    [
        "from aiodelay.a import x",
        "from aiodelay import a",
        "def f():\n    import aiodelay.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aiodelay.a import x",
        "from importlib import import_module\nimport_module('aiodelay.a')",
        "NAME = 'aiodelay.a.x'",
    ],
)
def test_every_way_to_import_counts(project: Project, source: str) -> None:
    project.write(src__aiodelay__a="x = 1", tests__unit__test_a=source)
    assert project.selected("src/aiodelay/a.py") == ["test_a.py"]


def test_relative_imports_count_from_their_own_package(project: Project) -> None:
    project.files({"src/aiodelay/p/__init__.py": "from .deep import x"})
    project.write(src__aiodelay__p__deep="from ..a import x")
    project.write(src__aiodelay__a="x = 1", tests__unit__test_p="import aiodelay.p")
    assert project.selected("src/aiodelay/a.py") == ["test_p.py"]


def test_importing_a_module_runs_the_packages_around_it(project: Project) -> None:
    project.write(src__aiodelay__redis__keys="", tests__unit__test_keys="import aiodelay.redis.keys")
    assert project.selected("src/aiodelay/redis/__init__.py") == ["test_keys.py"]


ON_DEMAND = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .a import A
    from .b import B
def __getattr__(name): ...
"""


@pytest.mark.parametrize("source", ["from aiodelay import A", "import aiodelay\naiodelay.A"])
def test_a_name_that_a_package_loads_on_demand_counts_as_its_home(project: Project, source: str) -> None:
    project.files({"src/aiodelay/__init__.py": ON_DEMAND})
    project.write(src__aiodelay__a="", src__aiodelay__b="")
    project.write(tests__unit__test_a=source)
    assert project.selected("src/aiodelay/a.py") == ["test_a.py"]
    assert project.selected("src/aiodelay/b.py") == []
    assert project.selected("src/aiodelay/__init__.py") == ["test_a.py"]


def test_a_module_of_tests_is_a_module(project: Project) -> None:
    project.write(src__aiodelay__a="", tests__support__help="import aiodelay.a")
    project.write(tests__unit__test_help="from tests.support.help import x")
    assert project.selected("src/aiodelay/a.py") == ["test_help.py"]


@pytest.mark.parametrize("source", ["run(python, '-m', 'tests.spark.p')", "COMMAND = [python, '-m', 'tests.spark.p']"])
def test_a_program_that_a_test_starts_counts(project: Project, source: str) -> None:
    project.write(src__aiodelay__a="", tests__spark__p="import aiodelay.a", tests__unit__test_p=source)
    assert project.selected("src/aiodelay/a.py") == ["test_p.py"]


def test_a_package_that_a_test_runs_counts_as_its_main(project: Project) -> None:
    project.files({"src/aiodelay/__main__.py": "", "src/aiodelay/other.py": ""})
    project.write(tests__e2e__test_p="Program('-m', 'aiodelay', 'demo')")
    assert project.selected("src/aiodelay/__main__.py") == ["test_p.py"]
    assert project.selected("src/aiodelay/other.py") == []


def test_a_program_of_a_crew_counts(project: Project) -> None:
    project.write(src__aiodelay__a="", tests__faults__programs__owner="import aiodelay.a")
    project.write(tests__faults__test_owner="self._crew.start('owner', plan)", tests__faults__test_b="f('owner')")
    assert project.selected("src/aiodelay/a.py") == ["test_owner.py"]


def test_a_place_within_a_package_counts(project: Project) -> None:
    project.files({"src/aiodelay/cli/__init__.py": "COMMANDS = ['demo:demo']", "src/aiodelay/cli/demo.py": ""})
    project.write(tests__e2e__test_demo="import aiodelay.cli")
    assert project.selected("src/aiodelay/cli/demo.py") == ["test_demo.py"]


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("URL = 'sqlite:///delay.db'", "sqlite"),
        ("f'sqlite:///{path}'", "sqlite"),
        ("f'redis-list:{name}'", "redis"),
        ("run('--to redis-list:orders')", "redis"),
    ],
)
def test_a_url_counts_as_what_its_scheme_is_registered_for(project: Project, source: str, package: str) -> None:
    project.write(tests__unit__test_url=source)
    assert project.selected(f"src/aiodelay/{package}/__init__.py") == ["test_url.py"]


@pytest.mark.parametrize("source", ["'''redis-list:orders'''", "'a redis-list: many'", "'xredis-list:orders'"])
def test_other_texts_are_no_urls(project: Project, source: str) -> None:
    project.write(tests__unit__test_url=source)
    assert project.selected("src/aiodelay/redis/__init__.py") == []


def test_a_url_in_an_error_text_of_the_package_is_no_use(project: Project) -> None:
    project.write(src__aiodelay__a="f('such as sqlite:///delay.db')", tests__unit__test_a="import aiodelay.a")
    assert project.selected("src/aiodelay/sqlite/__init__.py") == []


def test_data_of_a_package_belong_to_its_modules(project: Project) -> None:
    project.files({"src/aiodelay/redis/lua/claim.lua": "", "src/aiodelay/py.typed": ""})
    project.write(src__aiodelay__redis__scripts="", tests__unit__test_scripts="import aiodelay.redis.scripts")
    project.write(tests__unit__test_other="import aiodelay.sqlite")
    assert project.selected("src/aiodelay/redis/lua/claim.lua") == ["test_scripts.py"]


@pytest.mark.parametrize(
    "source",
    ["ROOT / 'docs' / 'kafka.md'", "(ROOT / 'docs').glob('*.md')", "f('docs/kafka.md')", "ROOT / 'docs' / name / 'a'"],
)
def test_a_path_counts_as_the_file_or_the_folder(project: Project, source: str) -> None:
    project.files({"docs/kafka.md": ""})
    project.write(tests__unit__test_page=source)
    assert project.selected("docs/kafka.md") == ["test_page.py"]


def test_a_test_that_reads_sources_as_text_does_not_depend_on_what_they_import(project: Project) -> None:
    project.write(src__aiodelay__a="import cronsim", tests__unit__test_a="import aiodelay.a")
    project.write(
        tests__unit__test_texts="ROOT / 'tests'", tests__unit__test_sources="import aiodelay\naiodelay.__file__"
    )
    assert project.selected("src/aiodelay/a.py") == ["test_a.py", "test_sources.py"]
    assert project.selected("tests/unit/test_a.py") == ["test_a.py", "test_texts.py"]


def test_a_conftest_selects_all_tests_of_its_folder(project: Project) -> None:
    project.files({"tests/faults/conftest.py": "import aiodelay.redis"})
    project.write(tests__faults__test_a="", tests__faults__deep__test_b="", tests__unit__test_c="")
    assert project.selected("tests/faults/conftest.py") == ["test_b.py", "test_a.py"]
    assert project.selected("src/aiodelay/redis/__init__.py") == [], "its hooks are what it imports it for"


FIXTURES = """
import pytest
from aiodelay import sqlite
from aiodelay.redis import start

def started():
    return start()

@pytest.fixture
def server():
    return started()

@pytest.fixture
def client(server): ...

@pytest.fixture
def file():
    return sqlite.open_store()
"""


@pytest.mark.parametrize(
    "source",
    [
        "def test_a(server): ...",
        "async def test_a(client): ...",
        "@pytest.mark.usefixtures('client')\nclass TestA: ...",
        "def test_a(request):\n    request.getfixturevalue('server')",
    ],
)
@pytest.mark.parametrize("place", ["tests/conftest.py", "src/aiodelay/plugin.py"])
def test_a_fixture_counts_as_what_it_uses(project: Project, place: str, source: str) -> None:
    project.files({place: FIXTURES, "tests/unit/test_a.py": source, "tests/unit/test_b.py": "def test_b(file): ..."})
    assert project.selected("src/aiodelay/redis/__init__.py") == ["test_a.py"]
    assert project.selected("src/aiodelay/sqlite/__init__.py") == ["test_b.py"]


def test_an_automatic_fixture_counts_for_every_test(project: Project) -> None:
    text = FIXTURES.replace("@pytest.fixture\ndef server", "@pytest.fixture(autouse=True)\ndef server")
    project.files({"tests/conftest.py": text, "tests/unit/test_a.py": ""})
    assert project.selected("src/aiodelay/redis/__init__.py") == ["test_a.py"]


def test_pages_whose_blocks_are_tests_are_selected_as_test_files(project: Project) -> None:
    blocks = "```python\nfrom aiodelay import sqlite\nawait f()\n```\n\n```sh\nimport aiodelay.redis\n```\n"
    sybil = "Sybil(patterns=['docs/*.md', 'README.md'], excludes=[*('docs/kafka.md',)])"
    pages = ("docs/a.md", "docs/kafka.md", "docs/deep/b.md", "README.md")
    project.files({"conftest.py": sybil} | dict.fromkeys(pages, blocks))
    assert project.selected("src/aiodelay/sqlite/__init__.py") == ["README.md", "a.md"]
    assert project.selected("src/aiodelay/redis/__init__.py") == []
    assert project.selected("docs/a.md") == ["a.md"]


def test_a_file_that_cannot_be_read_as_python_is_still_a_test(project: Project) -> None:
    project.files({"tests/unit/test_a.py": "def", "tests/unit/test_b.py": "\udcff".encode(errors="replace").decode()})
    assert project.selected("tests/unit/test_a.py") == ["test_a.py"]


def test_what_uses_a_module_that_is_gone_is_selected(project: Project) -> None:
    project.write(tests__unit__test_a="import aiodelay.gone")
    assert project.selected("src/aiodelay/gone.py", "tests/unit/test_gone.py") == ["test_a.py"]


# --- git ---------------------------------------------------------------------------------------------------------


def test_changes_are_those_of_commits_index_and_work_tree_and_untracked_files(project: Project) -> None:
    project.files({"kept": "", "deleted": "", "moved": "as it was\n", ".gitignore": "ignored"})
    project.commit()
    project.git("checkout", "-q", "-b", "work")
    project.files({"committed": ""})
    project.commit()
    project.files({"staged": ""})
    project.git("mv", "moved", "to here")
    project.git("add", "staged")
    project.files({"pyproject.toml": "", "untracked": "", "ignored": ""})
    (project.root / "deleted").unlink()
    wanted = {"committed", "staged", "moved", "to here", "pyproject.toml", "untracked", "deleted"}
    assert changes(project.root, base_of(project.root)) == wanted
    assert changes(project.root, base_of(project.root, "HEAD")) == wanted - {"committed"}


def test_on_main_only_what_is_not_committed_counts(project: Project) -> None:
    project.commit()
    project.files({"new": ""})
    assert changes(project.root, base_of(project.root)) == {"new"}


def test_what_main_got_meanwhile_does_not_count(project: Project) -> None:
    project.commit()
    project.git("branch", "work")
    project.files({"of main": ""})
    project.commit()
    project.git("checkout", "-q", "work")
    assert changes(project.root, base_of(project.root)) == set()
    assert changes(project.root, base_of(project.root, "main")) == set()


def test_a_revision_that_git_does_not_know_is_told(project: Project) -> None:
    project.commit()
    with pytest.raises(SystemExit, match=r"changed_tests: git merge-base: .*nowhere"):
        base_of(project.root, "nowhere")


# --- plans -------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_it_leaves_out_and_why_it_runs_what_it_runs(project: Project) -> None:
    project.write(src__aiodelay__a="", tests__unit__test_a="import aiodelay.a", tests__unit__test_b="")
    project.write(tests__faults__test_c="")
    project.commit()
    project.files({"src/aiodelay/a.py": "x = 1", "notes.txt": ""})
    planned = plan(project.root, why=True)
    assert planned.tests == ["tests/unit/test_a.py"]
    assert planned.report[1:] == [
        "runs 1 of 3 test files; left out: tests/faults 1, tests/unit 1",
        "no test uses: notes.txt",
        "tests/unit/test_a.py: tests/unit/test_a.py imports src/aiodelay/a.py < src/aiodelay/a.py has changed",
    ]


def test_what_concerns_every_test_runs_those_that_need_no_server(project: Project) -> None:
    project.write(tests__unit__test_a="", tests__faults__test_b="", tests__support__kafka="", src__aiodelay__a="")
    project.write(tests__integration__test_c="import tests.support.kafka", tests__spark__test_d="import aiodelay.a")
    project.commit()
    project.files({"pyproject.toml": PROJECT + "\n", "src/aiodelay/a.py": "x = 1"})
    planned = plan(project.root)
    assert planned.tests == ["tests/spark/test_d.py", "tests/unit/test_a.py"]
    assert quick(project.root) == (
        ["tests/unit/test_a.py"],
        ["runs 1 of 4 test files; left out: tests/faults 1, tests/integration 1, tests/spark 1"],
    )
    assert any(line.startswith("pyproject.toml can affect every test") for line in planned.report)


def test_options_that_are_not_ours_go_to_pytest() -> None:
    options, arguments = options_of(["--since", "v1", "-x", "-k", "retry", "--why"])
    assert (options.since, options.why, arguments) == ("v1", True, ["-x", "-k", "retry"])


# --- our own tree ------------------------------------------------------------------------------------------------


IN_REPOSITORY = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive has no git repository")


@cache
def ours() -> Tree:
    return Tree(ROOT, files_of(ROOT))


@pytest.mark.nightly  # reads and links all files of the tree
@IN_REPOSITORY
def test_of_our_own_tree_a_change_selects_what_can_notice_it() -> None:
    found = {path: ours().select({path}).because for path in ("src/aiodelay/redis/lua/claim.lua", "docs/api.md")}
    lua, page = found.values()
    assert "tests/conformance/test_redis.py" in lua
    assert "tests/faults/test_redis_kill.py" in lua
    assert "tests/conformance/test_memory.py" not in lua
    assert "tests/conformance/test_kafka.py" not in lua
    assert "tests/integration/test_api_page.py" in page
    assert "tests/unit/test_retry.py" not in page
    assert "tests/unit/test_recurrence.py" in ours().select({"src/aiodelay/recurrence.py"}).because


@pytest.mark.nightly  # as above
@IN_REPOSITORY
def test_of_our_own_tree_no_unit_test_needs_a_server() -> None:
    chosen = set(ours().without_servers())
    assert {path for path in ours().tests if path.startswith("tests/unit/")} <= chosen
    assert "tests/conformance/test_sqlite.py" in chosen
    assert not any("redis" in path and not path.startswith("tests/unit/") for path in chosen)
