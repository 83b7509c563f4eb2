"""`aiodelay serve`: the service, from one file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aiodelay.errors import AiodelayError, missing_extra

from .errors import ungrouped
from .signals import stop_signals

if TYPE_CHECKING:
    from aiodelay.service.config import Settings
    from aiodelay.service.reading import Configuration

__all__ = ["read", "serve"]

log: logging.Logger = logging.getLogger("aiodelay.cli")

PROMETHEUS = "telemetry.prometheus_host, telemetry.prometheus_port"


def serve(
    *,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    host: str | None = None,
    port: int | None = None,
) -> None:
    """Run the service: stores whose messages are delivered, intakes, and an HTTP API.

    Runs until SIGTERM or Ctrl-C, then ends in order; a later signal ends it at once. Without a file, messages are kept
    in SQLite, in aiodelay.db in the working directory.

    Args:
        config: The file; without it AIODELAY_CONFIG, or aiodelay.toml in the working directory.
        host: Where the API listens, in place of the file's.
        port: The same; 0 = any free one.
    """
    configuration = read(config, host=host, port=port)
    settings = configuration.settings()
    from aiodelay.service.logs import set_up_logs  # noqa: PLC0415 - as in `read`
    from aiodelay.telemetry.emitting import emitting  # noqa: PLC0415 - `--help` does not need it

    set_up_logs(settings.log)
    telemetry = settings.telemetry
    emits = emitting(telemetry.prometheus_host, telemetry.prometheus_port, PROMETHEUS)
    with ungrouped(AiodelayError), emits:  # whose end sends what is left, which blocks
        asyncio.run(_serve(settings, configuration))


async def _serve(settings: Settings, configuration: Configuration) -> None:
    from aiodelay.service.serve import run_service  # noqa: PLC0415 - as in `read`

    with stop_signals() as stop:
        await run_service(settings, stop, configuration)
    log.info("the service has stopped")


def read(file: Path | None, *, host: str | None = None, port: int | None = None) -> Configuration:
    """Read flags, environment and file.

    Raises:
        MissingExtraError: What the service needs is not installed.
        SettingsError: The file cannot be read.
    """
    try:
        import fastapi  # noqa: F401, PLC0415
        import uvicorn  # noqa: F401, PLC0415

        from aiodelay.service.reading import read_configuration  # noqa: PLC0415 - other commands do not need it
    except ImportError as error:
        raise missing_extra(error, "service", "service") from error
    flags: dict[tuple[str | int, ...], tuple[str, Any]] = {
        ("api", name): (f"--{name}", value) for name, value in (("host", host), ("port", port)) if value is not None
    }
    return read_configuration(file, flags)
