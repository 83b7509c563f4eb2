"""Redis as managed services offer it: tokens that expire, TLS for one of many hosts, and forbidden commands."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from redis.credentials import CredentialProvider

from aiodelay import ConfigurationError, Scheduler, StoreMismatchError, StoreUnavailableError
from aiodelay.backends.redis.connection import login, wakeup_listener
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.connection.pipelined_connection import PipelinedConnection
from aiodelay.backends.redis.connection.scripts import packed
from aiodelay.backends.redis.records.keys import FIXED, Keys
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.ids import new_op
from aiodelay.core.table_scan import Scan
from aiodelay.core.values import After, Demand, Done, Envelope, Put, SettleOutcome, Stored
from aiodelay.core.values.deliveries import Promise
from aiodelay.redis import RedisStore, ShardedStore, open_list_sink
from tests.support.cli import Cli
from tests.support.proxy import proxied
from tests.support.servers import RedisServer, redis_programs, start
from tests.support.tls import Certificates
from tests.support.waiting import until

LANE = "work"
TAG = "{default:00}:"
RIGHTS = ("~*", "+@all")


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


class Tokens(CredentialProvider):
    """Returns the password that the user `iam` has now. A new password replaces the old one, as a new token does."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.token, self.asked = "", 0
        self.error: Exception | None = None
        self.renew()

    def renew(self) -> None:
        """Make a new token. The old token no longer logs in, and the connections of the old token stay open."""
        self.token = f"token-{self.token.count('x')}x{self.token}"
        self._server.command("ACL", "SETUSER", "iam", "on", "resetpass", f">{self.token}", *RIGHTS)

    async def end_connections(self, store: RedisStore) -> None:
        """End all connections, and use one of them. A call cannot know the end of its connection before it is sent."""
        self._server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with suppress(StoreUnavailableError):
            await store.counts()

    async def get_credentials_async(self) -> tuple[str, str]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return "iam", self.token

    def get_credentials(self) -> tuple[str, str]:
        return "iam", self.token


class BlockingTokens(Tokens):
    """A provider without `get_credentials_async`."""

    get_credentials_async = CredentialProvider.get_credentials_async  # type: ignore[assignment]

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        assert threading.current_thread() is not threading.main_thread()
        return "iam", self.token


def put(message_id: str) -> Put:
    return Put(new_op(), Envelope(message_id, LANE), After(0))


async def use(store: RedisStore | ShardedStore, message_id: str = "m") -> None:
    (outcome,) = await store.apply([put(message_id)])
    assert isinstance(outcome, Stored), outcome
    async with store.work("w", [LANE]) as work:
        (claim,) = (await work.claim({LANE: Demand(9)}, request=message_id, lease_ms=15_000)).claims
        assert await work.settle([Done(message_id, claim.record.revision, claim.token)]) == [SettleOutcome.SETTLED]


# --- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("kind", [Tokens, BlockingTokens])
def test_each_new_connection_asks_for_a_token(server: RedisServer, kind: type[Tokens], protocol: int) -> None:
    async def play() -> None:
        tokens = kind(server)
        url = f"{server.url}?protocol={protocol}"
        async with RedisStore(url, credential_provider=tokens) as store:
            await use(store, "first")
            tokens.renew()
            await tokens.end_connections(store)
            await use(store, "second")
            assert tokens.asked >= 2
        assert b"user=iam" not in server.command("CLIENT", "LIST")

    asyncio.run(play())


