"""Response format of `/status.json`."""

from datetime import date, datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, Field


class ServiceState(StrEnum):
    """State of a model or of the service at this moment."""

    OPERATIONAL = "operational"
    DEGRADED = "degraded"  # Requests fail or wait long.
    NO_WORKER = "no_worker"  # Requests are rejected until a worker serves the model.
    UNAVAILABLE = "unavailable"  # The gateway cannot reach the queue, and rejects requests.


class _Period(BaseModel):
    availability: float | None = Field(
        description="Percentage of requests that the service did not fail or reject, rounded down "
        "to hundredths. Null without requests."
    )
    p50_ms: int | None = Field(
        description="Median of the time to the first token, with the same weight for each account. "
        "Null unless an hour has the tokens of several accounts."
    )
    p75_ms: int | None = Field(description="75th percentile, likewise.")


class DayStatus(_Period):
    """One UTC day."""

    date: date


class PublicModelStatus(_Period):
    """One model, with all its adapters."""

    model: str
    state: ServiceState
    days: list[DayStatus] = Field(description="The days of the period, oldest first.")


class ServiceStatus(_Period):
    """The service: all requests, also those to models that are not listed."""

    object: Literal["service.status"] = "service.status"
    state: ServiceState
    updated_at: datetime
    is_history_known: bool = Field(
        description="False while the history cannot be read. Then only states are known."
    )
    days: list[DayStatus] = Field(description="The days of the period, oldest first.")
    models: list[PublicModelStatus] = Field(description="The models that workers have announced.")
