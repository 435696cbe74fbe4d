"""Causes of errors of Redis and the database, for messages to operators."""

import os
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Final

from asyncpg.exceptions import ClientConfigurationError
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

MAX_CHARACTERS: Final = 200

_LOGIN_REFUSED: Final = "28P01"
_LOGIN_CLASS: Final = "28"
_NO_PRIVILEGE: Final = "42501"
_READ_ONLY: Final = "25006"

_CAUSES: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...]] = (
    (socket.gaierror, "its name cannot be resolved"),
    (AuthenticationError, "authentication failed"),
    (ReadOnlyError, "it is a read-only replica"),
    (MasterNotFoundError, "no sentinel reports its master"),
    ((TimeoutError, RedisTimeoutError, PoolTimeoutError), "no response in time"),
)
_ERRNO: Final = re.compile(r"\[Errno ([0-9]+)\]")
_COMMAND: Final = "caused error: "
"""Separates the command from the error in redis-py's messages about pipelines."""
_ARGUMENTS: Final = ", with args"
"""Precedes the arguments of an unknown command in messages of Redis, such as a password."""


def cause_of(error: BaseException) -> str:
    """Return why Redis or the database failed, in a few words without a password."""
    chain = list(_chain(error))
    for each in chain:
        if (cause := _known_cause(each)) is not None:
            return cause
    texts = (text for each in reversed(chain) if (text := _text(each)))
    return next(texts, type(error).__name__)


def lacks_permission(error: BaseException) -> bool:
    """Whether the database's user lacks the privilege for a statement."""
    return any(_sqlstate(each) == _NO_PRIVILEGE for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then the errors that caused it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _known_cause(error: BaseException) -> str | None:
    for kinds, cause in _CAUSES:
        if isinstance(error, kinds):
            return cause
    match error:
        case ssl.SSLError():
            return f"TLS failed ({getattr(error, 'verify_message', None) or error.reason})"
        case ClientConfigurationError():
            return _text(error)  # It names the file, unlike the error of the system below it.
        case NoPermissionError():
            return f"missing permission ({_text(error)})"
        case OSError() if (found := _ERRNO.search(str(error))) is not None:
            # Python reports the failures of a name's addresses as one error without a number.
            return os.strerror(int(found[1])).lower()
        case _:
            return _sql_cause(error)


def _sql_cause(error: BaseException) -> str | None:
    state = _sqlstate(error)
    if state == _LOGIN_REFUSED:
        return "authentication failed"
    if state.startswith(_LOGIN_CLASS):
        return f"authentication failed ({_text(error)})"
    if state == _NO_PRIVILEGE:
        return f"missing permission ({_text(error)})"
    return "it is read-only" if state == _READ_ONLY else None


def _sqlstate(error: BaseException) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def _text(error: BaseException) -> str:
    line = str(error).partition("\n")[0].rpartition(_COMMAND)[2].partition(_ARGUMENTS)[0]
    return line.rstrip(".")[:MAX_CHARACTERS]
