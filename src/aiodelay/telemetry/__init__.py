"""OpenTelemetry traces and metrics of a scheduler. docs/telemetry.md lists them."""

from __future__ import annotations

from .settings import Telemetry

__all__ = ["Telemetry"]
