"""`FastStreamSink`: publishes due messages through a broker of FastStream: Redis, RabbitMQ, NATS, MQTT or Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, Self

from aiodelay.core.values import Delivery, Demand, Failed, NotTaken, SendOutcome, Sent
from aiodelay.errors import SinkUnavailableError, TargetError

__all__ = ["Broker", "FastStreamSink"]

PING_S: Final = 2.0


class Broker(Protocol):
    """The part of FastStream's brokers that the sink uses."""

    running: bool
    """Whether the application has started the broker."""

    @property
    def publish(self) -> Callable[..., Awaitable[Any]]:
        """Publish a message."""
        ...

    async def connect(self) -> Any:  # noqa: ANN401 - each broker has its own connection
        """Connect, if the broker is not connected."""
        ...

    async def ping(self, timeout: float | None) -> bool:
        """Return whether the server answers within this time, s."""
        ...

    async def stop(self) -> None:
        """Disconnect."""
        ...


class FastStreamSink:
    """Publishes messages with `broker.publish`. They reach it with `to="faststream:<address>"`.

    The body is the payload, byte for byte. Headers must be ASCII text. The correlation id is the delivery id, by which
    a consumer recognises a repeated message. A message is done once `publish` has returned. If `publish` raises and the
    server answers a ping, the attempt has failed. If the server does not answer, the message waits, which costs no
    attempt.

    The sink connects the broker. When the scheduler closes, the sink disconnects the broker, unless the application has
    started it.

    Args:
        broker: A broker of FastStream.
        name: The part of `to=` before the colon.
        destination: The argument of `publish` that gets the address, such as `list` or `stream` for Redis. None = the
            second argument: the topic, queue, subject or channel.
    """

    name: str
    limits: Demand = Demand(100)

    def __init__(self, broker: Broker, *, name: str = "faststream", destination: str | None = None) -> None:
        self.name, self._broker, self._destination = name, broker, destination

    def check(self, address: str) -> None:
        """Refuse an empty address.

        Raises:
            TargetError: The address is empty.
        """
        if not address:
            raise TargetError("to", f"{self.name}:", f"{self.name}:<topic, queue, subject, channel or list>")

    async def __aenter__(self) -> Self:
        """Connect the broker.

        Raises:
            SinkUnavailableError: The server does not answer.
        """
        try:
            await self._broker.connect()
            is_there = await self._broker.ping(PING_S)
        except Exception as error:
            await self.__aexit__()
            raise SinkUnavailableError(self.name, _text(error)) from error
        if not is_there:
            await self.__aexit__()
            raise SinkUnavailableError(self.name, "no answer to a ping")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect the broker, unless the application has started it."""
        if not self._broker.running:
            await self._broker.stop()

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Publish messages, all at once. Return one outcome for each message, in order."""
        async with asyncio.TaskGroup() as tasks:
            sends = [tasks.create_task(self._publish(delivery)) for delivery in deliveries]
        return [send.result() for send in sends]

    async def _publish(self, delivery: Delivery) -> SendOutcome:
        envelope = delivery.envelope
        wrong = [name for name, value in envelope.headers.items() if not (name.isascii() and value.isascii())]
        if wrong:  # FastStream's format for Redis would shift the body
            return Failed(f"the header {wrong[0]!r} is not ASCII text", retryable=False)
        headers = {name: value.decode() for name, value in envelope.headers.items()}
        options: dict[str, Any] = {"headers": headers, "correlation_id": delivery.delivery_id}
        if envelope.key is not None:
            options["key"] = envelope.key  # a broker without keys refuses it
        try:
            if self._destination is None:
                await self._broker.publish(envelope.payload, envelope.address, **options)
            else:
                await self._broker.publish(envelope.payload, **{self._destination: envelope.address}, **options)
        except Exception as error:  # noqa: BLE001 - each broker has its own errors
            return Failed(_text(error)) if await self._answers() else NotTaken(_text(error))
        return Sent()

    async def _answers(self) -> bool:
        try:
            return await self._broker.ping(PING_S)
        except Exception:  # noqa: BLE001 - as above
            return False


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
