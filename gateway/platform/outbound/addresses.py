"""Check customer-supplied URLs: which hosts are on the public internet, or allowed by patterns."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit

LOCAL_SUFFIXES: Final = (
    "localhost",
    # Reserved by IANA and ICANN, or not delegated by ICANN because private networks use them.
    *(".localhost", ".local", ".internal", ".home.arpa", ".test", ".invalid", ".onion", ".alt"),
    *(".corp", ".home", ".mail", ".lan", ".localdomain", ".intranet", ".private"),
    # Kubernetes services, under a name that its resolvers complete with `.cluster.local`.
    ".svc",
)
"""Host name suffixes that do not exist on the public internet."""

_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
"""All IPv6 addresses of internet hosts; addresses outside serve special purposes."""

_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_NAT64: Final = IPv6Network("64:ff9b::/96")

# IANA's special-purpose ranges that `ipaddress` considers global in at least one Python version.
_SPECIAL: Final = tuple(
    map(
        ip_network,
        (
            "168.63.129.16/32",  # Azure's own services on every virtual machine.
            "192.0.0.0/24",  # IETF protocols; Oracle Cloud's metadata.
            "192.88.99.0/24",  # 6to4 relays.
            "2001::/23",  # IETF protocols, including Teredo.
            "2001:db8::/32",  # Documentation.
            "2002::/16",  # 6to4: maps to any IPv4 address.
            "3fff::/20",  # Documentation.
        ),
    )
)

_NAME: Final = re.compile(r"(?=.{1,253}$)([a-z0-9_-]{1,63}\.)+[a-z_][a-z0-9_-]{0,62}\.?")
"""At least two labels, the last not numeric: some programs parse 127.1 and 0x7f.1 as addresses."""

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
HTTPS_PORTS: Final = (443, 8443)
"""Ports of webhook receivers. Other ports belong to services that do not expect such requests."""
_FORBIDDEN: Final = frozenset(' "<>\\^`{|}')
"""Characters that must be percent-encoded in a URL; programs disagree on how to parse them
unencoded."""
_PATTERN: Final = re.compile(
    r"(?P<wildcard>\*\.?)?(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])?(:(?P<port>[0-9]{1,5}))?"
)


def is_public(address: str) -> bool:
    """Whether an address is public, including any address embedded in an IPv6 address."""
    if "%" in address:
        return False
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address):
        if parsed in _MAPPED or parsed in _NAT64:
            return is_public(str(IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed not in _GLOBAL_UNICAST:
            return False
    is_special = any(parsed in network for network in _SPECIAL)
    return parsed.is_global and not parsed.is_multicast and not is_special


def looks_public(host: str) -> bool:
    """Whether a host (a name, or an address without brackets) may be on the public internet.

    For a name this is only a first check: its addresses are checked each time something is sent
    there.
    """
    try:
        return is_public(host)
    except ValueError:
        name = host.lower()
        return bool(_NAME.fullmatch(name)) and not name.rstrip(".").endswith(LOCAL_SUFFIXES)


def split_url(text: str, *, most_characters: int) -> SplitResult | None:
    """Return the parts of an absolute http(s) URL; None for any other text."""
    if not 0 < len(text) <= most_characters or not text.isascii() or not text.isprintable():
        return None
    if not _FORBIDDEN.isdisjoint(text):
        return None
    try:
        parts = urlsplit(text)
        has_valid_port = parts.port != 0
    except ValueError:
        return None
    is_web = parts.scheme in DEFAULT_PORTS and bool(parts.hostname)
    return parts if is_web and has_valid_port else None


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
