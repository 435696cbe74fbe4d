"""Prompt log: requests and responses of tenants who opted in, encrypted by their public keys.

An entry has two objects: `DAY/ID.request.jwe`, written when the request is admitted, and
`DAY/ID.response.jwe`, written when its response ends. `DAY` is the day on which background jobs
remove the entry (`gateway.jobs.prompt_log`), so that removing needs no other record of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from gateway.completions.rendering.completion import Completion
from gateway.completions.settlement import SettlementService
from gateway.completions.stored.object_writer import ObjectWriter
from gateway.platform.blobs import log_of
from gateway.platform.concurrency.large_work import Beside, LargeWork
from gateway.platform.jwe import encrypted
from gateway.platform.settings import Settings
from gateway.records.records import PromptLog
from gateway.records.usage_record import Outcome, UsageRecord


def day_of(created: int, days: int) -> date:
    """Return the day on which the entry of a request is removed: `days` are over by then."""
    return (datetime.fromtimestamp(created, UTC) + timedelta(days=days + 1)).date()


@dataclass(eq=False)
class PromptLogs:
    """Writes the entries of this gateway's requests."""

    _settings: Settings
    _settlements: SettlementService
    _large_work: LargeWork

    def __post_init__(self) -> None:
        self._writer = ObjectWriter(self._settlements.tasks, "prompt_log")

    def begin(
        self, record: UsageRecord, completion: Completion, body: Mapping[str, Any], beside: Beside
    ) -> None:
        """Log a request that was admitted, in a task, if its tenant wants that."""
        if (log := completion.request.prompt_log) is not None:
            content = {
                "id": completion.id,
                "created": completion.created,
                "endpoint": record.endpoint,
                "model": completion.model,
                "project_id": record.project_id,
                "credential_id": record.credential_id,
                "request": body,
            }
            self._write(log, completion, record, "request", content, beside)

    def end(
        self,
        record: UsageRecord,
        completion: Completion,
        outcome: Outcome,
        *,
        response: bytes | None = None,
        texts: Sequence[str] = (),
    ) -> None:
        """Log the end of a request, in a task, if its tenant wants that.

        Args:
            record: of the request.
            completion: as rendered.
            outcome: how the request ended. The end of one that a client has resumed replaces this.
            response: the whole response; None if there is none.
            texts: of each choice of a response that did not finish.
        """
        if (log := completion.request.prompt_log) is not None:
            content: dict[str, Any] = {"id": completion.id, "outcome": outcome}
            if response is None:
                content["texts"] = texts
            else:
                is_json = response.startswith(b"{")
                content["response"] = msgspec.Raw(response) if is_json else response.decode()
            beside = self._large_work.of(record.tenant_id, size=len(response or b""))
            self._write(log, completion, record, "response", content, beside)

    def _write(
        self,
        log: PromptLog,
        completion: Completion,
        record: UsageRecord,
        name: str,
        content: Mapping[str, Any],
        beside: Beside,
    ) -> None:
        def made() -> bytes:
            return encrypted(log.key, msgspec.json.encode(content, enc_hook=str))

        day = day_of(completion.created, log.days)
        key = f"{record.tenant_id}/{day}/{record.admitted_id}.{name}.jwe"
        put = partial(log_of(self._settings.prompt_log_store, record.tenant_id).put, key)
        _ = self._writer.write(beside(made), put)
