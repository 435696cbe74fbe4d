"""Redis URLs: one server, the servers of a cluster, or the master according to Redis Sentinel.

    redis://[USER:PASSWORD@]HOST[:6379][/DATABASE]      rediss:// with TLS
    redis://[USER:PASSWORD@]HOST[:6379][,HOST[:6379]...]?cluster=true
    redis+sentinel://[USER:PASSWORD@]HOST[:26379][,HOST[:26379]...]/SERVICE[/DATABASE][?OPTIONS]

The servers of a cluster report all others. USER and PASSWORD log in at the servers, the OPTIONS
`sentinel_username` and `sentinel_password` at the sentinels. All may be percent-encoded.

Clients of `rediss://` verify the certificate and its name, unless the URL has `ssl_cert_reqs=none`
or `ssl_check_hostname=false`. Then each process logs a warning.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.connection import FALSE_STRINGS, parse_url
from typing_extensions import override

from common.redis_cluster import ClusterClient, SlotMap, slot_map_of
from common.redis_private import guarded

SENTINEL_SCHEME: Final = "redis+sentinel"
SCHEMES: Final = ("redis", "rediss", SENTINEL_SCHEME)
REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
LARGEST_PORT: Final = 65_535

_TLS: Final = "ssl_"
_FILES: Final = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_REQUIREMENTS: Final = ("required", "optional", "none")
_UNVERIFIED: Final = {
    "ssl_cert_reqs": {"none"},
    "ssl_check_hostname": {value.lower() for value in FALSE_STRINGS},
}
"""Values of options with which somebody else can pass for the server."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelAddress:
    """The parts of a `redis+sentinel` URL."""

    hosts: tuple[tuple[str, int], ...]
    """Host and port of each sentinel."""
    service: str
    """The sentinels' name for the master."""
    database: int
    username: str | None
    password: str | None = field(repr=False)
    sentinel_username: str | None
    sentinel_password: str | None = field(repr=False)

    @property
    def server_options(self) -> dict[str, Any]:
        """Arguments for a client of the servers."""
        return {"db": self.database, "username": self.username, "password": self.password}

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """Arguments for a client of the sentinels."""
        return {"username": self.sentinel_username, "password": self.sentinel_password}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """The parts of a URL of a cluster."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    """Host and port of the servers that the URL names."""
    username: str | None
    password: str | None = field(repr=False)
    query: str
    """The other options of the URL, such as `ssl_ca_certs`."""


def check_redis_url(url: str) -> str:
    """Return the URL if it is valid, else raise ValueError. Its message contains no password."""
    parts = _split(url)
    if parts.scheme == SENTINEL_SCHEME:
        _read_sentinels(parts)
        return url
    if cluster_address(url) is not None:
        return url
    if not parts.hostname:
        raise ValueError(f"a host must follow {parts.scheme}://")
    _require_port(parts)
    _database(parts.path.removeprefix("/"))
    return url


def server_options(url: str) -> dict[str, Any]:
    """Return redis-py's arguments for the URL of one server: all `ssl_` options, and `db`.

    With TLS, they contain `ssl_cert_reqs`: other libraries verify nothing without it.
    """
    _warn_if_unverified(check_redis_url(url))
    given = {"db": 0, **parse_url(url)}
    options = {name: value for name, value in given.items() if name.startswith((_TLS, "db"))}
    return {"ssl_cert_reqs": "required", **options} if url.startswith("rediss:") else options


def sentinel_address(url: str) -> SentinelAddress | None:
    """Return the parts of a sentinel URL; None if the URL names a server. Raises ValueError."""
    parts = _split(url)
    return _read_sentinels(parts) if parts.scheme == SENTINEL_SCHEME else None


def cluster_address(url: str) -> ClusterAddress | None:
    """Return the parts of a cluster's URL; None if the URL names no cluster. Raises ValueError."""
    parts = _split(url)
    options = _options(parts)
    if parts.scheme == SENTINEL_SCHEME or options.get("cluster", "false") == "false":
        if "," in parts.netloc.rpartition("@")[2] and parts.scheme != SENTINEL_SCHEME:
            raise ValueError("several hosts need ?cluster=true")
        return None
    if (given := options.pop("cluster")) != "true":
        raise ValueError(f"cluster must be true or false. Given: {given}")
    if parts.path not in ("", "/", "/0"):
        raise ValueError(f"a cluster has only the database 0. Given: {parts.path[1:]}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    return ClusterAddress(
        scheme=parts.scheme,
        hosts=tuple(_host(text, REDIS_PORT) for text in hosts.split(",")),
        username=unquote(username) or None,
        password=unquote(password) or None,
        query=urlencode(options),
    )


