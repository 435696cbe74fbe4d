"""Validation rules for API keys: allowed options, addresses, and which keys can be changed."""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from ipaddress import IPv6Network, ip_interface, ip_network
from typing import Any, Final

from gateway.records.checks import check_name
from gateway.records.errors import BadRequestError, InvalidParameterError, must, shown
from gateway.records.records import KeyRecord, Network
from gateway.records.times import utc_now

MAX_ADDRESSES: Final = 100

_MAPPED = IPv6Network("::ffff:0:0/96")


def read_addresses(texts: Collection[str]) -> tuple[Network, ...]:
    """Return the networks in canonical form, without duplicates.

    Raises InvalidParameterError for an invalid one.
    """
    if not 0 < len(texts) <= MAX_ADDRESSES:
        raise must("allowed_addresses", f"contain 1 to {MAX_ADDRESSES} networks", len(texts))
    return tuple(dict.fromkeys(map(_read, texts)))


def _read(text: str) -> Network:
    try:
        # An address with a zone is only meaningful on the machine where it was written.
        network = ip_network("" if "%" in text else text, strict=False)
        host = ip_interface(text)
    except ValueError:
        raise must(
            "allowed_addresses",
            "contain addresses and networks such as 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32",
            text,
        ) from None
    if host.ip != network.network_address:
        advice = f"use {network} for the network, or {host.ip} for the host"
        raise must("allowed_addresses", f"not contain a network with host bits: {advice}", text)
    return _without_mapping(network)


def _without_mapping(network: Network) -> Network:
    """Return an IPv4-mapped IPv6 network as IPv4, the form in which clients are compared."""
    if not isinstance(network, IPv6Network) or not network.subnet_of(_MAPPED):
        return network
    first = network.network_address.ipv4_mapped
    return ip_network(f"{first}/{network.prefixlen - _MAPPED.prefixlen}")


MAX_ALLOWED_MODELS: Final = 1000
DEFAULT_GRACE: Final = timedelta(days=1)
MAX_GRACE: Final = timedelta(days=30)


class MadeKeys(StrEnum):
    """Keys to revoke together with the key that made them, and those that they made."""

    ALL = "all"
    IN_GRACE = "in_grace"  # Made with a replaced secret in its grace period.
    NONE = "none"


def check_not_revoked(key: KeyRecord) -> None:
    """Reject a revoked key."""
    if key.revoked_at is not None:
        raise BadRequestError(f"The key {shown(key.id)} is revoked: create a new key.")


def check_lives(key: KeyRecord) -> None:
    """Reject a key that does not work any more."""
    check_not_revoked(key)
    if key.expires_at is not None and key.expires_at <= utc_now():
        raise BadRequestError(
            f"The key {shown(key.id)} has expired: change 'expires_at' first, or create a new key."
        )


def check_grace(grace: timedelta) -> None:
    """Reject a grace period out of range."""
    if not timedelta(0) <= grace <= MAX_GRACE:
        most, given = int(MAX_GRACE.total_seconds()), round(grace.total_seconds())
        raise must("grace_seconds", f"be from 0 to {most}", given)


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return key options in the form of a key record. Raises InvalidParameterError."""
    checked = dict(options)
    if "name" in options:
        check_name(options["name"])
    if "scopes" in options and not options["scopes"]:
        raise InvalidParameterError("'scopes' must contain at least one scope.", param="scopes")
    models = options.get("allowed_models")
    if models is not None:
        _check_models(models)
        checked["allowed_models"] = frozenset(models)
    expires_at = options.get("expires_at")
    if expires_at is not None:
        checked["expires_at"] = _future(expires_at)
    return checked


def _check_models(models: Collection[str]) -> None:
    if not 0 < len(models) <= MAX_ALLOWED_MODELS:
        raise must("allowed_models", f"contain 1 to {MAX_ALLOWED_MODELS} models", len(models))
    for model in models:
        check_name(model, param="allowed_models")


def _future(expires_at: datetime) -> datetime:
    try:
        in_utc = expires_at.astimezone(UTC)
    except OverflowError:
        in_utc = None
    if expires_at.tzinfo is None or in_utc is None or in_utc <= utc_now():
        raise InvalidParameterError(
            "'expires_at' must be a time in the future, with a time zone. "
            f"Given: {expires_at.isoformat()}.",
            param="expires_at",
        )
    return in_utc
