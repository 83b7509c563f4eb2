"""Reads the settings of the service, and reports all mistakes at once.

Each mistake names the field, the value, the allowed values and the origin. `Configuration` lists all settings with
their origins.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from aiodelay.core.durations import format_duration
from aiodelay.core.validation import HANDLER_TARGET, Targets
from aiodelay.errors import (
    ConfigurationError,
    InputError,
    UnknownSinkError,
    cut,
    masked_url,
    shortened,
)
from aiodelay.scheduler import Scheduler

from .config import (
    FILE,
    PREFIX,
    ApiSettings,
    Intake,
    Limits,
    LogSettings,
    Settings,
    SinkSettings,
    StoreSettings,
    TelemetrySettings,
    Token,
)
from .parts import KAFKA, default_topics, make_box, make_scheduler, store_of
from .settings_origin import Layer, Layers, Place, dotted, read_toml

__all__ = ["Configuration", "Problem", "SettingsError", "Shown", "read_configuration"]

CONFIG = f"{PREFIX}CONFIG"
"""The environment variable that names the settings file, unless a flag names the file."""
NO_SETTINGS = re.compile(
    rf"{PREFIX}((CONFIG|CHROMIUM|PROMTOOL|SCREENSHOTS|REDIS_SERVER|VALKEY_SERVER|TEST_.*)=|(.*_)?SERVICE_(HOST|PORT(_.*)?)=|(.*_)?PORT(_.*)?=\w+://"
    r"|(.*_)?PORT_\d+_[A-Z]+_(PROTO|PORT|ADDR)=)"
)
"""Variables with the prefix that are not settings: variables of other parts of aiodelay, and variables that Kubernetes
sets for each Service whose name begins with `aiodelay`."""
_Disagreement: TypeAlias = tuple[Place, str, str]
"""A value that contradicts another value: its path, the value, and the allowed values."""

# --- mistakes ---------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """One mistake in the settings.

    Attributes:
        field: The name of the setting, such as `api.port`.
        value: The wrong value, shortened and without secrets.
        allowed: The allowed values.
        origin: The source of the value, such as `aiodelay.toml:7`, `AIODELAY_API__PORT` or `--port`; or None.
    """

    field: str
    value: str
    allowed: str
    origin: str | None = None

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        return f"{where}{self.field} is {self.value}; allowed: {self.allowed}"


class SettingsError(ConfigurationError):
    """The settings have mistakes. `problems` holds all of them."""

    problems: tuple[Problem, ...]

    def __init__(self, *problems: Problem) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.allowed)
        self.args = problems
        self.problems = problems

    def __str__(self) -> str:
        number = "a mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        return "\n  ".join([f"{number} in the settings", *map(str, self.problems)])


class Shown(NamedTuple):
    """A setting, its value as text without secrets, and its origin."""

    field: str
    value: str
    origin: str


_MODELS: Mapping[tuple[str, ...], type[BaseModel]] = {
    (): Settings,
    ("stores",): StoreSettings,
    ("sinks",): SinkSettings,
    ("intake",): Intake,
    ("api",): ApiSettings,
    ("api", "tokens"): Token,
    ("limits",): Limits,
    ("log",): LogSettings,
    ("telemetry",): TelemetrySettings,
}
SEVERAL = ("stores", "sinks", "intake")
URLS = ("url", "store", "from")
SHAPES = {"tuple_type": "a list", "dict_type": "a table", "model_type": "a table"}
_SHOULD = re.compile(r"^(Input|Value|String|Tuple|List|Dictionary) should (be |have )?")


def _problem(error: ErrorDetails, layers: Layers) -> Problem:
    place: Place = tuple(part for part in error["loc"] if part != "[key]")
    field, origin = dotted(place), layers.nearest_origin(place)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InputError | ConfigurationError):
        what = cause.field if isinstance(cause, InputError) else cause.setting
        inner = f" ({what})" if "://" in what else ""
        is_misplaced = place[-1] not in URLS and _may_hold_password(error["input"])
        return Problem(
            field + inner, _shown(error["input"], place) if is_misplaced else cause.value, cause.allowed, origin
        )
    if error["type"] == "extra_forbidden":
        return _unknown(place, origin)
    if error["type"] == "missing":
        return Problem(field, "missing", "a value; this setting has no default", origin)
    if error["type"] in SHAPES:
        allowed = f"a list: [[{field}]]" if isinstance(error["input"], Mapping) else SHAPES[error["type"]]
        return Problem(field, _shown(error["input"], place), allowed, origin)
    allowed = _SHOULD.sub("", error["msg"])
    if error["type"].endswith("_parsing"):
        allowed = allowed.partition(",")[0]
    value = "a wrong name" if "[key]" in error["loc"] else _shown(error["input"], place)
    return Problem(field, value, allowed.replace("match pattern", "text that matches"), origin)


def _is_of_its_items(error: ErrorDetails) -> bool:
    """Whether a list is too short only because its items are wrong. Another problem reports each wrong item."""
    return error["type"] == "too_short" and bool(error["input"])


def _unknown(place: Place, origin: str | None) -> Problem:
    table = tuple(part for part in place[:-1] if isinstance(part, str))
    model = _MODELS[table[:1] if table[:1] in (("stores",), ("sinks",)) else table]
    beside = [field.alias or name for name, field in model.model_fields.items()]
    near = get_close_matches(str(place[-1]), beside, 1) or get_close_matches(dotted(place), _fields(), 1)
    return Problem(cut(dotted(place)), _unknown_but(near), ", ".join(beside), origin)


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each environment variable that has the prefix and is not a setting."""
    known = [field.upper().replace(".", "__") for field in _fields()]
    for name, value in environment.items():
        setting = name.upper().removeprefix(PREFIX)
        is_ours = setting != name.upper() and not NO_SETTINGS.match(f"{name}={value}")
        if is_ours and setting.partition("__")[0].lower() not in Settings.model_fields:
            near = [f"{PREFIX}{found}" for found in get_close_matches(setting, known, 1)]
            yield Problem(cut(name), _unknown_but(near), f"{PREFIX} and the name of a setting, with __ for each dot")


