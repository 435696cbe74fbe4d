"""Expiry of prompt logs."""

import logging
from datetime import datetime
from typing import Final

from sqlalchemy import select

from common.object_store import NO_STORE
from common.tasks import each_apart
from gateway.platform.blobs import log_of
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import TenantRow
from gateway.platform.settings import Settings
from gateway.records.errors import ApiError

TENANTS_AT_ONCE: Final = 8

logger = logging.getLogger(__name__)


async def remove_expired_logs(settings: Settings, database: Database, now: datetime) -> None:
    """Remove the entries of prompt logs that expire by today, also of tenants who opted out."""
    if settings.prompt_log_store == NO_STORE:
        return
    async with database.reading() as transaction:
        query = select(TenantRow.id).where(TenantRow.prompt_log_key.is_not(None))
        tenants = [*await transaction.scalars(query)]

    async def remove(tenant_id: str) -> None:
        store = log_of(settings.prompt_log_store, tenant_id)
        try:
            for day in await store.folders(tenant_id):
                if day <= now.date().isoformat():
                    await store.delete_folder(f"{tenant_id}/{day}")
        except ApiError as error:
            logger.warning("cannot remove old entries of a prompt log: %s", error)

    await each_apart(remove, tenants, at_once=TENANTS_AT_ONCE)
