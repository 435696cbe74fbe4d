"""Settings of a gateway process, read from environment variables that begin with `SLUICE_`."""

import base64
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from common.logs import LogFormat
from common.object_store import NO_STORE
from common.redis_url import check_redis_url, require_files
from contract.dialect import Dialect
from gateway.platform.env_file import LiveEnvFile
from gateway.platform.outbound.addresses import HostPattern, parse_host_pattern
from gateway.records.checks import read_origins
from gateway.records.errors import StartupError
from gateway.records.scopes import Role

LOCAL_FOLDER = Path(".sluice")
"""Folder of `sluice up` in the current folder."""
COMMANDS_FILE = LOCAL_FOLDER / "cli.env"
"""Settings of a running `sluice up` for the commands that manage a deployment."""

KIBIBYTE = 1024
MAX_PROCESSES = 64
ENCRYPTION_KEY_BYTES = 32
"""Key length for AES-128 and HMAC-SHA-256, as Fernet uses them."""
MIN_JWT_SECRET_BYTES = 32
"""Output length of HMAC-SHA-256; a shorter secret would weaken the signature (RFC 7518)."""

MAX_ISSUER_CHARACTERS = 255
MIN_CACHE_SALT_CHARACTERS = 16
MIN_AUDIT_KEY_CHARACTERS = 32
AUDIT_LOG_SINK = "log"
_FINGERPRINT = b"sluice check"
_WINDOW = re.compile(r"[1-9][0-9]{0,3}[mhd]")
SCOPE_CLAIMS = ("scope", "scp", "scopes", "permissions")
"""Claims of a token that restrict its rights, under the names of several identity providers."""
TENANTS_CLAIMS = ("scope", "scp", "scopes", "sub", "project", "models", "dialect")
"""Claims with which a tenant's issuer describes its users and programs."""


T = TypeVar("T")


