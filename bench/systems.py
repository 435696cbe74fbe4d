"""Systems under test, and how to deploy them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

ENGINE_GROUP = "engine"
"""Group of an engine's own processes, which both systems share; excluded from sums."""


class Engine(StrEnum):
    """The engine that generates the completions."""

    VLLM = "vllm"  # The real engine.
    SCRIPTED = "scripted"  # Words at a steady pace, without a model.


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Parameters that must be equal in both systems."""

    engine: Engine
    max_sequences: int
    """Maximum number of sequences in the engine's batch."""
    context_window: int
    """Tokens."""
    step_seconds: float = 0.0
    """Scripted engine: time between two steps."""


class System(Protocol):
    """A running server under test."""

    @property
    def name(self) -> str:
        """Name in reports."""
        ...

    def urls(self, number: int) -> list[str]:
        """Return base URLs of `number` front ends; starts missing ones."""
        ...

    def key(self, tenant: str) -> str:
        """Return an API key of a tenant; empty if none is needed."""
        ...

    def groups(self, front_doors: int) -> Mapping[str, list[int]]:
        """Return the process ids of each part, with the engine separate."""
        ...
