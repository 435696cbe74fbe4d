"""The SQL tables, by topic; importing this package registers all of them with the metadata."""

from gateway.accounts.tables.api_keys import ApiKeyRow
from gateway.accounts.tables.audit_log import AuditRow
from gateway.accounts.tables.base import Table
from gateway.accounts.tables.money import CreditRow, PriceRow
from gateway.accounts.tables.tenants import MemberRow, PlanRow, ProjectRow, TenantRow
from gateway.accounts.tables.usage import (
    FAILED_OUTCOMES,
    DirtyHourRow,
    LedgerRow,
    RollupPeriod,
    RollupRow,
)
from gateway.accounts.tables.webhooks import WebhookEventRow, WebhookRow

__all__ = [
    "FAILED_OUTCOMES",
    "ApiKeyRow",
    "AuditRow",
    "CreditRow",
    "DirtyHourRow",
    "LedgerRow",
    "MemberRow",
    "PlanRow",
    "PriceRow",
    "ProjectRow",
    "RollupPeriod",
    "RollupRow",
    "Table",
    "TenantRow",
    "WebhookEventRow",
    "WebhookRow",
]
