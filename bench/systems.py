"""Systems under test, and how to deploy them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from bench.starting import CHECKPOINT

ENGINE_GROUP = "engine"
"""Group of an engine's own processes, which both systems share; excluded from sums."""

_CPU_STEP_TOKENS = 4096


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
    gathers: bool = False
    """Scripted engine: whether new text is gathered over several steps, as by default."""
    times_steps: bool = False
    """Whether Sluice's worker writes when its steps ended (`bench.timed_worker`)."""
    checkpoint: Path = CHECKPOINT
    """Folder of the model."""
    engine_arguments: str = ""
    """vLLM's arguments as a JSON object, in addition to those that follow from the other fields."""
    is_cpu: bool = True
    """Whether vLLM runs on a CPU, where Sluice sets more arguments."""

    def vllm_arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM with which its worker in Sluice runs, apart from limits."""
        cpu = {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(self.context_window, _CPU_STEP_TOKENS),
        }
        return {
            "model": str(self.checkpoint),
            "generation_config": "vllm",
            "max_num_seqs": self.max_sequences,
            "max_model_len": self.context_window,
            "enable_prefix_caching": True,
            **(cpu if self.is_cpu else {}),
            **self.given_arguments(),
        }

    def given_arguments(self) -> dict[str, Any]:
        """Return the arguments of `engine_arguments`."""
        found: dict[str, Any] = json.loads(self.engine_arguments or "{}")
        return found


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose requests a gateway limits: by its key, or by fields of the body."""

    api_key: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A system with one front end and one key for all tenants."""

    name: str
    url: str
    api_key: str = ""
    """Empty if none is needed."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of all requests, in addition to their own or in place of them."""
    limited: Caller | None = None
    """A caller with a finite limit on requests per minute; None for a system without limits."""
    parts: Callable[[], dict[str, list[int]]]
    """Returns the process ids of each part, with the engine separate."""

    def urls(self, number: int) -> list[str]:
        """Return the base URL; there is only one front end."""
        if number != 1:
            raise ValueError(f"number: {self.name} has 1 front door. Given: {number}")
        return [self.url]

    def key(self, tenant: str) -> str:
        """Return the API key, the same for every tenant."""
        del tenant
        return self.api_key

    def groups(self, front_doors: int) -> dict[str, list[int]]:
        """Return the process ids of each part."""
        del front_doors
        return self.parts()
