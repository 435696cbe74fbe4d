"""How commands choose a gateway, and what they say when it cannot be reached."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest

from gateway.cli import client
from tests.gateway.cli.conftest import Sluice
from tests.support.cases import case
from tests.support.processes import free_port

KEY = "sk-0123456789ab-secret"


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of profiles, which does not exist yet."""
    monkeypatch.setattr(click, "get_app_dir", lambda name: str(tmp_path / name))
    (tmp_path / "sluice").mkdir()
    return tmp_path / "sluice" / "profiles.toml"


@pytest.fixture
def silent() -> Iterator[str]:
    """URL of a server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def _error(sluice: Sluice, *arguments: str) -> str:
    result = sluice("tenants", *arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    [line] = result.stderr.splitlines()
    assert KEY not in line
    return line


def test_gateway_that_cannot_be_reached_is_named(sluice: Sluice) -> None:
    for url, message in (
        (
            nowhere := f"http://127.0.0.1:{free_port()}",
            f"Error: The gateway at {nowhere} cannot be",
        ),
        ("http://no-such.invalid", "The gateway at http://no-such.invalid cannot be reached: "),
        ("https://", "'--url' must be http(s)://HOST[:PORT]. Given: 'https://'."),
        ("redis://127.0.0.1", "'--url' must be http(s)://HOST[:PORT]."),
        ("http://127.0.0.1:x", "cannot be used"),
    ):
        with case(url):
            assert message in _error(sluice, "list", "--url", url, "--key", KEY)


def test_gateway_that_does_not_respond_is_named(
    sluice: Sluice, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT", httpx.Timeout(0.1))
    at = ("--url", silent, "--key", KEY)
    assert _error(sluice, "list", *at).endswith(f"{silent} has not responded in time.")
    assert _error(sluice, "suspend", "acme", *at).endswith("Check whether the change was made.")


STRANGERS = (
    httpx.Response(200, html="<p>It works!</p>"),
    httpx.Response(200, json=["no", "list"], headers={"content-type": "text/plain"}),
    httpx.Response(302, headers={"location": "https://other.example"}),
    httpx.Response(502, html="<p>Bad gateway</p>"),
    httpx.Response(404, json={"detail": "Not Found"}),
    httpx.Response(400, json={"error": "text"}),
)
"""Responses of other servers."""


def test_response_of_another_server_is_no_traceback(
    sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for response in STRANGERS:

        async def answer(
            _http: httpx.AsyncClient, *_: object, _response: httpx.Response = response, **__: object
        ) -> httpx.Response:
            return _response

        monkeypatch.setattr(httpx.AsyncClient, "request", answer)
        with case(response):
            line = _error(sluice, "list", "--url", "http://gateway.example", "--key", KEY)
            assert f"status {response.status_code}, but not as the operators' port" in line


def test_profile_selects_url_and_key(sluice: Sluice, profiles: Path, silent: str) -> None:
    wanted = ("list", "--profile", "prod")
    assert f"{profiles} cannot be read: No such file" in _error(sluice, *wanted)
    for text, message in (
        ("[prod", "cannot be read: "),
        ("[other]", "has no profile 'prod'. Its profiles: other."),
        ("prod = 1", "has no profile 'prod'."),
        ("[prod]", "'url' and 'key' must be text"),
        ("[prod]\nurl = 1", "'url' and 'key' must be text"),
        ("[prod]\nurl = 'http://h'\ntoken = 'x'", "'token' is unknown"),
        ("[prod]\nurl = 'http://h'", "A URL requires an operator's key"),
        ("[prod]\nurl = 'ftp://h'\nkey = 'k'", "must be http(s)://"),
        ("[prod]\nurl = 'http://h'\nkey = 'a b'", "contains characters that no key has"),
    ):
        with case(text):
            profiles.write_text(text)
            assert message in _error(sluice, *wanted)
    nowhere = f"http://127.0.0.1:{free_port()}"
    profiles.write_text(f"[prod]\nurl = '{nowhere}'\nkey = '{KEY}'")
    assert nowhere in _error(sluice, *wanted)


@pytest.mark.usefixtures("upgraded")
def test_option_has_priority_over_the_environment(
    sluice: Sluice, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The environment of `sluice up` has the key of an operator, but no URL.
    monkeypatch.setenv("SLUICE_ADMIN_KEY", KEY)
    assert [each["id"] for each in json.loads(sluice("tenants", "list", "--json").stdout)] == [
        "acme"
    ]
    monkeypatch.setenv("SLUICE_ADMIN_URL", "http://of-variable.invalid")
    profiles.write_text("[prod]\nurl = 'http://of-profile.invalid'\nkey = 'k'")
    assert "of-variable" in _error(sluice, "list")
    assert "of-profile" in _error(sluice, "list", "--profile", "prod")
    monkeypatch.setenv("SLUICE_PROFILE", "prod")
    assert "of-profile" in _error(sluice, "list")
    assert "of-option" in _error(sluice, "list", "--url", "http://of-option.invalid")
    file = f"sqlite+aiosqlite:///{tmp_path}/data/sluice.db"
    assert sluice("tenants", "list", "--database-url", file).exit_code == 0


def test_contradicting_options_are_refused(sluice: Sluice) -> None:
    url, profile = ("--url", "http://h"), ("--profile", "p")
    for options in (
        (*url, *profile),
        (*url, "--database-url", "sqlite+aiosqlite:///x"),
        (*profile, "--redis-url", "redis://h"),
        ("--key", KEY),
    ):
        with case(options):
            result = sluice("tenants", "list", *options)
            assert (result.exit_code, "Usage: " in result.stderr) == (2, True)
