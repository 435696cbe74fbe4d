"""CSV export of usage: single requests as table rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.billing.usage.csv_text import Cell
from gateway.records.times import to_time
from gateway.records.usage_record import UsageRecord

_CELLS: Final[Mapping[str, Callable[[UsageRecord], Cell]]] = {
    "id": lambda record: record.request_id,
    "created_at": lambda record: to_time(record.created_ms),
    "ended_at": lambda record: to_time(record.ended_ms),
    "tenant": lambda record: record.tenant_id,
    "project": lambda record: record.project_id,
    "key": lambda record: record.credential_id,
    "model": lambda record: record.model,
    "engine": lambda record: record.engine,
    "endpoint": lambda record: record.endpoint,
    "dialect": lambda record: record.dialect,
    "service_tier": lambda record: record.service_tier,
    "stream": lambda record: str(record.is_streamed).lower(),
    "outcome": lambda record: record.outcome,
    "code": lambda record: record.code,
    "first_token_ms": lambda record: record.first_token_ms,
    "prompt_tokens": lambda record: record.prompt_tokens,
    "cached_tokens": lambda record: record.cached_tokens,
    "completion_tokens": lambda record: record.completion_tokens,
    "free_prompt_tokens": lambda record: record.free_prompt_tokens,
    "free_cached_tokens": lambda record: record.free_cached_tokens,
    "free_completion_tokens": lambda record: record.free_completion_tokens,
    "prompt_price": lambda record: record.prompt_price,
    "cached_price": lambda record: record.cached_price,
    "completion_price": lambda record: record.completion_price,
    "prepaid": lambda record: str(record.is_prepaid).lower(),
    "cost_micros": lambda record: record.cost_micros,
}

RECEIPT_COLUMNS: Final = tuple(_CELLS)


def receipt_row(record: UsageRecord, columns: Sequence[str] = RECEIPT_COLUMNS) -> list[Cell]:
    """Return the cells of a request."""
    return [_CELLS[name](record) for name in columns]
