"""The settings of the service: their sources, and the errors for mistakes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from aiodelay.cli.app import run_app
from aiodelay.service.config import Settings
from aiodelay.service.parts import make_scheduler
from aiodelay.service.reading import Problem, SettingsError, read_configuration
from aiodelay.service.settings_origin import read_toml

SECRET = "hunter2-hunter2"
WHOLE = """\
allowed_targets = [
  "kafka:out",
  "kafka:eu-*",
]

[stores.hot]
url = "sqlite:///hot.db"

[stores.cold]
url = "memory://"
namespace = "cold"
allowed_targets = []

[sinks.kafka]
url = "kafka://localhost:9092"

[[intake]]
from = "kafka://localhost:9092/delays"
store = "hot"
countdown_from = "arrival"

[api]
port = 9000
read_only = false

[[api.tokens]]
name = "ops"
hash = "sha256:{hash}"
scopes = ["read", "operate"]

[limits]
overdue = "90s"
"""
INTAKE = "[[intake]]\nfrom = 'kafka://localhost:9092/delays'\n"
SINK = "[sinks.kafka]\nurl = 'kafka://localhost:9092'\n"
TEN = f"""\
store = "redis://:{SECRET}@localhost?timeout=3"
allowed_targets = ["kafka:out", "nowhere"]
shop = "{SECRET}"

[sinks.kafka]
url = "kafka://user:{SECRET}@localhost?partitions=1"

[[intake]]
from = "kafka://localhost:9092/"
countdown_from = "birth"

[[intake]]
dead_topic = "a b"

[api]
port = 99999
tokens = [
  {{ name = "me", hash = "{SECRET}", scopes = ["read", "write"] }},
]

[limits]
memory = 2
drain = "soon"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "aiodelay.toml") -> Path:
    path = folder / name
    path.write_text(text.replace("{hash}", "0" * 64))
    path.chmod(0o600)
    return path


def problems(folder: Path, text: str) -> Mapping[str, Problem]:
    write(folder, text)
    with pytest.raises(SettingsError) as caught:
        read_configuration().settings()
    return {problem.field: problem for problem in caught.value.problems}


def test_without_anything_messages_are_kept_in_the_working_directory() -> None:
    settings = read_configuration().settings()
    (store,) = settings.named_stores.values()
    assert store.url == "sqlite:///aiodelay.db"
    assert store.allowed_targets == ()
    assert (settings.api.host, settings.api.read_only) == ("127.0.0.1", True)


def test_a_file_is_read(folder: Path) -> None:
    write(folder, WHOLE)
    settings = read_configuration().settings()
    assert list(settings.named_stores) == ["hot", "cold"]
    hot, cold = settings.named_stores.values()
    assert (hot.namespace, hot.allowed_targets) == ("default", ("kafka:out", "kafka:eu-*"))
    assert (cold.namespace, cold.allowed_targets) == ("cold", ())
    assert settings.intake[0].from_ == "kafka://localhost:9092/delays"
    assert settings.api.tokens[0].scopes == ("read", "operate")
    assert settings.limits.overdue == timedelta(seconds=90)


def test_the_environment_wins_over_the_file_and_flags_over_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, WHOLE)
    monkeypatch.setenv("AIODELAY_API__PORT", "9001")
    monkeypatch.setenv("AIODELAY_API__HOST", "::1")
    monkeypatch.setenv("AIODELAY_STORES__HOT__URL", "memory://")
    monkeypatch.setenv("AIODELAY_ALLOWED_TARGETS", "kafka:a,kafka:b")
    configuration = read_configuration(flags={("api", "port"): ("--port", 9002)})
    settings = configuration.settings()
    assert (settings.api.port, settings.api.host, settings.api.read_only) == (9002, "::1", False)
    assert settings.named_stores["hot"].url == "memory://"
    assert settings.allowed_targets == ("kafka:a", "kafka:b")
    origins = {each.field: each.origin for each in configuration.shown()}
    assert origins["api.port"] == "--port"
    assert origins["api.host"] == "AIODELAY_API__HOST"
    assert origins["stores.hot.url"] == "AIODELAY_STORES__HOT__URL"
    assert origins["allowed_targets"] == "AIODELAY_ALLOWED_TARGETS"
    assert origins["api.read_only"] == "aiodelay.toml:24"
    assert origins["api.rate"] == "default"


