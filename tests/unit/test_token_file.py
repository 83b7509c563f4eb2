"""The service follows the tokens of its settings file: removed tokens, a missing file, and mistakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from aiodelay.service import Tokens, hash_token, token_file
from aiodelay.service.reading import Configuration, read_configuration
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

SECRET = "a long random text"
TOKEN = f'[[api.tokens]]\nname = "shop"\nhash = "{hash_token(SECRET)}"\nscopes = ["read"]\n'
HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])


def api(host: str) -> str:
    return f'store = "memory://"\n[api]\nhost = "{host}"\n'


def configured(file: Path, host: str) -> Configuration:
    file.write_text(api(host) + TOKEN)
    file.chmod(0o600)
    return read_configuration(file)


@asynccontextmanager
async def followed(file: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tokens]:
    monkeypatch.setattr(token_file, "LOOK_S", 0.01)
    configuration = configured(file, host)
    tokens = Tokens(configuration.settings().api.tokens)
    following = asyncio.create_task(token_file.follow_tokens(configuration, tokens))
    await asyncio.sleep(0)  # it has seen the first file
    yield tokens
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


@HOSTS
async def test_the_last_token_is_refused_once_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    async with followed(tmp_path / "x.toml", host, monkeypatch) as tokens:
        assert tokens.find(SECRET)
        (tmp_path / "x.toml").write_text(api(host))
        await until(lambda: tokens.find(SECRET) is None, "the token is refused")
        assert not tokens.is_open


@HOSTS
async def test_the_tokens_stay_without_a_file_and_with_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    async with followed(tmp_path / "x.toml", host, monkeypatch) as tokens:
        (tmp_path / "x.toml").unlink()
        await until(lambda: "does not exist any more; the valid tokens stay" in caplog.text, "a warning")
        (tmp_path / "x.toml").write_text(api(host) + "port = 99999\n")
        await until(lambda: "has changed; the valid tokens stay" in caplog.text, "a warning")
        assert "api.port" in caplog.text
        assert tokens.find(SECRET)
