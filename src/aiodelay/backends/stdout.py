"""The sink `stdout:`, which writes one JSON line per message to standard output."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Self, TextIO

import msgspec

from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import Delivery, Demand, SendOutcome, Sent
from aiodelay.errors import SinkUnavailableError

__all__ = ["StdoutSink", "open_stdout"]


class StdoutSink:
    """Writes one JSON object per line. Messages reach it with `to="stdout:<address>"`.

    An object has the keys `to`, `id`, `delivery_id`, `due` (epoch ms), `lateness` (ms) and `attempt`. A payload that is
    UTF-8 text is in the key `payload`. Any other payload is in the key `payload_base64`.

    Args:
        stream: The stream to write to. With None, the sink writes to standard output.
    """

    name: str = "stdout"
    limits: Demand = Demand(100)

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def check(self, address: str) -> None:
        """Accept every address. The sink only prints the address."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Write one line for each message. Return one outcome for each message, in order.

        Raises:
            SinkUnavailableError: The stream is closed or broken.
        """
        stream = self._stream or sys.stdout
        lines = "".join(_line(delivery) for delivery in deliveries)
        try:
            stream.write(lines)
            stream.flush()
        except (OSError, ValueError) as error:
            raise SinkUnavailableError(self.name, type(error).__name__) from error
        return [Sent()] * len(deliveries)


def _line(delivery: Delivery) -> str:
    envelope = delivery.envelope
    line: dict[str, object] = {
        "to": f"{envelope.lane}:{envelope.address}",
        "id": envelope.id,
        "delivery_id": delivery.delivery_id,
        "due": delivery.due_ms,
        "lateness": delivery.lateness_ms,
        "attempt": delivery.attempt,
    }
    try:
        line["payload"] = None if envelope.encoding == "null" else envelope.payload.decode()
    except UnicodeDecodeError:
        line["payload_base64"] = base64.b64encode(envelope.payload).decode()
    return msgspec.json.encode(line).decode() + "\n"


def open_stdout(url: str) -> StdoutSink:
    """Return a sink for the URL `stdout:`."""
    UrlOptions(url).finish(bare=True)
    return StdoutSink()
