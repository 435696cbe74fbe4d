"""Logging of all processes, as lines of text or as JSON."""

import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from types import TracebackType
from typing import Any, Final

from opentelemetry.trace import INVALID_SPAN_CONTEXT, format_span_id, format_trace_id
from opentelemetry.trace import get_current_span as current_span
from typing_extensions import override

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s {process}%(name)s: %(message)s"
_IDS: Final = ("trace_id", "span_id", "request_id", "session_id", "job_id")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The `x-request-id` of the current request; empty outside of requests."""

session_id: ContextVar[str] = ContextVar("session_id", default="")
"""The session that the client of the current request names; empty if it names none."""

_log = logging.getLogger(__name__)
_ready = logging.getLogger("sluice.ready")


class LogFormat(StrEnum):
    """Format of log records."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object on one line.

    Its members are `time` (RFC 3339, UTC), `level`, `logger` and `message`. Where they apply, it
    also has `trace_id`, `span_id`, `request_id`, `session_id`, `job_id`, and the traceback
    `exception`.
    """

    def __init__(self, process: int | None = None) -> None:
        """Format records of a process, with its number if it is one of several."""
        super().__init__()
        self._process = {} if process is None else {"process": process}

    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **_ids_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        # ASCII, so that no character of a message can make the write fail.
        return json.dumps(line)


def configure_logs(form: LogFormat, *, level: int | str, process: int | None = None) -> None:
    """Configure this process to log to standard error, and replace any earlier configuration.

    Each record names the process by its number if it is one of several.
    """
    if form is LogFormat.TEXT:
        name = "" if process is None else f"[process {process}] "
        logging.basicConfig(level=level, format=TEXT_FORMAT.format(process=name), force=True)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def log_ready(process: str, *facts: str) -> None:
    """Log the line that says that a process is ready, whatever the level of its other lines."""
    _ready.setLevel(logging.INFO)
    _ready.info("%s %s is ready: %s", process, version("sluice"), "; ".join(facts))


def _ids_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids in the record's `extra`, or else the ids of the current request."""
    ids = {}
    if (context := current_span().get_span_context()) != INVALID_SPAN_CONTEXT:
        ids["trace_id"] = format_trace_id(context.trace_id)
        ids["span_id"] = format_span_id(context.span_id)
    if served := request_id.get():
        ids["request_id"] = served
    if session := session_id.get():
        ids["session_id"] = session
    return ids | {name: record.__dict__[name] for name in _IDS if name in record.__dict__}


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        _log.critical("Uncaught exception; the process exits", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(details: "threading.ExceptHookArgs") -> None:
    if details.exc_value is not None:
        _log.critical(
            "Uncaught exception; a thread exited",
            exc_info=(details.exc_type, details.exc_value, details.exc_traceback),
        )
