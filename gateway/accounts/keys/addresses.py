"""Parse IP networks from user input, such as `10.0.0.0/8`."""

from collections.abc import Collection
from ipaddress import IPv6Network, ip_interface, ip_network
from typing import Final

from gateway.records.errors import must
from gateway.records.records import Network

MAX_ADDRESSES: Final = 100

_MAPPED = IPv6Network("::ffff:0:0/96")


def read_addresses(
    texts: Collection[str], *, param: str = "allowed_addresses"
) -> tuple[Network, ...]:
    """Return the networks in canonical form, without duplicates.

    Raises InvalidParameterError for an invalid one.
    """
    if not 0 < len(texts) <= MAX_ADDRESSES:
        raise must(param, f"contain 1 to {MAX_ADDRESSES} networks", len(texts))
    return tuple(dict.fromkeys(_read(text, param) for text in texts))


def _read(text: str, param: str) -> Network:
    try:
        # An address with a zone is only meaningful on the machine where it was written.
        network = ip_network("" if "%" in text else text, strict=False)
        host = ip_interface(text)
    except ValueError:
        raise must(
            param,
            "contain addresses and networks such as 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32",
            text,
        ) from None
    if host.ip != network.network_address:
        advice = f"use {network} for the network, or {host.ip} for the host"
        raise must(param, f"not contain a network with host bits: {advice}", text)
    return _without_mapping(network)


def _without_mapping(network: Network) -> Network:
    """Return an IPv4-mapped IPv6 network as IPv4, the form in which clients are compared."""
    if not isinstance(network, IPv6Network) or not network.subnet_of(_MAPPED):
        return network
    first = network.network_address.ipv4_mapped
    return ip_network(f"{first}/{network.prefixlen - _MAPPED.prefixlen}")
