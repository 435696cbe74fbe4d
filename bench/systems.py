"""What is measured: a server under test, and how it is to be set up."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

ENGINE_GROUP = "engine"
"""Group of an engine's own processes, which both systems share and which is therefore left out of sums."""


class Engine(StrEnum):
    """What continues the prompts."""

    VLLM = "vllm"  # The real one.
    SCRIPTED = "scripted"  # Words at a steady pace, without a model.


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What has to be the same in both systems."""

    engine: Engine
    max_sequences: int
    """Sequences in the engine's batch, at most."""
    context_window: int
    """Tokens."""
    step_seconds: float = 0.0
    """Scripted engine: time between two steps."""


class System(Protocol):
    """A running server under test."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def urls(self, number: int) -> list[str]:
        """Return base URLs of that many front doors, started if they are not running yet."""
        ...

    def key(self, tenant: str) -> str:
        """Return an API key of a tenant; empty where none is needed."""
        ...

    def groups(self, front_doors: int) -> Mapping[str, list[int]]:
        """Return the process ids of each part, those of the engine apart."""
        ...