def _plain_seconds(value: object) -> object:
    """Parse "0.2" as seconds; pydantic itself only parses numbers and ISO 8601."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _check_cache_salt(value: SecretStr) -> SecretStr:
    # An empty secret is valid here; gateways check it at startup.
    if 0 < len(value.get_secret_value()) < MIN_CACHE_SALT_CHARACTERS:
        raise ValueError(f"must have at least {MIN_CACHE_SALT_CHARACTERS} characters")
    return value


def _check_smtp_url(value: SecretStr | None) -> SecretStr | None:
    parts = urlsplit("" if value is None else value.get_secret_value())
    if value is not None and (parts.scheme not in ("smtp", "smtps") or not parts.hostname):
        raise ValueError("must be smtp:// or smtps:// with a host")
    return value


def _check_audit_sink(value: str) -> str:
    parts = urlsplit(value)
    is_file = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    if value != AUDIT_LOG_SINK and not is_file and not is_url:
        # The URL may contain a password.
        raise ValueError("must be 'log', file:///PATH, or an http or https URL")
    return value


def _check_windows(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values or not all(map(_WINDOW.fullmatch, values)):
        raise ValueError("must be numbers of minutes, hours or days such as 90m, 24h or 7d")
    return values


def _check_public_url(value: str) -> str:
    parts = urlsplit(value)
    is_origin = value.rstrip("/") == f"{parts.scheme}://{parts.netloc}"
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in value or not is_origin:
        raise ValueError("must have the form SCHEME://HOST[:PORT], with http or https")
    return value.rstrip("/")


def _link(name: str = "") -> Callable[[str], str]:
    """Return a check of a link, which is a template with this name in braces if there is one."""
    needed = name and f"{{{name}}}"

    def check(value: str) -> str:
        parts = urlsplit(value)
        # Other braces, such as braces of JSON in a query, must be percent-encoded.
        count = value.count(needed) if needed else 0
        is_known = value.count("{") == value.count("}") == count and bool(count) == bool(needed)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_known:
            what = f"with {needed} and no other braces" if needed else "without braces"
            raise ValueError(f"must be an http or https URL {what}")
        return value

    return check


def _check_issuer(value: str) -> str:
    parts = urlsplit(value)
    is_local = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not (parts.scheme == "https" or is_local) or not parts.hostname:
        raise ValueError("must be an https URL, or an http URL of this machine")
    if "@" in parts.netloc or parts.query or parts.fragment or len(value) > MAX_ISSUER_CHARACTERS:
        raise ValueError(
            f"must have at most {MAX_ISSUER_CHARACTERS} characters and no user, query or fragment"
        )
    return value


def _read_host(value: object) -> object:
    return parse_host_pattern(value) if isinstance(value, str) else value


def _is_encryption_key(text: str) -> bool:
    try:
        return len(base64.urlsafe_b64decode(text)) == ENCRYPTION_KEY_BYTES
    except ValueError:
        return False


Duration = Annotated[timedelta, BeforeValidator(_plain_seconds)]
"""Seconds, or an ISO 8601 duration such as PT30S."""

RedisUrl = Annotated[str, AfterValidator(check_redis_url)]
"""A Redis server, or a master known to Sentinels; the URL may contain passwords."""

CommaSeparated = Annotated[T, NoDecode, BeforeValidator(_split)]

_HostPattern = Annotated[HostPattern, BeforeValidator(_read_host)]


class JwtAlgorithm(StrEnum):
    """Signature algorithms that a deployment may allow."""

    HS256 = "HS256"
    RS256 = "RS256"
    ES256 = "ES256"
    EDDSA = "EdDSA"


class ExportKind(StrEnum):
    """Protocols of systems to which the ledger is exported."""

    OPENMETER = "openmeter"
    CLOUDEVENTS = "cloudevents"
    STRIPE = "stripe"
    OTLP = "otlp"


STRIPE_URL = "https://api.stripe.com"
EXPORT_RETRIES = {
    # Stripe recognizes an identifier for at least 24 hours, OpenMeter by default for 32 days.
    ExportKind.STRIPE: timedelta(hours=23),
    ExportKind.OPENMETER: timedelta(days=30),
    ExportKind.CLOUDEVENTS: timedelta(days=30),
    ExportKind.OTLP: timedelta(days=30),
}


class InvoiceIssuer(BaseModel):
    """Who issues invoices, as they name it, and the tax on their amounts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    address: tuple[str, ...] = ()
    """Lines."""
    tax_id: str = ""
    tax_name: str = "VAT"
    tax_percent: Annotated[Decimal | None, Field(ge=0, le=100)] = None
    """Added to the total, rounded to cents; null: invoices name no tax."""
    note: str = ""
    """Text below the amounts, such as bank details or the reason why there is no tax."""


