"""URLs that lead, or seem to lead, to forbidden addresses are refused without any connection.

Every host and port that the tests need is allowed, so that only the address can be refused.
"""

from typing import Any

import pytest

from gateway.completions.prompt.images.fetcher import MAX_URL_CHARACTERS, ImageFetcher
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError
from tests.gateway.completions.prompt.images.serving import (
    PARAM,
    PNG,
    SERVED,
    Names,
    Server,
    fetch,
    fetching,
    image,
    redirect,
    serving,
)
from tests.support.names import resolve_to

NO_URL = "must be a data URI, or an http or https URL"
NOT_LISTED = "must name an allowed host and port"
NOT_PUBLIC = "must name a host on the public internet"
LEADS_INSIDE = "must resolve to a host on the public internet"

HOSTILE = [
    # Other schemes, and what is no URL.
    ("", NO_URL),
    ("file:///etc/passwd", NO_URL),
    ("file://127.0.0.1/etc/passwd", NO_URL),
    ("ftp://images.example/a.png", NO_URL),
    ("gopher://127.0.0.1:6379/_FLUSHALL", NO_URL),
    ("data:text/html;base64,aGFsbG8=", NO_URL),
    ("data:image/png;base64," + "A" * 100_000, NO_URL),
    ("javascript:alert(1)", NO_URL),
    ("images.example/a.png", NO_URL),
    ("//images.example/a.png", NO_URL),
    ("http:images.example", NO_URL),
    ("http:///a.png", NO_URL),
    ("https://", NO_URL),
    ("http://[::1/", NO_URL),
    ("http://images.example:99999/", NO_URL),
    ("http://images.example:0/", NO_URL),
    ("http://images.example:http/", NO_URL),
    ("https://images.example/" + "x" * MAX_URL_CHARACTERS, NO_URL),
    # URLs that parsers read in two ways.
    ("http://images.example/\r\nHost: 127.0.0.1", NO_URL),
    ("http://images.example\r\n.evil.example/", NO_URL),
    ("http://images.example\t@127.0.0.1/", NO_URL),
    ("http://images.example\\@127.0.0.1/", NO_URL),
    ("http://127.0.0.1\x00.images.example/", NO_URL),
    ("http://images.example /", NO_URL),
    (" http://127.0.0.1/", NO_URL),
    ("http://\uff11\uff12\uff17.0.0.1/", NO_URL),
    ("http://\u2460\u2461\u2466.0.0.1/", NO_URL),
    ("http://127\u30020\u30020\u30021/", NO_URL),
    ("http://im\u0101ges.example/", NO_URL),
    ("http://user:secret@images.example/", "must not contain a user name or password"),
    ("http://images.example@127.0.0.1/", "must not contain a user name or password"),
    ("http://@127.0.0.1/", "must not contain a user name or password"),
    ("http://images.example:80@127.0.0.1:80/", "must not contain a user name or password"),
    ("http://images.example%2f@127.0.0.1/", "must not contain a user name or password"),
    # Ports of other services.
    ("http://images.example:22/", NOT_LISTED),
    ("http://127.0.0.1:6379/", NOT_LISTED),
    ("https://images.example:5432/", NOT_LISTED),
    # Addresses in all forms.
    ("http://127.0.0.1/", NOT_PUBLIC),
    ("http://127.1/", NOT_PUBLIC),
    ("http://2130706433/", NOT_PUBLIC),
    ("http://0x7f000001/", NOT_PUBLIC),
    ("http://0x7f.0.0.1/", NOT_PUBLIC),
    ("http://0177.0.0.1/", NOT_PUBLIC),
    ("http://017700000001/", NOT_PUBLIC),
    ("http://127.0.0.1./", NOT_PUBLIC),
    ("http://%31%32%37.0.0.1/", NOT_PUBLIC),
    ("http://0/", NOT_PUBLIC),
    ("http://0.0.0.0/", NOT_PUBLIC),
    ("http://10.0.0.1/", NOT_PUBLIC),
    ("http://172.31.255.255/", NOT_PUBLIC),
    ("http://192.168.0.1/", NOT_PUBLIC),
    ("http://100.64.0.1/", NOT_PUBLIC),
    ("http://169.254.169.254/latest/meta-data/", NOT_PUBLIC),
    ("http://100.100.100.200/latest/meta-data/", NOT_PUBLIC),
    ("http://168.63.129.16/metadata/", NOT_PUBLIC),
    ("http://192.0.0.192/opc/v2/", NOT_PUBLIC),
    ("http://224.0.0.1/", NOT_PUBLIC),
    ("http://255.255.255.255/", NOT_PUBLIC),
    ("http://[::1]/", NOT_PUBLIC),
    ("http://[0:0:0:0:0:0:0:1]/", NOT_PUBLIC),
    ("http://[::]/", NOT_PUBLIC),
    ("http://[::127.0.0.1]/", NOT_PUBLIC),
    ("http://[::ffff:127.0.0.1]/", NOT_PUBLIC),
    ("http://[::ffff:7f00:1]/", NOT_PUBLIC),
    ("http://[::ffff:0:127.0.0.1]/", NOT_PUBLIC),
    ("http://[64:ff9b::127.0.0.1]/", NOT_PUBLIC),
    ("http://[64:ff9b:1::a9fe:a9fe]/", NOT_PUBLIC),
    ("http://[2002:7f00:1::]/", NOT_PUBLIC),
    ("http://[2001:0:7f00:1::]/", NOT_PUBLIC),
    ("http://[fe80::1]/", NOT_PUBLIC),
    ("http://[fe80::1%25lo]/", NOT_PUBLIC),
    ("http://[fec0::1]/", NOT_PUBLIC),
    ("http://[fd00:ec2::254]/latest/meta-data/", NOT_PUBLIC),
    ("http://[ff02::1]/", NOT_PUBLIC),
    # Names without a public address.
    ("http://localhost/", NOT_PUBLIC),
    ("http://LOCALHOST/", NOT_PUBLIC),
    ("http://localhost./", NOT_PUBLIC),
    ("http://a.localhost/", NOT_PUBLIC),
    ("http://redis/", NOT_PUBLIC),
    ("http://metadata.google.internal/computeMetadata/v1/", NOT_PUBLIC),
    ("http://kubernetes.default.svc.cluster.local/", NOT_PUBLIC),
    ("http://images.example./", NOT_PUBLIC),
    ("http://.images.example/", NOT_PUBLIC),
    ("http://images..example/", NOT_PUBLIC),
    ("http://" + "a" * 64 + ".example/", NOT_PUBLIC),
    ("http://im*ges.example/", NOT_PUBLIC),
    # Names with forbidden addresses; `images.example` would be the server itself.
    ("http://images.example/", LEADS_INSIDE),
    ("http://private.example/", LEADS_INSIDE),
    ("https://private.example/", LEADS_INSIDE),
    ("http://mixed.example/", LEADS_INSIDE),
    ("http://mapped.example/", LEADS_INSIDE),
    ("http://translated.example/", LEADS_INSIDE),
    ("http://link-local.example/", LEADS_INSIDE),
    ("http://xn--nxasmq6b.example/", LEADS_INSIDE),
    ("http://xn--a.example/", LEADS_INSIDE),
    ("http://no-such-host.example/", LEADS_INSIDE),
    ("http://empty.example/", LEADS_INSIDE),
]