def test_lists_of_tables_are_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"name": "ops", "hash": f"sha256:{'0' * 64}", "scopes": ["read"]}
    monkeypatch.setenv("AIODELAY_API__TOKENS", str([token]).replace("'", '"'))
    configuration = read_configuration()
    assert configuration.settings().api.tokens[0].name == "ops"
    origins = {each.field: each.origin for each in configuration.shown()}
    assert origins["api.tokens[0].name"] == "AIODELAY_API__TOKENS"


def test_a_file_is_named_by_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "store = 'memory://'", "other.toml")
    monkeypatch.setenv("AIODELAY_CONFIG", "other.toml")
    assert read_configuration().settings().store == "memory://"


def test_each_value_knows_its_line(folder: Path) -> None:
    origins = read_toml(write(folder, WHOLE)).origins
    lines = {place: int(origin.rpartition(":")[2]) for place, origin in origins.items()}
    assert lines["allowed_targets",] == 1
    assert lines["stores", "cold", "namespace"] == 11
    assert lines["intake", 0, "countdown_from"] == 20
    assert lines["api", "tokens", 0, "scopes"] == 29


# --- mistakes ---------------------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once(folder: Path) -> None:
    found = problems(folder, TEN)
    assert {field: problem.origin for field, problem in found.items()} == {
        "store (option of redis://:***@localhost?timeout=3)": "aiodelay.toml:1",
        "allowed_targets": "aiodelay.toml:2",
        "shop": "aiodelay.toml:3",
        "sinks.kafka.url (option of kafka://user:***@localhost?partitions=1)": "aiodelay.toml:6",
        "intake[0].from": "aiodelay.toml:9",
        "intake[0].countdown_from": "aiodelay.toml:10",
        "intake[1].from": "aiodelay.toml:12",
        "intake[1].dead_topic": "aiodelay.toml:13",
        "api.port": "aiodelay.toml:16",
        "api.tokens[0].hash": "aiodelay.toml:17",
        "api.tokens[0].scopes[1]": "aiodelay.toml:17",
        "limits.memory": "aiodelay.toml:22",
        "limits.drain": "aiodelay.toml:23",
    }
    assert found["api.port"].value == "99999"
    assert found["api.port"].allowed == "less than or equal to 65535"
    assert found["api.tokens[0].scopes[1]"].allowed == "'read', 'schedule' or 'operate'"
    assert found["intake[1].from"].value == "missing"
    assert found["shop"].allowed.startswith("store, stores, namespace")
    assert SECRET not in "".join(map(str, found.values()))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("AIODELAY_ALOWED_TARGETS", "AIODELAY_ALLOWED_TARGETS"),
        ("AIODELAY_API_PORT", "AIODELAY_API__PORT"),
        ("AIODELAY_LOG_LEVEL", "AIODELAY_LOG__LEVEL"),
        ("AIODELAY_LIMIT__OVERDUE", "AIODELAY_LIMITS__OVERDUE"),
        ("aiodelay_storre", "AIODELAY_STORE"),
        ("AIODELAY_Q", None),
        ("AIODELAY_", None),
    ],
)
def test_a_variable_that_is_no_setting_is_told(monkeypatch: pytest.MonkeyPatch, name: str, near: str | None) -> None:
    monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AIODELAY_API__PORT", "99999")
    with pytest.raises(SettingsError) as caught:
        read_configuration().settings()
    found, port = caught.value.problems
    assert (found.field, port.field) == (name, "api.port")
    assert found.value == (f"unknown (did you mean {near}?)" if near else "unknown")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AIODELAY", "/opt/aiodelay"),
        ("AIODELAY_CONFIG", ""),
        ("AIODELAY_TEST_REDIS_URL", "redis://localhost"),
        ("AIODELAY_CHROMIUM", "/usr/bin/chromium"),
        ("AIODELAY_SERVICE_HOST", "10.0.0.7"),  # as Kubernetes tells each container of Services
        ("AIODELAY_SERVICE_PORT_HTTP", "8080"),
        ("AIODELAY_PORT", "tcp://10.0.0.7:8080"),
        ("AIODELAY_PORT_8080_TCP", "tcp://10.0.0.7:8080"),
        ("AIODELAY_PORT_8080_TCP_PROTO", "tcp"),
        ("AIODELAY_REDIS_SERVICE_PORT", "6379"),
        ("AIODELAY_REDIS_PORT_6379_TCP_ADDR", "10.0.0.8"),
    ],
)
def test_a_variable_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    read_configuration().settings()


