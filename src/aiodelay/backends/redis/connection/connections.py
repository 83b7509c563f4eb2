"""Base classes of the sinks and sources on a Redis server: `Connected` keeps a client, and `ConnectedSink` sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Delivery, Demand, NotTaken, SendOutcome, Sent
from aiodelay.errors import ConfigurationError, SinkUnavailableError, TargetError, shortened

from .client import Client
from .faults import Fault
from .options import Options, read_url

__all__ = ["MOST_MESSAGES", "Connected", "ConnectedSink", "check_integer", "milliseconds"]

MOST_MESSAGES = 1 << 40


def check_integer(name: str, value: int, most: int) -> int:
    """Return the value of an option after a check of its type and range.

    Raises:
        ConfigurationError: The value is not an integer from 0 to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ConfigurationError(name, shortened(value), f"an integer from 0 to {most}")
    return value


def milliseconds(max_age: Duration | None) -> int:
    """Return the option `max_age` in ms, or 0 if there is no limit.

    Raises:
        ConfigurationError: The value is not a duration.
    """
    return 0 if max_age is None else parse_duration(max_age, field="max_age", error=ConfigurationError, least_ms=1)


class Connected:
    """A base class with a client of one server. The client is open inside an `async with` block.

    Args:
        server: A URL in the form of a Redis store's URL, or the options that were read from it.

    Raises:
        ConfigurationError: The URL is not allowed.
    """

    def __init__(self, server: str | Options) -> None:
        self.options: Options = read_url(server) if isinstance(server, str) else server
        self._client: Client | None = None
        self._openings = 0

    async def __aenter__(self) -> Self:
        self._openings += 1  # An object may be a sink and a source. The scheduler then opens the object twice.
        self._client = self._client or Client(self.options)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._openings = max(self._openings - 1, 0)
        if self._client is not None and self._openings == 0:
            client, self._client = self._client, None
            await client.aclose()


class ConnectedSink(Connected, ABC):
    """A sink that sends all messages for the same address in one call."""

    name: str
    limits: Demand = Demand(MAX_CLAIM_MESSAGES)

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Send the messages, with one call for each address. Return one outcome for each message, in order.

        Raises:
            SinkUnavailableError: The server did not answer. It may have taken some of the messages.
        """
        by_address: dict[str, list[int]] = {}
        for i, delivery in enumerate(deliveries):
            by_address.setdefault(delivery.envelope.address, []).append(i)
        outcomes: list[SendOutcome] = [NotTaken("not sent")] * len(deliveries)
        for address, places in by_address.items():
            try:
                sent = await self._send_to(address, [deliveries[i] for i in places])
            except SinkUnavailableError:
                if not any(isinstance(outcome, Sent) for outcome in outcomes):
                    raise
                break  # After an error, the scheduler would send all messages again, also those already sent.
            for i, outcome in zip(places, sent, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def _send_to(self, address: str, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        assert self._client is not None
        try:
            return await self._pushed(self._client, address, deliveries)
        except TargetError as error:
            return [NotTaken(str(error))] * len(deliveries)
        except Fault as fault:
            if fault.is_connection or not (fault.kind == "unknown" or fault.reason.startswith("NOPERM")):
                raise SinkUnavailableError(f"{self.name} at {self.options.name}", fault.reason) from fault
            return [NotTaken(fault.reason)] * len(deliveries)

    @abstractmethod
    async def _pushed(self, client: Client, address: str, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Send the messages for one address. Return one outcome for each message, in order.

        Raises:
            TargetError: No message for this address can ever be sent.
            Fault: The server did not answer, or it refused the call.
        """
