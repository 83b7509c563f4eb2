"""`Attempt` and `Run`: one attempt to deliver a message. `HandlerMeasures`: the measurements of one handler's runs."""

from __future__ import annotations

import contextvars

from msgspec import Struct
from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import Span

from aiodelay.core.values import Dead, Done, Settlement

from . import names
from .instruments import Attributes, Instruments, loop_clock
from .tracing import fail, fail_as

__all__ = ["Attempt", "BatchRun", "HandlerMeasures", "Run"]


class Attempt(Struct, eq=False, gc=False):
    """One attempt to deliver a message, without a span or a measurement of its own.

    This is a message of a batch for a sink, whose span ends with the batch. It is also a run of a handler, if its span
    is not recorded and metrics are off.

    Attributes:
        context: The context of the attempt's span.
    """

    context: Context

    def enter(self, variables: contextvars.Context) -> None:
        """Make the attempt's span the current span of the context in which the handler runs."""
        variables.run(contexts.attach, self.context)

    def failed(self, error: BaseException) -> None:
        """Record the error that a handler raised."""

    def end(self, settlement: Settlement | None) -> None:
        """End the attempt. The settlement is None if the claim was not settled; its lease then ends the claim."""


class BatchRun(Struct, eq=False, gc=False):
    """One run of a handler of batches. Each of its messages has an `Attempt` too.

    Attributes:
        context: The context of the run's span.
        span: The span of the run.
    """

    context: Context
    span: Span

    def enter(self, variables: contextvars.Context) -> None:
        """Make the run's span the current span of the context in which the handler runs."""
        variables.run(contexts.attach, self.context)

    def end(self, error: BaseException | None) -> None:
        """End the span."""
        if error is not None:
            fail(self.span, error)
        self.span.end()


class HandlerMeasures:
    """The measurements of one handler's runs, while a scheduler is open.

    They are looked up once for each handler, because a look-up by labels takes longer than adding a value.

    Args:
        instruments: Hold the counts and durations.
        destination: The name of the handler in spans and labels.
        labels: The labels of the count and of the durations.
        own_labels: The labels of the lateness.
    """

    def __init__(self, instruments: Instruments, destination: str, labels: Attributes, own_labels: Attributes) -> None:
        self.destination = destination
        self._instruments, self._labels = instruments, labels
        self._count = instruments.count(names.CONSUMED, labels)
        self._lateness = instruments.values(names.DELIVERY_LATENESS, own_labels)
        self._durations = instruments.values(names.PROCESS_DURATION, labels)
        self._now_s = loop_clock()

    def begin(self, context: Context, span: Span | None, lateness_ms: int | None) -> Attempt:
        """Begin to measure a run.

        Args:
            context: The context of the span.
            span: The span, which ends with the run; None if no span is recorded.
            lateness_ms: The start of the run minus the due time; None for a retry, which is late by its wait.
        """
        if span is None and not self._instruments.is_on:
            return Attempt(context)
        self._count.add(1)
        if lateness_ms is not None:
            self._lateness.add(lateness_ms / 1000, None if span is None else context)
        return Run(context, self, span, self._now_s())

    def end(self, run: Run) -> None:
        """Record the duration of a run."""
        took_s, sampled_in = self._now_s() - run.started_s, None if run.span is None else run.context
        if run.error:
            labels = {**self._labels, names.ERROR_TYPE: run.error}
            self._instruments.record(names.PROCESS_DURATION, took_s, labels, sampled_in)
        else:
            self._durations.add(took_s, sampled_in)


class Run(Attempt, eq=False, gc=False):
    """One run of a handler, with its span or its measurements.

    Attributes:
        measures: The measurements of the handler's runs.
        span: The span; None if no span is recorded.
        started_s: The start of the run, in the time of the event loop.
        error: The kind of the failure; empty for a run without a failure.
    """

    measures: HandlerMeasures
    span: Span | None
    started_s: float
    error: str = ""

    def failed(self, error: BaseException) -> None:
        """Record the error that a handler raised."""
        self.error = type(error).__qualname__ if self.span is None else fail(self.span, error)

    def end(self, settlement: Settlement | None) -> None:
        """End the run. The settlement is None if the claim was not settled; its lease then ends the claim."""
        if not self.error and not isinstance(settlement, Done):
            self._end_without_error(settlement)
        self.measures.end(self)
        if self.span is not None:
            self.span.end()

    def _end_without_error(self, settlement: Settlement | None) -> None:
        """Note why the message is given up, or is left to its lease, although the handler did not raise."""
        if settlement is None:
            self.error = "left_to_lease"
        elif isinstance(settlement, Dead):
            self.error = settlement.reason
        if self.error and self.span is not None:
            fail_as(self.span, self.error)