def redis_client(url: str, *, kind: type["Redis"] = Redis, **options: Any) -> "Redis":
    """Return a client of the server, of the cluster, or of the master that sentinels name.

    Each new connection goes to the server that is master at that moment. This function opens no
    connection. `kind` is the class of the client; `options` are connection options
    (timeouts, retries). Raises ValueError.
    """
    cluster = cluster_address(check_redis_url(url))
    _warn_if_unverified(url)
    if cluster is not None:
        client: Any = _server(cluster, type("Cluster", (ClusterClient, kind), {}), options)
        client.slot_map = SlotMap(cluster.hosts, partial(_server, cluster, kind, options))
        whole: Redis = client
        return whole
    address = sentinel_address(url)
    if address is None:
        return guarded(kind.from_url(url, **options))
    sentinels: Any = Sentinel(address.hosts, sentinel_kwargs=_sentinel_options(address, options))
    for client in sentinels.sentinels:
        _ = guarded(client)
    master = type("Master", (_EndsSentinels, kind), {})
    return guarded(
        sentinels.master_for(
            address.service, redis_class=master, **options | address.server_options
        )
    )


def describe(client: "Redis") -> str:
    """Return the address of the server, or of its sentinels or cluster, without a password."""
    if (slots := slot_map_of(client)) is not None:
        servers = (f"{host}:{port}" for host, port in slots.masters or slots.seeds)
        return f"Redis Cluster of {', '.join(servers)}"
    pool: Any = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        sentinels = (address_of(each.connection_pool) for each in pool.sentinel_manager.sentinels)
        return f"Redis {pool.service_name} of the sentinels {', '.join(sentinels)}"
    return f"Redis at {address_of(pool)}"


def address_of(pool: Any) -> str:
    """Return the host and port of a pool of connections to one server."""
    return f"{pool.connection_kwargs['host']}:{pool.connection_kwargs.get('port', REDIS_PORT)}"


def _server(
    cluster: ClusterAddress,
    kind: type["Redis"],
    options: Mapping[str, Any],
    address: tuple[str, int] | None = None,
) -> "Redis":
    host, port = address or cluster.hosts[0]
    name = f"[{host}]" if ":" in host else host
    url = f"{cluster.scheme}://{name}:{port}?{cluster.query}"
    login: dict[str, Any] = {"username": cluster.username, "password": cluster.password}
    return guarded(kind.from_url(url, **options, **login))


def blocking_redis_client(url: str, **options: Any) -> "redis.Redis":
    """Return a client like `redis_client`, but a blocking one, and of no cluster."""
    address = sentinel_address(check_redis_url(url))
    _warn_if_unverified(url)
    if address is None:
        return redis.Redis.from_url(url, **options)
    sentinels: Any = redis.Sentinel(
        address.hosts, sentinel_kwargs=_sentinel_options(address, options)
    )
    master: redis.Redis = sentinels.master_for(
        address.service, redis_class=_BlockingMaster, **options | address.server_options
    )
    return master


