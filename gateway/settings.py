"""Settings of a gateway process, all from environment variables that begin with `SLUICE_`."""

import os
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    IPvAnyNetwork,
    SecretStr,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from contract.dialect import Dialect
from contract.redis_url import check_redis_url
from gateway.outbound.hosts import HostPattern, parse_host_pattern

KIBIBYTE = 1024
MIN_JWT_SECRET_BYTES = 32
"""The length of HMAC-SHA-256's output: a shorter secret is the weakest part of the signature (RFC 7518)."""


def _plain_seconds(value: object) -> object:
    """Read "0.2" as seconds; pydantic itself only reads numbers and ISO 8601."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _read_host(value: object) -> object:
    return parse_host_pattern(value) if isinstance(value, str) else value


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

    trusted_proxies: Annotated[tuple[IPvAnyNetwork, ...], NoDecode] = ()
    """Addresses and networks, comma-separated, whose X-Forwarded-For is believed; of nobody by default."""

    default_dialect: Dialect = Dialect.OPENAI
    """How requests are read and answered where neither they, nor key, tenant or model name a dialect."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 8 * KIBIBYTE * KIBIBYTE
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
    max_waiting_jobs: Annotated[int, Field(gt=0)] = 10_000
    """Waiting jobs of one model."""
    max_waiting_jobs_of_tenant: Annotated[int, Field(gt=0)] = 2_000
    """Waiting jobs of one tenant on one model."""

    answer_retention: Duration = timedelta(seconds=120)
    """How long a stream can be continued after its end by a client that comes back; 0 keeps no streams."""
    idempotency_retention: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(hours=24)
    """How long an Idempotency-Key stands for its answer, and how long background answers can be read."""
    journal_interval: Duration = timedelta(seconds=1)
    """How often what a stream has brought is written to Redis for clients that come back."""

    key_cache_ttl: Duration = timedelta(seconds=60)
    """How long a key found in the database is believed; revocation does not wait for it."""
    key_cache_size: Annotated[int, Field(gt=0)] = 100_000

    jwt_algorithms: Annotated[frozenset[JwtAlgorithm], NoDecode] = frozenset()
    """Accepted signature algorithms, comma-separated; none (the default) refuses every JWT."""
    jwt_secret: SecretStr | None = None
    jwt_jwks_file: Path | None = None
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_tenant_claim: str = "tenant"
    jwt_leeway: Duration = timedelta(seconds=30)

    cache_salt_secret: SecretStr = SecretStr("sluice")
    """Mixed into the prefix-cache salt of each tenant, so that it cannot be guessed."""

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
    """Whether webhooks may be plain http and lie in private networks."""

    image_url_hosts: Annotated[tuple[_HostPattern, ...], NoDecode] = ()
    """Hosts, comma-separated, from which images of chats are fetched, redirects included; none by default."""
    image_url_timeout: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(seconds=10)
    """How long fetching the images of a request may take."""
    image_url_max_bytes: Annotated[int, Field(gt=0)] = 8 * KIBIBYTE * KIBIBYTE
    """Size of all images together that are fetched for a request."""

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
        ):
            value = values.get(name)
            if isinstance(value, str):
                values[name] = [part.strip() for part in value.split(",") if part.strip()]
        return values

    @model_validator(mode="after")
    def _check_jwt(self) -> "Settings":
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


def load_settings(**given: str | None) -> Settings:
    """Return the environment's settings with those that were given on the command line."""
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Settings(**overrides)


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables set, for a process that it starts."""
    return {**os.environ, **variables}
