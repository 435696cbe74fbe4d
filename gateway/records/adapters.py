"""Records of adapters, as passed between packages."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

SEPARATOR = ":"
"""Between the base model and the adapter in an adapter's full name."""


class AdapterState(StrEnum):
    """State of an adapter."""

    VALIDATING = "validating"  # Its files are being checked and copied.
    READY = "ready"
    FAILED = "failed"  # Its files are not valid or cannot be read; `reason` says why.
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter of a tenant."""

    id: str
    tenant_id: str
    name: str
    base_model: str
    """The name of its base model, not an alias."""
    source: str
    """Where its files came from: a folder or `s3://BUCKET/PREFIX`."""
    is_shared: bool
    """Whether every tenant may use it."""
    state: AdapterState = AdapterState.VALIDATING
    reason: str = ""
    """Why it failed, or why its validation is being repeated; else empty."""
    sha256: str = ""
    """Identifies its files; empty until they are checked."""
    rank: int = 0
    target_modules: tuple[str, ...] = ()
    size: int = 0
    """Bytes of its files."""
    created_at: datetime
    deleted_at: datetime | None = None

    @property
    def full_name(self) -> str:
        """The base model and the adapter, as in the ledger."""
        return f"{self.base_model}{SEPARATOR}{self.name}"