class ExportSink(BaseModel):
    """A billing system to which `sluice jobs` exports the ledger."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]
    kind: ExportKind
    url: str = ""
    """Server of OpenMeter, Stripe or OTLP; for `cloudevents` the URL that receives the events."""
    tenant: Annotated[str, Field(max_length=63)] = ""
    """The tenant whose requests are exported; empty: all. Required for `otlp`."""
    event: Annotated[str, Field(min_length=1, max_length=100)] = "sluice.usage"
    """`type` of the events; for Stripe the event name of the meter."""
    source: Annotated[str, Field(min_length=1, max_length=200)] = "sluice"
    """`source` of the events; different for each deployment."""
    batch_size: Annotated[int, Field(ge=1, le=1000)] = 100
    """Events of one request; Stripe always gets one."""
    window: Annotated[Duration, Field(ge=timedelta(minutes=1), le=timedelta(hours=1))] = timedelta(
        hours=1
    )
    """How often the usage of each tenant is summed up for Stripe."""
    retry_for: Annotated[Duration | None, Field(gt=timedelta(0))] = None
    """How long a batch with an unknown outcome is sent again: less than the time for which the
    receiver recognizes an id."""

    @model_validator(mode="after")
    def _check_url(self) -> "ExportSink":
        parts = urlsplit(self.url or (STRIPE_URL if self.kind is ExportKind.STRIPE else ""))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the sink '{self.name}' needs an http or https 'url'")
        if self.kind is ExportKind.OTLP and not self.tenant:
            raise ValueError(f"the sink '{self.name}' of the kind otlp needs a 'tenant'")
        if self.kind is ExportKind.STRIPE and self.tenant:
            raise ValueError(f"the sink '{self.name}' of the kind stripe takes no 'tenant'")
        return self

    @property
    def retries_end_after(self) -> timedelta:
        """`retry_for`, or its default for the kind."""
        return self.retry_for or EXPORT_RETRIES[self.kind]


def _check_sinks(sinks: tuple[ExportSink, ...]) -> tuple[ExportSink, ...]:
    if len({sink.name for sink in sinks}) < len(sinks):
        raise ValueError("must have different names")
    return sinks


class Settings(BaseSettings):
    """All deployment-specific settings."""

    model_config = SettingsConfigDict(
        env_prefix="SLUICE_", env_ignore_empty=True, frozen=True, hide_input_in_errors=True
    )

    redis_url: Annotated[RedisUrl, Field(repr=False)] = "redis://127.0.0.1:6379/0"
    database_url: SecretStr = SecretStr("sqlite+aiosqlite:///.sluice/sluice.db")
    """`sqlite+aiosqlite:///FILE`, or `postgresql://USER:PASSWORD@HOST/NAME` with parameters of
    libpq."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    operator_host: str = "127.0.0.1"
    operator_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which a gateway serves /admin and /metrics, separate from customers; 0 disables
    it."""

    processes: Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = 1
    """Gateway processes that share the customers' port; each is one gateway, with an operators'
    port of its own: `operator_port`, the next one, and so on."""

    trusted_proxies: CommaSeparated[tuple[IPvAnyNetwork, ...]] = ()
    """Comma-separated addresses and networks whose X-Forwarded-For is trusted; none by default, so
    that the address of a client is that of the connection."""

    cors_origins: Annotated[CommaSeparated[tuple[str, ...]], AfterValidator(read_origins)] = ()
    """Comma-separated origins of web pages that may use any key, or `*`; none by default."""

    default_dialect: Dialect = Dialect.OPENAI
    """Dialect of requests for which neither the request nor its key, tenant or model sets one."""
    openrouter_models: dict[str, dict[str, Any]] = {}
    """By model, the members of its entry in `GET /v1/models?format=openrouter` that the gateway
    cannot know, such as `quantization`, as JSON."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 8 * KIBIBYTE * KIBIBYTE
    """Like the next one, it grows with the largest context window unless it is set."""
    max_body_items: Annotated[int, Field(gt=0)] = 262_144
    """Items in all arrays and objects of one request body, including token ids of prompts."""
    max_audio_bytes: Annotated[int, Field(gt=0)] = 25 * KIBIBYTE * KIBIBYTE
    """Bytes of an audio file."""
    max_audio_seconds: Annotated[int, Field(gt=0)] = 1500
    """Seconds of an audio file. Redis stores 32,000 bytes for each while its request runs."""
    max_held_bytes_of_tenant: Annotated[int, Field(gt=0)] = 64 * KIBIBYTE * KIBIBYTE
    """Per tenant: body bytes that a gateway reads at once, body bytes that wait to be parsed, and
    bytes of audio files that wait to be decoded."""
    prompt_cache_bytes: Annotated[int, Field(ge=0)] = 128 * 1024 * KIBIBYTE
    """Memory for the token ids of prompts, so that the next turn of a session encodes only what is
    new in it. The tenant that has most loses segments first."""
    prompt_cache_bytes_of_tenant: Annotated[int, Field(ge=0)] = 32 * 1024 * KIBIBYTE
    fast_tokenizers: bool = False
    """Whether fastokens encodes long prompts, of models for which its ids are the tokenizer's."""
    max_prompts: Annotated[int, Field(gt=0)] = 1024
    """Maximum prompts in one request, and maximum sequences (prompts times best_of)."""
    header_timeout: Duration = timedelta(seconds=10)
    """How long a client may take to send the request headers."""
    send_timeout: Duration = timedelta(seconds=30)
    """How long a client may read nothing of a waiting response before its connection is closed."""
    max_connections: Annotated[int, Field(gt=0)] = 20_000
    """Maximum open client connections; further ones receive a 503 and are closed. The connections
    of one network beyond 20 times the free ones are closed without a response."""
    body_timeout: Duration = timedelta(seconds=30)
    """How long a client may take to send the request body."""
    queue_timeout: Duration = timedelta(seconds=120)
    """How long a request waits for a worker before it is rejected with 503."""
    resume_after: Duration = timedelta(seconds=5)
    """How long after a Redis outage no job is considered lost, so that live workers can first
    report the jobs that they hold. Longer than their SLUICE_LEASE_SECONDS."""
    request_timeout: Duration = timedelta(minutes=30)
    """Maximum total duration of a request."""
    commit_after: Duration = timedelta(seconds=10)
    """A streamed request that waits longer receives its 200 and keep-alives."""
    keep_alive_interval: Duration = timedelta(seconds=15)
    """Idle time after which a stream sends a keep-alive."""
    max_unread_bytes: Annotated[int, Field(gt=0)] = 1024 * KIBIBYTE
    """Unread text buffered for a slow client; beyond it the request is cancelled."""
    max_held_bytes: Annotated[int, Field(gt=0)] = 128 * 1024 * KIBIBYTE
    """Memory for a response that is not streamed, or whose best choices are known only at its end.
    A request whose response may need more is rejected."""
    max_waiting_jobs: Annotated[int, Field(gt=0)] = 10_000
    """Maximum waiting jobs of one model."""
    max_waiting_jobs_of_tenant: Annotated[int, Field(gt=0)] = 2_000
    """Maximum waiting jobs of one tenant for one model."""

    max_stored_bytes_of_tenant: Annotated[int, Field(gt=0)] = 256 * KIBIBYTE * KIBIBYTE
    """Bytes in Redis for one tenant's waiting or running requests and its retained responses."""

    answer_retention: Duration = timedelta(seconds=120)
    """How long after its end a client can still resume a stream; 0 retains no streams."""
    idempotency_retention: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(hours=24)
    """How long an Idempotency-Key maps to its response, and background responses stay readable."""
    responses_retention: Duration = timedelta(hours=24)
    """How long the file store keeps items of Responses that a client `store`s; 0 keeps none."""
    journal_interval: Duration = timedelta(seconds=1)
    """How often new output is checked: Redis has all of it after twelve seconds and a check."""

    key_cache_ttl: Duration = timedelta(seconds=60)
    """How long a key from the database is cached; revocation takes effect without this delay."""
    key_cache_size: Annotated[int, Field(gt=0)] = 100_000

    unpaid_requests_per_minute: Annotated[int, Field(ge=0)] = 6000
    """Requests of one key that fail by its own fault, or only estimate, tokenize or read a
    response; 0: no limit."""
    failed_logins_per_minute: Annotated[int, Field(ge=0)] = 600
    """Invalid credentials from one address; 0: no limit."""

    jwt_algorithms: CommaSeparated[frozenset[JwtAlgorithm]] = frozenset()
    """Comma-separated accepted signature algorithms; none (the default) rejects every JWT."""
    jwt_secret: SecretStr | None = None
    jwt_jwks_file: Path | None = None
    jwt_jwks_url: Annotated[str, AfterValidator(_check_issuer)] | None = None
    """Where the issuer publishes the keys, in place of the file."""
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_tenant_claim: str = "tenant"
    jwt_leeway: Duration = timedelta(seconds=30)
    jwt_operator_claim: str | None = None
    """Claim that makes its holder an operator if it has one of the values below; none by
    default."""
    jwt_operator_value: str | None = None
    """Claim value, or entry of its list, that grants the scope `admin`."""
    jwt_operator_reader_value: str | None = None
    """Claim value, or entry of its list, that grants the scope `admin:read`."""
    jwt_role_claim: str | None = None
    """Claim with groups of `oidc_roles`; none by default."""

    cache_salt_secret: Annotated[SecretStr, AfterValidator(_check_cache_salt)] = SecretStr("")
    """Mixed into each tenant's prefix-cache salt to make it unguessable. Required by gateways."""

    audit_key: SecretStr | None = None
    """Comma-separated keys for the audit log's head: the first signs, further ones are also
    accepted. Without a key, `sluice jobs` signs nothing."""
    audit_sink: Annotated[str, Field(repr=False), AfterValidator(_check_audit_sink)] = (
        AUDIT_LOG_SINK
    )
    """Where signed heads are stored: `log`, `file:///PATH`, or an http(s) URL that receives a
    POST."""

    celery_broker_url: Annotated[RedisUrl | None, Field(repr=False)] = None
    """Redis server for the queue of background jobs; `redis_url` by default."""

    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which `sluice jobs` and `sluice beat` serve /metrics and /healthz; 0 disables it."""
    metrics_tenants: CommaSeparated[tuple[str, ...]] = ()
    """Comma-separated tenant ids that have their own label in metrics; all others share one."""

    webhook_allow_private: bool = False
    """Whether webhooks may use plain http, private networks and any port."""
    smtp_url: Annotated[SecretStr | None, AfterValidator(_check_smtp_url)] = None
    """SMTP server for webhooks whose URL is an address: `smtp://USER:PASSWORD@HOST:587`, which uses
    STARTTLS if the server has it, or `smtps://`. Without it, no webhook sends mail."""
    mail_from: str = ""
    """Address of the sender, such as `Sluice <billing@example.com>`. Required with `smtp_url`."""
    encryption_keys: CommaSeparated[tuple[SecretStr, ...]] = ()
    """Comma-separated keys, 32 bytes each in base64, that encrypt webhook secrets in the database.
    The first encrypts, all decrypt. Without a key no webhook can be registered."""

    export_sinks: Annotated[tuple[ExportSink, ...], AfterValidator(_check_sinks)] = ()
    """Billing systems to which `sluice jobs` exports the ledger: a JSON list."""
    export_tokens: CommaSeparated[tuple[SecretStr, ...]] = ()
    """Comma-separated `SINK=TOKEN`: the bearer tokens of the sinks."""

    file_store: Annotated[str, Field(min_length=1)] = str(LOCAL_FOLDER / "files")
    """Store of files and batch results: a folder that all gateways and `sluice jobs` share,
    `s3://BUCKET/PREFIX`, or `none`. The standard `AWS_` variables configure S3."""
    prompt_log_store: Annotated[str, Field(min_length=1)] = NO_STORE
    """Store of the prompt logs of tenants who opt in, as `file_store`. `{tenant}` in it is the
    tenant's id: `s3://acme-{tenant}` gives each a bucket of its own. Default: nobody can opt in."""
    max_file_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024 * KIBIBYTE
    max_file_lines: Annotated[int, Field(gt=0)] = 1_000_000
    max_file_bytes_of_tenant: Annotated[int, Field(gt=0)] = 10 * 1024 * 1024 * KIBIBYTE
    """Bytes of all files of one tenant, including batch results."""
    max_file_lines_of_tenant: Annotated[int, Field(gt=0)] = 10_000_000
    file_retention: Annotated[Duration, Field(ge=timedelta(hours=1))] = timedelta(days=30)
    """How long files are stored if their request sets no `expires_after`."""
    batch_windows: Annotated[CommaSeparated[tuple[str, ...]], AfterValidator(_check_windows)] = (
        "24h",
    )
    """Comma-separated values of `completion_window` that batches may have, such as 1h or 7d."""
    max_batches_of_tenant: Annotated[int, Field(gt=0)] = 2_000
    """Batches of one tenant that have not ended."""
    batch_price_percent: Annotated[int, Field(ge=0, le=100)] = 50
    """Price of batch lines for models without a price in the tier batch, in percent of the price
    in the tier default."""
    batch_lines: Annotated[int, Field(gt=0)] = 1_000
    """Batch lines that one gateway process runs at once."""

    max_adapter_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024 * KIBIBYTE
    """Maximum bytes of the weights of one LoRA adapter."""

    image_url_hosts: CommaSeparated[tuple[_HostPattern, ...]] = ()
    """Comma-separated hosts from which chat images are fetched, including redirects; none by
    default."""
    image_url_timeout: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(seconds=10)
    """Maximum time to fetch the images of a request."""
    image_url_max_bytes: Annotated[int, Field(gt=0)] = 8 * KIBIBYTE * KIBIBYTE
    """Maximum total size of the images that are fetched for a request."""

    log_format: LogFormat = LogFormat.TEXT
    traces: bool = False
    """Whether spans are created and exported; the standard `OTEL_` variables configure the
    export."""
    trace_content: bool = False
    """Whether spans contain prompts and messages."""

    console: bool = True
    """Whether the console is served at /console, on each of the two ports for its audience."""
    status_page: bool = True
    """Whether everybody may read the state of the service at /status, on the customers' port."""
    public_url: Annotated[str, AfterValidator(_check_public_url)] | None = None
    """URL under which customers reach gateways, such as `https://api.example.com`. By default the
    console shows the one in the address bar."""
    invoice_issuer: InvoiceIssuer | None = None
    """Name, address, tax and note of the pages of invoices, as JSON; none by default."""
    console_idle_timeout: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(minutes=30)
    """How long a session of the console continues without a request."""
    console_session_timeout: Annotated[Duration, Field(gt=timedelta(0))] = timedelta(hours=12)
    """How long a session of the console continues at most."""
    console_key_login: bool = True
    """Whether API keys log in to the console, also next to an identity provider."""
    operator_public_url: Annotated[str, AfterValidator(_check_public_url)] | None = None
    """URL under which operators reach the operators' listener, if a proxy is in front of it."""

    oidc_issuer: Annotated[str, AfterValidator(_check_issuer)] | None = None
    """OpenID provider at which people log in to the console, by its `iss`; none by default."""
    oidc_client_id: str | None = None
    oidc_client_secret: SecretStr | None = None
    """Secret of the client; without one, the client is public and only PKCE protects the code."""
    oidc_scopes: CommaSeparated[tuple[str, ...]] = ("openid", "email", "profile")
    """Comma-separated scopes that a login requests."""
    oidc_operator_claim: str | None = None
    """Claim that makes a person an operator if it has one of the values below; none by default."""
    oidc_operator_values: CommaSeparated[tuple[str, ...]] = ()
    """Comma-separated claim values, or entries of its list, that grant the scope `admin`."""
    oidc_operator_reader_values: CommaSeparated[tuple[str, ...]] = ()
    """Comma-separated claim values, or entries of its list, that grant the scope `admin:read`."""
    oidc_role_claim: str | None = None
    """Claim with groups of `oidc_roles`; none by default."""
    oidc_roles: dict[str, dict[str, Role]] = {}
    """JSON: by value of either claim, or entry of its list, a role in each of some tenants."""
    oidc_email_tenants: CommaSeparated[tuple[str, ...]] = ()
    """Comma-separated directories of Microsoft Entra (claim `tid`) whose e-mails count as verified,
    since Entra sends no `email_verified`; none by default."""

    dashboard_url: Annotated[str, AfterValidator(_link())] | None = None
    """Link from the operators' console to a dashboard of the deployment."""
    traces_url: Annotated[str, AfterValidator(_link())] | None = None
    """Link from the operators' console to the traces of the deployment."""
    tenant_dashboard_url: Annotated[str, AfterValidator(_link("tenant"))] | None = None
    """Link from the operators' console to a dashboard of a tenant, with `{tenant}` for its id."""
    model_dashboard_url: Annotated[str, AfterValidator(_link("model"))] | None = None
    """Link to a dashboard of a model, with `{model}` for its name."""
    trace_url: Annotated[str, AfterValidator(_link("request_id"))] | None = None
    """Link from a receipt to the trace of its request, with `{request_id}` for the response's id,
    which traces have as `gen_ai.response.id`."""

    drain_delay: Duration = timedelta(0)
    """How long new requests are still served after SIGTERM while /readyz already fails."""
    drain_timeout: Duration = timedelta(seconds=30)
    """How long running requests may continue after that."""

    @property
    def audit_keys(self) -> tuple[str, ...]:
        """The keys of `audit_key`; the first one signs."""
        text = "" if self.audit_key is None else self.audit_key.get_secret_value()
        return tuple(key for part in text.split(",") if (key := part.strip()))

    @model_validator(mode="after")
    def _check_mail(self) -> "Settings":
        if self.smtp_url is not None and "@" not in self.mail_from:
            raise ValueError("SLUICE_MAIL_FROM must be an address, because SLUICE_SMTP_URL is set")
        return self

    @model_validator(mode="after")
    def _check_audit_keys(self) -> "Settings":
        if any(len(key) < MIN_AUDIT_KEY_CHARACTERS for key in self.audit_keys):
            raise ValueError(
                "each key of SLUICE_AUDIT_KEY must have at least "
                f"{MIN_AUDIT_KEY_CHARACTERS} characters"
            )
        return self

    @field_validator("encryption_keys")
    @classmethod
    def _check_encryption_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            if not _is_encryption_key(key.get_secret_value()):
                raise ValueError(
                    "SLUICE_ENCRYPTION_KEYS must be keys of 32 bytes in base64, comma-separated; "
                    "`openssl rand -base64 32` generates one"
                )
        return keys

    def plain_encryption_keys(self) -> list[str]:
        """Return the keys as configured."""
        return [key.get_secret_value() for key in self.encryption_keys]

    @property
    def tokens_of_sinks(self) -> dict[str, str]:
        """The bearer tokens by the names of their sinks."""
        pairs = (token.get_secret_value().partition("=") for token in self.export_tokens)
        return {name: token for name, _, token in pairs}

    @model_validator(mode="after")
    def _check_export_tokens(self) -> "Settings":
        tokens = self.tokens_of_sinks
        if not all(tokens.values()) or len(tokens) < len(self.export_tokens):
            raise ValueError("SLUICE_EXPORT_TOKENS must be SINK=TOKEN, comma-separated")
        if unknown := tokens.keys() - {sink.name for sink in self.export_sinks}:
            raise ValueError(
                f"SLUICE_EXPORT_TOKENS has a token of a sink that SLUICE_EXPORT_SINKS lacks: "
                f"{len(unknown)} of {len(tokens)}"
            )
        for sink in self.export_sinks:
            if sink.kind is ExportKind.STRIPE and sink.name not in tokens:
                raise ValueError(f"SLUICE_EXPORT_TOKENS needs the key of the sink '{sink.name}'")
        return self

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
        sources = (self.jwt_jwks_file, self.jwt_jwks_url).count(None)
        if sources == 0 or (sources == 2 and self.jwt_algorithms - {JwtAlgorithm.HS256}):
            raise ValueError(
                "one of SLUICE_JWT_JWKS_FILE and SLUICE_JWT_JWKS_URL is required for RS256, ES256 "
                "and EdDSA"
            )
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
                "SLUICE_JWT_OPERATOR_CLAIM must not be a claim about a tenant: "
                f"{', '.join(TENANTS_CLAIMS)} or the claim that SLUICE_JWT_TENANT_CLAIM names"
            )

    @model_validator(mode="after")
    def _check_oidc(self) -> "Settings":
        if (self.oidc_issuer is None) != (self.oidc_client_id is None):
            raise ValueError("SLUICE_OIDC_ISSUER and SLUICE_OIDC_CLIENT_ID require each other")
        values = self.oidc_operator_values + self.oidc_operator_reader_values
        if bool(values) != (self.oidc_operator_claim is not None):
            raise ValueError(
                "SLUICE_OIDC_OPERATOR_CLAIM is required with SLUICE_OIDC_OPERATOR_VALUES or "
                "SLUICE_OIDC_OPERATOR_READER_VALUES, and needs one of them"
            )
        if bool(self.oidc_roles) != any((self.oidc_role_claim, self.jwt_role_claim)):
            raise ValueError(
                "SLUICE_OIDC_ROLES requires SLUICE_OIDC_ROLE_CLAIM or SLUICE_JWT_ROLE_CLAIM, and "
                "either of them requires SLUICE_OIDC_ROLES"
            )
        values += (self.oidc_role_claim or "", *self.oidc_email_tenants)
        if self.oidc_issuer is None and (any(values) or not self.console_key_login):
            raise ValueError(
                "SLUICE_OIDC_ISSUER is required with SLUICE_OIDC_OPERATOR_CLAIM, "
                "SLUICE_OIDC_ROLE_CLAIM, SLUICE_OIDC_EMAIL_TENANTS and "
                "SLUICE_CONSOLE_KEY_LOGIN=false"
            )
        if "openid" not in self.oidc_scopes:
            raise ValueError("SLUICE_OIDC_SCOPES must contain openid")
        return self

    @property
    def fingerprints(self) -> str:
        """`NAME=DIGEST` of the secrets that all gateways share, too short to reveal anything."""
        values = {
            "SLUICE_CACHE_SALT_SECRET": self.cache_salt_secret.get_secret_value(),
            "SLUICE_ENCRYPTION_KEYS": ",".join(self.plain_encryption_keys()),
            "SLUICE_JWT_SECRET": ""
            if self.jwt_secret is None
            else self.jwt_secret.get_secret_value(),
        }
        return " ".join(
            f"{name}={blake2b(value.encode(), digest_size=4, key=_FINGERPRINT).hexdigest()}"
            for name, value in values.items()
        )

    @property
    def keeps_responses(self) -> bool:
        """Whether Responses are kept for later requests."""
        return self.responses_retention > timedelta(0) and self.file_store != NO_STORE

    @property
    def member_issuer(self) -> str | None:
        """The issuer of JWTs, and of members that were added without an issuer."""
        return self.jwt_issuer or self.oidc_issuer


