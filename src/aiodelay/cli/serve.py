"""`aiodelay serve`: runs the service with the settings of one file."""

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
    """Run the service: deliver the messages of stores, take in requests, and serve an HTTP API and a page.

    The service runs until SIGTERM or Ctrl-C, then ends in order. A later signal ends it at once. Without a settings
    file, messages are kept in the SQLite file aiodelay.db in the working directory.

    Args:
        config: The settings file. Default: the file that AIODELAY_CONFIG names, or aiodelay.toml in the working
            directory.
        host: The address on which the API listens, instead of the address in the settings.
        port: The port on which the API listens, instead of the port in the settings; 0 = any free port.
    """
    configuration = read(config, host=host, port=port)
    settings = configuration.settings()
    from aiodelay.service.logs import set_up_logs  # noqa: PLC0415 - as in `read`
    from aiodelay.telemetry.emitting import emitting  # noqa: PLC0415 - `--help` does not need it

    set_up_logs(settings.log)
    telemetry = settings.telemetry
    emits = emitting(telemetry.prometheus_host, telemetry.prometheus_port, PROMETHEUS)
    with ungrouped(AiodelayError), emits:  # `emits` sends the last metrics when it ends, which blocks: not in the loop
        asyncio.run(_serve(settings, configuration))


async def _serve(settings: Settings, configuration: Configuration) -> None:
    from aiodelay.service.serve import run_service  # noqa: PLC0415 - as in `read`

    with stop_signals() as stop:
        await run_service(settings, stop, configuration)
    log.info("the service has stopped")


def read(file: Path | None, *, host: str | None = None, port: int | None = None) -> Configuration:
    """Read the settings from flags, environment variables and the file.

    Raises:
        MissingExtraError: A package that the service needs is not installed.
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
