"""The SQL tables, one file each; importing this package registers all of them with the metadata."""

from gateway.accounts.tables.api_keys import ApiKeyRow
from gateway.accounts.tables.base import Table
from gateway.accounts.tables.tenants import TenantRow

__all__ = ["ApiKeyRow", "Table", "TenantRow"]
