"""Request and response bodies of adapters."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from gateway.accounts.shared import ListBody, Name, RecordBody, RequestBody
from gateway.records.adapters import AdapterState


class AdapterRegistration(RequestBody):
    """An adapter to register."""

    name: str = Field(
        min_length=1,
        max_length=63,
        description="Selects the adapter as a model, alone or as `BASE_MODEL:NAME`.",
    )
    base_model: Name = Field(description="Id under which workers announce the base model.")
    source: str = Field(
        min_length=1,
        max_length=1000,
        description="Folder of the machines that run `sluice jobs`, or `s3://BUCKET/PREFIX`, with "
        "`adapter_config.json` and `adapter_model.safetensors`.",
    )
    is_shared: bool = Field(False, strict=True, description="Whether every tenant may use it.")


class AdapterBody(RecordBody):
    """A LoRA adapter of a tenant."""

    object: Literal["adapter"] = "adapter"
    id: str
    tenant_id: str
    name: str
    base_model: str
    is_shared: bool = Field(description="Whether every tenant may use it.")
    state: AdapterState
    reason: str = Field(description="Why it failed, or why its validation is being repeated.")
    sha256: str = Field(description="Identifies its files; empty until they are checked.")
    rank: int
    target_modules: list[str]
    size: int = Field(description="Bytes of its files.")
    created_at: datetime


class RegisteredAdapterBody(AdapterBody):
    """A LoRA adapter with its source, for operators."""

    source: str = Field(description="Where its files came from.")


class AdapterList(ListBody[AdapterBody]):
    """A page of the adapters of a tenant, oldest first."""


class RegisteredAdapterList(ListBody[RegisteredAdapterBody]):
    """A page of the adapters of a tenant with their sources, oldest first."""


class DeletedAdapter(BaseModel):
    """A deleted adapter."""

    object: Literal["adapter.deleted"] = "adapter.deleted"
    id: str
    deleted: Literal[True] = True
