"""The settings of the service: models with defaults and limits.

Settings come from a TOML file, environment variables `AIODELAY_...` and flags; `reading` merges them. A flag wins over
a variable, and a variable wins over the file. A setting that none of the three sources gives has its default.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from aiodelay.backends import registry
from aiodelay.core.durations import parse_duration
from aiodelay.core.validation import Targets, check_namespace
from aiodelay.errors import ConfigurationError, missing_extra, shortened
from aiodelay.scheduler import MOST_PAYLOAD

__all__ = [
    "FILE",
    "PREFIX",
    "ApiSettings",
    "Intake",
    "Limits",
    "LogSettings",
    "Scope",
    "Settings",
    "SinkSettings",
    "StoreSettings",
    "TelemetrySettings",
    "Token",
]

FILE = "aiodelay.toml"
"""The settings file in the working directory, read if no other file is named."""
DATABASE = "aiodelay.db"
"""The SQLite file in the working directory, used as the store if no store is named."""
PREFIX = "AIODELAY_"
ONLY = "default"
"""The name of the store that `store = "..."` sets."""

Scope: TypeAlias = Literal["read", "schedule", "operate"]
"""A right of a token.

`read`: inspect the store. `schedule`: schedule messages, and change single messages. `operate`: all other changes.
"""


# --- values -----------------------------------------------------------------------------------------------


def _duration(value: object) -> timedelta:
    given: Any = value
    return timedelta(milliseconds=parse_duration(given, field="duration", error=ConfigurationError))


def _split(value: object) -> object:
    """Split text such as `a,b` into a list. Environment variables hold lists in this form."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _targets(value: tuple[str, ...]) -> tuple[str, ...]:
    Targets(value)
    return value


def _store_url(url: str) -> str:
    registry.open_store(url, namespace="default", clock=None)
    return url


def _sink_url(url: str) -> str:
    registry.open_sink(url)
    return url


def _intake_url(url: str) -> str:
    _box("memory://", url, ["_"], None)
    return url


def _topic(topic: str) -> str:
    _box("memory://", "kafka://localhost/_", [topic], None)
    return topic


def _box(store: str, source: str, allow: Iterable[str], dead_topic: str | None) -> None:
    """Refuse values that `DelayBox` refuses."""
    try:
        from aiodelay.delay_box import DelayBox  # noqa: PLC0415 - imports a client that only an intake needs
    except ImportError as error:
        raise missing_extra(error, "intake", "kafka") from error
    DelayBox(store, source, allow=list(allow), dead_topic=dead_topic)


_NAME = r"[a-z][a-z0-9.+-]{0,63}"
Length = Annotated[timedelta, BeforeValidator(_duration)]
Name = Annotated[str, Field(pattern=f"^{_NAME}$")]
AllowedTargets = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_targets)]
Namespace = Annotated[str, AfterValidator(check_namespace)]
Topic = Annotated[str, AfterValidator(_topic)]
StoreUrl = Annotated[str, AfterValidator(_store_url)]


class _Part(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_flags_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            allowed = "a value other than true or false"
            raise ConfigurationError(info.field_name or "", shortened(value).lower(), allowed)
        return value


class StoreSettings(_Part):
    """A store. A store without `namespace` or `allowed_targets` uses the value of the whole service."""

    url: StoreUrl = Field(repr=False)
    namespace: Namespace | None = None
    allowed_targets: AllowedTargets | None = None


class SinkSettings(_Part):
    """A sink. Its name is the part of a destination before the colon."""

    url: Annotated[str, AfterValidator(_sink_url)] = Field(repr=False)


class Intake(_Part):
    """A delay box: Kafka topics whose schedule requests go into a store (docs/delay-box.md)."""

    from_: Annotated[str, AfterValidator(_intake_url)] = Field(alias="from", repr=False)
    store: str | None = None
    allow: Annotated[tuple[Topic, ...], BeforeValidator(_split)] | None = None
    countdown_from: Literal["record", "arrival"] = "record"
    dead_topic: Topic | None = None
    begin_after: str | None = None


class Token(_Part):
    """A token with which a caller uses the API. `aiodelay config hash-token` makes a token and its hash."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$", repr=False)
    scopes: Annotated[tuple[Scope, ...], BeforeValidator(_split)] = Field(min_length=1)


class ApiSettings(_Part):
    """The HTTP API.

    Attributes:
        host: The address to listen on. An address other than the loopback needs tokens.
        port: The port to listen on; 0 = any free port.
        read_only: Refuse every change, whatever scopes a token has.
        tokens: The tokens of the callers. Without tokens, every request from this machine is allowed.
        max_body: Most bytes of a request's body, and of a line of a stream.
        max_connections: Most connections at the same time.
        body_timeout: Longest time for the headers of a request to arrive, and then for the body. Also the longest pause
            in a stream, and the longest time in which a client may read nothing of an answer.
        rate: Most requests a second from one token or address. Twice this number may come at once. 0 = no limit.
        max_page: Most items of a page.
        environment: The text of the page's badge, such as "production".
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8080, ge=0, le=65_535)
    read_only: bool = True
    tokens: tuple[Token, ...] = ()
    max_body: int = Field(default=1 << 20, ge=1_024, le=1 << 30)
    max_connections: int = Field(default=500, ge=1, le=100_000)
    body_timeout: Length = Field(default=timedelta(seconds=10), gt=timedelta())
    rate: int = Field(default=500, ge=0, le=500_000)
    max_page: int = Field(default=500, ge=1, le=1_000)
    environment: str = Field(default="", max_length=32)


