"""Response formats of usage: JSON and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from gateway.accounts.routes_common import PageBody
from gateway.billing.usage.parts import Dimension
from gateway.billing.usage.service import UsageSlice
from gateway.records.times import to_time
from gateway.records.usage_record import Outcome, UsageRecord

T = TypeVar("T")
_MICROS = "Micro-dollars per million tokens"


class UsageBody(BaseModel):
    """Sums over the requests of one time range and one value of the grouping."""

    object: Literal["usage"] = "usage"
    start: datetime
    end: datetime = Field(description="End of the period, exclusive.")
    model: str | None = Field(description="Null unless grouped by `model`.")
    key: str | None = Field(description="Id of the key, or `jwt:SUBJECT`; null unless grouped so.")
    project: str | None = Field(description="Null unless grouped by `project`, or without one.")
    service_tier: str | None = Field(description="Null unless grouped by `service_tier`.")
    requests: int
    failed_requests: int = Field(description="Requests that failed, timed out or were lost.")
    prompt_tokens: int
    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")
    completion_tokens: int
    audio_seconds: int
    cost_micros: int = Field(description="Micro-dollars.")


class AnyUsageBody(UsageBody):
    """Sums of usage of any tenant."""

    tenant: str | None = Field(description="Null unless grouped by `tenant`.")


class Report(PageBody, Generic[T]):
    """A page of a usage report, by time."""

    start: datetime
    end: datetime
    bucket: str
    has_more: bool
    next: str | None = Field(description="`after` for the next page; null on the last page.")
    data: list[T]


class Prices(BaseModel):
    """Prices that applied when the request was admitted."""

    prompt_micros: int = Field(description=f"{_MICROS}.")
    cached_micros: int = Field(description=f"{_MICROS}.")
    completion_micros: int = Field(description=f"{_MICROS}.")
    audio_micros: int = Field(description="Micro-dollars per million seconds of audio.")


class ReceiptBody(BaseModel):
    """Usage and cost of one request."""

    object: Literal["usage.request"] = "usage.request"
    id: str = Field(description="Id of the completion.")
    created_at: datetime = Field(description="When it was admitted.")
    ended_at: datetime
    first_token_ms: int = Field(description="Milliseconds to the first reply; 0 if there was none.")
    model: str
    engine: str | None = Field(
        description="Name and version of the engine that ran it, such as `vllm 0.32.0`. Several "
        "ones are separated by commas. Null if none ran it, and in records of earlier releases."
    )
    key: str
    project: str | None
    endpoint: str
    dialect: str
    service_tier: str
    stream: bool
    outcome: Outcome
    code: str | None = Field(description="Code of the error that ended it.")
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audio_seconds: int
    prices: Prices
    free_prompt_tokens: int = Field(
        description="Prompt tokens that are not charged, because a fault of the service ended "
        "their job. Negative in a record that charges for free tokens of an earlier record."
    )
    free_cached_tokens: int = Field(description="The same for cached tokens.")
    free_completion_tokens: int = Field(description="The same for completion tokens.")
    free_audio_seconds: int = Field(description="The same for seconds of audio.")
    is_prepaid: bool = Field(description="Whether the cost was taken from credits.")
    cost_micros: int = Field(description="Micro-dollars.")
    preemptions: int = Field(
        description="How often its sequences left an engine to make room for other work."
    )
    recomputed_tokens: int = Field(
        description="Completion tokens that engines processed again after that. The counts above "
        "include each token once."
    )
    exactness_class: str | None = Field(
        description="Exactness class of the engine that generated its tokens; several ones are "
        "separated by commas. Null if it is unknown."
    )
    class_crossings: int = Field(
        description="How often an engine of another exactness class continued the generation."
    )


class AnyReceiptBody(ReceiptBody):
    """Usage and cost of one request of any tenant."""

    tenant: str
    gateway: str


def usage_fields(each: UsageSlice) -> dict[str, Any]:
    """Return the members of an AnyUsageBody, which include those of a UsageBody."""
    named = {dimension.value: each.values.get(dimension) or None for dimension in Dimension}
    span = {"start": each.span.start, "end": each.span.end}
    return {"object": "usage", **span, **named, **each.sums._asdict()}


_SAME: Final = [
    name for name in AnyReceiptBody.model_fields if name in UsageRecord.__struct_fields__
]
"""Members of a receipt that a record has under the same name."""


def receipt_fields(record: UsageRecord) -> dict[str, Any]:
    """Return the members of an AnyReceiptBody, which include those of a ReceiptBody."""
    return {
        **{name: getattr(record, name) for name in _SAME},
        "object": "usage.request",
        "id": record.request_id,
        "created_at": to_time(record.created_ms),
        "ended_at": to_time(record.ended_ms),
        "tenant": record.tenant_id,
        "engine": record.engine or None,
        "exactness_class": record.exactness_class or None,
        "key": record.credential_id,
        "project": record.project_id,
        "stream": record.is_streamed,
        "code": record.code or None,
        "prices": {
            "prompt_micros": record.prompt_price,
            "cached_micros": record.cached_price,
            "completion_micros": record.completion_price,
            "audio_micros": record.audio_price,
        },
    }


RECEIPT_COLUMNS: Final = (
    *("id", "created_at", "ended_at", "tenant", "project", "key", "model", "engine", "endpoint"),
    *("dialect", "service_tier", "stream", "outcome", "code", "first_token_ms"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
    *("free_prompt_tokens", "free_cached_tokens", "free_completion_tokens"),
    *("prompt_price", "cached_price", "completion_price", "prepaid", "cost_micros"),
    *("preemptions", "recomputed_tokens", "audio_seconds", "free_audio_seconds", "audio_price"),
    *("exactness_class", "class_crossings"),
)
FORMULA_SIGNS: Final = ("=", "+", "-", "@", "\t", "\r")
"""Spreadsheets evaluate text that starts with one of these characters."""
Cell = str | int | datetime | None


def receipt_row(record: UsageRecord, columns: Sequence[str] = RECEIPT_COLUMNS) -> list[Cell]:
    """Return the cells of a request."""
    fields = receipt_fields(record)
    fields |= {name.replace("micros", "price"): each for name, each in fields["prices"].items()}
    fields["prepaid"] = record.is_prepaid
    return [fields[name] for name in columns]


def to_csv(headings: Sequence[str] | None, rows: Iterable[Sequence[Cell]]) -> str:
    """Return the rows as CSV (RFC 4180), after the headings if any; None is an empty cell."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if headings is not None:
        writer.writerow(headings)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA_SIGNS) else value
    if isinstance(value, int):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return "" if value is None else value.isoformat().replace("+00:00", "Z")
