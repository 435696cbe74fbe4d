"""URLs of PostgreSQL as managed services give them: the parameters of libpq, for asyncpg."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx
from sqlalchemy.engine import URL

from gateway.records.errors import InvalidParameterError, shown

SCHEMES: Final = ("postgresql", "postgres", "postgresql+asyncpg")
POSTGRESQL_PORT: Final = 5432
MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SYSTEM: Final = "system"
"""The `sslrootcert` of the public authorities."""

_WITHOUT_EFFECT: Final = ("channel_binding", "pgbouncer", "prepared_statement_cache_size")
"""asyncpg cannot bind channels, and prepares no statements by name, which the others ask for.
`channel_binding=require` verifies the server's certificate in place of that."""
_SEVERAL: Final = re.compile(r"([a-z+]+://(?:[^@/]*@)?)([^@/?]*,[^@/?]*)([^?]*)\??(.*)", re.DOTALL)
_BINDINGS: Final = ("disable", "prefer", "require")


def with_hosts_in_query(url: str) -> str:
    """Return a URL whose several hosts are in its query, where SQLAlchemy reads them."""
    found = _SEVERAL.fullmatch(url)
    if found is None:
        return url
    begin, hosts, name, query = found.groups()
    return f"{begin}{name}?{urlencode([('host', hosts)])}&{query}"


def connect_arguments(url: URL, *, most_seconds: float) -> tuple[URL, dict[str, Any]]:
    """Return the URL without parameters of connections, and asyncpg's arguments for them.

    Args:
        url: with parameters of libpq, or `ssl` for `sslmode`.
        most_seconds: the longest time for a connection, which `connect_timeout` may shorten.

    Raises InvalidParameterError, whose message names the parameter.
    """
    query = {name: ",".join(values) for name, values in url.normalized_query.items()}
    ports = query.pop("port", "").split(",")
    hosts = query.pop("host", (url.host or "") if any(ports) else "").split(",")
    if any(ports) or len(hosts) > 1:
        if len(ports) not in (1, len(hosts)):
            raise _must("port", f"be one number, or one for each of {len(hosts)} hosts", *ports)
        pairs = zip(hosts, ports * (len(hosts) // len(ports)), strict=True)
        hosts = [
            host if ":" in host else f"{host}:{port or POSTGRESQL_PORT}" for host, port in pairs
        ]
        ports = [host.rpartition(":")[2] for host in hosts]
        if not all(map(str.isdecimal, ports)):
            raise _must("port", "be a number", *ports)
    plain = url.set(drivername="postgresql+asyncpg", query={"host": hosts} if any(hosts) else {})
    if (mode := query.pop("ssl", None)) is not None:
        query["sslmode"] = _one_of("ssl", MODES, mode)
    for name, check in _CHECKS.items():
        if name in query:
            check(name, query[name])
    if query.get("channel_binding") == "require":
        _verify_in_place_of_binding(query)
    trust = {}
    if query.get("sslrootcert") == SYSTEM:
        trust = {"ssl": httpx.create_ssl_context()}
        del query["sslrootcert"]
    for name in _WITHOUT_EFFECT:
        query.pop(name, None)
    seconds = float(query.pop("connect_timeout", most_seconds))
    # asyncpg reads the others from a URL, and sends those that it does not know to the server.
    dsn = f"postgresql://?{urlencode({'application_name': 'sluice', **query})}"
    return plain, {"dsn": dsn, "timeout": min(seconds, most_seconds) or most_seconds, **trust}


def _must(name: str, rule: str, *given: str) -> InvalidParameterError:
    text = f"{name} of the database URL must {rule}. Given: {shown(','.join(given))}."
    return InvalidParameterError(text, param="database_url")


def _one_of(name: str, values: tuple[str, ...], given: str) -> str:
    if given not in values:
        raise _must(name, f"be one of {', '.join(values)}", given)
    return given


def _check_mode(name: str, given: str) -> None:
    _one_of(name, MODES, given)


def _check_binding(name: str, given: str) -> None:
    _one_of(name, _BINDINGS, given)


def _verify_in_place_of_binding(query: dict[str, str]) -> None:
    """Verify the server by its certificate, which keeps another one out as a binding would."""
    mode = query.get("sslmode", "require")
    if mode in ("disable", "allow", "prefer"):
        raise _must("sslmode", "be require or verify-full with channel_binding=require", mode)
    query["sslmode"] = "verify-full"
    query.setdefault("sslrootcert", SYSTEM)


def _check_seconds(name: str, given: str) -> None:
    if not given.isdecimal():
        raise _must(name, "be a number of seconds", given)


def _check_file(name: str, given: str) -> None:
    if name == "sslrootcert" and given == SYSTEM:
        return
    try:
        content = Path(given).read_text("utf-8", "replace")
    except OSError as error:
        reason = error.strerror
    else:
        if "-----BEGIN " in content:
            return
        reason = "no PEM"
    raise InvalidParameterError(
        f"{name} of the database URL: the file {given} cannot be read ({reason}).",
        param="database_url",
    )


_CHECKS: Final[Mapping[str, Callable[[str, str], None]]] = {
    "sslmode": _check_mode,
    "sslrootcert": _check_file,
    "sslcert": _check_file,
    "sslkey": _check_file,
    "sslcrl": _check_file,
    "channel_binding": _check_binding,
    "connect_timeout": _check_seconds,
}