def _sentinel_options(address: SentinelAddress, options: Mapping[str, Any]) -> dict[str, Any]:
    timeouts = {name: value for name, value in options.items() if name.startswith("socket_")}
    return timeouts | address.sentinel_options


class _EndsSentinels:
    """Closes the connections to the sentinels together with a client of the master."""

    connection_pool: Any

    async def aclose(self, *args: Any) -> None:
        above: Any = super()
        await above.aclose(*args)
        await self.connection_pool.sentinel_manager.aclose()


class _BlockingMaster(redis.Redis):
    """A blocking client of a master that closes its connections to sentinels."""

    @override
    def close(self) -> None:
        super().close()
        pool: Any = self.connection_pool
        pool.sentinel_manager.close()


def _split(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    return parts


def _options(parts: SplitResult) -> dict[str, str]:
    """Return the options of a URL. Raises ValueError if one has no meaning."""
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(given)
    if len(options) < len(given):
        raise ValueError(f"an option must have one value. Given: {', '.join(n for n, _ in given)}")
    if parts.scheme == "redis" and any(name.startswith(_TLS) for name in options):
        raise ValueError(f"options that begin with {_TLS} need rediss://")
    if (required := options.get("ssl_cert_reqs", "none")) not in _REQUIREMENTS:
        raise ValueError(
            f"ssl_cert_reqs must be one of {', '.join(_REQUIREMENTS)}. Given: {required}"
        )
    return options


def require_files(url: str) -> None:
    """Raise ValueError if a file that a URL names cannot be read here. The message names both."""
    options = _options(_split(url))
    for name in sorted(_FILES & options.keys()):
        try:
            Path(options[name]).open("rb").close()
        except OSError as error:
            reason = f"{options[name]} cannot be read ({error.strerror})"
            raise ValueError(f"{name}: the file {reason}") from None


def unverified_options(url: str) -> list[str]:
    """Return the options of a URL that turn the verification off, as `NAME=VALUE`."""
    options = {name: value.lower() for name, value in parse_qsl(urlsplit(url).query)}
    return [
        f"{name}={options[name]}"
        for name, values in _UNVERIFIED.items()
        if options.get(name) in values
    ]


@cache
def _warn_if_unverified(url: str) -> None:
    """Log the options of a URL that turn the verification off, once in each process."""
    for each in unverified_options(url):
        server = urlsplit(url).netloc.rpartition("@")[2]
        _log.warning(
            "%s: Redis at %s is not verified, so another server can get the password", each, server
        )


def _require_port(parts: SplitResult) -> None:
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"a port must be a number from 0 to {LARGEST_PORT}") from None


def _read_sentinels(parts: SplitResult) -> SentinelAddress:
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not service:
        raise ValueError(
            "the name of the master must follow the sentinels: "
            f"{SENTINEL_SCHEME}://HOST:{SENTINEL_PORT}/NAME"
        )
    options = _options(parts)
    if unknown := sorted(options.keys() - set(SENTINEL_OPTIONS)):
        raise ValueError(
            f"options of {SENTINEL_SCHEME}:// are {' and '.join(SENTINEL_OPTIONS)}. "
            f"Given: {', '.join(unknown)}"
        )
    return SentinelAddress(
        hosts=tuple(_host(text, SENTINEL_PORT) for text in hosts.split(",")),
        service=unquote(service),
        database=_database(database),
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=options.get("sentinel_username") or None,
        sentinel_password=options.get("sentinel_password") or None,
    )


def _host(text: str, port: int) -> tuple[str, int]:
    """Parse `HOST`, `HOST:PORT` or `[ADDRESS]:PORT`."""
    found = urlsplit(f"//{text}")
    _require_port(found)
    if not found.hostname:
        raise ValueError("each server must be HOST or HOST:PORT, separated by commas")
    return found.hostname, port if found.port is None else found.port


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isdecimal():
        raise ValueError(f"the database must be a number of at least 0. Given: {text}")
    return int(text)
