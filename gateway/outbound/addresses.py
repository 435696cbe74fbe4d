"""Check which addresses and host names belong to the public internet."""

import re
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

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