class Limits(_Part):
    """Limits for payloads, alarms and readiness, and for the time that the service takes to start and to end.

    Attributes:
        max_payload: Most bytes of a message's payload.
        overdue: The service logs an alarm if a message is overdue for longer than this duration.
        memory: The service is not ready if a Redis server uses more than this part of its maxmemory.
        probe_every: Shortest time between two probe messages. A failed probe is repeated sooner.
        probe_timeout: Longest time for a store to answer a probe.
        open_timeout: Longest wait, at the start, for a store, a sink or an intake that does not answer.
        leave: Time after a signal in which the service still serves requests, but says that it is not ready.
        drain: Longest wait after `leave` for deliveries in flight to end.
    """

    max_payload: int = Field(default=262_144, ge=1, le=MOST_PAYLOAD)
    overdue: Length = Field(default=timedelta(minutes=5), gt=timedelta())
    memory: float = Field(default=0.9, gt=0, le=1)
    probe_every: Length = timedelta(seconds=30)
    probe_timeout: Length = timedelta(seconds=5)
    open_timeout: Length = timedelta(seconds=30)
    leave: Length = timedelta()
    drain: Length = timedelta(seconds=30)


class LogSettings(_Part):
    """The log, on stderr. The format `auto` is text on a terminal, and JSON otherwise."""

    format: Literal["auto", "json", "text"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TelemetrySettings(_Part):
    """The port at which Prometheus reads metrics.

    The usual `OTEL_...` variables set where metrics and traces go by OTLP.

    Attributes:
        prometheus_host: The address of the port. The port needs no token: everybody who reaches it can read.
        prometheus_port: The port; 0 = any free port; None = no port.
    """

    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    prometheus_port: int | None = Field(default=None, ge=0, le=65_535)


class Settings(BaseSettings):
    """All settings of the service. `reading` reads them; docs/operate.md lists each one."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, env_prefix=PREFIX, env_nested_delimiter="__"
    )

    store: StoreUrl | None = Field(default=None, repr=False)
    stores: dict[Name, StoreSettings] = Field(default_factory=dict)
    namespace: Namespace = "default"
    allowed_targets: AllowedTargets = ()
    sinks: dict[Name, SinkSettings] = Field(default_factory=dict)
    intake: tuple[Intake, ...] = ()
    api: ApiSettings = ApiSettings()
    limits: Limits = Limits()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the arguments: `reading` has merged the sources already, and knows the origin of each value."""
        return (init_settings,)

    @property
    def named_stores(self) -> dict[str, StoreSettings]:
        """The stores by name. A store without `namespace` or `allowed_targets` gets the value of the service."""
        only = StoreSettings.model_construct(url=self.store or f"sqlite:///{DATABASE}")
        return {
            name: store.model_copy(
                update={
                    "namespace": store.namespace or self.namespace,
                    "allowed_targets": self.allowed_targets if store.allowed_targets is None else store.allowed_targets,
                }
            )
            for name, store in (self.stores or {ONLY: only}).items()
        }
