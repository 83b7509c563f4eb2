"""OpenTelemetry traces and metrics of a scheduler, which docs/telemetry.md lists. Begin with `observer`."""

from __future__ import annotations

from .settings import Telemetry

__all__ = ["Telemetry"]
