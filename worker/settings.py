"""Settings of the worker process, from the environment (prefix `SLUICE_`) or the command line."""

import json
import os
import secrets
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from contract.dialect import Dialect
from contract.logs import LogFormat
from contract.redis_url import check_redis_url
from worker.chat_format import given_template

_PREFIX = "SLUICE_"


def environment_name(field: str) -> str:
    """Return the environment variable of a field."""
    return _PREFIX + field.upper()


def _default_worker_id() -> str:
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


class Settings(BaseSettings):
    """All settings of a worker."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    model_path: str = Field(
        min_length=1, description="Folder of the model, or its Hugging Face id."
    )
    model_name: str = Field(
        default="", description="Name under which the model is served; the folder's name if empty."
    )
    model_aliases: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Other names under which clients may ask for the model, comma-separated.",
    )
    redis_url: Annotated[SecretStr, AfterValidator(_check_redis_url)] = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"), description="Redis server of the queue."
    )
    worker_id: str = Field(
        default_factory=_default_worker_id,
        min_length=1,
        description="Name of this worker, different for each one and each start; made up if not given.",
    )
    dialect: Dialect | None = Field(
        default=None,
        description="The dialect in which this model is asked unless a request says otherwise: "
        f"{', '.join(Dialect)}; the gateway's default if not given.",
    )
    engine: Literal["vllm", "scripted"] = Field(
        default="vllm", description="`scripted` makes up words at a steady pace, for tests."
    )

    max_sequences: int | None = Field(
        default=None, ge=1, description="Sequences in the engine's batch, at most."
    )
    context_window: int | None = Field(
        default=None,
        ge=2,
        description="Prompt and completion tokens together, at most; what the model allows if not given.",
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Start faster without compiling the model; true on a CPU and false on a GPU if not given.",
    )
    chat_template: Path | None = Field(
        default=None,
        description="File with the chat template that stands in for the model's own (Jinja).",
    )
    tool_parser: str = Field(
        default="",
        description="vLLM's name of the parser that finds tool calls in chat answers, such as `hermes`; "
        "none are looked for if empty. The scripted engine has its own.",
    )
    reasoning_parser: str = Field(
        default="",
        description="vLLM's name of the parser that tells reasoning from content in chat answers, such as "
        "`qwen3`; all is content if empty. The scripted engine has its own.",
    )
    cpu_kv_cache_gib: int = Field(
        default=1, ge=1, description="Memory for the KV cache on a CPU, in GiB."
    )
    engine_arguments: Annotated[dict[str, Any], BeforeValidator(_from_json)] = Field(
        default={},
        description='More engine arguments as JSON, such as {"tensor_parallel_size": 2}.',
    )

    lease_seconds: float = Field(
        default=4.0, ge=0.3, le=600, description="Time after which a silent worker loses its jobs."
    )
    drain_seconds: float = Field(
        default=30.0,
        ge=0,
        description="Time that running jobs get to finish when the worker stops.",
    )
    gather_seconds: float = Field(
        default=0.04,
        ge=0,
        le=1,
        description="Longest time for which new text of many running sequences is gathered into one "
        "delta each; 0 sends every engine step's at once.",
    )
    reply_buffer_deltas: int = Field(
        default=200_000,
        ge=1_000,
        description="Unwritten reply deltas kept while Redis is away, before jobs are given up.",
    )

    health_host: str = Field(
        default="127.0.0.1", description="Address of /metrics, /healthz and /readyz."
    )
    health_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of /metrics, /healthz and /readyz; 0 opens none.",
    )
    stall_seconds: float = Field(
        default=120.0,
        gt=0,
        description="Time without an engine step, while jobs run, after which the engine is started again.",
    )
    restart_pause_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Longest pause before a try to start a dead engine again; the first one is 1 s, each "
        "further one twice as long, until an engine has worked for a minute.",
    )
    restart_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Time in which a dead engine must have been started again, or /healthz fails.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="What is logged."
    )
    log_format: LogFormat = Field(
        default=LogFormat.TEXT,
        description="`text`, or `json`: one object in each line, with the ids of its request and trace.",
    )
    traces: bool = Field(
        default=False,
        description="Whether spans are made of jobs whose gateways trace them, and exported as the standard "
        "`OTEL_` variables say.",
    )

    scripted_step_seconds: float = Field(
        default=0.02, ge=0, description="Scripted engine: time between two steps; 0 does not wait."
    )
    scripted_prefill_seconds_per_token: float = Field(
        default=0.0, ge=0, description="Scripted engine: time to read a prompt token."
    )
    scripted_kv_cache_tokens: int = Field(
        default=1_000_000, ge=1, description="Scripted engine: size of the made-up KV cache."
    )
    scripted_completion_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Scripted engine: tokens after which a text ends; never if not given.",
    )
    scripted_deadly_token_id: int | None = Field(
        default=None,
        ge=0,
        description="Scripted engine: a token whose prompts make the engine die; none if not given.",
    )
    scripted_dies_on_signal: bool = Field(
        default=False,
        description="Scripted engine: whether SIGUSR1 makes the engine die, not the process.",
    )

    @property
    def served_name(self) -> str:
        """The name that clients put into `model`."""
        return self.model_name or Path(self.model_path).name

    @property
    def lease_ms(self) -> int:
        """The lease in milliseconds."""
        return round(self.lease_seconds * 1000)

    @model_validator(mode="after")
    def _check_model_folder(self) -> Self:
        folder = Path(self.model_path)
        is_folder_meant = folder.is_absolute() or self.model_path.startswith(".")
        if is_folder_meant and not (folder / "config.json").is_file():
            raise ValueError(f"model_path: {self.model_path} holds no config.json")
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