def _unknown_but(near: Iterable[str]) -> str:
    return "".join(["unknown", *(f" (did you mean {each}?)" for each in near)])


def _fields() -> Iterator[str]:
    """Yield the names of all settings. For stores, sinks and intakes, yield only the name of the table."""
    for name in Settings.model_fields:
        yield name
        if (name,) in _MODELS and name not in SEVERAL:
            yield from (f"{name}.{inner}" for inner in _MODELS[name,].model_fields)


def _may_hold_password(value: object) -> bool:
    return isinstance(value, str) and ("://" in value or "@" in value)


def _shown(value: object, place: Place) -> str:
    if isinstance(value, str):
        if "tokens" in place and not {"name", "scopes"} & {*place}:
            return "***"
        return repr(masked_url(value)) if place[-1] in URLS or _may_hold_password(value) else shortened(value)
    if isinstance(value, timedelta):
        return format_duration(value // timedelta(milliseconds=1))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item, place) for item in value)}]"
    return "a table" if isinstance(value, Mapping) else shortened(value)


# --- the configuration ------------------------------------------------------------------------------------


class Configuration:
    """The settings as read from their sources, not yet checked.

    Args:
        layers: The flags, the environment variables and the file, merged.
        file: The path of the settings file, which may not exist.
        again: Reads all sources again.
        problems: Mistakes found before the values are checked: unknown environment variables, or a file with secrets
            that every user of the machine may read.
    """

    def __init__(
        self, layers: Layers, file: Path, again: Callable[[], Configuration], problems: Sequence[Problem]
    ) -> None:
        self._layers, self._problems = layers, problems
        self.file: Path = file
        self.again: Callable[[], Configuration] = again

    def settings(self, *, needs_tokens: bool = True) -> Settings:
        """Check all values and return the settings.

        Args:
            needs_tokens: Whether an address other than the loopback needs tokens.

        Raises:
            SettingsError: The settings have mistakes. The error names all of them.
        """
        given, problems, broken = self._layers.values, [*self._problems], set[str]()
        try:
            settings = Settings(**given)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            problems += [_problem(each, self._layers) for each in errors if not _is_of_its_items(each)]
            broken = {str(each["loc"][0]) for each in errors}
            settings = Settings(**{name: value for name, value in given.items() if name not in broken})
        for place, value, allowed in _disagreements(settings, broken, needs_tokens=needs_tokens):
            problems.append(Problem(dotted(place), value, allowed, self._layers.nearest_origin(place)))
        if problems:
            raise SettingsError(*problems)
        return settings

    def shown(self) -> list[Shown]:
        """List the value of every setting, with its origin.

        Raises:
            SettingsError: See `settings`.
        """
        return [
            Shown(dotted(place), _shown(value, place), self._layers.origin(place) or "default")
            for place, value in _leaves(self.settings())
            if value is not None
        ]


def _leaves(value: object, at: Place = ()) -> Iterator[tuple[Place, object]]:
    """Yield each single value of the settings, with its path."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            yield from _leaves(getattr(value, name), (*at, field.alias or name))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*at, name))
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for i, inner in enumerate(value):
            yield from _leaves(inner, (*at, i))
    else:
        yield at, value


def _disagreements(settings: Settings, broken: Collection[str], *, needs_tokens: bool) -> Iterator[_Disagreement]:
    """Yield the values that are valid alone, but contradict other values.

    Args:
        settings: Settings in which each value alone is valid.
        broken: Tables with mistakes, which `settings` leaves out. Values that depend on them are not checked.
        needs_tokens: Whether an address other than the loopback needs tokens.
    """
    if settings.store is not None and settings.stores:
        yield ("store",), "given together with [stores]", "only one of store and [stores]"
    names = [token.name for token in settings.api.tokens]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield ("api", "tokens", i, "name"), f"{name!r}, the name of another token", "a unique name"
    is_open = needs_tokens and not settings.api.tokens
    if is_open and "api" not in broken and not _is_loopback(settings.api.host):
        yield (
            ("api", "host"),
            repr(settings.api.host),
            "127.0.0.1, ::1 or localhost; any address if there are [[api.tokens]]",
        )
    if not {*broken} & {"store", "stores", "namespace", "sinks", "allowed_targets", "limits"}:
        yield from _store_disagreements(settings)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _store_disagreements(settings: Settings) -> Iterator[_Disagreement]:
    """Yield the mistakes of stores, allowed targets and intakes."""
    schedulers: dict[str, Scheduler] = {}
    for name, store in settings.named_stores.items():
        place: Place = ("stores", name) if settings.stores else ()
        try:
            schedulers[name] = make_scheduler(settings, store)
        except ConfigurationError as error:
            url = "url" if settings.stores else "store"
            yield (*place, "namespace" if error.setting == "namespace" else url), *_value_and_rule(error)
    for name, store in settings.stores.items():
        for to in store.allowed_targets or ():
            if name in schedulers:
                yield from _unknown_target(to, [schedulers[name]], ("stores", name, "allowed_targets"))
    for to in settings.allowed_targets if len(schedulers) == len(settings.named_stores) else ():
        yield from _unknown_target(to, list(schedulers.values()), ("allowed_targets",))
    for i, intake in enumerate(settings.intake):
        yield from _intake_disagreements(settings, intake, schedulers, ("intake", i))


def _unknown_target(to: str, schedulers: Sequence[Scheduler], place: Place) -> Iterator[_Disagreement]:
    """Yield a mistake if no message can go to a destination: its sink is unknown, or the sink refuses the address."""
    errors: list[ConfigurationError | InputError] = []
    sink, _, address = to.partition(":")
    for scheduler in schedulers:
        try:
            if sink != HANDLER_TARGET:
                found = scheduler.sink(sink)
                if not to.endswith("*"):
                    found.check(address)
        except (ConfigurationError, InputError) as error:
            errors.append(error)
    if errors and len(errors) == len(schedulers):
        _, allowed = _value_and_rule(errors[0])
        is_unknown = isinstance(errors[0], UnknownSinkError)
        yield place, _shown(to, place) + (f", but there is no sink {cut(sink)!r}" if is_unknown else ""), allowed


def _intake_disagreements(
    settings: Settings, intake: Intake, schedulers: Mapping[str, Scheduler], place: Place
) -> Iterator[_Disagreement]:
    try:
        name = store_of(settings, intake)
    except ConfigurationError as error:
        yield (*place, "store"), *_value_and_rule(error)
        return
    store = settings.named_stores[name]
    targets = Targets(store.allowed_targets)
    for topic in intake.allow or ():
        try:
            targets.check(f"{KAFKA}{topic}")
        except InputError:
            yield (*place, "allow"), repr(topic), f"topics that allowed_targets lists as '{KAFKA}<topic>'"
    if intake.allow is None and not default_topics(store):
        yield (*place, "allow"), "missing", f"a list of topics; or set allowed_targets with '{KAFKA}<topic>'"
    elif name in schedulers:
        try:
            schedulers[name].sink(KAFKA.removesuffix(":"))
            make_box(settings, intake, schedulers)
        except (ConfigurationError, InputError) as error:
            yield (*place, "from"), *_value_and_rule(error)


def _value_and_rule(error: ConfigurationError | InputError) -> tuple[str, str]:
    return error.value, error.allowed


# --- the sources ------------------------------------------------------------------------------------------


class _Environment(EnvSettingsSource):
    """The environment variables `AIODELAY_...`. A value that is not JSON stays text, and the setting checks it."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:  # noqa: ANN401 - any type
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError):
            return value