def test_a_connection_logs_in_again_before_its_token_expires(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        tokens = Tokens(server)
        async with RedisStore(server.url, credential_provider=tokens) as store:
            for name in ("first", "second"):
                await store.apply([put(name)])
                assert tokens.asked == 1
            monkeypatch.setattr(login, "LOGIN_LASTS_S", 0.0)
            await store.apply([put("third")])
            assert tokens.asked == 2

    asyncio.run(play())


def test_the_connection_for_wake_ups_logs_in_again_too(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "LOGIN_LASTS_S", 0.05)
    monkeypatch.setattr(wakeup_listener, "BLOCK_MS", 50)

    async def play() -> None:
        tokens = Tokens(server)
        async with RedisStore(server.url, credential_provider=tokens) as store, store.work("w", [LANE]):
            opened = tokens.asked
            await until(lambda: tokens.asked >= opened + 2, "only the listener uses its connection")

    asyncio.run(play())


def test_a_listener_that_was_asked_late_logs_in_again_first(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        tokens = Tokens(server)
        logins_at_wake = list[int]()
        client = Client(read_url(server.url).with_provider(login.checked_provider(tokens)))
        listener = wakeup_listener.ListListener(client, "jobs", lambda: logins_at_wake.append(tokens.asked))
        await client.command("RPUSH", "jobs", "one")
        async with wakeup_listener.listening(listener, "listener"):
            await until(lambda: server.command("CLIENT", "LIST").count(b"name=aiodelay") == 2, "the listener waits")
            before = tokens.asked
            monkeypatch.setattr(login, "LOGIN_LASTS_S", 0.0)
            listener.ask()
            await until(lambda: tokens.asked > before, "it logs in again")
            monkeypatch.setattr(login, "LOGIN_LASTS_S", 240.0)
            await until(lambda: logins_at_wake, "the list has an element")
            assert logins_at_wake[0] > before
        await client.aclose()

    asyncio.run(play())


def test_a_store_with_a_provider_follows_a_move_to_more_shards(server: RedisServer) -> None:
    async def play() -> None:
        tokens = Tokens(server)
        async with ShardedStore(server.url, credential_provider=tokens) as store:
            await use(store, "first")
            asked = tokens.asked
            await reshard(server.url, "", 3, lambda *_: None)
            await use(store, "second")
            assert len(store.shards) == 3
            assert tokens.asked >= asked + 3

    asyncio.run(play())


def test_a_scan_logs_in_again_before_its_token_expires(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers to commands that were sent before come first."""
    options = read_url(server.url).with_provider(login.checked_provider(Tokens(server)))
    with PipelinedConnection(options, Keys("default")) as connection:
        first = connection.ask("CLIENT", "ID")
        assert connection.ask("CLIENT", "ID") == first
        connection.send(packed(["ECHO", "a"]), packed(["ECHO", "b"]))
        assert connection.answer() == b"a"
        monkeypatch.setattr(login, "LOGIN_LASTS_S", 0.0)
        connection.send(packed(["CLIENT", "ID"]))
        assert connection.answer() == b"b"
        assert connection.answer() > first


def test_a_provider_that_fails_is_named_and_asked_again(server: RedisServer) -> None:
    async def play() -> None:
        tokens = Tokens(server)
        tokens.error = RuntimeError("no token today")
        with pytest.raises(StoreUnavailableError, match="credential provider failed: RuntimeError: no token today"):
            async with RedisStore(server.url, credential_provider=tokens):
                pass
        tokens.error = None
        async with RedisStore(server.url, credential_provider=tokens) as store:
            tokens.error = RuntimeError("no token today")
            await tokens.end_connections(store)
            with pytest.raises(StoreUnavailableError, match="no token today"):
                await store.counts()
            tokens.error = None
            await use(store)

    asyncio.run(play())


def test_an_answer_that_is_no_pair_is_refused(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(server)
    monkeypatch.setattr(tokens, "token", b"bytes")
    with pytest.raises(StoreUnavailableError, match="returned a tuple, not a tuple with a user and a password"):
        asyncio.run(use_of(RedisStore(server.url, credential_provider=tokens)))


async def use_of(store: RedisStore) -> None:
    async with store:
        await use(store)


@pytest.fixture
def module(server: RedisServer) -> Iterator[ModuleType]:
    """A module `shop_iam` of a program, with a provider and other objects."""
    module = ModuleType("shop_iam")
    module.__dict__.update(tokens=Tokens(server), Tokens=Tokens, number=7)
    sys.modules["shop_iam"] = module
    yield module
    del sys.modules["shop_iam"]


def test_a_url_names_a_provider(server: RedisServer, module: ModuleType) -> None:
    option = "credential_provider=shop_iam:tokens"
    place = f"127.0.0.1:{server.port}"

    async def play() -> None:
        async with RedisStore(f"redis://{place}?{option}") as store, Scheduler(store) as scheduler:
            await use(store)
            await store.apply([put("kept")])
            scan = Scan(table="messages", columns=("id",))
            rows = [await asyncio.to_thread(list, store.scan_part(scan, part)) for part in store.scan_parts(scan)]
            assert sum(len(columns) for each in rows for columns in each) >= 1
            same = open_list_sink(f"redis-list://{place}?{option}")
            assert store.reaches(same).promise is Promise.EXACTLY_ONCE
            assert store.reaches(open_list_sink(f"redis-list://{place}")).promise is Promise.AT_LEAST_ONCE
            assert scheduler.store is store

    asyncio.run(play())


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("shop_iam", "'shop_iam'"),
        ("shop_iam:absent", "whose import failed (AttributeError"),
        ("no_such_module:tokens", "whose import failed (ModuleNotFoundError"),
        ("shop_iam:number", "'shop_iam:number', an int"),
        ("shop_iam:Tokens", "'shop_iam:Tokens', a type"),
    ],
)
@pytest.mark.usefixtures("module")
def test_a_url_that_names_no_provider_is_refused(reference: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisStore(f"redis://host?credential_provider={reference}")
    assert said in caught.value.value
    assert (caught.value.setting, caught.value.allowed) == (
        "credential_provider in redis://host?credential_provider=***",
        "MODULE:OBJECT, which names an instance of redis.CredentialProvider",
    )


@pytest.mark.parametrize("url", ["redis://user:secret@host", "redis://:secret@host", "redis://host?{option}"])
def test_a_provider_beside_another_login_is_refused(module: ModuleType, url: str) -> None:
    url = url.format(option="credential_provider=shop_iam:tokens")
    with pytest.raises(ConfigurationError, match="allowed: a URL without a user"):
        RedisStore(url, credential_provider=module.tokens)
    with pytest.raises(ConfigurationError, match="credential_provider is a str; allowed: an instance of redis"):
        RedisStore("redis://host", credential_provider="shop_iam:tokens")  # type: ignore[arg-type]


# --- TLS --------------------------------------------------------------------------------------------------


def test_tls_asks_for_the_host_of_the_url(server: RedisServer, tmp_path: Path) -> None:
    certificates, asked = Certificates(tmp_path), list[str | None]()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificates.issue("localhost"))
    context.sni_callback = lambda _socket, name, _context: asked.append(name)

    async def play() -> None:
        async with proxied(server.port, tls=context) as proxy:
            store = RedisStore(f"rediss://localhost:{proxy.port}?ca_certs={certificates.ca}")
            async with store:
                await use(store)
                await asyncio.to_thread(store.scan_parts, Scan(table="messages", columns=("id",)))
        assert len(asked) >= 3
        assert set(asked) == {"localhost"}

    asyncio.run(play())


# --- forbidden commands -----------------------------------------------------------------------------------


def user_of(server: RedisServer, *rights: str) -> str:
    """Make a user with the rights. Return the URL of a store that logs in as this user."""
    answer = server.command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rights)
    assert answer == b"+OK\r\n", answer
    return f"redis://app:secret@127.0.0.1:{server.port}"


@pytest.mark.parametrize("less", ["-client", "-script", "-config", "-info"])
def test_a_store_opens_without_a_command_that_it_can_do_without(
    server: RedisServer, caplog: pytest.LogCaptureFixture, less: str
) -> None:
    async def play() -> None:
        async with RedisStore(user_of(server, *RIGHTS, less)) as store:
            await use(store)
            assert await store.fill() is None

    asyncio.run(play())
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    wanted = {"-config": "CONFIG GET is not allowed; make sure that maxmemory-policy", "-info": "INFO is not allowed"}
    # INFO has the policy too, so a store asks for CONFIG only if INFO has not told it.
    assert [each for each in warned if wanted.get(less, "?") in each] == (warned if less == "-info" else [])
    assert all(word in " ".join(warned) for word in (("version", "role", "appendonly") if less == "-info" else ()))


def test_a_store_opens_on_a_service_without_info_and_config(tmp_path: Path) -> None:
    renamed = [part for name in ("INFO", "CONFIG", "CLIENT") for part in ("--rename-command", name, "")]
    server = start(redis_programs()[0].program, *renamed)
    try:
        asyncio.run(use_of(RedisStore(server.url)))
        ran = Cli(server.url, tmp_path)("check", "--json")
        assert ran.code == 0, ran
        info, config = (each for each in ran.objects if each["level"] == "warning")
        assert "INFO is not allowed (unknown command" in info["text"]
        assert "that were not checked: the version (Redis 6.2 or later, Valkey 7.2 or later), the role" in info["text"]
        assert config["text"] == "CONFIG GET is not allowed; make sure that maxmemory-policy is noeviction"
    finally:
        server.stop()


ONLY_DECLARED = ("-@all", "+@all", *(f"~{TAG}{name}" for name in FIXED))
"""The rights of a user whose scripts can use only the keys that each call declares."""


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ((*RIGHTS, "-eval"), "NOPERM"),
        ((*RIGHTS, "-evalsha"), "NOPERM"),
        (ONLY_DECLARED, "key"),
    ],
    ids=["no EVAL", "no EVALSHA", "only declared keys"],
)
def test_a_store_does_not_open_if_its_scripts_cannot_work(
    server: RedisServer, rights: tuple[str, ...], said: str
) -> None:
    with pytest.raises(StoreMismatchError) as caught:
        asyncio.run(use_of(RedisStore(user_of(server, *rights))))
    assert caught.value.setting == f"answer of redis://app:***@127.0.0.1:{server.port} to a script"
    assert said in caught.value.value
    assert caught.value.allowed == (
        f"EVAL and EVALSHA for this user, in scripts that may use all keys {TAG}* and not only declared keys"
    )
