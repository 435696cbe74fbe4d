"""Settings of the worker process, from the environment (prefix `SLUICE_`) or the command line."""

import json
import os
import secrets
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from common.logs import LogFormat
from common.redis_url import check_redis_url
from contract.dialect import Dialect
from worker.chat_format import given_template
from worker.model_files import adapter_modules

_PREFIX = "SLUICE_"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks for which vLLM has kernels."""

JOB_LEASES = 3
"""Leases of a worker in the lease of a job. The thread that renews the former cannot be starved;
the event loop that renews the latter may be blocked for a while."""


def environment_name(field: str) -> str:
    """Return the environment variable of a field."""
    return _PREFIX + field.upper()


def default_worker_id() -> str:
    """Return a name for a worker process, unique among all machines."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _from_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("must be a JSON object") from None


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",")] if value.strip() else []


def _check_redis_url(url: SecretStr) -> SecretStr:
    check_redis_url(url.get_secret_value())
    return url


def _check_rank(rank: int) -> int:
    if rank not in _RANKS:
        raise ValueError(f"must be one of {', '.join(map(str, _RANKS))}")
    return rank


RedisUrl = Annotated[SecretStr, AfterValidator(_check_redis_url)]


class ProcessSettings(BaseSettings):
    """Settings of every process that runs models."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    redis_url: RedisUrl = SecretStr("redis://127.0.0.1:6379/0")
    """Redis server of the queue."""
    health_host: str = "127.0.0.1"
    """Address of /metrics, /healthz and /readyz."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum level of log messages."""
    log_format: LogFormat = LogFormat.TEXT
    """`text`, or `json`: one object per line, with the ids of the request and trace."""