def _environment_layer(environment: Mapping[str, str]) -> Layer:
    values = _Environment(Settings)()
    places = {
        name: tuple(name.lower().removeprefix(PREFIX.lower()).split("__"))
        for name in environment
        if name.upper().startswith(PREFIX)
    }
    return Layer(values, {place: name for name, place in places.items() if place[0] in values})


def read_configuration(file: Path | None = None, flags: Mapping[Place, tuple[str, object]] = {}) -> Configuration:
    """Read the settings from flags, environment variables and a file, without checking the values.

    Args:
        file: The settings file. None = the file that `AIODELAY_CONFIG` names; without that variable, `aiodelay.toml` in
            the working directory, if it exists.
        flags: The name and the value of each flag, by the path of its setting.

    Raises:
        SettingsError: The file is missing, cannot be read, or is not TOML.
    """
    named = file or (Path(os.environ[CONFIG]) if os.environ.get(CONFIG) else None)
    path = named or Path(FILE)
    try:
        from_file = read_toml(path) if named or path.exists() else Layer({}, {})
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise SettingsError(Problem(str(path), f"not readable: {reason}", "a file in UTF-8")) from error
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, or a number of thousands of digits
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise SettingsError(Problem(str(path), f"not TOML: {why}", "a TOML file")) from None
    layers = Layers(_flag_layer(flags), _environment_layer(os.environ), from_file)
    problems = [*_unknown_variables(os.environ), *_exposed(path, from_file.values)]
    return Configuration(layers, path, partial(read_configuration, file, flags), problems)


def _exposed(path: Path, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a mistake if the file holds secrets and every user of the machine may read it.

    On Windows the function checks nothing: Windows does not keep these rights in the file mode.
    """
    if os.name != "nt" and _holds_secrets(values) and (mode := path.stat().st_mode & 0o777) & stat.S_IROTH:
        value = f"readable by every user (mode {mode:o}), and holds tokens or passwords"
        yield Problem(str(path), value, f"mode 600, or 640 and a group: chmod 640 {path}")


def _holds_secrets(value: object, name: str = "") -> bool:
    if isinstance(value, Mapping):
        return any(_holds_secrets(each, key) for key, each in value.items())
    if isinstance(value, list):
        return name == "tokens" or any(map(_holds_secrets, value))
    return isinstance(value, str) and "***" in masked_url(value)


def _flag_layer(flags: Mapping[Place, tuple[str, object]]) -> Layer:
    values: dict[str, Any] = {}
    for place, (_, value) in flags.items():
        table = values
        for part in place[:-1]:
            table = table.setdefault(str(part), {})
        table[str(place[-1])] = value
    return Layer(values, {place: name for place, (name, _) in flags.items()})
