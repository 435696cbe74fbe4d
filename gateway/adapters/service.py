"""Adapters: registered, validated, listed and deleted."""

import asyncio
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession

from contract.object_store import S3_SCHEME
from gateway.adapters.checks import InvalidAdapterError
from gateway.adapters.copying import AdapterCopier
from gateway.adapters.store import AdapterStore
from gateway.database.engine import Database
from gateway.database.locking import lock_tenant
from gateway.database.paging import Page, PageRequest
from gateway.dispatch.catalogue import Catalogue
from gateway.errors import (
    ConflictError,
    InvalidParameterError,
    NotFoundError,
    NoWorkerError,
    shown,
)
from gateway.files.blobs import Blobs
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.tenants.service import reading_of_tenant
from gateway.settings import Settings
from gateway.tenancy.adapters import Adapter, AdapterState
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known, check_name
from gateway.tenancy.times import utc_now

MAX_ADAPTERS: Final = 1_000
"""Maximum number per tenant."""
MAX_SOURCE_CHARACTERS: Final = 1_000
AT_ONCE: Final = 4
"""Adapters that one run validates."""
CLAIM: Final = timedelta(hours=1)
"""Time after which a validation is repeated whose process died or could not reach a store."""
RETRY: Final = timedelta(seconds=10)
"""Time after which the validation is repeated if the base model is not known."""
KEPT_AFTER_DELETION: Final = timedelta(days=1)
"""Time for which running requests may still need the files of a deleted adapter."""
MAX_REASON_CHARACTERS: Final = 500

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

logger = logging.getLogger(__name__)