@pytest.mark.parametrize(
    "value", [SECRET, f'["{SECRET}"]', f'[{{"hash": "{SECRET}", "name": 5}}]', f'{{"a": "{SECRET}"}}']
)
def test_a_token_in_the_wrong_place_is_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AIODELAY_API__TOKENS", value)
    with pytest.raises(SettingsError) as caught:
        read_configuration().settings()
    assert "AIODELAY_API__TOKENS" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_variable_in_small_letters_knows_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("aiodelay_api__port", "9001")
    origins = {each.field: each.origin for each in read_configuration().shown()}
    assert origins["api.port"] == "aiodelay_api__port"


TOKEN = f'name = "a"\nhash = "sha256:{"0" * 64}"\n'


@pytest.mark.parametrize(
    ("text", "field", "value", "allowed"),
    [
        (f"[api.tokens]\n{TOKEN}scopes = ['read']", "api.tokens", "a table", "a list: [[api.tokens]]"),
        ("[intake]\nfrom = 'kafka://localhost/x'", "intake", "a table", "a list: [[intake]]"),
        ("[store]\nurl = 'memory://'", "store", "a table", "a valid string"),
        ("[stores]\nurl = 'memory://'", "stores.url", "'memory://'", "a table"),
        ("stores = 'memory://'", "stores", "'memory://'", "a table"),
        ("api = 7", "api", "7", "a table"),
        ("[api]\nport = true", "api.port", "true", "a value other than true or false"),
        ("[api]\nrate = false", "api.rate", "false", "a value other than true or false"),
        ("[limits]\nmemory = true", "limits.memory", "true", "a value other than true or false"),
        (
            "[telemetry]\nprometheus_port = true",
            "telemetry.prometheus_port",
            "true",
            "a value other than true or false",
        ),
        (f"[[api.tokens]]\n{TOKEN}scopes = ['admin']", "api.tokens[0].scopes[0]", "'admin'", "'read', 'schedule' or"),
        (f"[[api.tokens]]\n{TOKEN}scopes = []", "api.tokens[0].scopes", "[]", "at least 1 item"),
    ],
)
def test_what_is_of_another_shape_is_told_in_words_of_the_file(
    folder: Path, text: str, field: str, value: str, allowed: str
) -> None:
    (found,) = problems(folder, text).values()
    assert (found.field, found.value) == (field, value)
    assert found.allowed.startswith(allowed)


