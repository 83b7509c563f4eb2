"""Deliver a message later: durable, cancellable, on time."""

from __future__ import annotations

from ._runtime.housekeeping import Alarm
from ._version import __version__
from .bulk import PartlyScheduledError, Rejected
from .context import Context, Later, Reject
from .dependencies import Depends
from .errors import (
    AiodelayError,
    ClosedError,
    CodecError,
    ConfigurationError,
    DuplicateHandlerError,
    DuplicateIdError,
    HandlerResultError,
    HandlerSignatureError,
    HandlerTimeoutError,
    HeaderError,
    InputError,
    MessageIdError,
    MissingExtraError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    PayloadTypeError,
    RecordFormatError,
    ScheduleTimeError,
    SinkUnavailableError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    StoreUnavailableError,
    TargetError,
    TargetNotAllowedError,
    UnknownSinkError,
    UnsupportedByStoreError,
    WrongLoopError,
)
from .handlers import event
from .messages import Message, Scheduled
from .model import (
    CancelOutcome,
    Conflict,
    DeadKey,
    DeadLetter,
    FireOutcome,
    Late,
    RescheduleOutcome,
    ScheduleOutcome,
    Snapshot,
    State,
)
from .received import Received
from .recurrence import Cron, Every
from .retry import Retry
from .scheduler import Scheduler
from .timeunits import Duration

__all__ = [
    "AiodelayError",
    "Alarm",
    "CancelOutcome",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "Conflict",
    "Context",
    "Cron",
    "DeadKey",
    "DeadLetter",
    "Depends",
    "DuplicateHandlerError",
    "DuplicateIdError",
    "Duration",
    "Every",
    "FireOutcome",
    "HandlerResultError",
    "HandlerSignatureError",
    "HandlerTimeoutError",
    "HeaderError",
    "InputError",
    "Late",
    "Later",
    "Message",
    "MessageIdError",
    "MissingExtraError",
    "OutcomeUnknownError",
    "PartlyScheduledError",
    "PayloadTooLargeError",
    "PayloadTypeError",
    "Received",
    "RecordFormatError",
    "Reject",
    "Rejected",
    "RescheduleOutcome",
    "Retry",
    "ScheduleOutcome",
    "ScheduleTimeError",
    "Scheduled",
    "Scheduler",
    "SinkUnavailableError",
    "Snapshot",
    "State",
    "StoreBusyError",
    "StoreError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "TargetError",
    "TargetNotAllowedError",
    "UnknownSinkError",
    "UnsupportedByStoreError",
    "WrongLoopError",
    "__version__",
    "event",
]