class AdapterService:
    """Adapters of all tenants. All methods raise StoreUnavailableError."""

    def __init__(
        self,
        database: Database,
        announcer: ChangeAnnouncer,
        catalogue: Catalogue,
        copier: AdapterCopier,
    ) -> None:
        self._database = database
        self._announcer = announcer
        self._catalogue = catalogue
        self._copier = copier

    @classmethod
    def of(
        cls,
        settings: Settings,
        database: Database,
        announcer: ChangeAnnouncer,
        catalogue: Catalogue,
    ) -> "AdapterService":
        """Return the adapters of a deployment."""
        blobs = Blobs(settings.file_store)
        copier = AdapterCopier(blobs, catalogue, max_bytes=settings.max_adapter_bytes)
        return cls(database, announcer, catalogue, copier)

    async def register(
        self,
        tenant_id: str,
        name: str,
        *,
        base_model: str,
        source: str,
        is_shared: bool = False,
        claims: bool = False,
        actor: str = SYSTEM,
    ) -> Adapter:
        """Register an adapter, whose files are validated later.

        Args:
            tenant_id: the tenant that owns it.
            name: selects it in requests, alone or after the base model's name and a colon.
            base_model: the id under which workers announce its base model.
            source: a folder of the process that validates it, or `s3://BUCKET/PREFIX`.
            is_shared: whether every tenant may use it.
            claims: whether the caller itself validates it now.
            actor: recorded in the audit log.
        """
        check_known(tenant_id, "tenant")
        _check_name(name)
        check_name(base_model, param="base_model")
        _check_source(source)
        self._copier.require_store()
        if self._catalogue.known(name) is not None:
            raise ConflictError(f"'name' must differ from all models. Given: {shown(name)}.")
        await self._copier.support_of(base_model)
        now = utc_now()
        adapter = Adapter(
            id=f"adp_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            name=name,
            base_model=base_model,
            source=source,
            is_shared=is_shared,
            state=AdapterState.VALIDATING,
            reason="",
            sha256="",
            rank=0,
            target_modules=(),
            size=0,
            created_at=now,
            deleted_at=None,
        )
        async with self._database.writing() as transaction:
            await lock_tenant(transaction, tenant_id)
            store = AdapterStore(transaction)
            await _check_free(store, adapter)
            await store.add(adapter, claimed_until=now + CLAIM if claims else now)
            await _audit(transaction, "adapter.register", adapter, actor=actor)
        return adapter

    async def get(self, tenant_id: str, id_or_name: str) -> Adapter:
        """Return an adapter. Raises NotFoundError."""
        check_known(tenant_id, "tenant")
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, id_or_name)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Adapter]:
        """Return a page of the tenant's adapters, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await AdapterStore(transaction).page(tenant_id, wanted)

    async def page_of_all(self, wanted: PageRequest) -> Page[Adapter]:
        """Return a page of the adapters of all tenants."""
        async with self._database.reading() as transaction:
            return await AdapterStore(transaction).page(None, wanted)

    async def loaded_on(self, adapters: Iterable[Adapter]) -> dict[str, list[str]]:
        """Return the workers whose engines have loaded these adapters, by adapter id.

        Raises RedisError.
        """
        adapters = list(adapters)
        models = sorted({each.base_model for each in adapters})
        cards = await asyncio.gather(*map(self._catalogue.workers, models))
        workers: defaultdict[str, list[str]] = defaultdict(list)
        for card in (card for some in cards for card in some):
            for digest in () if card.adapters is None else card.adapters.loaded:
                workers[digest].append(card.id)
        return {each.id: workers.get(each.sha256, []) for each in adapters}

    async def delete(self, tenant_id: str, id_or_name: str, *, actor: str = SYSTEM) -> Adapter:
        """Delete an adapter. Requests that were admitted continue. Raises NotFoundError."""
        check_known(tenant_id, "tenant")
        async with self._database.writing() as transaction:
            await lock_tenant(transaction, tenant_id)
            adapter = await _find(transaction, tenant_id, id_or_name)
            await AdapterStore(transaction).change(
                adapter.id, state=AdapterState.DELETED, deleted_at=utc_now()
            )
            await _audit(transaction, "adapter.delete", adapter, actor=actor)
        await self._announcer.adapters_changed()
        return adapter

    # -- validation ------------------------------------------------------------------------------

    async def validate(self, adapter: Adapter) -> Adapter:
        """Check and copy the files of an adapter, and store the result.

        Raises NoWorkerError while its base model is not known.
        """
        columns: dict[str, Any]
        try:
            copied = await self._copier.copy(adapter.source, adapter.base_model)
        except InvalidAdapterError as error:
            reason = str(error)[:MAX_REASON_CHARACTERS]
            logger.info("the adapter %s is not valid: %s", adapter.id, reason)
            columns = {"state": AdapterState.FAILED, "reason": reason}
        else:
            columns = {
                "state": AdapterState.READY,
                "sha256": copied.sha256,
                "rank": copied.format.rank,
                "target_modules": copied.format.target_modules,
                "size": copied.size,
                "is_stored": True,
            }
        async with self._database.writing() as transaction:
            await AdapterStore(transaction).change(adapter.id, **columns)
        await self._announcer.adapters_changed()
        return await self.get(adapter.tenant_id, adapter.id)

    async def validate_new(self) -> int:
        """Validate new adapters that no other process validates; return how many."""
        now = utc_now()
        async with self._database.writing() as transaction:
            claimed = await AdapterStore(transaction).claim(now, now + CLAIM, limit=AT_ONCE)
        if claimed:
            await self._catalogue.refresh()
        for adapter in claimed:
            try:
                await self.validate(adapter)
            except NotFoundError:
                continue  # It was deleted meanwhile.
            except NoWorkerError as error:
                logger.info("the adapter %s cannot be validated yet: %s", adapter.id, error)
                await self._release(adapter)
        return len(claimed)

    async def _release(self, adapter: Adapter) -> None:
        """Let another run validate an adapter, in a while."""
        async with self._database.writing() as transaction:
            await AdapterStore(transaction).change(adapter.id, claimed_until=utc_now() + RETRY)

    async def remove_deleted(self) -> int:
        """Remove the files of adapters that were deleted a while ago; return how many."""
        before = utc_now() - KEPT_AFTER_DELETION
        async with self._database.reading() as transaction:
            found = await AdapterStore(transaction).to_remove(before, limit=AT_ONCE)
        for adapter in found:
            async with self._database.writing() as transaction:
                store = AdapterStore(transaction)
                if not await store.is_used(adapter.sha256, deleted_before=before):
                    await self._copier.remove(adapter.sha256)
                await store.note_removed(adapter.id)
        return len(found)


async def _find(transaction: AsyncSession, tenant_id: str, id_or_name: str) -> Adapter:
    found = None
    if _NAME.fullmatch(id_or_name):
        found = await AdapterStore(transaction).find(tenant_id, id_or_name)
    if found is None:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no adapter {shown(id_or_name)}.")
    return found


async def _check_free(store: AdapterStore, adapter: Adapter) -> None:
    name, tenant_id = adapter.name, adapter.tenant_id
    if await store.find(tenant_id, name) is not None:
        raise ConflictError(f"The tenant {shown(tenant_id)} already has an adapter {shown(name)}.")
    if adapter.is_shared and await store.find_shared(name) is not None:
        raise ConflictError(f"There is already a shared adapter {shown(name)}.")
    if await store.count(tenant_id) >= MAX_ADAPTERS:
        raise ConflictError(
            f"The tenant {shown(tenant_id)} already has {MAX_ADAPTERS} adapters, the maximum. "
            "Delete one first."
        )


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise InvalidParameterError(
            "'name' must have 1 to 63 letters, digits, periods, underscores or hyphens, and begin "
            f"with a letter or digit. Given: {shown(name)}.",
            param="name",
        )


def _check_source(source: str) -> None:
    is_s3 = source.startswith(S3_SCHEME) and len(source) > len(S3_SCHEME)
    is_valid = (is_s3 or Path(source).is_absolute()) and source.isprintable()
    if len(source) > MAX_SOURCE_CHARACTERS or not is_valid:
        raise InvalidParameterError(
            "'source' must be the absolute path of a folder, or s3://BUCKET/PREFIX, of at most "
            f"{MAX_SOURCE_CHARACTERS} characters. Given: {shown(source)}.",
            param="source",
        )


async def _audit(transaction: AsyncSession, action: str, adapter: Adapter, *, actor: str) -> None:
    await AuditLog(transaction).append(
        action,
        adapter.id,
        actor=actor,
        tenant_id=adapter.tenant_id,
        details={
            "name": adapter.name,
            "base_model": adapter.base_model,
            "source": adapter.source,
            "is_shared": adapter.is_shared,
            "sha256": adapter.sha256,
        },
    )
