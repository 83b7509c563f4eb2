"""The nox sessions. Each session answers one question, and `nox -l` lists the sessions.

Arguments after `--` go to the program that the session runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nox
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

nox.needs_version = ">=2026.10"
nox.options.sessions = ["lint", "types", "docs", "tests", "package"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
# "venv" comes with Python, and it is the only backend that follows pip's own configuration.
nox.options.default_venv_backend = "venv"

ROOT = Path(__file__).parent
sys.path.insert(0, f"{ROOT / '.ci'}")
import changed_tests  # noqa: E402

PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
DOCS = ["docs"]  # one process runs all blocks of a page, because they build on each other
# Tests of faults mostly wait, so 8 processes are more than the cores. `tests/support/distribution.py` groups the tests.
IN_PARALLEL = ["--numprocesses=8", "--dist=loadscope", "--no-loadscope-reorder"]
IN_TWO = ["--numprocesses=2", *IN_PARALLEL[1:]]  # tests without a server keep the cores busy
# Save time: pip does not compile modules that no test imports, and does not compress PySpark's half a gigabyte. PySpark
# comes as a source archive, from which pip builds a wheel.
AS_IT_IS = ["--no-compile", "--config-settings=--build-option=--compression=stored"]
FEW_FILES = 8  # up to this number, `changed` uses one process, because starting more processes takes longer
# The tests that cover the pure modules. pyproject.toml lists these modules for coverage.
PURE = [
    *(f"tests/unit/test_{name}.py" for name in ("appending", "conflicts", "errors", "limits", "load_forecast")),
    *(f"tests/unit/test_{name}.py" for name in ("memory", "model", "recurrence", "retry", "spread", "timeunits")),
    *(f"tests/unit/test_{name}.py" for name in ("transitions", "unknown_zone", "urls")),
    "tests/conformance/test_memory.py",
]
PYSPARK = "4.3.*"
WHEEL_METADATA = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "sboms/aiodelay.cdx.json"]
REQUIRED_IN_WHEEL = {"aiodelay/py.typed", "aiodelay/backends/sqlite/schema.sql", "pyspark_aiodelay/__init__.py"}
STORM_TIMEOUT_S = 3600
OF_THE_GATE = "not nightly and not storm"  # the choice by markers that pyproject.toml makes for pytest


@nox.session
def tests(session: nox.Session) -> None:
    """Does everything work here? Run all tests of the gate and all docs examples, or the tests in the arguments."""
    if session.posargs:
        prepare(session, requirements(spark=PYSPARK))
        session.run("pytest", *session.posargs)
        return
    renew_pip(session)
    with ThreadPoolExecutor() as beside:
        installed = beside.submit(session.install, *AS_IT_IS, f"pyspark=={PYSPARK}")  # half a gigabyte
        prepare(session, group("spark"))
        # Compile the tests once. Otherwise each process below compiles them, since all start at the same time.
        collect = ["--collect-only", "-qq", "--ignore=tests/spark", "tests", *DOCS]
        compiled = beside.submit(session.run, "pytest", *collect, silent=True)
        session.run("coverage", "run", "-m", "pytest", "-q", *PURE)
        session.run("coverage", "report")
        installed.result()
        compiled.result()
    session.run("pytest", *IN_PARALLEL, "--durations=25", *(f"--ignore={path}" for path in PURE), "tests", *DOCS)


@nox.session
def quick(session: nox.Session) -> None:
    """Did I break something? Run the tests that need no server, in a minute at most. Arguments go to pytest."""
    install_editable(session, spark="")
    planned = changed_tests.quick(ROOT)
    session.log("\n".join(planned.report))
    chosen = ["-m", f"{OF_THE_GATE} and not slow"]
    session.run("pytest", *IN_TWO, *chosen, "-q", "--durations=10", *session.posargs, *planned.tests)


@nox.session
def changed(session: nox.Session) -> None:
    """Did I break code that depends on my change? Needs servers. Takes `--since REV`, `--why`, and pytest's options."""
    options, arguments = changed_tests.options_of(session.posargs)
    planned = changed_tests.plan(ROOT, options.since, why=options.why)
    session.log("\n".join(planned.report))
    if not planned.tests:
        return
    has_spark = any(path.startswith("tests/spark/") for path in planned.tests)
    install_editable(session, spark=PYSPARK if has_spark else "")
    add_redis(session)
    if any(path.startswith(("tests/browser/", "tests/spark/")) for path in planned.tests):
        add_chromium(session)
    if "tests/integration/test_alerts.py" in planned.tests:
        add_promtool(session)
    in_parallel = IN_PARALLEL if len(planned.tests) > FEW_FILES else []
    session.run("pytest", *in_parallel, "-q", *arguments, *planned.tests)


