"""Audit heads: sign the audit log's head and store it outside the database: log, file or URL."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.accounts.audit.log import AuditLog, HeadSigner, SignedHead
from gateway.jobs.outbound import DeliveryError, Outbound
from gateway.platform.database.engine import Database
from gateway.platform.settings import AUDIT_LOG_SINK, Settings

FILE_MODE: Final = 0o600

logger = logging.getLogger(__name__)


Sink = Callable[[SignedHead], Awaitable[None]]
"""Stores a head, which it may receive twice. Raises OSError."""


def log_sink() -> Sink:
    """Return the log of this process; no other line of this logger has this level."""
    logger.setLevel(logging.INFO)

    async def keep(head: SignedHead) -> None:
        logger.info("%s", head)

    return keep


def file_sink(path: Path) -> Sink:
    """Return a file to which heads are appended as lines."""

    def append(line: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(path, flags, FILE_MODE), "w") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    return lambda head: asyncio.to_thread(append, f"{head}\n")


def url_sink(url: str) -> Sink:
    """Return an operator's URL.

    It receives `{"object": "audit.head", "sequence", "hash", "signature"}` as a POST, and must
    respond with a success.
    """
    outbound = Outbound(allows_private=True)

    async def keep(head: SignedHead) -> None:
        body = msgspec.json.encode({"object": "audit.head", **head.details})
        try:
            await outbound.post(url, body, {"content-type": "application/json"})
        except DeliveryError as error:
            logger.warning("SLUICE_AUDIT_SINK rejected the head of the audit log: %s", error)
            raise OSError(str(error)) from None

    return keep


class HeadKeeper:
    """Signs the newest entry and stores the signature, whenever there are new entries.

    Does nothing if the settings have no key.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._signer = HeadSigner(settings.audit_keys) if settings.audit_keys else None
        self._sink = _sink(settings.audit_sink)
        self._signed: SignedHead | None = None
        self._kept: SignedHead | None = None

    async def run(self) -> None:
        """Sign the head and store it at least once. May run twice at once.

        Raises AuditLogBrokenError, StoreUnavailableError, OSError.
        """
        if self._signer is None:
            return
        async with self._database.writing() as transaction:
            head = await AuditLog(transaction).sign(self._signer, after=self._signed)
        self._signed = head
        if head is not None and head != self._kept:
            await self._sink(head)
            self._kept = head


def _sink(place: str) -> Sink:
    if place == AUDIT_LOG_SINK:
        return log_sink()
    if place.startswith("file:"):
        return file_sink(Path(unquote(urlsplit(place).path)))
    return url_sink(place)
