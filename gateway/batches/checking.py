"""Task: validate the input files of new batches."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession

from contract.dialect import Dialect
from gateway.auth.authenticator import Authenticator
from gateway.auth.principal import Principal
from gateway.batches.events import add_events
from gateway.batches.principals import principal_of
from gateway.batches.store import BatchStore
from gateway.batches.validation import FileChecker, error_of
from gateway.database.batch_tokens import tokens_in_batches
from gateway.database.engine import Database
from gateway.database.locking import lock_tenant
from gateway.dialects.profile import PROFILES
from gateway.dialects.profile_choice import DEFAULT_MODEL
from gateway.dispatch.adapter_book import AdapterBook
from gateway.dispatch.alias_book import AliasBook
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.model_access import find_allowed
from gateway.errors import (
    AuthenticationError,
    ModelNotFoundError,
    NotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from gateway.files.service import FileService
from gateway.files.store import Owner
from gateway.tenancy.batches import Batch, BatchStatus, File
from gateway.tenancy.times import utc_now

AT_ONCE: Final = 4
"""Files that one run validates concurrently."""
RENEW_SECONDS: Final = 10.0
TOKEN_LIMIT_CODE: Final = "token_limit_exceeded"  # noqa: S105 - a code of OpenAI's API


class Validator:
    """Validates batches. A run that dies is repeated from the beginning of the file."""

    def __init__(
        self,
        database: Database,
        files: FileService,
        catalogue: Catalogue,
        authenticator: Authenticator,
    ) -> None:
        self._database = database
        self._files = files
        self._catalogue = catalogue
        self._adapters = AdapterBook(database)
        self._aliases = AliasBook(database)
        self._authenticator = authenticator

    async def run(self) -> int:
        """Validate batches that no other task validates; return how many.

        Raises StoreUnavailableError and RedisError; the next run then does the rest.
        """
        async with self._database.reading() as transaction:
            states = (BatchStatus.VALIDATING,)
            found = await BatchStore(transaction).in_states(states, limit=AT_ONCE)
        if not found:
            return 0
        await self._catalogue.refresh()
        await self._adapters.refresh()
        await self._aliases.refresh()
        claimed = [batch for batch in found if await self._claim(batch)]
        await asyncio.gather(*map(self._validate, claimed))
        return len(claimed)

    async def _claim(self, batch: Batch) -> bool:
        async with self._database.writing() as transaction:
            return await BatchStore(transaction).claim(batch.id, utc_now())

    async def _validate(self, batch: Batch) -> None:
        try:
            principal = await principal_of(self._authenticator, batch)
            file = await self._files.get(Owner(batch.tenant_id), batch.input_file_id)
        except StoreUnavailableError:
            raise
        except (AuthenticationError, PermissionDeniedError, NotFoundError) as error:
            await self._fail(batch, [error_of(error.message, error.code, None, None)])
            return
        refusal_of = _refusal_of(
            self._catalogue, self._adapters, self._aliases, principal, batch.dialect
        )
        checker = FileChecker(batch.id, batch.endpoint, refusal_of=refusal_of)
        await self._read(batch, file, checker)
        if checker.errors:
            await self._fail(batch, checker.errors)
        else:
            await self._start(batch, principal, checker)

    async def _read(self, batch: Batch, file: File, checker: FileChecker) -> None:
        renewed_at = time.monotonic()
        async for lines in self._files.reader.lines(file.id, file.size):
            await asyncio.to_thread(checker.feed, lines)
            if checker.is_over:
                return
            if time.monotonic() > renewed_at + RENEW_SECONDS:
                renewed_at = time.monotonic()
                async with self._database.writing() as transaction:
                    await BatchStore(transaction).renew_claim(batch.id, utc_now())
        checker.finish()

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
            await self._fail(batch, [error_of(refusal, TOKEN_LIMIT_CODE, None, None)])

    async def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            if (await store.lock(batch.id)).status is not BatchStatus.VALIDATING:
                return
            await store.change(
                batch.id, status=BatchStatus.FAILED, failed_at=utc_now(), errors=errors
            )
            await add_events(transaction, await store.lock(batch.id))


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
                f"{limit} tokens in total. Given: about {tokens} tokens, besides {used} of other "
                "batches."
            )
    return ""


def _refusal_of(
    catalogue: Catalogue,
    adapters: AdapterBook,
    aliases: AliasBook,
    principal: Principal,
    dialect: Dialect | None,
) -> Callable[[str], str]:
    """Return a function that returns why a model may not be used, or an empty text."""
    takes_any_name = dialect is not None and PROFILES[dialect].takes_any_model_name

    def refusal(name: str) -> str:
        if name == DEFAULT_MODEL or takes_any_name:
            return ""
        try:
            found = find_allowed(catalogue, adapters, aliases, principal, name)
        except ModelNotFoundError as error:
            return error.message
        return "" if found is not None else ModelNotFoundError(name).message

    return refusal