@nox.session
def lint(session: nox.Session) -> None:
    """Is the code written as agreed: lint, format, spelling? Are workflows, container file and manifests correct?"""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("zizmor", "--offline", "--quiet", ".github")
    workflows = [f"{file}" for file in sorted(Path(".github/workflows").iterdir())]
    session.run("check-jsonschema", "--builtin-schema=vendor.github-workflows", *workflows, silent=True)
    session.run("hadolint", "docs/deploy/Containerfile")
    session.run("kubernetes-validate", "--strict", "docs/deploy/kubernetes.yaml")


@nox.session
def types(session: nox.Session) -> None:
    """Are the types correct inside (mypy), and complete for users (basedpyright)?"""
    renew_pip(session)
    session.install(*AS_IT_IS, ".[cli]", *group("types"))
    session.run("mypy", *session.posargs)
    session.run("basedpyright", "--verifytypes", "aiodelay", "--ignoreexternal")


@nox.session
def docs(session: nox.Session) -> None:
    """Does the site build, and do its links work? Arguments go to Zensical: `nox -s docs -- serve`."""
    session.install("--no-compile", *group("site"))
    session.run(*(["zensical", *session.posargs] if session.posargs else ["python", ".ci/build_site.py"]))


@nox.session
def bench(session: nox.Session) -> None:
    """How fast is aiodelay, compared with its limits? Without arguments, write docs/performance.md and .json."""
    needs_spark = not session.posargs or any(each.startswith("BD") for each in session.posargs)
    install(session, spark=PYSPARK if needs_spark else "")
    add_redis(session)
    reports = ["--markdown", "docs/performance.md", "--json", "docs/performance.json"]
    session.run("python", "-m", "benchmarks", *(session.posargs or reports))


@nox.session
def peers(session: nox.Session) -> None:
    """How fast is aiodelay, beside other libraries? Without arguments, write the tables of docs/performance.md."""
    install(session)
    add_redis(session)
    keep_peers(session)
    session.run("python", "-m", "benchmarks.peers", *(session.posargs or ["--markdown", "docs/performance.md"]))


@nox.session
def failures(session: nox.Session) -> None:
    """Which messages are lost, doubled or late after a kill? Without arguments, write docs/failures.md."""
    install(session)
    add_redis(session)
    keep_peers(session)
    options = session.posargs or ["--markdown", "docs/failures.md"]
    session.run("python", "-m", "benchmarks.peers.failures", *options)


@nox.session
def backlog(session: nox.Session) -> None:
    """How fast, and in how much memory, are ten million overdue messages delivered? `nox -s backlog -- redis`."""
    install(session)
    add_redis(session)
    session.run("python", "-m", "benchmarks.backlog", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Does the wheel contain the right files, and does it work outside this tree?"""
    session.install(*group("package"))
    with tempfile.TemporaryDirectory() as name:
        outside = Path(name)
        # Build the wheel from the sdist: so a file that is missing in the sdist is missing in the wheel, too.
        session.run("python", "-m", "build", "--outdir", f"{outside / 'dist'}", silent=True)
        (wheel,) = (outside / "dist").glob("*.whl")
        if problems := list(wheel_problems(wheel)):
            session.error(f"{wheel.name}: {'; '.join(problems)}")
        session.run("python", "tests/package/check_sbom.py", f"{wheel}")
        run_outside(session, outside, wheel)


@nox.session(default=False)
def image(session: nox.Session) -> None:
    """Does the container image run as a user with few rights? Needs Docker or Podman. `-- --tag aiodelay:0.1.0`."""
    session.run("python", "tests/package/check_image.py", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the files of a release in dist/, and check them: `nox -s release -- v0.1.0`."""
    session.install(*group("package"))
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "tests/package/check_release.py", *session.posargs, "--notes", "dist/notes.md")
    session.run("python", "-m", "build", "--outdir", "dist/packages", silent=True)
    (wheel,) = Path("dist/packages").glob("*.whl")
    if problems := list(wheel_problems(wheel)):
        session.error(f"{wheel.name}: {'; '.join(problems)}")
    session.run("python", "tests/package/check_sbom.py", f"{wheel}")
    session.run("twine", "check", "--strict", *(f"{file}" for file in Path("dist/packages").iterdir()))


