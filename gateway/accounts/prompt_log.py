"""Prompt log of a tenant: opt in, show and opt out.

Tenants have these routes at `/v1/prompt_log`, operators at `/admin/tenants/{tenant_id}/prompt_log`.
"""

from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Unpack

from pydantic import Field

from common.object_store import NO_STORE
from gateway.accounts.changes import By, changing
from gateway.accounts.routes_common import (
    OfTenant,
    RecordBody,
    RequestBody,
    TenantRouter,
    own_tenant,
)
from gateway.accounts.tenants.service import TenantService, find_tenant
from gateway.http.services import made
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import TenantRow
from gateway.platform.jwe import LEAST_RSA_BITS, public_key
from gateway.platform.settings import Settings
from gateway.records.errors import BadRequestError, InvalidParameterError, StateConflictError
from gateway.records.records import Tenant
from gateway.records.scopes import Scope

MOST_DAYS: Final = 3_650
MOST_KEY_CHARACTERS: Final = 8_192


class PromptLogService:
    """Changes and shows the prompt logs of tenants; every change is audited."""

    def __init__(self, settings: Settings, database: Database, announcer: ChangeAnnouncer) -> None:
        self._has_store = settings.prompt_log_store != NO_STORE
        self._database = database
        self._announcer = announcer

    async def set(self, tenant_id: str, key: str, days: int, **by: Unpack[By]) -> Tenant:
        """Log the tenant's requests from now on."""
        if not self._has_store:
            raise BadRequestError("This deployment has no prompt log (SLUICE_PROMPT_LOG_STORE).")
        try:
            public_key(key)
        except ValueError as error:
            rule = f"be a public key in PEM: RSA of at least {LEAST_RSA_BITS} bits, or EC"
            raise InvalidParameterError(
                f"'public_key' must {rule}. {error}", param="public_key"
            ) from None
        columns = {"prompt_log_key": key, "prompt_log_days": days}
        return await self._change(tenant_id, columns, **by)

    async def stop(self, tenant_id: str, **by: Unpack[By]) -> Tenant:
        """Log no further requests. What is logged still expires."""
        return await self._change(tenant_id, {"prompt_log_days": None}, **by)

    async def _change(self, tenant_id: str, columns: dict[str, Any], **by: Unpack[By]) -> Tenant:
        async with changing(self._database, tenant_id, **by) as change:
            tenant = await find_tenant(change.transaction, tenant_id, is_locked=True)
            if tenant.zero_retention and columns["prompt_log_days"] is not None:
                raise StateConflictError("The account's 'zero_retention' allows no prompt log.")
            await change.set(TenantRow, TenantRow.id == tenant_id, columns)
            await change.audit("prompt_log.change", tenant_id, columns)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return replace(tenant, **columns)


class PromptLogChange(RequestBody):
    """Opts in to a prompt log, or changes it."""

    public_key: str = Field(
        max_length=MOST_KEY_CHARACTERS,
        description="Public key in PEM, RSA or EC. Each object is encrypted by it, as a JWE.",
        examples=["-----BEGIN PUBLIC KEY-----\n...\n-----END PUBLIC KEY-----\n"],
    )
    days: int = Field(
        strict=True, ge=1, le=MOST_DAYS, description="How long each entry is kept, in days."
    )


class PromptLogBody(RecordBody):
    """The prompt log of a tenant."""

    object: Literal["prompt_log"] = "prompt_log"
    tenant_id: str = Field(validation_alias="id")
    public_key: str | None = Field(validation_alias="prompt_log_key")
    days: int | None = Field(
        validation_alias="prompt_log_days", description="Null: no requests are logged."
    )


router = TenantRouter("/prompt_log", "Prompt log", own_tenant(Scope.KEYS, of_tenant=True))

Logs = Annotated[PromptLogService, made(PromptLogService)]
Tenants = Annotated[TenantService, made(TenantService)]


@router.get("", summary="Get the prompt log", response_model=PromptLogBody)
async def get_prompt_log(tenants: Tenants, caller: OfTenant) -> Tenant:
    """Show whether the account's requests are logged, and for how long.

    These routes need the scope `keys` and a credential of the whole account.
    """
    return await tenants.get(caller.tenant_id)


@router.put("", summary="Opt in to a prompt log", response_model=PromptLogBody)
async def set_prompt_log(logs: Logs, caller: OfTenant, body: PromptLogChange) -> Tenant:
    """Log each request and its response, encrypted, in the account's folder of the log store.

    Gateways apply the change within a second. Requests with zero retention are not logged.
    """
    return await logs.set(caller.tenant_id, body.public_key, body.days, **caller.by)


@router.delete("", summary="Opt out of the prompt log", response_model=PromptLogBody)
async def stop_prompt_log(logs: Logs, caller: OfTenant) -> Tenant:
    """Log no further requests. Entries expire as they would have."""
    return await logs.stop(caller.tenant_id, **caller.by)
