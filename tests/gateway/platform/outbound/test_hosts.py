"""Hosts that operators allow."""

import pytest
from pydantic import ValidationError

from gateway.platform.outbound.addresses import parse_host_pattern
from gateway.platform.settings import Settings
from tests.support.cases import all_cases

ALLOWED = [
    ("example.com", "example.com", 443),
    ("example.com", "EXAMPLE.com", 80),
    ("Example.COM", "example.com", 443),
    ("example.com:8443", "example.com", 8443),
    ("*.example.com", "a.example.com", 443),
    ("*.example.com", "a.b.example.com", 443),
    ("*.example.com:8080", "a.example.com", 8080),
    ("93.184.216.34", "93.184.216.34", 80),
    ("[2606:2800:220:1:0:0:0:1]", "2606:2800:220:1::1", 443),
    ("[2606:2800:220:1::1]:8443", "2606:2800:220:1:0::1", 8443),
    ("*", "anything.example", 443),
    ("*:8080", "anything.example", 8080),
]
REFUSED = [
    ("example.com", "a.example.com", 443),
    ("example.com", "example.com.", 443),
    ("example.com", "example.com.evil.example", 443),
    ("example.com", "badexample.com", 443),
    ("example.com", "example.com", 8443),
    ("example.com", "example.com", 22),
    ("example.com:8443", "example.com", 443),
    ("*.example.com", "example.com", 443),
    ("*.example.com", "badexample.com", 443),
    ("*.example.com", "a.example.com.evil.example", 443),
    ("93.184.216.34", "93.184.216.35", 443),
    ("*", "example.com", 6379),
    ("*:8080", "example.com", 443),
]
WRONG = [
    "http://example.com",
    "example.com/path",
    "user@example.com",
    "example.com:x",
    "example.com:123456",
    "example.com:0",
    "example.com:65536",
    "a.*.com",
    "**",
    "*.",
    "*example.com",
    "*.[2606:2800:220:1::1]",
    ":443",
    "[2606::",
    "2606:2800:220:1::1",
    "exämple.com",
    "localhost",
    "intranet",
    "example.com.",
    "a.internal",
    "10.0.0.8",
    "127.0.0.1:8000",
    "[::1]",
    "[fd00::1]",
    "0x7f.1",
]


@all_cases(("pattern", "host", "port"), ALLOWED)
def test_listed_host_is_allowed(pattern: str, host: str, port: int) -> None:
    assert parse_host_pattern(pattern).allows(host, port)


@all_cases(("pattern", "host", "port"), REFUSED)
def test_other_host_or_port_is_not_allowed(pattern: str, host: str, port: int) -> None:
    assert not parse_host_pattern(pattern).allows(host, port)


@all_cases("pattern", WRONG)
def test_wrong_pattern_is_refused_and_named(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"is not|must have one of|the port of") as caught:
        parse_host_pattern(pattern)
    assert repr(pattern) in str(caught.value)


def test_setting_is_a_list_and_empty_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_IMAGE_URL_HOSTS", raising=False)
    assert Settings().image_url_hosts == ()
    monkeypatch.setenv("SLUICE_IMAGE_URL_HOSTS", "images.example.com, *.cdn.example:8443")
    assert Settings().image_url_hosts == (
        parse_host_pattern("images.example.com"),
        parse_host_pattern("*.cdn.example:8443"),
    )


def test_wrong_host_in_the_setting_is_reported_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_IMAGE_URL_HOSTS", "images.example.com,10.0.0.8")
    with pytest.raises(
        ValidationError, match=r"'10\.0\.0\.8' is not a host on the public internet"
    ):
        Settings()
