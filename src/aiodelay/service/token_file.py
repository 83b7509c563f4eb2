"""Tokens that are exchanged while the service runs: the file is read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from .api import Tokens
from .reading import Configuration, SettingsError

__all__ = ["follow_tokens"]

log: logging.Logger = logging.getLogger("aiodelay.service")

LOOK_S = 1.0


async def follow_tokens(configuration: Configuration, tokens: Tokens) -> None:
    """Take the tokens of the file whenever it has changed, until cancelled; with mistakes in it they stay as they are.

    Args:
        configuration: What the service was started with.
        tokens: Those that are valid.
    """
    seen = _stamp(configuration.file)
    while True:
        await asyncio.sleep(LOOK_S)
        stamp = _stamp(configuration.file)
        if stamp == seen:
            continue
        seen = stamp
        if stamp is None:
            log.warning("%s is not there; tokens stay as they were", configuration.file)
            continue
        try:
            settings = await asyncio.to_thread(lambda: configuration.again().settings())
        except SettingsError as error:
            log.warning("%s has changed, and tokens stay as they were: %s", configuration.file, error)
            continue
        tokens.load(settings.api.tokens)
        names = ", ".join(token.name for token in settings.api.tokens) or "none"
        log.info(
            "%s has changed; tokens that are valid now: %s; all else holds from the next start",
            configuration.file,
            names,
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
