"""What the service is told: a TOML file, environment variables `AIODELAY_...` over it, flags over both; or nothing."""

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
"""What is read from the working directory where no file is named."""
DATABASE = "aiodelay.db"
"""Where messages are kept where no store is named: in the working directory."""
PREFIX = "AIODELAY_"
ONLY = "default"
"""What the one store of `store = "..."` is called."""

Scope: TypeAlias = Literal["read", "schedule", "operate"]
"""What a token allows: to look; to schedule, replace and cancel; all else."""


# --- values -----------------------------------------------------------------------------------------------


def _duration(value: object) -> timedelta:
    given: Any = value
    return timedelta(milliseconds=parse_duration(given, field="duration", error=ConfigurationError))


def _split(value: object) -> object:
    """Take `a,b` for a list of two: so lists are written in environment variables."""
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
    """Refuse what no delay box could be made of."""
    try:
        from aiodelay.delay_box import DelayBox  # noqa: PLC0415 - needs a client that a service without intake does not
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
            raise ConfigurationError(info.field_name or "", shortened(value).lower(), "no true or false")
        return value


class StoreSettings(_Part):
    """A store, and what may be scheduled through it; what is not said is as for the whole service."""

    url: StoreUrl = Field(repr=False)
    namespace: Namespace | None = None
    allowed_targets: AllowedTargets | None = None


class SinkSettings(_Part):
    """A system that messages go to; its name stands before the colon in `to`."""

    url: Annotated[str, AfterValidator(_sink_url)] = Field(repr=False)


class Intake(_Part):
    """Kafka topics from which requests are taken into a store: a delay box (docs/delay-box.md)."""

    from_: Annotated[str, AfterValidator(_intake_url)] = Field(alias="from", repr=False)
    store: str | None = None
    allow: Annotated[tuple[Topic, ...], BeforeValidator(_split)] | None = None
    countdown_from: Literal["record", "arrival"] = "record"
    dead_topic: Topic | None = None
    begin_after: str | None = None


class Token(_Part):
    """Who may use the API. `aiodelay config hash-token` makes one."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$", repr=False)
    scopes: Annotated[tuple[Scope, ...], BeforeValidator(_split)] = Field(min_length=1)


class ApiSettings(_Part):
    """The HTTP API.

    Attributes:
        host: Where it listens; beyond the loopback only with tokens.
        port: 0 = any free one.
        read_only: Refuse whatever changes something, whoever asks.
        tokens: Without any, whoever reaches it may use it.
        max_body: Most bytes of a request's body, and of a line of a stream.
        max_connections: Most connections at once.
        body_timeout: Longest time for a request's headers to arrive, then for its body, and for a stream or the reader
            of an answer to stand still.
        rate: Most requests a second of one token or address, and half of what may come at once; 0 = any number.
        max_page: Most items of a page.
        environment: What the page's badge says, such as "production".
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
    """When an alarm is logged, when the service is no longer ready, how long it takes for its start and its end.

    Attributes:
        max_payload: Most bytes of a message.
        overdue: Age of the oldest overdue message from which an alarm is logged.
        memory: Part of a Redis server's maxmemory from which it is not ready.
        probe_every: How often a probe is written, at most; one that failed is repeated sooner.
        probe_timeout: How long a store may take to answer.
        open_timeout: How long the service waits at its start for a store, a sink or an intake that does not answer.
        leave: How long it goes on after a signal while it says that it is not ready.
        drain: Then, how long deliveries may take to end.
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
    """The log, on stderr. `auto` is text on a terminal, and JSON elsewhere."""

    format: Literal["auto", "json", "text"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TelemetrySettings(_Part):
    """Where Prometheus finds metrics; by OTLP they and traces go where the usual `OTEL_...` variables say.

    Attributes:
        prometheus_host: Where the port is open. Whoever reaches it may read: it asks for no token.
        prometheus_port: 0 = any free one; None = none is opened.
    """

    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    prometheus_port: int | None = Field(default=None, ge=0, le=65_535)


class Settings(BaseSettings):
    """All of it. `reading` reads it; each field stands in docs/operate.md."""

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
        """Take what is given: `reading` has merged the sources, and knows where each value comes from."""
        return (init_settings,)

    @property
    def named_stores(self) -> dict[str, StoreSettings]:
        """The stores by name, with all that they do not say themselves."""
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
