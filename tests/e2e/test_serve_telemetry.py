"""The service's metrics and traces: at its port for Prometheus, and sent by OTLP."""

from __future__ import annotations

import gzip
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from aiodelay.errors import ConfigurationError
from aiodelay.telemetry.emitting import emitting
from tests.support.service import Service, until_ready
from tests.support.waiting import until_sync

pytestmark = pytest.mark.timeout(90)

FILE = """\
store = "memory://"
allowed_targets = ["stdout:*"]

[sinks.stdout]
url = "stdout:"

[api]
read_only = false

[telemetry]
prometheus_port = 0
"""


def schedule(client: httpx.Client, delay: str) -> None:
    answer = client.post("/v1/messages", json={"to": "stdout:out", "payload": "x", "delay": delay})
    assert answer.status_code < 300, answer.text


def test_prometheus_reads_at_a_port_of_its_own(tmp_path: Path) -> None:
    with Service(tmp_path, FILE) as service, service.client() as client:
        until_ready(client)
        found = re.search(r"http://[^\s\"]+/metrics", "\n".join(service.err.seen))
        assert found is not None
        schedule(client, "10ms")

        def lateness() -> str:
            text = httpx.get(found[0], trust_env=False).text
            return text if "aiodelay_delivery_lateness_seconds_count{" in text else ""

        text = until_sync(lateness, "its lateness is measured")
    assert "http_server" not in text, "metrics of each request to the API are not among them"
    assert 'messaging_destination_name="stdout:out"' in text
    assert 'service_name="aiodelay"' in text  # of target_info


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent by OTLP over HTTP."""

    taken: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.taken.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    taken: list[tuple[str, bytes]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Collector", (Collector,), {"taken": taken}))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    server.server_close()


def test_traces_and_metrics_are_sent_by_otlp_and_the_last_ones_at_the_end(tmp_path: Path) -> None:
    file = FILE.partition("\n[telemetry]")[0]
    with collector() as (endpoint, taken):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "shop"}
        with Service(tmp_path, file, environment) as service, service.client() as client:
            until_ready(client)
            schedule(client, "10ms")
            with client.stream("GET", "/live?view=hour") as tab:
                assert next(tab.iter_lines())
            service.out.wait_for("x")
            service.send(signal.SIGTERM)
            assert service.exit_code() == 0
    spans, metrics, services, failed = set(), set(), set(), list[str]()
    for path, body in taken:
        if path == "/v1/traces":
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans |= {span.name for scope in each.scope_spans for span in scope.spans}
                failed += [span.name for scope in each.scope_spans for span in scope.spans if span.status.code == 2]
                services |= {a.value.string_value for a in each.resource.attributes if a.key == "service.name"}
        else:
            for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                metrics |= {metric.name for scope in each.scope_metrics for metric in scope.metrics}
    assert {"schedule stdout:out", "deliver stdout:out"} <= spans
    assert "aiodelay.delivery.lateness" in metrics
    assert failed == [], "a closed tab is no error"
    assert services == {"shop"}


@pytest.mark.parametrize(
    ("environment", "named"),
    [({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc")],
)
def test_what_is_not_spoken_is_named(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], named: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=named), emitting("127.0.0.1", None, "x"):
        pass


def test_a_port_that_is_taken_is_named() -> None:
    with collector() as (endpoint, _):
        port = int(endpoint.rpartition(":")[2])
        with (
            pytest.raises(ConfigurationError, match=f"prometheus_port.* {port} "),
            emitting("127.0.0.1", port, "prometheus_port"),
        ):
            pass
