"""The SQL tables, by topic; importing this package registers all of them with the metadata."""

from gateway.database.tables.adapters import AdapterRow
from gateway.database.tables.aliases import AliasRow
from gateway.database.tables.api_keys import ApiKeyRow
from gateway.database.tables.audit_log import AuditRow
from gateway.database.tables.base import Table
from gateway.database.tables.batches import BatchChunkRow, BatchFeedRow, BatchRow
from gateway.database.tables.exports import BatchState, ExportBatchRow, ExportSinkRow, PositionRow
from gateway.database.tables.files import FilePartRow, FileRow
from gateway.database.tables.money import CreditRow, PriceRow
from gateway.database.tables.tenants import MemberRow, PlanRow, ProjectRow, TenantRow
from gateway.database.tables.usage import (
    FAILED_OUTCOMES,
    FIRST_TOKENS,
    DirtyHourRow,
    LedgerRow,
    RejectionRow,
    RollupPeriod,
    RollupRow,
    ServiceRollupRow,
)
from gateway.database.tables.webhooks import WebhookEventRow, WebhookRow

__all__ = [
    "FAILED_OUTCOMES",
    "FIRST_TOKENS",
    "AdapterRow",
    "AliasRow",
    "ApiKeyRow",
    "AuditRow",
    "BatchChunkRow",
    "BatchFeedRow",
    "BatchRow",
    "BatchState",
    "CreditRow",
    "DirtyHourRow",
    "ExportBatchRow",
    "ExportSinkRow",
    "FilePartRow",
    "FileRow",
    "LedgerRow",
    "MemberRow",
    "PlanRow",
    "PositionRow",
    "PriceRow",
    "ProjectRow",
    "RejectionRow",
    "RollupPeriod",
    "RollupRow",
    "ServiceRollupRow",
    "Table",
    "TenantRow",
    "WebhookEventRow",
    "WebhookRow",
]