def load_settings(**given: str | None) -> Settings:
    """Return the settings from the environment, overridden by command-line options.

    Raises ValidationError, and StartupError for a file of Redis's TLS that cannot be read.
    """
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings = Settings(**overrides)
    urls = {"REDIS_URL": settings.redis_url, "CELERY_BROKER_URL": settings.celery_broker_url}
    for name, url in urls.items():
        try:
            require_files(url or "redis://")
        except ValueError as error:
            raise StartupError(f"SLUICE_{name}: {error}.") from None
    return settings


def load_command_settings(**given: str | None) -> tuple[Settings, Path | None]:
    """Return the settings of a command that manages a deployment, and the file that they are from.

    If no option or environment variable names Redis or the database, both are those of the
    `sluice up` that runs in the current folder. Without one, the file is None.
    """
    settings = load_settings(**given)
    if settings.model_fields_set & {"redis_url", "database_url"}:
        return settings, None
    if not (variables := LiveEnvFile(COMMANDS_FILE).read()):
        return settings, None
    prefix = str(Settings.model_config["env_prefix"])
    values = {name.removeprefix(prefix).lower(): value for name, value in variables.items()}
    return load_settings(
        **{name: value for name, value in values.items() if name not in settings.model_fields_set}
    ), COMMANDS_FILE.absolute()


def environment_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a process loads these settings."""
    prefix = str(Settings.model_config["env_prefix"])
    return {f"{prefix}{name}".upper(): value for name, value in settings.items()}


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables set, to start a child process."""
    return {**os.environ, **variables}
