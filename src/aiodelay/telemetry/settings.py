"""`Telemetry`: the settings of a scheduler for traces and metrics. This module does not import OpenTelemetry."""

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
    """Settings for the traces and metrics of a scheduler. docs/telemetry.md lists the spans and the metrics.

    A provider must be given here, or be set globally before the scheduler opens. Without a provider, nothing is emitted
    and telemetry costs nothing.

    Args:
        delayed: `new_trace`: a delivery begins a new trace, with a link to the span that scheduled the message.
            `continue`: the delivery goes on in the trace of the schedule span, if the message was scheduled with a
            delay shorter than `continue_below`. Deliveries of a recurring message always begin new traces. The choice
            is stored with the message.
        continue_below: `continue` continues the trace of a message with a delay shorter than this.
        create_spans: Whether `schedule_many` also makes a `create` span for each message. This costs one span per
            message.
        propagate_baggage: Whether to store baggage with messages. The baggage then stays in the store as long as the
            message. Baggage often holds personal data.
        tracing: Whether to emit spans.
        metrics: Whether to emit metrics.
        tracer_provider: The provider of spans, instead of the global provider.
        meter_provider: The provider of metrics, instead of the global provider.

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
        """The delay in ms below which a delivery continues the trace of the schedule call; 0 = it never does."""
        if self.delayed == "new_trace":
            return 0
        return parse_duration(self.continue_below, field="continue_below", error=ConfigurationError)
