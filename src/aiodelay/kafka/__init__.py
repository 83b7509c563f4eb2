"""Kafka: a compacted topic as the only database, and topics as destinations."""

from .session import Session
from .standing import Seen, Standing

__all__ = ["Seen", "Session", "Standing"]
