"""Task: validate the input files of new batches."""

import asyncio
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.ext.asyncio import AsyncSession

from contract.dialect import Dialect
from gateway.auth.authenticator import Authenticator
from gateway.batches.file_checker import UNREADABLE_CODE, FileChecker, ModelBounds, error_of
from gateway.batches.files.service import FileService, Owner
from gateway.batches.finishing import add_end_events
from gateway.batches.principals import principal_of
from gateway.batches.slots import BatchSlots
from gateway.batches.store import BatchStore
from gateway.dialects.endpoint import COMPLETIONS, EMBEDDINGS
from gateway.dialects.profile import ALL_THAT_FIT, PROFILES
from gateway.dialects.profile_choice import DEFAULT_MODEL, dialect_of
from gateway.models.access import find_allowed
from gateway.models.alias_and_adapter_caches import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.claims import TURN_SECONDS, lock_tenant
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import tokens_in_batches
from gateway.platform.database.tables import BatchRow, FileRow
from gateway.records.adapters import Adapter
from gateway.records.aliases import Alias
from gateway.records.batches import Batch, BatchStatus
from gateway.records.errors import (
    AccountSuspendedError,
    AuthenticationError,
    ModelNotFoundError,
    NotFoundError,
    PermissionDeniedError,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now

LARGE_LINES: Final = 20_000
LARGE_BYTES: Final = 32 * 1024 * 1024
"""Files with more are large: they have their own slots, so that small ones never wait for them."""
AT_ONCE: Final = 3
"""Large files, and small ones, that a process validates at a time."""
LINES_AT_ONCE: Final = 100
"""Lines that are checked at a time. The check holds Python's lock, for which other jobs wait."""
SMALL_SECONDS: Final = 30.0
LARGE_SECONDS: Final = 600.0
"""After this time, an attempt has failed."""
MOST_ATTEMPTS: Final = 9
"""The pauses between them take about four minutes."""
SUSPENDED_SECONDS: Final = 10.0
"""Interval at which batches of a suspended tenant look whether it is active again."""
TOO_MANY_TOKENS: Final = "token_limit_exceeded"

_IS_LARGE: Final = exists().where(
    FileRow.id == BatchRow.input_file_id,
    or_(FileRow.lines > LARGE_LINES, FileRow.size > LARGE_BYTES),
)


@dataclass(eq=False)
class Validator:
    """Validates batches. A validation that fails is repeated from the beginning of the file."""

    _database: Database
    _files: FileService
    _catalogue: Catalogue
    _authenticator: Authenticator
    _default_dialect: Dialect

    def __post_init__(self) -> None:
        self._adapters = AdapterBook(self._database)
        self._aliases = AliasBook(self._database)
        self._work = LargeWork(most_waiting_bytes=sys.maxsize)
        self._slots = [
            BatchSlots(
                self._database,
                self._validate,
                partial(_is_due, is_of_size),
                number=AT_ONCE,
                limit_seconds=seconds,
                prepare=self._refresh,
            )
            for is_of_size, seconds in ((~_IS_LARGE, SMALL_SECONDS), (_IS_LARGE, LARGE_SECONDS))
        ]
        self._lock = asyncio.Lock()

    async def run(self, *, seconds: float = TURN_SECONDS) -> int:
        """Validate due batches for some time; return how many attempts have succeeded.

        The validation of large files continues afterwards. Raises StoreUnavailableError and
        RedisError.
        """
        return sum(await asyncio.gather(*(each.run(seconds=seconds) for each in self._slots)))

    async def aclose(self) -> None:
        """Stop, and leave the batches to other processes."""
        await asyncio.gather(*(each.aclose() for each in self._slots))
        self._work.close()

    async def _refresh(self) -> None:
        async with self._lock:
            await self._catalogue.refresh()
            await self._adapters.refresh()
            await self._aliases.refresh()

    async def _validate(self, batch: Batch) -> float:
        """Validate a batch, or fail it with a reason; return the seconds until it is due again."""
        if batch.attempts > MOST_ATTEMPTS:
            message = f"The input file could not be read in {MOST_ATTEMPTS} attempts."
            await self._fail(batch, [error_of(message, UNREADABLE_CODE, None, None)])
            return 0.0
        try:
            principal = await principal_of(self._authenticator, batch)
            file = await self._files.get(Owner(batch.tenant_id), batch.input_file_id)
        except AccountSuspendedError:
            return SUSPENDED_SECONDS
        except (AuthenticationError, PermissionDeniedError, NotFoundError) as error:
            await self._fail(batch, [error_of(error.message, error.code, None, None)])
            return 0.0
        look_up = partial(self._look_up, batch, principal)
        checker = FileChecker(batch.id, batch.endpoint, look_up=look_up)
        checker.takes_bad_bodies = batch.is_of_messages
        beside = self._work.of(batch.tenant_id, size=0)
        async for lines in self._files.reader.lines(file.id, file.size):
            for start in range(0, len(lines), LINES_AT_ONCE):
                part = lines[start : start + LINES_AT_ONCE]
                await beside(partial(checker.feed, part), size=sum(map(len, part)))
            if checker.is_over:
                break
        else:
            checker.finish()
        if checker.errors:
            await self._fail(batch, checker.errors)
        else:
            await self._start(batch, principal, checker)
        return 0.0

    def _look_up(self, batch: Batch, principal: Principal, name: str) -> ModelBounds:
        """Return what a batch needs to know of a model."""
        dialect, served = batch.dialect or principal.dialect, self._catalogue.models
        takes_any_name = dialect is not None and PROFILES[dialect].takes_any_model_name
        if name != DEFAULT_MODEL and not takes_any_name:
            books = self._catalogue, self._adapters, self._aliases
            try:
                found = find_allowed(*books, principal, name)
            except ModelNotFoundError as error:
                return ModelBounds(error.message)
            match found:
                case None:
                    return ModelBounds(ModelNotFoundError(name).message)
                case Alias():
                    models = found.models
                case Adapter():
                    models = [found.base_model]
                case _:
                    models = [found.card.model]
            served = [each for model in models if (each := self._catalogue.known(model))] or served
        window, lengths = 0, set[int]()
        for model in served:
            window = max(window, model.card.context_window)
            own = dialect or dialect_of(model.card.dialect) or self._default_dialect
            profile = PROFILES[own]
            own_lengths = {COMPLETIONS.path: profile.max_tokens, EMBEDDINGS.path: 0}
            lengths.add(own_lengths.get(batch.endpoint, profile.chat_max_tokens))
        fits = ALL_THAT_FIT in lengths or not lengths
        return ModelBounds("", window, ALL_THAT_FIT if fits else max(lengths))

    async def _start(self, batch: Batch, principal: Principal, checker: FileChecker) -> None:
        async with self._database.writing() as transaction:
            # Two batches that start at once must not both fit into the same limit.
            await lock_tenant(transaction, batch.tenant_id)
            store = BatchStore(transaction)
            if (await store.lock(batch.id)).status is not BatchStatus.VALIDATING:
                return
            refusal = await _token_refusal(transaction, principal, checker.tokens)
            if not refusal:
                await store.add_chunks(checker.chunks)
                now = utc_now()
                await store.change(
                    batch.id,
                    status=BatchStatus.IN_PROGRESS,
                    in_progress_at=now,
                    progressed_at=now,
                    total=checker.lines,
                    tokens=checker.tokens,
                    models=checker.models,
                )
        if refusal:
            await self._fail(batch, [error_of(refusal, TOO_MANY_TOKENS, None, None)])

    async def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            if (await store.lock(batch.id)).status is not BatchStatus.VALIDATING:
                return
            ended = await store.change(
                batch.id, status=BatchStatus.FAILED, failed_at=utc_now(), errors=errors
            )
            await add_end_events(transaction, ended)


def _is_due(is_of_size: ColumnElement[bool], now: datetime) -> ColumnElement[bool]:
    # A batch whose deadline has passed is ended instead. The models are read after `now`: a later
    # batch may name one that was added meanwhile.
    is_waiting = and_(BatchRow.status == BatchStatus.VALIDATING, BatchRow.expires_at > now)
    return and_(is_waiting, BatchRow.created_at <= now, BatchRow.due_at <= now, is_of_size)


async def _token_refusal(transaction: AsyncSession, principal: Principal, tokens: int) -> str:
    """Return why a batch exceeds a limit of tokens in batches; empty if it does not."""
    for subject in principal.limits:
        limit = subject.limits.batch_tokens
        if limit is None:
            continue
        used = await tokens_in_batches(transaction, principal.tenant_id, subject.scope, subject.id)
        if used + tokens > limit:
            return (
                f"The batches of the {subject.scope} {subject.id} that have not ended may have "
                f"{limit} tokens in total. Given: up to {tokens} tokens, besides {used} of other "
                "batches. Each byte of a line counts as one token of its prompt, up to the context "
                "window, and as completion tokens count the most that the line allows."
            )
    return ""
