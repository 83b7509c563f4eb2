"""TLS, users and passwords on a cluster and behind Sentinels, and the rights of docs/formats.md for them."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import CredentialProvider

from aiodelay.errors import StoreUnavailableError
from aiodelay.redis import RedisStore
from tests.integration.test_redis_page import BLOCKS, use
from tests.support.proxy import proxied
from tests.support.servers import RedisServer, redis_products, start
from tests.support.tls import Certificates
from tests.support.topologies import PRIMARY, Sentinel, node_of_a_cluster
from tests.support.waiting import until_sync

LOGIN = "aiodelay:secret"
RIGHTS, SENTINEL_RIGHTS = (block.split("<password> ")[1].split() for block in BLOCKS[1:3])
WITHOUT_IT_TOO = {"+sentinel|masters", "+subscribe", "+client|setname", "+hello", "&+switch-master"}


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param.program)


@pytest.fixture
def node(program: str) -> Iterator[RedisServer]:
    """A cluster of one node."""
    node = node_of_a_cluster(program)
    node.command("CLUSTER", "ADDSLOTS", *map(str, range(16_384)))
    until_sync(lambda: b"cluster_state:ok" in node.command("CLUSTER", "INFO"), "the node serves all slots")
    yield node
    node.stop()


@pytest.fixture
def watched(program: str) -> Iterator[tuple[RedisServer, Sentinel]]:
    """A primary and one Sentinel."""
    server = start(program)
    sentinel = Sentinel(program, server.port)
    sentinel.start()
    yield server, sentinel
    sentinel.stop()
    server.stop()


def grant(server: RedisServer, rights: list[str]) -> None:
    if b"unknown command" in server.command("WAITAOF", "0", "0", "1"):
        rights = [each for each in rights if each != "+waitaof"]
    answer = server.command("ACL", "SETUSER", "aiodelay", "reset", "on", ">secret", *rights)
    assert answer == b"+OK\r\n", answer


async def opens(url: str) -> None:
    async with RedisStore(url, namespace="default"):
        pass


def refusal(url: str) -> str:
    """Return the error with which a store does not open."""
    with pytest.raises(StoreUnavailableError) as raised:
        asyncio.run(opens(url))
    return str(raised.value)


# --- users ------------------------------------------------------------------------------------------------


def test_the_user_on_a_cluster_needs_one_right_more(node: RedisServer) -> None:
    url = f"redis+cluster://{LOGIN}@127.0.0.1:{node.port}"
    grant(node, RIGHTS)
    assert re.search(r"NOPERM .*cluster\|slots", refusal(url))
    grant(node, [*RIGHTS, "+cluster|slots"])
    asyncio.run(use(url))


def test_the_user_of_the_sentinels_needs_each_right(watched: tuple[RedisServer, Sentinel]) -> None:
    server, sentinel = watched
    url = f"redis+sentinel://{LOGIN}@127.0.0.1:{sentinel.port}/{PRIMARY}?sentinel_username=aiodelay&sentinel_password="
    grant(server, RIGHTS)
    grant(sentinel, SENTINEL_RIGHTS)
    asyncio.run(use(f"{url}secret"))
    for right in SENTINEL_RIGHTS:
        if right.startswith(("+", "&")) and right not in WITHOUT_IT_TOO:
            grant(sentinel, [each for each in SENTINEL_RIGHTS if each != right])
            assert "NOPERM" in refusal(f"{url}secret"), right
    grant(sentinel, [each for each in SENTINEL_RIGHTS if each not in WITHOUT_IT_TOO])
    asyncio.run(opens(f"{url}secret"))
    assert "sentinel_password=, and for a user sentinel_username=" in refusal(f"{url}wrong")


def test_the_sentinels_have_a_password_of_their_own(watched: tuple[RedisServer, Sentinel]) -> None:
    server, sentinel = watched
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/{PRIMARY}"
    sentinel.command("ACL", "SETUSER", "default", "resetpass", ">hush")
    assert "no Sentinel accepts the login" in refusal(url)
    asyncio.run(opens(f"{url}?sentinel_password=hush"))
    server.command("ACL", "SETUSER", "default", "resetpass", ">quiet")
    assert "the server wants a password" in refusal(f"{url}?sentinel_password=hush")
    asyncio.run(opens(f"{url.replace('://', '://:quiet@')}?sentinel_password=hush"))


class Provider(CredentialProvider):
    """Gives the credentials of the primary."""

    def get_credentials(self) -> tuple[str, str]:
        return "aiodelay", "secret"


provider = Provider()


@pytest.mark.parametrize("option", ["", "&sentinel_password=hush"])
def test_the_credentials_of_a_provider_belong_to_the_primary(
    watched: tuple[RedisServer, Sentinel], option: str
) -> None:
    server, sentinel = watched
    grant(server, RIGHTS)
    if option:
        sentinel.command("ACL", "SETUSER", "default", "resetpass", ">hush")
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/{PRIMARY}?credential_provider={__name__}:provider{option}"
    asyncio.run(use(url))


# --- TLS --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def with_tls(certificates: Certificates, server: RedisServer) -> AsyncIterator[int]:
    """Serve TLS in front of a server. Yield the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificates.issue("127.0.0.1"))
    async with proxied(server.port, tls=context) as proxy:
        yield proxy.port


def test_a_cluster_with_tls(node: RedisServer, tmp_path: Path) -> None:
    async def play() -> None:
        certificates = Certificates(tmp_path)
        async with with_tls(certificates, node) as port:
            options = f"announce=127.0.0.1:{node.port}=127.0.0.1:{port}&ca_certs={certificates.ca}"
            await use(f"rediss+cluster://127.0.0.1:{port}?{options}")

    asyncio.run(play())


def test_sentinels_with_tls(watched: tuple[RedisServer, Sentinel], tmp_path: Path) -> None:
    async def play() -> None:
        server, sentinel = watched
        certificates = Certificates(tmp_path)
        async with with_tls(certificates, server) as port, with_tls(certificates, sentinel) as front:
            options = f"announce=127.0.0.1:{server.port}=127.0.0.1:{port}&ca_certs={certificates.ca}"
            await use(f"rediss+sentinel://127.0.0.1:{front}/{PRIMARY}?{options}")

    asyncio.run(play())
