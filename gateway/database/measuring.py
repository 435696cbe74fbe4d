"""Database metrics: duration and failures of statements, and expiry of the server's certificate."""

import time
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.pool import ConnectionPoolEntry

from gateway import store_telemetry

OPERATIONS: Final = frozenset({"select", "insert", "update", "delete"})
OTHER: Final = "other"

_BEGAN: Final = "sluice_statement_began"


def measure(engine: Engine) -> None:
    """Record every statement of an engine, and of those that share its connections."""
    event.listen(engine, "before_cursor_execute", _begin)
    event.listen(engine, "after_cursor_execute", _end)
    event.listen(engine, "handle_error", _fail)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _record_certificate)


def operation_of(statement: str) -> str:
    """Return the type of the statement, by its first word."""
    word = statement[:16].lstrip()[:6].lower()
    return word if word in OPERATIONS else OTHER


def _begin(connection: Any, *_details: object) -> None:
    # A connection executes one statement at a time.
    connection.info[_BEGAN] = time.perf_counter()


def _end(connection: Any, _cursor: object, statement: str, *_details: object) -> None:
    store_telemetry.statement_ended(operation_of(statement), connection.info[_BEGAN])


def _fail(failure: ExceptionContext) -> None:
    # Without a statement the connection failed, which is not the failure of a statement.
    if failure.statement is not None:
        store_telemetry.statement_failed(operation_of(failure.statement))


def _record_certificate(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    driver: Any = connection.driver_connection
    encrypted = driver._transport.get_extra_info("ssl_object")  # noqa: SLF001 - no public API
    if encrypted is None:
        return
    certificate = encrypted.getpeercert(binary_form=True)
    if certificate is not None:
        store_telemetry.certificate_shown("database", certificate)