@pytest.fixture
def names() -> Names:
    """Names that the owner of a zone can make up."""
    return Names(
        {
            "images.example": [[SERVED]],
            "private.example": [["10.0.0.1"]],
            "mixed.example": [["93.184.216.34", SERVED]],
            "mapped.example": [["::ffff:127.0.0.1"]],
            "translated.example": [["64:ff9b::7f00:1"]],
            "link-local.example": [["fe80::1%lo"]],
            "xn--nxasmq6b.example": [[SERVED]],
            "xn--a.example": [[SERVED]],
            "empty.example": [[]],
        }
    )


@pytest.fixture
def strict(names: Names) -> ImageFetcher:
    """A fetcher that allows every host, as a gateway with a wildcard does."""
    return fetching("*", names=names)


async def test_hostile_url_is_refused_without_a_connection(
    strict: ImageFetcher, names: Names, connected: list[Any]
) -> None:
    for url, why in HOSTILE:
        names.asked.clear()
        with pytest.raises(InvalidParameterError) as caught:
            await fetch(strict, url)
        assert caught.value.message.startswith(f"'{PARAM}' {why}"), url
        assert caught.value.param == PARAM, url
        assert "secret" not in caught.value.message, url
        assert connected == [], url
        assert bool(names.asked) is (why == LEADS_INSIDE), url  # No other name is resolved.


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "127.1", "images.example"])
async def test_listening_server_on_this_machine_is_not_reached(
    server: Server, names: Names, connected: list[Any], host: str
) -> None:
    fetcher = fetching("*", f"*:{server.port}", names=names)
    with pytest.raises(InvalidParameterError, match=r"host .*on the public internet"):
        await fetch(fetcher, f"http://{host}:{server.port}/a.png")
    assert (connected, server.connections) == ([], 0)


async def test_wildcard_host_list_does_not_allow_the_local_machine(
    server: Server, connected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolve_to(monkeypatch, SERVED)
    monkeypatch.setenv("SLUICE_IMAGE_URL_HOSTS", f"*, *:{server.port}")
    fetcher = ImageFetcher.from_settings(Settings())
    for host, why in [(SERVED, NOT_PUBLIC), ("localhost", NOT_PUBLIC), ("a.example", LEADS_INSIDE)]:
        with pytest.raises(InvalidParameterError, match=why):
            await fetch(fetcher, f"http://{host}:{server.port}/a.png")
    assert asked == ["a.example"]
    assert (connected, server.connections) == ([], 0)


async def test_proxies_of_the_environment_are_not_used(
    server: Server, names: Names, connected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.port}")
    fetcher = fetching("*", names=names)
    with pytest.raises(InvalidParameterError, match=LEADS_INSIDE):
        await fetch(fetcher, "http://private.example/")
    assert (connected, server.connections) == ([], 0)


async def test_nothing_is_fetched_where_no_host_is_listed(connected: list[Any]) -> None:
    names = Names()
    fetcher = fetching(names=names)
    with pytest.raises(InvalidParameterError) as caught:
        await fetch(fetcher, "https://images.example/a.png")
    assert caught.value.message == (
        f"'{PARAM}' must be a data URI: this gateway fetches no images from URLs."
    )
    assert (connected, names.asked) == ([], [])


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/",
        "http://images.example.evil.example/",
        "http://evil-images.example/",
        "http://sub.images.example/",
        "http://images.example./",
        "http://xn--mages-ihb.example/",
        "http://images.example:8080/",
        "http://93.184.216.34/",
    ],
)
async def test_host_that_is_not_listed_is_refused_by_name(connected: list[Any], url: str) -> None:
    names = Names()
    fetcher = fetching("images.example", names=names)
    with pytest.raises(InvalidParameterError, match=NOT_LISTED) as caught:
        await fetch(fetcher, url)
    assert url.split("/")[2] in caught.value.message
    assert (connected, names.asked) == ([], [])


