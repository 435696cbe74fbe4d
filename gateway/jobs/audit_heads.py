"""Audit heads: sign the audit log's head and store it outside the database: log, file or URL."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.database.engine import Database
from gateway.jobs.outbound import DeliveryError, Outbound
from gateway.management.audit.log import AuditLog
from gateway.management.audit.signing import HeadSigner, SignedHead
from gateway.settings import AUDIT_LOG_SINK, Settings

FILE_MODE: Final = 0o600

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination of signed heads. It may receive a head twice."""

    async def keep(self, head: SignedHead) -> None:
        """Store a head. Raises OSError."""


class LogSink:
    """The log of this process; no other line of this logger has this level."""

    def __init__(self) -> None:
        logger.setLevel(logging.INFO)

    async def keep(self, head: SignedHead) -> None:
        """Log a head."""
        logger.info("%s", head)


class FileSink:
    """A file to which lines are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def keep(self, head: SignedHead) -> None:
        """Append a head. Raises OSError."""
        await asyncio.to_thread(self._append, f"{head}\n")

    def _append(self, line: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(self._path, flags, FILE_MODE), "w") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


class UrlSink:
    """An operator's URL.

    Receives `{"object": "audit.head", "sequence", "hash", "signature"}` as a POST.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._outbound = Outbound(allows_private=True)

    async def keep(self, head: SignedHead) -> None:
        """Send a head. Raises OSError unless the response is a success."""
        body = msgspec.json.encode({"object": "audit.head", **head.details})
        try:
            await self._outbound.post(self._url, body, {"content-type": "application/json"})
        except DeliveryError as error:
            logger.warning("SLUICE_AUDIT_SINK rejected the head of the audit log: %s", error)
            raise OSError(str(error)) from None


class HeadKeeper:
    """Signs the newest entry and stores the signature, whenever there are new entries."""

    def __init__(self, database: Database, signer: HeadSigner, sink: Sink) -> None:
        self._database = database
        self._signer = signer
        self._sink = sink
        self._signed: SignedHead | None = None
        self._kept: SignedHead | None = None

    @classmethod
    def from_settings(cls, settings: Settings, database: Database) -> "HeadKeeper | None":
        """Return the signer for the settings; None without a key."""
        keys = settings.audit_keys
        if not keys:
            return None
        return cls(database, HeadSigner(keys), _sink(settings.audit_sink))

    async def run(self) -> None:
        """Sign the head and store it at least once. May run twice at once.

        Raises AuditLogBrokenError, StoreUnavailableError, OSError.
        """
        async with self._database.writing() as transaction:
            head = await AuditLog(transaction).sign(self._signer, after=self._signed)
        self._signed = head
        if head is not None and head != self._kept:
            await self._sink.keep(head)
            self._kept = head


def _sink(place: str) -> Sink:
    if place == AUDIT_LOG_SINK:
        return LogSink()
    if place.startswith("file:"):
        return FileSink(Path(unquote(urlsplit(place).path)))
    return UrlSink(place)
