"""F40: TLS, Unix sockets, users and passwords: which logins work, which are refused, and that no secret is shown."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from aiodelay import Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Demand, Done, Envelope, Put, SettleOutcome, Stored
from aiodelay.errors import AiodelayError, StoreUnavailableError
from aiodelay.redis import RedisStore, open_store
from tests.support.clear_errors import PASSWORD
from tests.support.servers import Found, RedisServer, redis_programs, start
from tests.support.slow_stores import PATIENT
from tests.support.tls import Certificates, tls_port_of
from tests.support.waiting import until

LANE = "work"
AT_ONCE_S = 20.0
WOKEN_S = 90.0
"""The longest wait for a wake-up. Without a wake-up, a worker looks into the store after 450 s."""


@pytest.fixture(autouse=True)
def _nobody_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisStore, "traits", replace(RedisStore.traits, safety_poll_ms=600_000))


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def program(request: pytest.FixtureRequest) -> str:
    found: Found = request.param
    return found.program


@pytest.fixture
def server(program: str) -> Iterator[RedisServer]:
    server = start(program)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


async def use(url: str) -> None:
    """Schedule, be woken, claim and settle, over a URL alone."""
    url += f"{'&' if '?' in url else '?'}{PATIENT}"
    async with (
        open_store(url, namespace="faults", clock=None) as store,
        open_store(url, namespace="faults", clock=None) as other,
        store.work("w", [LANE]) as work,
    ):
        work.clear()
        async with asyncio.timeout(WOKEN_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(work.wait(until_ms=None))
            (outcome,) = await other.apply([Put(new_op(), Envelope("m", LANE, payload=bytes(100_000)), After(0))])
            assert isinstance(outcome, Stored), outcome
        (claim,) = (await work.claim({LANE: Demand(9)}, request="r", lease_ms=60_000)).claims
        assert claim.record.envelope.payload == bytes(100_000)
        settled = await work.settle([Done("m", claim.record.revision, claim.token)])
        assert list(settled) == [SettleOutcome.SETTLED]


async def refused(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """Open a store that must be refused at once; return why. Nothing that is said may hold the password."""
    caplog.set_level(logging.DEBUG)
    if "timeout_ms" not in url:
        url += f"{'&' if '?' in url else '?'}{PATIENT}"
    with pytest.raises(StoreUnavailableError) as caught:
        async with asyncio.timeout(AT_ONCE_S), open_store(url, namespace="faults", clock=None):
            pass
    assert_untold(caught.value, caplog)
    return str(caught.value)


def assert_untold(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    told = [*traceback.format_exception(error), caplog.text, repr(error)]
    assert PASSWORD not in "".join(told)


# --- TLS --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [pytest.param("rediss", marks=pytest.mark.valkey_too), "valkeys"])
def test_f40_tls_with_a_trusted_certificate(program: str, certificates: Certificates, scheme: str) -> None:
    async def play() -> None:
        async with tls_port_of(program, certificates, clients=False) as port:
            await use(f"{scheme}://127.0.0.1:{port}?ca_certs={quote(str(certificates.ca))}")

    asyncio.run(play())


def test_f40_tls_with_certificates_on_both_sides(
    program: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with tls_port_of(program, certificates, clients=True) as port:
            url = f"rediss://127.0.0.1:{port}?ca_certs={certificates.ca}"
            await use(f"{url}&client_cert={certificates.client}&client_key={certificates.client_key}")
            await refused(url, caplog)

    asyncio.run(play())


@pytest.mark.parametrize(
    "case",
    [
        ("127.0.0.1", None, False, "CERTIFICATE_VERIFY_FAILED.*self-signed certificate"),
        ("another.example", None, True, "CERTIFICATE_VERIFY_FAILED.*(not valid for|mismatch)"),
        ("127.0.0.1", datetime.now(UTC) - timedelta(days=1), True, "CERTIFICATE_VERIFY_FAILED.*has expired"),
    ],
    ids=["unknown authority", "other host", "expired"],
)
def test_f40_a_certificate_that_cannot_be_trusted_is_refused_at_once(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: tuple[str, datetime | None, bool, str]
) -> None:
    host, ends, trusted, why = case

    async def play() -> None:
        certificates = Certificates(tmp_path)
        async with tls_port_of(program, certificates, host=host, until=ends, clients=False) as port:
            ca = f"?ca_certs={certificates.ca}" if trusted else ""
            reason = await refused(f"rediss://user:{PASSWORD}@127.0.0.1:{port}{ca}", caplog)
            assert re.search(why, reason), reason

    asyncio.run(play())


def test_f40_plain_and_tls_that_meet_are_refused_at_once(
    program: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with tls_port_of(program, certificates, clients=False) as port:
            await refused(f"redis://user:{PASSWORD}@127.0.0.1:{port}", caplog)

    asyncio.run(play())


def test_f40_tls_to_a_server_without_is_refused_at_once(
    server: RedisServer, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"rediss://user:{PASSWORD}@127.0.0.1:{server.port}?ca_certs={certificates.ca}&connect_timeout_ms=500"
    asyncio.run(refused(url, caplog))


def test_f40_a_missing_file_of_certificates_is_named(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    assert "/no/such.pem" in asyncio.run(refused(f"rediss://127.0.0.1:{server.port}?ca_certs=/no/such.pem", caplog))


# --- other ways -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{port}/3", "valkey://localhost:{port}", "unix://{socket}?db=3"])
def test_every_plain_scheme_connects(server: RedisServer, url: str) -> None:
    asyncio.run(use(url.format(port=server.port, socket=server.socket)))
    is_used = b"db3:" in server.command("INFO", "keyspace")
    assert is_used == ("3" in url)


# --- users ------------------------------------------------------------------------------------------------

ODD = "p@ss:w/o?r#d% é"
"""A password of which nothing may stand in a URL as it is."""


def grant(server: RedisServer) -> None:
    assert server.command("ACL", "SETUSER", "own-ü", "on", f">{ODD}", "~{faults:00}:*", "+@all") == b"+OK\r\n"
    assert server.command("ACL", "SETUSER", "default", "off") == b"+OK\r\n"


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("way", ["127.0.0.1:{port}", "{socket}"], ids=["tcp", "unix"])
def test_a_user_with_an_odd_name_and_password(server: RedisServer, way: str, protocol: int) -> None:
    grant(server)
    scheme = "unix" if "socket" in way else "redis"
    place = way.format(port=server.port, socket=server.socket)
    asyncio.run(use(f"{scheme}://{quote('own-ü', safe='')}:{quote(ODD, safe='')}@{place}?protocol={protocol}"))


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("user", ["own", "unknown", ""])
def test_f40_a_wrong_password_is_refused_at_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture, user: str, protocol: int
) -> None:
    assert server.command("ACL", "SETUSER", "own", "on", ">right", "~*", "+@all") == b"+OK\r\n"
    assert server.command("ACL", "SETUSER", "default", "resetpass", ">right") == b"+OK\r\n"
    reason = asyncio.run(refused(f"redis://{user}:{PASSWORD}@127.0.0.1:{server.port}?protocol={protocol}", caplog))
    assert "invalid username-password pair" in reason
    assert "Authentication required" in asyncio.run(refused(f"redis://127.0.0.1:{server.port}", caplog))


def test_f40_a_password_that_is_changed_while_open_is_told_without_it(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        server.command("ACL", "SETUSER", "own", "on", f">{PASSWORD}", "~*", "+@all")
        url = f"redis://own:{PASSWORD}@127.0.0.1:{server.port}"
        async with Scheduler(url, store_timeout="1s", open_timeout="1m", dispatch=False) as scheduler:

            async def is_scheduled() -> bool:
                with suppress(AiodelayError):
                    await scheduler.schedule(b"", to="handler:work", delay="1h", id="m")
                    return True
                return False

            async def is_refused() -> bool:
                with pytest.raises(AiodelayError) as caught:
                    await scheduler.schedule(b"", to="handler:work", delay="1h", id="m")
                assert_untold(caught.value, caplog)
                return "invalid username-password pair" in str(caught.value)

            await until(is_scheduled, "the server answers in time")
            server.command("ACL", "SETUSER", "own", "resetpass", ">another")
            server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await until(is_refused, "the error tells the reason")  # of the first one nobody knows what became
            server.command("ACL", "SETUSER", "own", f">{PASSWORD}")
            await until(is_scheduled, "the password is right again")

    asyncio.run(play())