@pytest.mark.parametrize(
    ("text", "field", "near"),
    [
        ("alowed_targets = []", "alowed_targets", "allowed_targets"),
        ("api_port = 1", "api_port", "api.port"),
        ("[api]\nprot = 1", "api.prot", "port"),
        ("[stores.hot]\nulr = 'memory://'", "stores.hot.ulr", "url"),
    ],
)
def test_the_nearest_setting_is_named(folder: Path, text: str, field: str, near: str) -> None:
    assert problems(folder, text)[field].value == f"unknown (did you mean {near}?)"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("store = 'memory://'\n[stores.a]\nurl = 'memory://'", "store", "given together with"),
        ("[api]\nhost = '0.0.0.0'", "api.host", "0.0.0.0"),
        ("allowed_targets = ['kafka:out']", "allowed_targets", "'kafka:out', but there is no sink 'kafka'"),
        (f"allowed_targets = ['kafka:a b']\n{SINK}", "allowed_targets", "'kafka:a b'"),
        ("namespace = 'a b'", "namespace", "'a b'"),
        ("[stores.A]\nurl = 'memory://'", "stores.A", "a wrong name"),
        ("[stores.a]\nnamespace = 'x'", "stores.a.url", "missing"),
        ("[stores.a]\nurl = 'nosql://'", "stores.a.url (scheme of store nosql://)", "'nosql'"),
        ("store = 'kafka://localhost/schedules'\nnamespace = 'x'", "namespace", "x"),
        ("[api]\nport = 'http'", "api.port", "'http'"),
        ("[limits]\noverdue = 60", "limits.overdue", "60"),
        ("[log]\nformat = 'xml'", "log.format", "'xml'"),
        ("intake = 'kafka://localhost/delays'", "intake", "'kafka://localhost/delays'"),
    ],
)
def test_a_mistake_is_told(folder: Path, text: str, field: str, value: str) -> None:
    found = problems(folder, text)
    assert [problem.field for problem in found.values()] == [field]
    assert value in found[field].value


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (SINK + INTAKE, "intake[0].allow", "missing"),
        (f"allowed_targets = ['kafka:out']\n{SINK}{INTAKE}allow = ['in']", "intake[0].allow", "'in'"),
        (f"allowed_targets = ['kafka:delays']\n{SINK}{INTAKE}", "intake[0].from", "delays"),
        (f"allowed_targets = ['kafka:out']\n{SINK}{INTAKE}store = 'b'", "intake[0].store", "'b'"),
        (
            f"allowed_targets = ['kafka:out']\n{SINK}{INTAKE}[stores.a]\nurl = 'memory://'\n[stores.b]\nurl = 'memory://'",
            "intake[0].store",
            "missing",
        ),
        (
            f"allowed_targets = ['stdout:x']\n[sinks.stdout]\nurl = 'stdout:'\n{INTAKE}allow = ['in']",
            "intake[0].allow",
            "'in'",
        ),
    ],
)
def test_an_intake_is_judged_beside_its_store(folder: Path, text: str, field: str, value: str) -> None:
    found = problems(folder, text)
    assert field in found
    assert value in found[field].value


@pytest.mark.parametrize(
    "text", ["namespace = '{}'", "[limits]\ndrain = '{}'", "[api]\nport = '{}'", "allowed_targets = ['{}']"]
)
def test_a_url_in_the_wrong_place_keeps_its_password(folder: Path, text: str) -> None:
    for url in (f"redis://u:{SECRET}@localhost", f"u:{SECRET}@localhost"):
        (problem,) = problems(folder, text.format(url)).values()
        assert "u:***@localhost" in problem.value


@pytest.mark.parametrize("text", [f"[[api.tokens]]\n{TOKEN}scopes = ['read']", "[stores.a]\nurl = 'redis://:secret@h'"])
def test_a_file_with_secrets_that_everybody_may_read_is_refused(folder: Path, text: str) -> None:
    write(folder, text)
    for mode in (0o600, 0o640):
        (folder / "aiodelay.toml").chmod(mode)
        read_configuration().settings()
    (folder / "aiodelay.toml").chmod(0o644)
    with pytest.raises(
        SettingsError, match=r"readable by every user \(mode 644\), and holds tokens or passwords"
    ) as caught:
        read_configuration().settings()
    assert "chmod 640 aiodelay.toml" in str(caught.value)
    write(folder, "namespace = 'a'")
    (folder / "aiodelay.toml").chmod(0o644)
    read_configuration().settings()


