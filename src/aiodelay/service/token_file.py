"""`follow_tokens`: reads the settings file again when it changes, and replaces the valid tokens."""

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
    """Replace the valid tokens whenever the settings file changes, until the caller cancels this coroutine.

    If the changed file is missing or has mistakes, the valid tokens do not change. A file without tokens is no mistake
    here, at any address of the API: the running service then refuses every request.

    Args:
        configuration: The configuration with which the service started.
        tokens: The tokens that are valid now.
    """
    seen = _stamp(configuration.file)
    while True:
        await asyncio.sleep(LOOK_S)
        stamp = _stamp(configuration.file)
        if stamp == seen:
            continue
        seen = stamp
        if stamp is None:
            log.warning("%s does not exist any more; the valid tokens stay as they are", configuration.file)
            continue
        try:
            settings = await asyncio.to_thread(lambda: configuration.again().settings(needs_tokens=False))
        except SettingsError as error:
            log.warning("%s has changed; the valid tokens stay as they are: %s", configuration.file, error)
            continue
        tokens.load(settings.api.tokens)
        names = ", ".join(token.name for token in settings.api.tokens) or "none"
        log.info(
            "%s has changed; tokens that are valid now: %s; other changed settings apply at the next start",
            configuration.file,
            names,
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
