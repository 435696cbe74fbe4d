"""Client addresses behind proxies, as the allowed addresses of keys are checked."""

from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from pydantic import ValidationError

from gateway.accounts.keys.rules import read_addresses
from gateway.platform.settings import Settings
from gateway.process.server.serve import proxy_networks
from tests.gateway.conftest import gateway_client
from tests.support.processes import free_port
from tests.support.stack import Stack, running_stack


@pytest.fixture(scope="module")
def proxied() -> Iterator[Stack]:
    """Gateways that trust no proxy, this machine, and another network."""
    with running_stack() as stack:
        settings = {
            "trusts-nobody": {"FORWARDED_ALLOW_IPS": "*"},
            "trusts-us": {"SLUICE_TRUSTED_PROXIES": "127.0.0.1, 192.0.2.0/24"},
            "trusts-others": {"SLUICE_TRUSTED_PROXIES": "192.0.2.0/24,2001:db8::/32"},
        }
        # They start side by side.
        urls = {
            name: stack.launch_gateway(name, given, port=free_port())
            for name, given in settings.items()
        }
        for name, url in urls.items():
            stack.await_gateway(name, url)
        yield stack


@pytest.fixture(scope="module")
def key(proxied: Stack) -> str:
    """A key for one network."""
    return proxied.key(allowed_addresses=read_addresses(["203.0.113.0/24", "2001:db8:5::/48"]))


IS_ALLOWED = {
    None: False,
    "203.0.113.9": True,
    "::ffff:203.0.113.9": True,
    "2001:db8:5::1": True,
    "203.0.113.9:4711": True,
    "[2001:db8:5::1]:4711": True,
    "198.51.100.1": False,
    # The client's own claim comes first, and the address that the nearest trusted proxy saw last.
    "203.0.113.9, 198.51.100.1": False,
    "198.51.100.1, 203.0.113.9": True,
    "198.51.100.1, 203.0.113.9, 192.0.2.7": True,
    "203.0.113.9, 198.51.100.1, 192.0.2.7": False,
    "": False,
    "unknown": False,
    "203.0.113.9, unknown": False,
}
"""Whether the key is valid, by the header that a trusting gateway receives."""


async def test_header_of_a_trusted_proxy_is_used(proxied: Stack, key: str) -> None:
    nobody, us, others = proxied.gateways
    async with AsyncExitStack() as stack:
        clients = {
            url: await stack.enter_async_context(gateway_client(url, key))
            for url in proxied.gateways
        }
        for forwarded, is_allowed in IS_ALLOWED.items():
            headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
            statuses = {
                url: (await client.get("/v1/models", headers=headers)).status_code
                for url, client in clients.items()
            }
            expected = {nobody: 403, us: 200 if is_allowed else 403, others: 403}
            assert statuses == expected, forwarded


def test_no_proxy_is_trusted_by_default() -> None:
    assert Settings().trusted_proxies == ()
    assert proxy_networks(Settings()) == []


def test_proxies_are_recognised_on_sockets_for_ipv4_and_ipv6() -> None:
    # As the environment gives it.
    settings = Settings(trusted_proxies="10.0.0.0/8, ::1,192.0.2.7")  # type: ignore[arg-type]
    assert proxy_networks(settings) == [
        *("10.0.0.0/8", "::1/128", "192.0.2.7/32"),
        *("::ffff:10.0.0.0/104", "::ffff:192.0.2.7/128"),
    ]


@pytest.mark.parametrize("proxies", ["*", "localhost", "10.0.0.1/8", "10.0.0.0/8;::1", "1.2.3"])
def test_invalid_proxies_are_refused_at_the_start(proxies: str) -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        Settings(trusted_proxies=proxies)  # type: ignore[arg-type]
