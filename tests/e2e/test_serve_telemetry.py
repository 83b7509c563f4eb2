"""The service's metrics and traces, at its Prometheus port and sent by OTLP."""

from __future__ import annotations

import gzip
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from aiodelay.errors import ConfigurationError
from aiodelay.telemetry.emitting import emitting
from tests.support.service import Service, text_at, until_ready
from tests.support.waiting import until_sync

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


WITHOUT_PORT = FILE.partition("\n[telemetry]")[0]


def schedule(client: httpx.Client, delay: str) -> str:
    """Schedule a message; return its id."""
    answer = client.post("/v1/messages", json={"to": "stdout:out", "payload": "x", "delay": delay})
    assert answer.status_code < 300, answer.text
    return str(answer.json()["id"])


def port_for_prometheus(service: Service) -> str | None:
    """Return where Prometheus reads, by the log so far."""
    found = re.search(r"http://[^\s\"]+/metrics", "\n".join(service.err.seen))
    return found and found[0]


def test_prometheus_reads_at_a_port_of_its_own(tmp_path: Path) -> None:
    with Service(tmp_path, FILE) as service, service.client() as client:
        until_ready(client)
        port = port_for_prometheus(service)
        assert port is not None
        schedule(client, "10ms")

        def lateness() -> str:
            text = text_at(port)
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
    with collector() as (endpoint, taken):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "shop"}
        with Service(tmp_path, WITHOUT_PORT, environment) as service, service.client() as client:
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


class Combination(NamedTuple):
    """Settings of telemetry, and who is then told."""

    environment: Mapping[str, str]
    has_port: bool
    sends: frozenset[str]


ALL, TRACES, METRICS = "OTEL_EXPORTER_OTLP_ENDPOINT", "/v1/traces", "/v1/metrics"
COMBINATIONS = {
    "prometheus and OTLP": Combination({ALL: ""}, True, frozenset({TRACES, METRICS})),
    "traces alone": Combination({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": TRACES}, False, frozenset({TRACES})),
    "metrics alone": Combination({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": METRICS}, False, frozenset({METRICS})),
    "disabled": Combination({ALL: "", "OTEL_SDK_DISABLED": "true"}, True, frozenset()),
}


@pytest.mark.parametrize("combination", COMBINATIONS.values(), ids=COMBINATIONS)
def test_the_service_is_ready_and_works_with_every_setting_of_telemetry(
    tmp_path: Path, combination: Combination
) -> None:
    file = FILE if combination.has_port else WITHOUT_PORT
    with collector() as (endpoint, taken):
        environment = {
            name: value if value == "true" else f"{endpoint}{value}" for name, value in combination.environment.items()
        }
        with Service(tmp_path, file, environment) as service, service.client() as client:
            until_ready(client)
            ahead = schedule(client, "1h")
            assert client.delete(f"/v1/messages/{ahead}").json()["outcome"] == "cancelled"
            schedule(client, "10ms")
            service.out.wait_for("x")
            assert client.get("/readyz").status_code == 200
            port = port_for_prometheus(service)
            assert (port is not None) is (combination.has_port and bool(combination.sends))
            assert port is None or "aiodelay_cancellations_total" in text_at(port)
            service.send(signal.SIGTERM)
            assert service.exit_code() == 0
    assert {path for path, _ in taken} == combination.sends


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
