"""Metrics of Redis and the database, measured in the process that uses them."""

from typing import Final

from cryptography import x509
from prometheus_client import Counter, Gauge

from common.metrics import LightHistogram

REDIS_SECONDS: Final = LightHistogram(
    "sluice_redis_command_duration_seconds",
    "Duration of Redis commands and scripts, except for blocking commands.",
    ["command", "server"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
REDIS_ERRORS: Final = Counter(
    "sluice_redis_errors_total",
    "Redis commands that failed or received no response.",
    ["command", "server"],
)
REDIS_REDIRECTIONS: Final = Counter(
    "sluice_redis_redirections_total",
    "Commands that a server of a cluster did not execute because their slot moves or has moved.",
    ["server", "kind"],
)
REDIS_UP: Final = Gauge("sluice_redis_up", "Whether the Redis server responds.", ["server"])
REDIS_USED_MEMORY: Final = Gauge(
    "sluice_redis_used_memory_bytes", "Memory in use by Redis.", ["server"]
)
REDIS_MAX_MEMORY: Final = Gauge(
    "sluice_redis_max_memory_bytes",
    "Memory limit of Redis: its maxmemory, or the memory of its machine.",
    ["server"],
)
SQL_SECONDS: Final = LightHistogram(
    "sluice_sql_statement_duration_seconds",
    "Duration of database statements, by kind.",
    ["operation"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60),
)
SQL_ERRORS: Final = Counter(
    "sluice_sql_errors_total", "Database statements that failed.", ["operation"]
)
_CERTIFICATE_EXPIRY: Final = Gauge(
    "sluice_certificate_expiry_timestamp_seconds",
    "Expiry of the certificate of a TLS peer (redis, database), as Unix time in seconds.",
    ["peer"],
)


def certificate_shown(peer: str, der: bytes) -> None:
    """Record the certificate (DER) that `redis` or `database` presented on a new connection."""
    expiry = x509.load_der_x509_certificate(der).not_valid_after_utc
    _CERTIFICATE_EXPIRY.labels(peer).set(expiry.timestamp())
