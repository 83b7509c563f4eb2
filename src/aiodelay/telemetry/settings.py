"""`Telemetry`: what a scheduler is told about traces and metrics. Nothing here imports OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.validation import check_flag
from aiodelay.errors import ConfigurationError, shortened

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["Telemetry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """How a scheduler emits traces and metrics; what, is in docs/telemetry.md.

    Without a provider, given or set globally before the scheduler opens, nothing is emitted and nothing is spent.

    Args:
        delayed: `new_trace`: a delivery begins a trace of its own, linked to the span that scheduled the message.
            `continue`: it goes on in that span's trace where the message was scheduled less far ahead than
            `continue_below`. Decided when a message is scheduled, and kept with it; what recurs never goes on.
        continue_below: See there.
        create_spans: Of `schedule_many`: a `create` span for each message too. It costs one per message.
        propagate_baggage: Keep baggage with messages; it would be stored as long as they are, and is often personal.
        tracing: Whether spans are emitted.
        metrics: Whether metrics are.
        tracer_provider: Instead of the global one.
        meter_provider: Instead of the global one.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    delayed: Literal["new_trace", "continue"] = "new_trace"
    continue_below: Duration = "30s"
    create_spans: bool = False
    propagate_baggage: bool = False
    tracing: bool = True
    metrics: bool = True
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None

    def __post_init__(self) -> None:
        if self.delayed not in ("new_trace", "continue"):
            raise ConfigurationError("delayed", shortened(self.delayed), "'new_trace' or 'continue'")
        parse_duration(self.continue_below, field="continue_below", error=ConfigurationError)
        for name in ("create_spans", "propagate_baggage", "tracing", "metrics"):
            check_flag(getattr(self, name), name)

    @property
    def continue_below_ms(self) -> int:
        """Messages that are due sooner go on in their trace, in ms; 0 = none does."""
        if self.delayed == "new_trace":
            return 0
        return parse_duration(self.continue_below, field="continue_below", error=ConfigurationError)
