"""Settings of a gateway process, all from environment variables that begin with `SLUICE_`."""

import base64
import os
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    IPvAnyNetwork,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from contract.dialect import Dialect
from contract.logs import LogFormat
from contract.redis_url import check_redis_url
from gateway.outbound.hosts import HostPattern, parse_host_pattern

KIBIBYTE = 1024
ENCRYPTION_KEY_BYTES = 32
"""For AES-128 and HMAC-SHA-256, as Fernet uses them."""
MIN_JWT_SECRET_BYTES = 32
"""The length of HMAC-SHA-256's output: a shorter secret is the weakest part of the signature (RFC 7518)."""

MIN_CACHE_SALT_CHARACTERS = 16
MIN_AUDIT_KEY_CHARACTERS = 32
AUDIT_LOG_SINK = "log"
TENANTS_CLAIMS = ("scope", "sub", "project", "models", "dialect")
"""Claims by which a tenant's issuer describes its own people and programs."""


def _plain_seconds(value: object) -> object:
    """Read "0.2" as seconds; pydantic itself only reads numbers and ISO 8601."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_cache_salt(value: SecretStr) -> SecretStr:
    # None is checked where one is needed: by gateways.
    if 0 < len(value.get_secret_value()) < MIN_CACHE_SALT_CHARACTERS:
        raise ValueError(f"must have at least {MIN_CACHE_SALT_CHARACTERS} characters")
    return value


def _check_audit_sink(value: str) -> str:
    parts = urlsplit(value)
    is_file = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    if value != AUDIT_LOG_SINK and not is_file and not is_url:
        # It may carry a password.
        raise ValueError("must be 'log', file:///PATH, or an http or https URL")
    return value


def _read_host(value: object) -> object:
    return parse_host_pattern(value) if isinstance(value, str) else value


def _is_encryption_key(text: str) -> bool:
    try:
        return len(base64.urlsafe_b64decode(text)) == ENCRYPTION_KEY_BYTES
    except ValueError:
        return False


Duration = Annotated[timedelta, BeforeValidator(_plain_seconds)]
"""Seconds, or ISO 8601 such as PT30S."""

RedisUrl = Annotated[str, AfterValidator(check_redis_url)]
"""A server, or a master that sentinels know; it may carry passwords."""

_HostPattern = Annotated[HostPattern, BeforeValidator(_read_host)]


class JwtAlgorithm(StrEnum):
    """Signature algorithms that a deployment may pin."""

    HS256 = "HS256"
    RS256 = "RS256"
    ES256 = "ES256"
    EDDSA = "EdDSA"


class Settings(BaseSettings):
    """Everything that differs between deployments."""

    model_config = SettingsConfigDict(
        env_prefix="SLUICE_", env_ignore_empty=True, frozen=True, hide_input_in_errors=True
    )

    redis_url: Annotated[RedisUrl, Field(repr=False)] = "redis://127.0.0.1:6379/0"
    database_url: SecretStr = SecretStr("sqlite+aiosqlite:///.sluice/sluice.db")
    """SQLAlchemy URL: `sqlite+aiosqlite:///FILE` or `postgresql+asyncpg://USER:PASSWORD@HOST/NAME`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    operator_host: str = "127.0.0.1"
    operator_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where a gateway answers /admin and /metrics, which customers do not reach; with port 0 it does not."""

    trusted_proxies: Annotated[tuple[IPvAnyNetwork, ...], NoDecode] = ()
    """Addresses and networks, comma-separated, whose X-Forwarded-For is believed; of nobody by default."""

    default_dialect: Dialect = Dialect.OPENAI
    """How requests are read and answered where neither they, nor key, tenant or model name a dialect."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 8 * KIBIBYTE * KIBIBYTE
    max_body_items: Annotated[int, Field(gt=0)] = 262_144
    """Items of all arrays and objects in one request body, token ids of prompts included."""
    max_held_bytes_of_tenant: Annotated[int, Field(gt=0)] = 64 * KIBIBYTE * KIBIBYTE
    """Bytes of one tenant's bodies that a gateway reads at once, and of those that wait to be parsed."""
    max_prompts: Annotated[int, Field(gt=0)] = 1024
    """Prompts in one request, and sequences (prompts times best_of) as well."""
    header_timeout: Duration = timedelta(seconds=10)
    """How long a client may take to send the headers of a request."""
    send_timeout: Duration = timedelta(seconds=30)
    """How long a client may take nothing of an answer that waits for it; then its connection is cut."""
    max_connections: Annotated[int, Field(gt=0)] = 20_000
    """Open connections of clients; further ones are answered with 503 and closed."""
    body_timeout: Duration = timedelta(seconds=30)
    """How long a client may take to send the body."""
    queue_timeout: Duration = timedelta(seconds=120)
    """How long a request waits for its first token before it is refused with 503."""
    resume_after: Duration = timedelta(seconds=5)
    """How long after an outage of Redis no job is taken to be lost, so that living workers can say first what they
    hold. Longer than their SLUICE_LEASE_SECONDS."""
    request_timeout: Duration = timedelta(minutes=30)
    """How long a request may take in all."""
    commit_after: Duration = timedelta(seconds=10)
    """A streamed request that waits longer gets its 200 and comments that keep the connection alive."""
    keep_alive_interval: Duration = timedelta(seconds=15)
    """Silence after which a stream carries a comment."""
    max_unread_bytes: Annotated[int, Field(gt=0)] = 1024 * KIBIBYTE
    """Text that may pile up for a client that does not read; beyond it the request is cancelled."""
    max_held_bytes: Annotated[int, Field(gt=0)] = 128 * 1024 * KIBIBYTE
    """Memory for an answer that is not streamed, or whose best choices are known at its end. A request whose answer
    may need more is refused."""
    max_waiting_jobs: Annotated[int, Field(gt=0)] = 10_000
    """Waiting jobs of one model."""
    max_waiting_jobs_of_tenant: Annotated[int, Field(gt=0)] = 2_000
    """Waiting jobs of one tenant on one model."""

    max_stored_bytes_of_tenant: Annotated[int, Field(gt=0)] = 256 * KIBIBYTE * KIBIBYTE
    """Bytes in Redis of one tenant's requests that wait or run, and of its answers that are kept."""

    answer_retention: Duration = timedelta(seconds=120)
    """How long a stream can be continued after its end by a client that comes back; 0 keeps no streams."""
    idempotency_retention: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(hours=24)
    """How long an Idempotency-Key stands for its answer, and how long background answers can be read."""
    journal_interval: Duration = timedelta(seconds=1)
    """How often what a stream has brought is written to Redis for clients that come back."""

    key_cache_ttl: Duration = timedelta(seconds=60)
    """How long a key found in the database is believed; revocation does not wait for it."""
    key_cache_size: Annotated[int, Field(gt=0)] = 100_000

    unpaid_requests_per_minute: Annotated[int, Field(ge=0)] = 6000
    """Requests of one key that fail by its own fault, or only estimate, tokenize or read an answer; 0: no bound."""
    failed_logins_per_minute: Annotated[int, Field(ge=0)] = 600
    """Credentials from one address that are not valid; 0: no bound."""

    jwt_algorithms: Annotated[frozenset[JwtAlgorithm], NoDecode] = frozenset()
    """Accepted signature algorithms, comma-separated; none (the default) refuses every JWT."""
    jwt_secret: SecretStr | None = None
    jwt_jwks_file: Path | None = None
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_tenant_claim: str = "tenant"
    jwt_leeway: Duration = timedelta(seconds=30)
    jwt_operator_claim: str | None = None
    """Claim that makes an operator of whoever has one of the values below in it; none by default."""
    jwt_operator_value: str | None = None
    """Value of that claim, or entry of its list, that gives the scope `admin`."""
    jwt_operator_reader_value: str | None = None
    """Value of that claim, or entry of its list, that gives the scope `admin:read`."""

    cache_salt_secret: Annotated[SecretStr, AfterValidator(_check_cache_salt)] = SecretStr("")
    """Mixed into the prefix-cache salt of each tenant, so that it cannot be guessed. A gateway does not start without."""

    audit_key: SecretStr | None = None
    """Signs the audit log's head; further keys behind commas are accepted as well. `sluice jobs` signs nothing without."""
    audit_sink: Annotated[str, Field(repr=False), AfterValidator(_check_audit_sink)] = (
        AUDIT_LOG_SINK
    )
    """Where signed heads are kept: `log`, `file:///PATH`, or an http(s) URL to which they are posted."""

    celery_broker_url: Annotated[RedisUrl | None, Field(repr=False)] = None
    """Redis server through which background jobs are told to run; `redis_url` if not given."""
    jobs_concurrency: Annotated[int, Field(gt=0)] = 4
    """Background jobs that one `sluice jobs` runs at the same time."""

    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where `sluice jobs` and `sluice beat` answer /metrics and /healthz; with port 0 they do not."""
    metrics_tenants: Annotated[tuple[str, ...], NoDecode] = ()
    """Ids of tenants, comma-separated, that have a label of their own in metrics; all others share one."""

    webhook_allow_private: bool = False
    """Whether webhooks may be plain http, lie in private networks, and listen on any port."""
    encryption_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys, comma-separated, 32 bytes each in base64, that encrypt webhooks' secrets in the database. The first encrypts,
    all decrypt. Without a key no webhook can be registered."""

    image_url_hosts: Annotated[tuple[_HostPattern, ...], NoDecode] = ()
    """Hosts, comma-separated, from which images of chats are fetched, redirects included; none by default."""
    image_url_timeout: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(seconds=10)
    """How long fetching the images of a request may take."""
    image_url_max_bytes: Annotated[int, Field(gt=0)] = 8 * KIBIBYTE * KIBIBYTE
    """Size of all images together that are fetched for a request."""

    log_format: LogFormat = LogFormat.TEXT
    traces: bool = False
    """Whether spans are made and exported; how, is up to the standard `OTEL_` variables."""
    trace_content: bool = False
    """Whether prompts and messages stand in spans."""

    drain_delay: Duration = timedelta(0)
    """How long new requests are still served after SIGTERM, while /readyz fails already."""
    drain_timeout: Duration = timedelta(seconds=30)
    """How long running requests may go on after that."""

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: dict[str, object]) -> dict[str, object]:
        for name in (
            "jwt_algorithms",
            "trusted_proxies",
            "image_url_hosts",
            "metrics_tenants",
            "encryption_keys",
        ):
            value = values.get(name)
            if isinstance(value, str):
                values[name] = [part.strip() for part in value.split(",") if part.strip()]
        return values

    @property
    def audit_keys(self) -> tuple[str, ...]:
        """The keys of `audit_key`: the first one signs."""
        text = "" if self.audit_key is None else self.audit_key.get_secret_value()
        return tuple(key for part in text.split(",") if (key := part.strip()))

    @model_validator(mode="after")
    def _check_audit_keys(self) -> "Settings":
        if any(len(key) < MIN_AUDIT_KEY_CHARACTERS for key in self.audit_keys):
            raise ValueError(
                f"each key of SLUICE_AUDIT_KEY must have at least {MIN_AUDIT_KEY_CHARACTERS} characters"
            )
        return self

    @field_validator("encryption_keys")
    @classmethod
    def _check_encryption_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            if not _is_encryption_key(key.get_secret_value()):
                raise ValueError(
                    "SLUICE_ENCRYPTION_KEYS must be keys of 32 bytes in base64, comma-separated; "
                    "`openssl rand -base64 32` makes one"
                )
        return keys

    def plain_encryption_keys(self) -> list[str]:
        """Return the keys as they were given."""
        return [key.get_secret_value() for key in self.encryption_keys]

    @model_validator(mode="after")
    def _check_jwt(self) -> "Settings":
        self._check_jwt_operators()
        if not self.jwt_algorithms:
            return self
        if self.jwt_issuer is None or self.jwt_audience is None:
            raise ValueError(
                "SLUICE_JWT_ISSUER and SLUICE_JWT_AUDIENCE are required with SLUICE_JWT_ALGORITHMS"
            )
        if JwtAlgorithm.HS256 in self.jwt_algorithms and self.jwt_secret is None:
            raise ValueError("SLUICE_JWT_SECRET is required for HS256")
        secret = self.jwt_secret
        if secret is not None and len(secret.get_secret_value().encode()) < MIN_JWT_SECRET_BYTES:
            raise ValueError(f"SLUICE_JWT_SECRET must have at least {MIN_JWT_SECRET_BYTES} bytes")
        if self.jwt_algorithms - {JwtAlgorithm.HS256} and self.jwt_jwks_file is None:
            raise ValueError("SLUICE_JWT_JWKS_FILE is required for RS256, ES256 and EdDSA")
        return self

    def _check_jwt_operators(self) -> None:
        values = {self.jwt_operator_value, self.jwt_operator_reader_value} - {None}
        if bool(values) != (self.jwt_operator_claim is not None):
            raise ValueError(
                "SLUICE_JWT_OPERATOR_CLAIM is required with SLUICE_JWT_OPERATOR_VALUE or "
                "SLUICE_JWT_OPERATOR_READER_VALUE, and needs one of them"
            )
        if self.jwt_operator_claim in (*TENANTS_CLAIMS, self.jwt_tenant_claim):
            raise ValueError(
                "SLUICE_JWT_OPERATOR_CLAIM must be a claim that says nothing about a tenant, "
                f"so none of {', '.join(TENANTS_CLAIMS)} and what SLUICE_JWT_TENANT_CLAIM names"
            )


def load_settings(**given: str | None) -> Settings:
    """Return the environment's settings with those that were given on the command line."""
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Settings(**overrides)


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables set, for a process that it starts."""
    return {**os.environ, **variables}
