"""Which URLs may be registered."""

import pytest

from gateway.accounts.webhooks.service import MAX_URL_CHARACTERS, check_url, host_of
from gateway.records.errors import InvalidParameterError
from tests.support.cases import all_cases, case

PUBLIC = [
    "https://example.com",
    "https://example.com:443",
    "https://svc.example.com/",
    "https://example.com/",
    "https://hooks.example.com:8443/a/b?c=d",
    "https://xn--bcher-kva.example/",
    "https://93.184.216.34/x",
    "https://[2606:2800:220:1:248:1893:25c8:1946]/x",
]
PRIVATE = [
    "http://example.com/",
    "https://localhost/",
    "https://localhost./",
    "https://gateway/",
    "https://a.local/",
    "https://db.internal:5432/",
    "https://kubernetes.default.svc/",
    "https://kubernetes.default.svc./",
    "https://hooks.corp/",
    "https://example.com:22/",
    "https://example.com:25/",
    "https://example.com:80/",
    "https://93.184.216.34:6379/",
    "https://127.0.0.1/",
    "https://127.1/",
    "https://0x7f.1/",
    "https://2130706433/",
    "https://10.0.0.8/",
    "https://192.168.1.1/",
    "https://169.254.169.254/latest/meta-data",
    "https://100.64.0.1/",
    "https://0.0.0.0/",
    "https://224.0.0.1/",
    "https://[::1]/",
    "https://[::]/",
    "https://[fe80::1%25eth0]/",
    "https://[fd00::1]/",
    "https://[::ffff:10.0.0.1]/",
]
NEVER = [
    "",
    "example.com/hooks",
    "//example.com/hooks",
    "ftp://example.com/",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "https://",
    "https:///path",
    "https://user:secret@example.com/",
    "https://user@example.com/",
    "https://example.com/#part",
    "https://example.com:0/",
    "https://example.com:99999/",
    "https://example.com:x/",
    "https://[::1/",
    "https://exämple.com/",
    "https://example.com/a b",
    "https://example.com/a\nb",
    "https://example.com/\0",
    "https://example.com\\@127.0.0.1/",
    "https://example.com/" + "x" * MAX_URL_CHARACTERS,
]


def test_public_https_is_accepted() -> None:
    for url in PUBLIC:
        with case(url):
            check_url(url, allows_private=False)
            assert host_of(url) in url


def test_private_or_plain_is_accepted_only_where_allowed() -> None:
    for url in PRIVATE:
        with case(url):
            check_url(url, allows_private=True)
            with pytest.raises(
                InvalidParameterError, match=r"'url' must (begin|have|use)"
            ) as caught:
                check_url(url, allows_private=False)
            assert caught.value.param == "url"


@all_cases("url", NEVER)
@all_cases("allows_private", [False, True])
def test_invalid_url_is_refused_without_repeating_it(url: str, allows_private: bool) -> None:
    with pytest.raises(InvalidParameterError, match="'url' must") as caught:
        check_url(url, allows_private=allows_private)
    assert "secret" not in caught.value.message