async def test_one_bad_url_prevents_all_fetches(
    fetcher: ImageFetcher, server: Server, connected: list[Any]
) -> None:
    good = f"http://images.example:{server.port}/a.png"
    with pytest.raises(InvalidParameterError) as caught:
        await fetch(fetcher, good, good, "file:///etc/passwd", good)
    assert caught.value.param == "messages[0].content[3].image_url.url"
    assert (connected, server.connections) == ([], 0)


REDIRECTS = [
    "http://127.0.0.2:PORT/",
    "http://private.example:PORT/",
    "//private.example:PORT/",
    "http://[::1]:PORT/",
    "http://[::ffff:127.0.0.2]:PORT/",
    "http://2130706434:PORT/",
    "http://0x7f.2:PORT/",
    "http://localhost:PORT/",
    "http://169.254.169.254/latest/meta-data/",
    "http://images.example@127.0.0.2:PORT/",
    "http://images.example\\@127.0.0.2:PORT/",
    "http://images.example:6379/",
    "file:///etc/passwd",
    "data:image/png;base64,iVBORw0KGgo=",
    "gopher://127.0.0.2:PORT/",
    "http://[::1",
]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_to_a_forbidden_address_is_not_followed(
    fetcher: ImageFetcher,
    server: Server,
    forbidden: Server,
    connected: list[Any],
    status: int,
) -> None:
    for location in REDIRECTS:
        connected.clear()
        server.responses["/"] = redirect(location.replace("PORT", str(server.port)), status)
        with pytest.raises(
            InvalidParameterError, match=r"redirects to a URL|on the public internet"
        ):
            await fetch(fetcher, f"http://images.example:{server.port}/")
        assert connected == [(SERVED, server.port)], location
    assert forbidden.connections == 0


@pytest.mark.parametrize("location", ["/", "", "/b", "?x", "http://images.example:PORT/b"])
async def test_loop_of_redirects_ends(fetcher: ImageFetcher, server: Server, location: str) -> None:
    there = redirect(location.replace("PORT", str(server.port)))
    server.responses = {"/": there, "/b": there, "/?x": there}
    with pytest.raises(InvalidParameterError, match="redirects more than 3 times"):
        await fetch(fetcher, f"http://images.example:{server.port}/")
    assert server.connections == 4


async def test_name_is_not_resolved_again_after_the_check(
    server: Server, forbidden: Server, names: Names, fetcher: ImageFetcher, connected: list[Any]
) -> None:
    names.addresses["images.example"] = [[SERVED], ["127.0.0.2"]]
    server.responses["/a.png"] = image()
    assert await fetch(fetcher, f"http://images.example:{server.port}/a.png") == [PNG]
    assert names.asked == ["images.example"]
    assert connected == [(SERVED, server.port)]
    assert forbidden.connections == 0


async def test_name_is_checked_again_after_a_redirect(
    server: Server, forbidden: Server, names: Names, fetcher: ImageFetcher, connected: list[Any]
) -> None:
    names.addresses["images.example"] = [[SERVED], ["127.0.0.2"]]
    server.responses["/a.png"] = redirect("/b.png")
    with pytest.raises(InvalidParameterError, match=LEADS_INSIDE):
        await fetch(fetcher, f"http://images.example:{server.port}/a.png")
    assert names.asked == ["images.example", "images.example"]
    assert connected == [(SERVED, server.port)]
    assert forbidden.connections == 0


async def test_redirect_from_https_to_http_is_not_followed(
    server: Server, names: Names, connected: list[Any], tls: Any
) -> None:
    secure, trust = tls
    async with serving(tls=secure) as secured:
        secured.responses["/"] = redirect(f"http://images.example:{server.port}/a.png")
        ports = (f"*:{server.port}", f"*:{secured.port}")
        fetcher = fetching(*ports, names=names, is_allowed=_is_any, trust=trust)
        with pytest.raises(InvalidParameterError, match="redirects from https to http"):
            await fetch(fetcher, f"https://images.example:{secured.port}/")
        assert connected == [(SERVED, secured.port)]
    assert server.connections == 0


def _is_any(_address: str) -> bool:
    return True
