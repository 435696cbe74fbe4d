"""Host patterns with which an operator allows hosts."""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from gateway.outbound.addresses import looks_public
from gateway.outbound.urls import DEFAULT_PORTS

_PATTERN: Final = re.compile(
    r"(?P<wildcard>\*\.?)?(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])?(:(?P<port>[0-9]{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class HostPattern:
    """A pattern of allowed hosts and ports."""

    name: str
    """A normalized host, a suffix of names (`.example.com`), or empty for any host."""
    port: int | None
    """None stands for the default ports of http and https."""

    def allows(self, host: str, port: int) -> bool:
        """Whether a host, as in URLs but without brackets, is allowed with this port."""
        if port not in (DEFAULT_PORTS.values() if self.port is None else (self.port,)):
            return False
        if self.name.startswith("."):
            return host.lower().endswith(self.name)
        return self.name in ("", _usual_form(host))


def parse_host_pattern(text: str) -> HostPattern:
    """Parse a host pattern, with or without `:PORT`.

    It is a name, `*.example.com` (all hosts below it), an address or `*` (any host).

    Raises ValueError.
    """
    found = _PATTERN.fullmatch(text.lower())
    if found is None:
        raise ValueError(_explanation(text))
    wildcard, host, port = found["wildcard"] or "", found["host"] or "", found["port"]
    if (wildcard != "*") != bool(host) or (wildcard and host.startswith("[")):
        raise ValueError(_explanation(text))
    name = _usual_form(host.strip("[]"))
    if host and (not looks_public(name) or name.endswith(".")):
        raise ValueError(f"{text!r} is not a host on the public internet")
    if port is not None and not 0 < int(port) < 2**16:
        raise ValueError(f"the port of {text!r} must be from 1 to 65535")
    return HostPattern(
        "." + name if wildcard == "*." else name, None if port is None else int(port)
    )


def _usual_form(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower()


def _explanation(text: str) -> str:
    return (
        f"{text!r} must have one of these forms: example.com, *.example.com, 192.0.2.7, "
        "[2001:db8::7], *, optionally with :PORT"
    )
