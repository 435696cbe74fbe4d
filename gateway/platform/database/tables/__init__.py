"""The SQL tables, by topic; importing this package registers all of them with the metadata."""

from gateway.platform.database.tables.adapters import AdapterRow
from gateway.platform.database.tables.aliases import AliasRow
from gateway.platform.database.tables.api_keys import ApiKeyRow
from gateway.platform.database.tables.audit_log import AuditRow
from gateway.platform.database.tables.base import Table
from gateway.platform.database.tables.batches import BatchChunkRow, BatchFeedRow, BatchRow
from gateway.platform.database.tables.exports import (
    ExportBatchRow,
    ExportBatchState,
    ExportSinkRow,
    PositionRow,
)
from gateway.platform.database.tables.files import FilePartRow, FileRow
from gateway.platform.database.tables.money import CreditRow, PriceRow
from gateway.platform.database.tables.tenants import MemberRow, PlanRow, ProjectRow, TenantRow
from gateway.platform.database.tables.usage import (
    FAILED_OUTCOMES,
    FIRST_TOKENS,
    DirtyHourRow,
    LedgerRow,
    RejectionRow,
    RollupPeriod,
    RollupRow,
    ServiceRollupRow,
)
from gateway.platform.database.tables.webhooks import WebhookEventRow, WebhookRow

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
    "CreditRow",
    "DirtyHourRow",
    "ExportBatchRow",
    "ExportBatchState",
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
