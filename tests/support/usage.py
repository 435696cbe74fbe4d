"""Usage records for tests."""

from typing import Any

from gateway.records.usage_record import Outcome, UsageRecord

NOON_MS = 1_795_176_000_000
"""2026-11-20 12:00 UTC."""
HOUR_MS = 3_600_000


def usage_record(number: int, **fields: Any) -> UsageRecord:
    """A record of a finished request; its numbers follow from `number`."""
    known: dict[str, Any] = {
        "request_id": f"cmpl-{number:06}",
        "tenant_id": "acme",
        "project_id": "prj_1",
        "credential_id": "key_1",
        "model": "m",
        "endpoint": "/v1/completions",
        "dialect": "openai",
        "gateway": "gw-1",
        "created_ms": NOON_MS + number,
        "ended_ms": NOON_MS + number + 250,
        "outcome": Outcome.FINISHED,
        "prompt_tokens": 10 + number % 7,
        "cached_tokens": number % 5,
        "completion_tokens": 1 + number % 11,
        "cost_micros": 100 + number,
    }
    return UsageRecord(**(known | fields))
