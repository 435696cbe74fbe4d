"""The demo tenant, its key and the file `demo.env`, which `sluice up` prepares."""

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway.auth.authenticator import Authenticator
from gateway.database.engine import Database
from gateway.errors import ApiError, NotFoundError
from gateway.management.keys.service import KeyService
from gateway.management.tenants.service import TenantService
from gateway.redis_client import connect
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.scopes import Scope

TENANT_ID: Final = "demo"


class DemoFile:
    """`demo.env`: three lines of shell variables. The only place that stores the demo key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self) -> dict[str, str]:
        """Return the variables of the file and remove it: it exists only while it is valid."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return {}
        self.path.unlink()
        pairs = (line.partition("=") for line in lines if "=" in line)
        return {name: "".join(shlex.split(value)) for name, _, value in pairs}

    def write(self, variables: Mapping[str, str]) -> None:
        """Replace the file atomically, readable only by its owner."""
        text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(self.path)


async def prepare_key(database_url: str, redis_url: str, earlier_key: str | None) -> str:
    """Return a key of the demo tenant: the earlier one if it still works, else a new one."""
    database = Database(database_url)
    redis = connect(redis_url, max_connections=1)
    announcer = ChangeAnnouncer(redis)
    try:
        if earlier_key is not None and await _works(database, earlier_key):
            return earlier_key
        await _ensure_tenant(TenantService(database, announcer))
        created = await KeyService(database, announcer).create(TENANT_ID, name="sluice up")
        return created.key.reveal()
    finally:
        await redis.aclose()
        await database.aclose()


async def _works(database: Database, key: str) -> bool:
    authenticator = Authenticator(database, verifier=None, ttl_seconds=0, max_entries=1)
    try:
        principal = await authenticator.authenticate(f"Bearer {key}")
        principal.require_scope(Scope.COMPLETIONS)
    except ApiError:
        return False
    return principal.tenant_id == TENANT_ID and principal.allowed_models is None


async def _ensure_tenant(tenants: TenantService) -> None:
    try:
        await tenants.get(TENANT_ID)
    except NotFoundError:
        await tenants.create("Demo", tenant_id=TENANT_ID)
