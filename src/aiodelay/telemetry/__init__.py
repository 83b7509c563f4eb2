"""Traces and metrics by OpenTelemetry: what is emitted, and how a scheduler is told so (docs/telemetry.md)."""

from __future__ import annotations

from .settings import Telemetry

__all__ = ["Telemetry"]
