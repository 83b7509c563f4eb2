"""`RootSampling`: decides whether a new trace is sampled, before anything else of its first span is made.

OpenTelemetry's SDK takes a third of the time of a delivery for a span that is not sampled. This module knows samplers
of the SDK that look only at the trace id: it makes the id and compares it, as the sampler would. `root_sampling_of`
first compares both on providers of its own. If they differ, the SDK decides about each span.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, final

from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, Tracer

__all__ = ["RootSampling", "UnsampledSpan", "root_sampling_of"]

LOWER_BITS = (1 << 64) - 1
"""The bits of a trace id that decide whether the trace is sampled."""
RANDOM_TRACE_ID: int = getattr(TraceFlags, "RANDOM_TRACE_ID", 0)
"""The flag of a trace whose id is random. Older versions of OpenTelemetry have no such flag."""


class RootSampling:
    """Decides by the trace id whether a new trace is sampled.

    Args:
        tracer: The SDK's tracer.
        bound: A trace is sampled if the lower 64 bits of its id are less than this number.
        flags: The flags of spans that are not sampled.
    """

    def __init__(self, tracer: Any, bound: int, flags: TraceFlags) -> None:  # noqa: ANN401 - the SDK may be missing
        self._tracer, self._ids, self._bound = tracer, tracer.id_generator, bound
        self.flags: TraceFlags = flags
        self._new_trace_id: Callable[[], int] = self._ids.generate_trace_id

    def decide(self) -> Tracer | UnsampledSpan:
        """Return the tracer that starts the first span of a sampled trace. If the trace is not sampled, return a span.

        The tracer is for one span.
        """
        trace_id = self._new_trace_id()
        if trace_id & LOWER_BITS >= self._bound:
            return UnsampledSpan(trace_id, self)
        tracer: Any = copy.copy(self._tracer)
        tracer.id_generator = _GivenTraceId(trace_id, self._ids)
        decided: Tracer = tracer
        return decided

    def new_span_id(self) -> int:
        """Return a new span id."""
        span_id: int = self._ids.generate_span_id()
        return span_id


class _GivenTraceId:
    """A generator of ids that has one trace id. The user's generator gives all other answers."""

    def __init__(self, trace_id: int, ids: Any) -> None:  # noqa: ANN401 - the SDK may be missing
        self._trace_id, self._ids = trace_id, ids

    def generate_trace_id(self) -> int:
        return self._trace_id

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method of the user's generator
        return getattr(self._ids, name)


@final
class UnsampledSpan(NonRecordingSpan):
    """A span that is not sampled. Its span id is made if somebody asks for it, such as a log or another service."""

    _made: SpanContext | None = None

    def __init__(self, trace_id: int, sampling: RootSampling) -> None:
        self._trace_id, self._sampling = trace_id, sampling

    def get_span_context(self) -> SpanContext:
        """Return the trace id, a span id and the flags."""
        if self._made is None:
            sampling = self._sampling
            self._made = SpanContext(
                self._trace_id, sampling.new_span_id(), is_remote=False, trace_flags=sampling.flags
            )
        return self._made

    def __repr__(self) -> str:
        return f"NonRecordingSpan({self.get_span_context()!r})"


def root_sampling_of(tracer: Tracer) -> RootSampling | None:
    """Return the decisions of a tracer about new traces; None if only the tracer itself can decide."""
    try:
        from opentelemetry.sdk.trace import Tracer as SdkTracer  # noqa: PLC0415 - the SDK may be missing
    except ImportError:
        return None
    return _sampling_of(tracer) if type(tracer) is SdkTracer and _is_known() else None


def _sampling_of(tracer: Any) -> RootSampling | None:  # noqa: ANN401 - as above
    from opentelemetry.sdk.trace import sampling  # noqa: PLC0415 - as above

    root: Any = tracer.sampler
    if isinstance(root, sampling.ParentBased) and type(root).should_sample is sampling.ParentBased.should_sample:
        root = root._root
    if root is sampling.ALWAYS_OFF:
        bound = 0
    elif type(root) is sampling.TraceIdRatioBased and root.bound <= LOWER_BITS:
        bound = root.bound
    else:
        return None
    is_random = RANDOM_TRACE_ID and tracer.id_generator.is_trace_id_random()
    return RootSampling(tracer, bound, TraceFlags(RANDOM_TRACE_ID if is_random else 0))


@cache
def _is_known() -> bool:
    """Return whether this module decides about traces like the installed SDK, with the same ids and flags."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - as above
    from opentelemetry.sdk.trace import TracerProvider, sampling  # noqa: PLC0415
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415

    def said_of(span: Span) -> object:
        context = span.get_span_context()
        return context.trace_id, context.trace_flags, context.trace_state, context.is_remote, span.is_recording()

    half = (LOWER_BITS + 1) // 2
    try:
        for lower in (1, half - 1, half, LOWER_BITS):
            ids: Any = _GivenTraceId(1 << 64 | lower, RandomIdGenerator())
            resource, sampler = Resource.get_empty(), sampling.TraceIdRatioBased(0.5)
            provider = TracerProvider(sampler, resource, shutdown_on_exit=False, id_generator=ids)
            tracer = provider.get_tracer("aiodelay")
            found = _sampling_of(tracer)
            assert found is not None
            decided = found.decide()
            ours = decided if isinstance(decided, UnsampledSpan) else decided.start_span("tried")
            if said_of(ours) != said_of(tracer.start_span("tried")):
                return False
    except Exception:  # noqa: BLE001 - another version of the SDK may raise anything
        return False
    return True