def test_tokens_have_names_of_their_own(folder: Path) -> None:
    token = f"[[api.tokens]]\nname = 'a'\nhash = 'sha256:{'0' * 64}'\nscopes = ['read']\n"
    assert list(problems(folder, token + token)) == ["api.tokens[1].name"]


def test_beyond_the_loopback_with_tokens(folder: Path) -> None:
    write(
        folder, f"[api]\nhost = '0.0.0.0'\n[[api.tokens]]\nname = 'a'\nhash = 'sha256:{'0' * 64}'\nscopes = ['read']\n"
    )
    assert read_configuration().settings().api.host == "0.0.0.0"


@pytest.mark.parametrize(
    "text",
    ["store = ", "store = 'a'\nstore = 'b'", b"store = '\xff'", "store = " + "[" * 5000, "store = " + "9" * 5000],
)
def test_what_is_no_toml_is_told(folder: Path, text: str | bytes) -> None:
    (folder / "aiodelay.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=r"aiodelay\.toml is (not TOML|not readable): ."):
        read_configuration()


@pytest.mark.parametrize("value", ["[" * 50_000, "9" * 5000, "NaN", "{"])
def test_a_variable_that_is_no_json_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AIODELAY_INTAKE", value)
    with pytest.raises(SettingsError, match=r"AIODELAY_INTAKE: intake is .*; allowed: a list"):
        read_configuration().settings()


def test_a_file_that_is_named_must_be_there(folder: Path) -> None:
    with pytest.raises(SettingsError, match="is not readable: No such file or directory"):
        read_configuration(folder / "missing.toml")


def test_secrets_are_in_no_repr(folder: Path) -> None:
    write(folder, WHOLE.replace("memory://", f"redis://:{SECRET}@localhost").replace("localhost:9092", f"u:{SECRET}@h"))
    settings = read_configuration().settings()
    assert settings.named_stores["cold"].url == f"redis://:{SECRET}@localhost"
    assert SECRET not in repr(settings)
    assert "000000" not in repr(settings)
    assert SECRET not in str(read_configuration().shown())


def test_a_sink_is_called_as_the_file_says(folder: Path) -> None:
    write(
        folder, "allowed_targets = ['eu:out', 'us:out']\n[sinks.eu]\nurl = 'kafka://eu'\n[sinks.us]\nurl = 'kafka://us'"
    )
    settings = read_configuration().settings()
    (store,) = settings.named_stores.values()
    scheduler = make_scheduler(settings, store)
    assert {scheduler.sink(name).name for name in ("eu", "us")} == {"eu", "us"}


# --- the command ------------------------------------------------------------------------------------------


def test_check_names_each_mistake_on_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, TEN)
    assert run_app(["config", "check"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "aiodelay: 13 mistakes in the settings"
    assert all(re.match(r"  aiodelay\.toml:\d+: .* is .*; allowed: ", line) for line in lines[1:])
    assert len(lines) == 14


def test_check_finds_nothing_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, WHOLE)
    assert run_app(["config", "check"]) == 0
    assert capsys.readouterr().out == "no mistake was found\n"


def test_show_tells_where_each_value_comes_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, WHOLE)
    assert run_app(["config", "show", "--origin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "limits.overdue = 1m30s  # aiodelay.toml:32" in lines
    assert "api.tokens[0].hash = ***  # aiodelay.toml:28" in lines
    assert "api.rate = 500  # default" in lines
    assert not [line for line in lines if " = None" in line]


def test_a_token_is_made_with_its_hash(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run_app(["config", "hash-token"]) == 0
    comment, *block = capsys.readouterr().out.splitlines()
    token = comment.rpartition(" ")[2]
    write(folder, "\n".join(block).replace("...", "ops"))
    (made,) = read_configuration().settings().api.tokens
    assert made.hash == f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def test_every_setting_stands_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    for name, field in Settings.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        for setting in [f"{name}.{each}" for each in inner] or [name]:
            assert f"`{setting}`" in page, setting
