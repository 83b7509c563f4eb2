"""`emitting`: exports traces and metrics by OTLP, as `OTEL_...` variables say, and serves metrics for Prometheus."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from aiodelay.core.version import __version__
from aiodelay.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

__all__ = ["emitting"]

log: logging.Logger = logging.getLogger("aiodelay.telemetry")

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
SPOKEN = "http/protobuf"


@contextmanager
def emitting(host: str, port: int | None, settings: str) -> Iterator[None]:
    """Set up OpenTelemetry for a block, if an exporter is configured. At the end of the block, send the remaining data.

    Args:
        host: The address at which Prometheus reads metrics.
        port: The port for Prometheus; 0 = any free port, None = no port.
        settings: The names of the options or settings that gave `host` and `port`, for error texts.

    Raises:
        MissingExtraError: The SDK of OpenTelemetry is not installed.
        ConfigurationError: The port is in use; or the OTLP protocol is not supported; or the program has set a meter
            provider itself, so that the port would show no metrics.
    """
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    traces, measures = (not is_off and _is_sent("TRACES"), not is_off and _is_sent("METRICS"))
    port = None if is_off else port
    if not traces and not measures and port is None:
        yield
        return
    try:
        from opentelemetry.sdk import resources  # noqa: PLC0415 - needed only if an exporter is configured
    except ImportError as error:
        raise MissingExtraError("telemetry", f"missing {error.name}", "pip install 'aiodelay[telemetry]'") from error
    named = {} if _is_named() else {"service.name": "aiodelay"}
    resource = resources.Resource.create({**named, "service.version": __version__})
    with ExitStack() as stack:
        if traces:
            _trace(resource, stack)
        readers = []
        if measures:
            readers.append(_sending_reader())
        if port is not None:
            readers.append(_prometheus_reader(host, port, settings, stack))
        if readers:
            _measure(resource, readers, stack)
        yield


def _is_sent(signal: str) -> bool:
    """Return whether the environment variables configure OTLP for a signal: `TRACES` or `METRICS`."""
    given = os.environ.get(ENDPOINT) or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    wanted = os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp").lower()
    if not given or wanted == "none":
        return False
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or os.environ.get(PROTOCOL, SPOKEN)
    if protocol != SPOKEN:
        raise ConfigurationError(PROTOCOL, repr(protocol), repr(SPOKEN))
    return True


def _is_named() -> bool:
    """Return whether the environment variables set the name of the service."""
    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name=" in attributes


def _trace(resource: Resource, stack: ExitStack) -> None:
    from opentelemetry import trace  # noqa: PLC0415 - as above
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    stack.callback(provider.shutdown)
    trace.set_tracer_provider(provider)


def _sending_reader() -> MetricReader:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

    return PeriodicExportingMetricReader(OTLPMetricExporter())


def _prometheus_reader(host: str, port: int, settings: str, stack: ExitStack) -> MetricReader:
    from opentelemetry import metrics  # noqa: PLC0415 - as above
    from opentelemetry.exporter.prometheus import PrometheusMetricReader  # noqa: PLC0415 - as above
    from prometheus_client import start_http_server  # noqa: PLC0415

    if not type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics"):
        raise ConfigurationError(
            settings,
            "given, but the program sets a meter provider itself",
            "a reader for Prometheus at the program's own meter provider",
        )
    try:
        server, _ = start_http_server(port, host)
    except OSError as error:
        raise ConfigurationError(settings, f"{host} {port} ({error.strerror})", "an address that is free") from None
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    log.info("metrics for Prometheus at http://%s:%d/metrics", host, server.server_port)
    return PrometheusMetricReader()


def _measure(resource: Resource, readers: list[MetricReader], stack: ExitStack) -> None:
    from opentelemetry import metrics  # noqa: PLC0415 - as above
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415

    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    stack.callback(provider.shutdown)
    metrics.set_meter_provider(provider)
