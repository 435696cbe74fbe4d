"""Names that resolve as a test wants."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pycares
import pytest


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Resolve every name to these addresses; return the list of the names that are resolved."""
    asked: list[str] = []
    getaddrinfo = pycares.Channel.getaddrinfo

    def resolve(
        channel: pycares.Channel,
        host: str,
        port: None,
        *,
        callback: Callable[..., None],
        **options: Any,
    ) -> None:
        if host[0].isdigit():
            getaddrinfo(channel, host, port, callback=callback, **options)
            return
        asked.append(host)
        nodes = [SimpleNamespace(addr=(each.encode(), 0)) for each in addresses]
        callback(SimpleNamespace(nodes=nodes), None)

    monkeypatch.setattr(pycares.Channel, "getaddrinfo", resolve)
    return asked