class WorkerSettings(ProcessSettings):
    """All settings of a worker."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX)

    model_path: Annotated[str, Field(min_length=1)]
    """Folder of the model, or its Hugging Face id."""
    model_name: str = ""
    """Name under which the model is served; the folder's name if empty."""
    model_aliases: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Other names under which clients may ask for the model, comma-separated."""
    scales_to_zero: bool = False
    """Whether waiting requests start a worker if none runs (KEDA, for example): gateways then
    accept requests while no worker serves the model."""
    ends_with_input: bool = False
    """Whether the worker returns its jobs and exits when its standard input ends or its engine
    dies."""
    may_sleep: bool = False
    """Whether the host may put the engine to sleep, which vLLM does on GPUs."""
    worker_id: str = Field(default_factory=default_worker_id, min_length=1)
    """Unique name of this worker process; generated if not given."""
    dialect: Dialect | None = Field(
        default=None,
        description="Dialect of requests for this model that select none: "
        f"{', '.join(Dialect)}; the gateway's default if not given.",
    )
    runner: Literal["generate", "pooling", "transcription"] = "generate"
    """What the model is used for: `generate` completes texts, `pooling` embeds, scores or
    classifies them (vLLM converts a model that can only generate), `transcription` writes the
    text of audio, with a Whisper model."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """`scripted` generates placeholder text at a steady pace, for tests."""

    required_class: Annotated[str, Field(pattern="^([0-9a-f]{12})?$")] = ""
    """Exactness class that this worker must have to serve, as its log, card and receipts show it; a
    worker of another class does not start. Empty accepts any class."""

    reproducible: bool = False
    """Whether texts shall not depend on what else is in the batch: vLLM's batch-invariant kernels
    on a GPU, float32 on a CPU. Engine arguments that would prevent it are rejected."""

    canary_seconds: Annotated[float, Field(ge=0)] = 3600.0
    """Interval in which an idle engine's results are compared with those of its exactness class,
    first when it has started; 0 never compares. The scripted engine is compared only if this is
    set."""

    max_sequences: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of sequences in the engine's batch."""
    context_window: Annotated[int | None, Field(ge=2)] = None
    """Maximum number of prompt and completion tokens together; the model's if not given."""
    enforce_eager: bool | None = None
    """Start faster without compiling the model. Default: true on a CPU, false on a GPU."""
    chat_template: Path | None = None
    """File with a chat template (Jinja) that replaces the model's own."""
    tool_parser: str = ""
    """vLLM's parser of tool calls in chat responses, such as `hermes`; no tool calls if empty. The
    scripted engine has its own."""
    reasoning_parser: str = ""
    """vLLM's parser of reasoning in chat responses, such as `qwen3`; all text is content if empty.
    The scripted engine has its own."""
    cpu_kv_cache_gib: Annotated[int, Field(ge=1)] = 1
    """Memory for the KV cache on a CPU, in GiB."""
    engine_arguments: Annotated[dict[str, Any], BeforeValidator(_from_json)] = {}
    """More engine arguments as JSON, such as {"tensor_parallel_size": 2}."""

    adapter_slots: Annotated[int, Field(ge=0, le=256)] = 0
    """LoRA adapters that the engine runs at once; 0 serves the base model only."""
    loaded_adapters: Annotated[int | None, Field(ge=1)] = None
    """LoRA adapters that stay loaded, at least the slots.  [default: the slots]"""
    max_adapter_rank: Annotated[int, AfterValidator(_check_rank)] = Field(
        default=16,
        description=f"Maximum rank of LoRA adapters: {', '.join(map(str, _RANKS))}.",
    )
    file_store: Annotated[str, Field(min_length=1)] = ".sluice/files"
    """Store of LoRA adapters, the same as the gateways': a folder, `s3://BUCKET/PREFIX`, or
    `none`."""
    adapter_folder: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / "sluice-adapters"
    )
    """Folder for copies of LoRA adapters, which workers of a machine may share."""
    adapter_folder_bytes: Annotated[int, Field(ge=1)] = 10 * 1024**3
    """Maximum bytes of all copies in that folder."""
    adapter_load_units: Annotated[float, Field(ge=0)] = 1000.0
    """Service units that a tenant is charged for each second of a load. A unit is a prompt
    token."""

    lease_seconds: float = Field(
        default=1.5,
        ge=0.3,
        le=600,
        description="Time after which a worker without heartbeats loses its jobs: one that is "
        "stopped, or cut off from Redis. A worker whose event loop is blocked loses them "
        f"after {JOB_LEASES:d} times this time.",
    )
    start_units: Annotated[float, Field(ge=0)] = 0.0
    """Service units that the tenant of the first job is charged. A host sets them if it starts the
    worker in place of another one."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Time for running jobs to finish when the worker stops."""
    gather_seconds: Annotated[float, Field(ge=0, le=1)] = 0.04
    """Longest time for which the new text of a sequence is collected in one delta; 0 sends the text
    of every engine step at once."""
    reply_buffer_deltas: Annotated[int, Field(ge=1_000)] = 200_000
    """Maximum number of unwritten reply deltas while Redis is unavailable; beyond it, jobs are
    dropped."""
    chunk_cache_bytes: Annotated[int, Field(ge=0)] = 128 * 1024**2
    """Memory for parts of long prompts, which later turns of a chat repeat; 0 reads them from Redis
    for each turn."""

    preempted_share: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Maximum share of the engine's sequences that batch jobs give up for requests, and tenants for
    tenants that use less, in a second; 0 preempts none."""

    affinity_seconds: Annotated[float, Field(ge=0, le=60)] = 15.0
    """Longest time for which a waiting job is left for a worker that has cached its prefix. It is
    no longer than twice the time in which this worker processes what it lacks of the prefix. Jobs
    of a tenant whose prefixes this worker has cached go first for this time too, but for at most
    1 s. 0 disables both."""

    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of /metrics, /healthz and /readyz; 0 opens none."""
    stall_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Time without an engine step while jobs run, after which the engine is restarted. An engine
    must also fall asleep and wake up in it."""
    restart_pause_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Longest pause before a restart of a dead engine. The first pause is 1 s. It doubles with each
    attempt until an engine has run for a minute."""
    restart_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Time after which /healthz fails if a dead engine was not restarted."""
    traces: bool = False
    """Whether to export spans of jobs whose gateways trace them, as configured by the standard
    `OTEL_` variables."""

    scripted_step_seconds: Annotated[float, Field(ge=0)] = 0.02
    """Scripted engine: time between two steps; 0 does not wait."""
    scripted_prefill_seconds_per_token: Annotated[float, Field(ge=0)] = 0.0
    """Scripted engine: time to process a prompt token."""
    scripted_kv_cache_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    """Scripted engine: size of the simulated KV cache."""
    scripted_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    """Scripted engine: tokens after which a sequence ends; never if not given."""
    scripted_deadly_token_id: Annotated[int | None, Field(ge=0)] = None
    """Scripted engine: id of a token that kills the engine if a prompt has it."""
    scripted_sessions: Path | None = None
    """Scripted engine: JSON file with what it answers in sessions of agents."""
    scripted_dies_on_signal: bool = False
    """Scripted engine: whether SIGUSR1 kills the engine instead of the process."""

    @property
    def served_name(self) -> str:
        """The name that clients put into `model`."""
        return self.model_name or Path(self.model_path).name

    @property
    def lease_ms(self) -> int:
        """The worker's lease in milliseconds."""
        return round(self.lease_seconds * 1000)

    @property
    def job_lease_ms(self) -> int:
        """The lease of a job in milliseconds."""
        return JOB_LEASES * self.lease_ms

    @model_validator(mode="after")
    def _check_model_folder(self) -> Self:
        folder = Path(self.model_path)
        is_folder_meant = folder.is_absolute() or self.model_path.startswith(".")
        if is_folder_meant and not (folder / "config.json").is_file():
            raise ValueError(f"model_path: {self.model_path} has no config.json")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.loaded_adapters is not None and self.loaded_adapters < self.adapter_slots:
            raise ValueError(
                f"loaded_adapters must be at least adapter_slots ({self.adapter_slots}). "
                f"Given: {self.loaded_adapters}"
            )
        if self.adapter_slots and not adapter_modules(Path(self.model_path)):
            raise ValueError(
                f"adapter_slots: {self.model_path} must be a folder with *.safetensors files"
            )
        return self

    @model_validator(mode="after")
    def _check_runner(self) -> Self:
        named = ("tool_parser", "reasoning_parser")
        if self.runner != "generate" and (given := [name for name in named if getattr(self, name)]):
            raise ValueError(f"{', '.join(given)}: only a model that completes texts can have them")
        return self

    @model_validator(mode="after")
    def _check_chat_template(self) -> Self:
        if self.chat_template is not None:
            given_template(self.chat_template)
        return self

    @model_validator(mode="after")
    def _check_aliases(self) -> Self:
        names = [self.served_name, *self.model_aliases]
        if not all(names):
            raise ValueError("model_aliases: a name must not be empty")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                "model_aliases: names must differ from each other and from the model's. "
                f"Given twice: {', '.join(repeated)}"
            )
        return self
