"""Public addresses and names."""

from gateway.platform.outbound.addresses import is_public, looks_public
from tests.support.cases import all_cases

PUBLIC = [
    "93.184.216.34",
    "192.0.1.1",
    "2606:2800:220:1:248:1893:25c8:1946",
    "::ffff:93.184.216.34",
    "64:ff9b::5db8:d822",
]
NOT_PUBLIC = [
    "10.1.2.3",
    "127.0.0.1",
    "127.255.255.254",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "0.0.0.0",
    "0.1.2.3",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::93.184.216.34",
    "fe80::1%eth0",
    "2606:2800:220:1::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::5db8:d822",
    "2001:0:5db8:d822::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:5db8:d822::",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "100::1",
]
PUBLIC_NAMES = [
    "example.com",
    "a.b-c.example",
    "xn--bcher-kva.example",
    "a.xn--p1ai",
    "EXAMPLE.com",
]
OTHER_NAMES = [
    "",
    "localhost",
    "localhost.",
    "intranet",
    "a.localhost",
    "a.LOCAL",
    "db.internal.",
    "printer.home.arpa",
    "kubernetes.default.svc",
    "KUBERNETES.default.SVC.",
    "kubernetes.default.svc.cluster.local",
    "hooks.corp",
    "127.1",
    "0x7f.1",
    "0x7f.0.0.0x1",
    "0177.0.0.1",
    "127.0.0.1.",
    "2130706433",
    "1.2.3.4.5",
    "a..example",
    ".example.com",
    "a b.example",
    "x" * 64 + ".example",
    "a." * 126 + "example",
]


@all_cases("address", PUBLIC)
def test_public_address_is_public(address: str) -> None:
    assert is_public(address)
    assert looks_public(address)


@all_cases("address", NOT_PUBLIC)
def test_other_address_is_not_public(address: str) -> None:
    assert not is_public(address)
    assert not looks_public(address)


@all_cases("name", PUBLIC_NAMES)
def test_name_that_may_be_public_looks_so(name: str) -> None:
    assert looks_public(name)


@all_cases("name", OTHER_NAMES)
def test_name_that_cannot_be_public_does_not_look_so(name: str) -> None:
    assert not looks_public(name)
