"""`HandlerSet`: the handlers and subscriptions of one scheduler, with the sources and event types that they use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from aiodelay.core.recurrence import Cron, Every
from aiodelay.core.retry import Retry
from aiodelay.core.validation import check_instance, split_target
from aiodelay.core.values import Conflict, Lane, Message
from aiodelay.errors import ConfigurationError, DuplicateHandlerError, cut, shortened
from aiodelay.handlers.registration import Decoder, EventTypes, check_concurrency, is_event_class, type_name
from aiodelay.handlers.spec import HandlerSpec
from aiodelay.ports import Sink, Source

from .sending.composer import check_rule

__all__ = ["HandlerSet"]

log: logging.Logger = logging.getLogger("aiodelay.handlers")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSet:
    """The handlers and subscriptions of one scheduler. A second handler for the same messages is refused.

    Attributes:
        sources: The sources that a handler may name.
        lanes: The handlers and sinks to serve; None = all.
        retry: The retry policy of handlers without one of their own.
        types: The event classes used so far.
        specs: The handlers, by the name of the lane.
        series: The recurring messages of handlers with `every=`, by the name of the lane.
        subscribed: The specs of subscriptions that take messages without a handler.
    """

    sources: Mapping[str, Source]
    lanes: frozenset[Lane] | None
    retry: Retry
    types: EventTypes = field(default_factory=EventTypes)
    specs: dict[Lane, HandlerSpec] = field(default_factory=dict)
    series: dict[Lane, Message] = field(default_factory=dict)
    subscribed: list[HandlerSpec] = field(default_factory=list)

    def copy(self) -> HandlerSet:
        """Return a copy. Handlers and event types that are added to it are not added to this set."""
        return replace(self, types=self.types.copy(), specs=dict(self.specs), series=dict(self.series))

    # --- add and remove -----------------------------------------------------------------------------------

    def add(self, spec: HandlerSpec, series: Message | None) -> None:
        """Add a handler that `check_free` has accepted, and its series."""
        if series is not None:
            self.series[spec.name] = series
        self.specs[spec.name] = spec

    def remove(self, what: type | str) -> Lane:
        """Remove a handler and its series. Return its lane.

        Raises:
            ConfigurationError: There is no such handler.
        """
        name = self._name_of(what)
        del self.specs[name]
        self.series.pop(name, None)
        return name

    def set_concurrency(self, what: type | str, concurrency: int) -> Lane:
        """Change the concurrency of a handler. Return its lane.

        Raises:
            ConfigurationError: There is no such handler, or the number is out of range.
        """
        name = self._name_of(what)
        self.specs[name] = replace(self.specs[name], concurrency=check_concurrency(concurrency))
        return name

    def subscribe(self, spec: HandlerSpec) -> Callable[[], None]:
        """Add a subscription that takes messages without a handler. Return the function that removes it.

        Raises:
            DuplicateHandlerError: As in `check_free`.
        """
        self.check_free(spec)
        self.subscribed.append(spec)
        return lambda: self.subscribed.remove(spec)

    def _name_of(self, what: type | str) -> Lane:
        name = type_name(what) if isinstance(what, type) and is_event_class(what) else what
        if not isinstance(name, str) or name not in self.specs:
            raise ConfigurationError(
                "handler", shortened(what), ", ".join(sorted(self.specs)) or "none (no handler was added)"
            )
        return name

    # --- checks -------------------------------------------------------------------------------------------

    def check_free(self, spec: HandlerSpec) -> None:
        """Refuse a second handler or subscription for the same messages in this process.

        Raises:
            DuplicateHandlerError: Another handler or subscription has one of the names, or the source.
        """
        for other in (*self.specs.values(), *self.subscribed):
            shared = {other.name, *other.aliases} & {spec.name, *spec.aliases}
            if shared:
                raise DuplicateHandlerError(
                    "handler",
                    f"a second handler for {min(shared)!r}; the first is {other.place}",
                    "one handler per event type",
                )
            if spec.source is not None and spec.source == other.source:
                got = f"{':'.join(spec.source)!r}, which another handler already has: {other.place}"
                raise DuplicateHandlerError("source", got, "one handler per source")

    def checked_retry(self, retry: Retry | None) -> Retry:
        """Return a handler's retry policy; for None, the scheduler's retry policy.

        Raises:
            ConfigurationError: The value is not a retry policy.
        """
        return self.retry if retry is None else check_instance(retry, Retry, "retry")

    def checked_source(self, source: str | None) -> tuple[str, str] | None:
        """Return the name and the address of a handler's source.

        Raises:
            ConfigurationError, TargetError: The scheduler has no such source, or the source no such address.
        """
        if source is None:
            return None
        name, address = split_target(source, field="source")
        if name not in self.sources:
            known = ", ".join(f"{each}:" for each in sorted(self.sources)) or "none"
            allowed = f"{known} (add other sources with the setting sources)"
            raise ConfigurationError("source", shortened(source), allowed)
        self.sources[name].check(address)
        return name, address

    def warn_of_places(self, spec: HandlerSpec, sinks: Mapping[str, Sink]) -> None:
        """Log a warning if a redriven dead letter of the handler's source would go to another server or namespace."""
        name, _ = spec.source or ("", "")
        read, sent = getattr(self.sources.get(name), "place", None), getattr(sinks.get(name), "place", None)
        if read and sent and read != sent:
            log.warning(
                "handler %s reads %s from %s, but the sink %s sends to %s: a redriven dead letter goes there",
                spec.name,
                name,
                read,
                name,
                sent,
            )

    def series_of(self, spec: HandlerSpec, every: Every | Cron) -> Message:
        """Return the recurring message of a handler. The event type is called without arguments.

        Raises:
            ScheduleTimeError: `every` is not a rule.
            ConfigurationError: The handler is for bytes, or its event type cannot be made without arguments.
        """
        check_rule(every)
        class_ = self.types.class_named(spec.name)
        allowed = "handlers of event types that can be made without arguments"
        if class_ is None:
            raise ConfigurationError("every", "given to a handler of bytes", allowed)
        try:
            event = class_()
        except Exception as error:  # noqa: BLE001 - a user's type may raise anything
            got = (
                f"given to the handler of {spec.name}, "
                f"whose event type raises {type(error).__name__} ({cut(str(error))})"
            )
            raise ConfigurationError("every", got, allowed) from None
        return Message(event, every=every, id=f"handler:{spec.name}", conflict=Conflict.keep())

    # --- inspect ------------------------------------------------------------------------------------------

    def serves(self, spec: HandlerSpec) -> bool:
        """Return whether this process serves a handler, given the setting `lanes`."""
        return self.lanes is None or spec.name in self.lanes

    def served(self) -> list[HandlerSpec]:
        """Return the handlers that this process serves."""
        return [spec for spec in self.specs.values() if self.serves(spec)]

    def decoders(self) -> Mapping[Lane, Decoder]:
        """Return the payload decoders by the name of the event type, former names included."""
        return {name: spec.decode for spec in self.specs.values() for name in (spec.name, *spec.aliases)}
