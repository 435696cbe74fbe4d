"""Adapters: registered, validated, listed and deleted."""

import asyncio
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, func, not_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from common.object_store import S3_SCHEME
from common.tasks import end_task
from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import changing
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.adapters.checks import InvalidAdapterError
from gateway.adapters.copying import AdapterCopier, CopiedAdapter, UnreadableSourceError
from gateway.models.catalogue import Catalogue
from gateway.platform.blobs import Blobs
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.claims import (
    CLAIM,
    Claim,
    LostClaimError,
    Slots,
    claiming,
    lock_in_turns,
)
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import AdapterRow
from gateway.platform.settings import Settings
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.checks import check_known, check_name
from gateway.records.errors import (
    ConflictError,
    NotFoundError,
    ServiceUnavailableError,
    StoreUnavailableError,
    must,
    shown,
)
from gateway.records.times import EPOCH, utc_now

AT_ONCE_OF_TENANT: Final = 2
"""Adapters of one tenant that a process validates at once."""
KEPT_AFTER_DELETION: Final = timedelta(days=1)
"""Time for which running requests may still need the files of a deleted adapter."""

_IS_UNTRIED = AdapterRow.reason == ""
_IS_LIVE = AdapterRow.state != AdapterState.DELETED
_HAS_ENDED = AdapterRow.state.in_((AdapterState.FAILED, AdapterState.DELETED))


async def lock_new(
    transaction: AsyncSession, now: datetime, limit: int, held: Collection[str]
) -> list[AdapterRow]:
    """Lock adapters to validate, in turns of their tenants; see `claiming`.

    The last free slot is for a tenant that has none, and for an adapter that was never tried: so
    its work is the first to give way (see `AdapterService.validate_new`).
    """
    is_due = and_(AdapterRow.state == AdapterState.VALIDATING, AdapterRow.claimed_until <= now)
    return await lock_in_turns(
        transaction,
        AdapterRow,
        is_due=is_due if limit > 1 else and_(is_due, _IS_UNTRIED),
        is_held=AdapterRow.id.in_(held),
        owners=(AdapterRow.tenant_id,),
        order=AdapterRow.claimed_until,
        limit=max(limit - 1, 1),
        most=(AT_ONCE_OF_TENANT if limit > 1 else 1,),
    )


async def lock_unused(
    transaction: AsyncSession, now: datetime, limit: int, held: Collection[str]
) -> list[AdapterRow]:
    """Lock adapters that ended a while ago, and whose files no other adapter has.

    The tenants take turns. Files that another adapter has are left to it.
    """
    before = now - KEPT_AFTER_DELETION
    rows = await lock_in_turns(
        transaction,
        AdapterRow,
        is_due=and_(AdapterRow.is_stored, AdapterRow.claimed_until <= now, _ended(before)),
        is_held=AdapterRow.id.in_(held),
        owners=(AdapterRow.tenant_id,),
        order=AdapterRow.claimed_until,
        limit=limit,
    )
    for row in rows:
        others = select(AdapterRow.id).where(
            AdapterRow.sha256 == row.sha256, AdapterRow.id != row.id, not_(_ended(before))
        )
        row.is_stored = await transaction.scalar(others.limit(1)) is None
    await transaction.flush()
    return [row for row in rows if row.is_stored]


def _ended(before: datetime) -> ColumnElement[bool]:
    """Whether an adapter has failed or was deleted before a time."""
    return or_(
        and_(AdapterRow.state == AdapterState.FAILED, AdapterRow.claimed_until < before),
        and_(AdapterRow.state == AdapterState.DELETED, AdapterRow.deleted_at < before),
    )


MAX_ADAPTERS: Final = 1_000
"""Maximum number per tenant."""
MAX_SOURCE_CHARACTERS: Final = 1_000
AT_ONCE: Final = 8
"""Adapters that one process validates at once, and that it removes at once."""
SECONDS: Final = 900.0
"""Time for one validation."""
LEAST_SECONDS: Final = 60.0
"""Time for which a validation never gives way to those of other tenants."""
LOOK_SECONDS: Final = 1.0
"""How often a longer one checks whether it has to."""
RUN_SECONDS: Final = 30.0
"""Time for which one run begins validations. They continue after it."""
FIRST_PAUSE: Final = timedelta(seconds=5)
LONGEST_PAUSE: Final = timedelta(minutes=5)
"""Bounds of the pause before the next attempt, which is as long as the adapter has waited so far.
So the number of attempts grows with the logarithm of the time."""
SOURCE_PATIENCE: Final = timedelta(minutes=1)
"""After this time, a validation that fails is not repeated ..."""
PATIENCE: Final = timedelta(hours=1)
"""... and after this time if a worker or the file store is missing, or others need its slot."""
REMOVAL_CLAIM: Final = timedelta(minutes=10)
"""Longer than an object store takes to remove an adapter's files or to fail."""
MAX_REASON_CHARACTERS: Final = 500

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