@nox.session(tags=["nightly"])
def products(session: nox.Session) -> None:
    """Do the tests of the rules pass on more Redis and Valkey servers, protocol versions and sizes?"""
    prepare(session, requirements(spark=PYSPARK))
    keep_peers(session)
    at_night(session, "nightly")


@nox.session(tags=["nightly"])
def storms(session: nox.Session) -> None:
    """Does aiodelay survive long random runs, with a new seed each time?"""
    prepare(session, requirements(spark=PYSPARK))
    at_night(session, "storm", "--numprocesses=0", f"--timeout={STORM_TIMEOUT_S}", "--hypothesis-profile=nightly")


@nox.session(default=False)
def nemesis(session: nox.Session) -> None:
    """Do the promises hold under random faults? `nox -s nemesis -- --minutes 10 --seed 7 --stack redis`."""
    prepare(session, group("test"))
    session.run("python", "-m", "tests.nemesis", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Does a long load with random faults lose nothing and leak nothing? `nox -s soak -- --minutes 60 --seed 1`."""
    prepare(session, group("test"))
    session.run("python", "-m", "tests.nemesis.soak", *session.posargs)


@nox.session(python=["3.12", "3.13", "3.14", "3.14t"], tags=["nightly"])
def tests_other_pythons(session: nox.Session) -> None:
    """Does everything except Spark work on the other versions of Python? 3.14t runs without the GIL."""
    if str(session.python).endswith("t"):
        session.env["PYTHON_GIL"] = "0"  # otherwise, importing aiokafka turns the GIL on
    prepare(session, requirements(spark=""))
    at_night(session, OF_THE_GATE, "--ignore=tests/spark")


@nox.session(tags=["nightly"])
def spark_floor(session: nox.Session) -> None:
    """Does aiodelay work with the oldest PySpark that it allows?"""
    prepare(session, requirements(spark="4.2.*"))
    at_night(session, "not storm", folder="tests/spark")


@nox.session(tags=["nightly"])
def lowest(session: nox.Session) -> None:
    """Does aiodelay work with the lowest versions of its dependencies that pyproject.toml allows?"""
    prepare(session, [*floors(extras=["cli", "kafka", "redis", "service", "telemetry"]), *group("test")])
    at_night(session, OF_THE_GATE, "--ignore=tests/spark")


@nox.session(tags=["nightly"])
def audit(session: nox.Session) -> None:
    """Does a dependency have a known vulnerability? Asks PyPI; if PyPI does not answer, the session fails."""
    session.install(".[all]", *group("audit"))
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.json")
        options = ["--progress-spinner=off", "--format=json", f"--output={report}"]
        session.run("pip-audit", *options, *session.posargs, success_codes=[0, 1])
        if not report.exists():
            session.error("PyPI does not answer, so nothing is known of any dependency. Is there a network?")
        problems = list(audit_problems(json.loads(report.read_text(encoding="utf-8"))))
    if problems:
        session.error("; ".join(problems))


@nox.session(default=False)
def changelog(session: nox.Session) -> None:
    """Collect the changelog fragments: `nox -s changelog -- --draft --version 0.2.0`."""
    session.install(*group("changelog"))
    session.run("towncrier", "build", *session.posargs)


def install(session: nox.Session, *, spark: str = "") -> None:
    """Install the package as users do, not editable, and the requirements of the tests, which benchmarks need too."""
    session.install(".[cli]", *requirements(spark=spark))


def renew_pip(session: nox.Session) -> None:
    """Install the newest pip. It needs half of the time of the pip that comes with Python 3.11."""
    session.install("--upgrade", "pip")


def requirements(*, spark: str) -> list[str]:
    """Return the requirements of the tests. With a version of PySpark, include the requirements of the Spark tests."""
    return [*group("spark"), f"pyspark=={spark}"] if spark else [*group("test")]


def install_editable(session: nox.Session, *, spark: str) -> None:
    """Install the package in editable mode. Install again only after pyproject.toml has changed."""
    keep_bytecode(session)
    installed = Path(session.virtualenv.location, f"installed-{'spark' if spark else 'test'}.toml")
    if not installed.exists() or installed.read_bytes() != Path("pyproject.toml").read_bytes():
        session.install("--editable", ".[cli]", *requirements(spark=spark))
        note = "import shutil, sys; shutil.copy(*sys.argv[1:])"
        session.run_install("python", "-c", note, "pyproject.toml", f"{installed}", silent=True)


def keep_bytecode(session: nox.Session) -> None:
    """Let Python write byte code even if the environment forbids it, because compiling the tests takes long."""
    session.env["PYTHONDONTWRITEBYTECODE"] = ""


def prepare(session: nox.Session, needed: Iterable[str]) -> None:
    """Install the package, the requirements of its tests, a Redis, a Chromium and a promtool."""
    keep_bytecode(session)
    with ThreadPoolExecutor() as beside:
        added = beside.submit(add_programs, session)
        session.install(*AS_IT_IS, ".[cli]", *needed)
        added.result()


def add_programs(session: nox.Session) -> None:
    """Install the programs that are no Python packages, one after the other: apt locks its lists."""
    add_redis(session)
    add_chromium(session)
    add_promtool(session)


def at_night(session: nox.Session, tier: str, *options: str, folder: str = "tests") -> None:
    """Run the tests of a tier, in a new order with a new seed.

    With arguments, run only these tests, with these options. So a failed run can be repeated with its seed.
    """
    ours = "--override-ini=addopts=--import-mode=importlib -ra"
    seed = f"--randomly-seed={random.randrange(1 << 32)}"
    session.run("pytest", ours, "-m", tier, seed, *IN_PARALLEL, *options, *(session.posargs or [folder]))


def add_redis(session: nox.Session) -> None:
    """If apt exists, let tests and benchmarks use Debian's Redis, too. It is unpacked into a cache, not installed."""
    if shutil.which("redis-server") or os.environ.get("AIODELAY_REDIS_SERVER") or not shutil.which("apt-get"):
        return
    root = Path(session.cache_dir, "debian-redis").resolve()
    program = root / "redis-server"
    if not program.exists() and not unpack_redis(session, root, program):
        session.warn("apt provides no redis-server; the tests use the servers from installed wheels")
        return
    session.env["AIODELAY_REDIS_SERVER"] = f"{program}"


def keep_peers(session: nox.Session) -> None:
    """Keep the environments of the peers in a cache. At night, a test measures an installed peer."""
    session.env["AIODELAY_PEERS"] = f"{Path(session.cache_dir, 'peers').resolve()}"


def add_promtool(session: nox.Session) -> None:
    """If apt exists, let tests of the alert rules use Debian's promtool. It is unpacked into a cache, not installed."""
    if shutil.which("promtool") or os.environ.get("AIODELAY_PROMTOOL") or not shutil.which("apt-get"):
        return
    root = Path(session.cache_dir, "debian-prometheus").resolve()
    program = root / "usr" / "bin" / "promtool"
    quiet: dict[str, Any] = {"external": True, "silent": True, "success_codes": range(256)}
    download = ["sh", "-c", f'mkdir -p "{root}" && cd "{root}" && apt-get -q download prometheus']
    for command in (download, ["apt-get", "-q", "-oAcquire::http::Timeout=20", "update"], download):
        if not any(root.glob("prometheus_*.deb")):  # the lists of packages may be old or missing
            session.run(*command, **quiet)
    for package in root.glob("prometheus_*.deb"):
        if not program.exists():
            session.run("dpkg", "-x", f"{package}", f"{root}", **quiet)
    if program.exists():
        session.env["AIODELAY_PROMTOOL"] = f"{program}"
    else:
        session.warn("apt provides no promtool; tests/integration/test_alerts.py will say what to install")


def add_chromium(session: nox.Session) -> None:
    """Install Chromium's headless shell for the browser tests, if it is missing and this user may use apt.

    It needs half of the processor time of a whole Chromium, which the tests use otherwise.
    """
    if os.environ.get("AIODELAY_CHROMIUM") or shutil.which("chromium-headless-shell"):
        return
    why = "only root may install one here" if shutil.which("apt-get") else "there is no apt that could install one"
    if shutil.which("apt-get") and os.name != "nt" and not os.geteuid():
        options = ["-q", "-y", "-oDPkg::Lock::Timeout=300", "-oAcquire::Retries=3", "-oAcquire::http::Timeout=20"]
        install = ["install", "--no-install-recommends", "chromium-headless-shell", "fonts-inter"]
        quiet: dict[str, Any] = {"external": True, "silent": True, "success_codes": range(256)}
        quiet["env"] = {"DEBIAN_FRONTEND": "noninteractive"}
        session.run("apt-get", *options, "update", **quiet)  # the lists of packages may be old or missing
        said = f"{session.run('apt-get', *options, *install, **quiet)}".strip()
        why = f"apt-get says: {said.splitlines()[-1] if said else 'nothing'}"
    if not has_chromium():
        session.warn(
            f"the tests in tests/browser will fail: there is no Chromium. Name a Chromium in AIODELAY_CHROMIUM; {why}"
        )


def has_chromium() -> bool:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    return bool(os.environ.get("AIODELAY_CHROMIUM") or any(map(shutil.which, names)))


def unpack_redis(session: nox.Session, root: Path, program: Path) -> bool:
    """Download and unpack Redis and the libraries that it needs, and write a script that runs it.

    Returns:
        True if the program runs.
    """
    quiet: dict[str, Any] = {"external": True, "silent": True, "success_codes": range(256)}
    archives = root / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    ours = [f"Dir::Cache::archives={archives}", "Debug::NoLocking=1", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-q", "-y", *(f"-o{option}" for option in [*ours, "Acquire::http::Timeout=20"])]
    for command in (["install"], ["update"], ["install"]):  # the lists of packages may be old or missing
        if not any(archives.glob("redis-server_*.deb")):
            wanted = ["--download-only", "--no-install-recommends", "redis-server"] if command == ["install"] else []
            session.run(*apt, *command, *wanted, **quiet)
    for package in archives.glob("*.deb"):
        session.run("dpkg", "-x", f"{package}", f"{root}", **quiet)
    libraries = ":".join(sorted({f"{path.parent}" for path in root.glob("usr/lib/**/*.so.*")}))
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {root}/usr/bin/redis-server "$@"\n')
    program.chmod(0o755)
    if "Redis server" in str(session.run(f"{program}", "--version", **quiet)):
        return True
    shutil.rmtree(root)
    return False


def group(name: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(PROJECT, name)


def floors(*, extras: Iterable[str]) -> Iterator[str]:
    """Yield `name==version` with the lowest allowed version, for each direct dependency that applies here."""
    project: dict[str, Any] = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate():
            (floor,) = (spec.version for spec in requirement.specifier if spec.operator in {">=", "=="})
            yield f"{requirement.name}=={floor}"


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Yield a text for each file that is missing in the wheel, and for each file that does not belong there."""
    source = ROOT / "src"
    wanted = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    names = set(zipfile.ZipFile(wheel).namelist())
    (metadata,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    wanted |= {f"{metadata}/{name}" for name in WHEEL_METADATA}
    yield from (f"{name} is missing" for name in sorted((wanted | REQUIRED_IN_WHEEL) - names))
    yield from (f"{name} does not belong in the wheel" for name in sorted(names - wanted))


def audit_problems(report: Any) -> Iterator[str]:  # noqa: ANN401 - JSON of pip-audit
    """Yield a text for each vulnerable dependency, and one text for all dependencies without an answer of PyPI."""
    unknown = []
    for each in report["dependencies"]:
        if known := [found["id"] for found in each.get("vulns", ())]:
            yield f"{each['name']} {each['version']} has {', '.join(known)}"
        if "skip_reason" in each and each["name"] != "aiodelay":
            unknown.append(each["name"])
    if unknown:  # pip-audit takes such an answer of a mirror as "no vulnerability"
        yield f"nothing is known of {', '.join(unknown)}: the index may be a mirror without PyPI's vulnerability data"


def run_outside(session: nox.Session, outside: Path, wheel: Path) -> None:
    """Install the wheel into a new environment outside the tree, and run a user's program there."""
    session.run("python", "-m", "venv", f"{outside / 'venv'}")
    python = f"{outside / 'venv' / ('Scripts' if os.name == 'nt' else 'bin') / 'python'}"
    session.run(python, "-m", "pip", "install", "--quiet", f"{wheel}", external=True)
    program = shutil.copy(ROOT / "tests" / "package" / "outside_program.py", outside)
    with session.chdir(outside):
        session.run(python, "-I", program, external=True)