logger = logging.getLogger(__name__)


class _GivenWayError(Exception):
    """A validation ends because another tenant waits for its slot."""

    def __init__(self) -> None:
        super().__init__("The source is slow. The validation begins again later.")


@dataclass(eq=False)
class AdapterService:
    """Adapters of all tenants. All methods raise StoreUnavailableError."""

    _database: Database
    _announcer: ChangeAnnouncer
    _catalogue: Catalogue
    _copier: AdapterCopier

    def __post_init__(self) -> None:
        claim = partial(claiming, self._database, AdapterRow.claimed_until)
        self._validating = Slots(AT_ONCE, claim(lock_new), self._validate_in_slot)
        self._late: dict[str, None] = {}
        """Adapters whose validations may have to give way, in the order of their age."""
        self._removing = Slots(AT_ONCE, claim(lock_unused, REMOVAL_CLAIM), self._remove)

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
        claimed_until: datetime = EPOCH,
        actor: str = SYSTEM,
    ) -> Adapter:
        """Register an adapter, whose files are validated later (see `AdapterRegistration`).

        `claimed_until` is the end of the caller's claim, if the caller itself validates it.
        """
        check_known(tenant_id, "tenant")
        _check_name(name)
        check_name(base_model, param="base_model")
        _check_source(source)
        self._copier.require_store()
        if self._catalogue.known(name) is not None:
            raise ConflictError(f"'name' must differ from all models. Given: {shown(name)}.")
        await self._copier.support_of(base_model)
        adapter = Adapter(
            id=f"adp_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            name=name,
            base_model=base_model,
            source=source,
            is_shared=is_shared,
            created_at=utc_now(),
        )
        async with changing(self._database, tenant_id, actor=actor, is_locked=True) as change:
            await _check_free(change.transaction, adapter)
            row = AdapterRow(**asdict(adapter), is_stored=False, claimed_until=claimed_until)
            await change.insert(row)
            await change.audit("adapter.register", adapter.id, _details(adapter))
        return adapter

    async def get(self, tenant_id: str, id_or_name: str) -> Adapter:
        """Return an adapter. Raises NotFoundError."""
        check_known(tenant_id, "tenant")
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, id_or_name)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Adapter]:
        """Return a page of the tenant's adapters, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await read_page(
                transaction, AdapterRow, wanted, _IS_LIVE, AdapterRow.tenant_id == tenant_id
            )

    async def page_of_all(self, wanted: PageRequest) -> Page[Adapter]:
        """Return a page of the adapters of all tenants."""
        async with self._database.reading() as transaction:
            return await read_page(transaction, AdapterRow, wanted, _IS_LIVE)

    async def loaded_on(self, adapters: Iterable[Adapter]) -> dict[str, list[str]]:
        """Return the workers whose engines have loaded these adapters, by adapter id.

        Raises RedisError.
        """
        adapters = list(adapters)
        models = sorted({each.base_model for each in adapters})
        seen = await asyncio.gather(*map(self._catalogue.workers, models))
        workers: defaultdict[str, list[str]] = defaultdict(list)
        for card in (each.card for some in seen for each in some if not each.silent_ms):
            for digest in () if card.adapters is None else card.adapters.loaded:
                workers[digest].append(card.id)
        return {each.id: workers.get(each.sha256, []) for each in adapters}

    async def delete(self, tenant_id: str, id_or_name: str, *, actor: str = SYSTEM) -> Adapter:
        """Delete an adapter. Requests that were admitted continue. Raises NotFoundError."""
        async with changing(self._database, tenant_id, actor=actor, is_locked=True) as change:
            adapter = await _find(change.transaction, tenant_id, id_or_name)
            now = utc_now()
            row = await change.transaction.get_one(AdapterRow, adapter.id, with_for_update=True)
            # This ends the claim of a validation too.
            row.state, row.deleted_at, row.claimed_until = AdapterState.DELETED, now, now
            await change.transaction.flush()
            await change.audit("adapter.delete", adapter.id, _details(adapter))
            change.announce(self._announcer.adapters_changed)
        return adapter

    # -- validation ------------------------------------------------------------------------------

    async def add(self, tenant_id: str, name: str, **details: Any) -> Adapter:
        """Register an adapter and validate its files now; the parameters are those of `register`.

        Raises InvalidAdapterError, and ServiceUnavailableError if it cannot be validated.
        """
        until = utc_now() + CLAIM
        adapter = await self.register(tenant_id, name, claimed_until=until, **details)
        claim = Claim(self._database, AdapterRow.claimed_until, adapter.id, until)
        try:
            await self._validate(adapter, claim)
        except Exception:
            await self.delete(tenant_id, adapter.id, actor=details.get("actor", SYSTEM))
            raise
        await self._announcer.adapters_changed()
        return await self.get(tenant_id, adapter.id)

    async def validate_new(self) -> int:
        """Begin to validate new adapters that no other process validates; return how many ended.

        If all slots are used for long, one gives way to a tenant that has none. It begins again
        later, and then has as much time as it has waited.
        """
        return await self._validating.run(seconds=RUN_SECONDS)

    async def remove_ended(self) -> int:
        """Remove the files of adapters that ended a while ago; return how many."""
        return await self._removing.run(seconds=RUN_SECONDS)

    async def aclose(self) -> None:
        """End all validations and removals. Another process repeats them."""
        await self._validating.aclose()
        await self._removing.aclose()

    async def _validate_in_slot(self, item: tuple[AdapterRow, Claim]) -> bool:
        try:
            return await self._try_to_validate(item)
        finally:
            # Not before: until its slot is free, no other validation gives way.
            self._late.pop(item[1].key, None)

    async def _try_to_validate(self, item: tuple[AdapterRow, Claim]) -> bool:
        """Validate an adapter; if that fails, let it be repeated after a pause, or fail."""
        adapter, claim = item[0].to_record(), item[1]
        patience = SOURCE_PATIENCE
        try:
            await self._validate(adapter, claim, gives_way=True)
        except LostClaimError:
            return False  # It was deleted meanwhile.
        except UnreadableSourceError as error:
            logger.warning("the adapter %s: %s", adapter.id, error.__cause__ or error)
            reason = str(error)
        except _GivenWayError as error:
            patience, reason = PATIENCE, str(error)
        except InvalidAdapterError as error:
            patience, reason = timedelta(0), str(error)
        except ServiceUnavailableError as error:
            patience, reason = PATIENCE, error.message
        except Exception:
            logger.exception("the adapter %s cannot be validated", adapter.id)
            reason = "The validation failed by an internal error."
        else:
            await self._announcer.adapters_changed()
            return True
        now = utc_now()
        waited = now - adapter.created_at
        is_over = waited >= patience
        columns: dict[str, Any] = {
            "claimed_until": now if is_over else now + min(max(waited, FIRST_PAUSE), LONGEST_PAUSE),
            "reason": reason[:MAX_REASON_CHARACTERS],
        }
        if is_over:
            logger.info("the adapter %s is not valid: %s", adapter.id, columns["reason"])
            columns["state"] = AdapterState.FAILED
        with suppress(LostClaimError):
            await claim.change(**columns)
        return False

    async def _validate(self, adapter: Adapter, claim: Claim, *, gives_way: bool = False) -> None:
        async def note(sha256: str) -> None:
            if adapter.sha256 not in ("", sha256):
                raise InvalidAdapterError("The files have changed while they were copied.")
            async with claim.changing(sha256=sha256, is_stored=True) as transaction:
                if await _is_being_removed(transaction, sha256):
                    raise StoreUnavailableError("Old copies of the files are being removed.")

        copying = self._copier.copy(adapter.source, adapter.base_model, note)
        work = self._in_turn(adapter, copying) if gives_way else copying
        try:
            copied = await claim.hold(work, seconds=SECONDS)
        except TimeoutError:
            raise UnreadableSourceError(
                f"The files were not copied within {SECONDS:.0f} seconds."
            ) from None
        await claim.change(
            state=AdapterState.READY,
            reason="",
            rank=copied.format.rank,
            target_modules=copied.format.target_modules,
            size=copied.size,
        )

    async def _in_turn(
        self, adapter: Adapter, copying: Coroutine[Any, Any, CopiedAdapter]
    ) -> CopiedAdapter:
        """Copy an adapter, but give way to other tenants. Raises _GivenWayError."""
        waited = (utc_now() - adapter.created_at).total_seconds()
        task = asyncio.create_task(copying)
        try:
            await asyncio.wait({task}, timeout=max(LEAST_SECONDS, waited))
            self._late[adapter.id] = None
            while not task.done():
                if next(iter(self._late)) == adapter.id and await self._has_waiting_tenant():
                    raise _GivenWayError
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
            return task.result()
        finally:
            await end_task(task)

    async def _has_waiting_tenant(self) -> bool:
        """Whether a tenant without a slot has an adapter that was never tried."""
        if not self._validating.is_full:
            return False
        owners = select(AdapterRow.tenant_id).where(AdapterRow.id.in_(self._validating.keys))
        waiting = select(AdapterRow.id).where(
            AdapterRow.state == AdapterState.VALIDATING,
            AdapterRow.claimed_until <= utc_now(),
            _IS_UNTRIED,
            AdapterRow.tenant_id.not_in(owners),
        )
        async with self._database.reading() as transaction:
            return await transaction.scalar(waiting.limit(1)) is not None

    async def _remove(self, item: tuple[AdapterRow, Claim]) -> bool:
        row, claim = item
        await self._copier.remove(row.sha256)
        await claim.change(is_stored=False)
        return True


async def _is_being_removed(transaction: AsyncSession, sha256: str) -> bool:
    """Return whether a process removes these files now. None begins during this transaction.

    The transaction must have noted that a live adapter has these files.
    """
    claims = await transaction.scalars(
        select(AdapterRow.claimed_until)
        .where(AdapterRow.sha256 == sha256, AdapterRow.is_stored, _HAS_ENDED)
        .with_for_update()
    )
    now = utc_now()
    return any(until > now for until in claims)


async def _find(transaction: AsyncSession, tenant_id: str, id_or_name: str) -> Adapter:
    found = None
    if _NAME.fullmatch(id_or_name):
        found = await find_record(transaction, AdapterRow, *_is_named(tenant_id, id_or_name))
    if found is None:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no adapter {shown(id_or_name)}.")
    return found


def _is_named(tenant_id: str, id_or_name: str) -> tuple[ColumnElement[bool], ...]:
    is_it = or_(AdapterRow.id == id_or_name, AdapterRow.name == id_or_name)
    return AdapterRow.tenant_id == tenant_id, is_it, _IS_LIVE


async def _check_free(transaction: AsyncSession, adapter: Adapter) -> None:
    name, tenant_id = adapter.name, adapter.tenant_id
    if await find_record(transaction, AdapterRow, *_is_named(tenant_id, name)) is not None:
        raise ConflictError(f"The tenant {shown(tenant_id)} already has an adapter {shown(name)}.")
    shared = (AdapterRow.name == name, AdapterRow.is_shared, _IS_LIVE)
    if adapter.is_shared and await find_record(transaction, AdapterRow, *shared) is not None:
        raise ConflictError(f"There is already a shared adapter {shown(name)}.")
    number = select(func.count()).where(AdapterRow.tenant_id == tenant_id, _IS_LIVE)
    if (await transaction.scalar(number) or 0) >= MAX_ADAPTERS:
        raise ConflictError(
            f"The tenant {shown(tenant_id)} already has {MAX_ADAPTERS} adapters, the maximum. "
            "Delete one first."
        )


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise must(
            "name",
            "have 1 to 63 letters, digits, periods, underscores or hyphens, and begin with a "
            "letter or digit",
            name,
        )


def _check_source(source: str) -> None:
    is_s3 = source.startswith(S3_SCHEME) and len(source) > len(S3_SCHEME)
    is_valid = (is_s3 or Path(source).is_absolute()) and source.isprintable()
    if len(source) > MAX_SOURCE_CHARACTERS or not is_valid:
        raise must(
            "source",
            "be the absolute path of a folder, or s3://BUCKET/PREFIX, of at most "
            f"{MAX_SOURCE_CHARACTERS} characters",
            source,
        )


def _details(adapter: Adapter) -> dict[str, Any]:
    names = ("name", "base_model", "source", "is_shared", "sha256")
    return {name: getattr(adapter, name) for name in names}
