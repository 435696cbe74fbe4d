"""Networks from which a key may be used."""

from ipaddress import ip_network

import pytest

from gateway.accounts.keys.rules import MAX_ADDRESSES, read_addresses
from gateway.records.errors import InvalidParameterError
from tests.support.cases import all_cases, case


def test_networks_are_normalised() -> None:
    for given, meant in [
        ("192.0.2.7", "192.0.2.7/32"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.0/255.0.0.0", "10.0.0.0/8"),
        ("2001:DB8:0:0::/32", "2001:db8::/32"),
        ("::1", "::1/128"),
        ("::ffff:192.0.2.7", "192.0.2.7/32"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        ("::/0", "::/0"),
        ("0.0.0.0/0", "0.0.0.0/0"),
    ]:
        with case((given, meant)):
            assert read_addresses([given]) == (ip_network(meant),)


def test_invalid_network_is_refused_by_name() -> None:
    for given in [
        *("", " ", "x", "localhost", "10", "10.0.0", "010.0.0.1", "10.0.0.1/33", "10.0.0.0/-1"),
        *("::1/129", "fe80::1%eth0", "fe80::1%eth0/128", "10.0.0.1,10.0.0.2", "10.0.0.1\x00"),
        *("1" * 5000, "/8", "10.0.0.1:80", "[::1]", "*"),
    ]:
        with case(given):
            with pytest.raises(
                InvalidParameterError, match="'allowed_addresses' must contain addresses"
            ) as e:
                read_addresses(["10.0.0.1", given])
            assert e.value.param == "allowed_addresses"
            assert len(e.value.message) < 250


def test_host_with_the_prefix_of_its_network_is_refused_with_both_meanings() -> None:
    with pytest.raises(InvalidParameterError, match=r"use 10.0.0.0/8 .* or 10.0.0.1 for"):
        read_addresses(["10.0.0.1/8"])


def test_each_network_is_kept_once_and_in_order() -> None:
    given = ["10.0.0.2", "10.0.0.1/32", "::ffff:10.0.0.2", "10.0.0.1"]
    assert [str(each) for each in read_addresses(given)] == ["10.0.0.2/32", "10.0.0.1/32"]


@all_cases("number", [0, MAX_ADDRESSES + 1])
def test_number_of_networks_is_bounded(number: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"1 to 100 networks. Given: {number}"):
        read_addresses([f"10.0.{n}.0/24" for n in range(number)])
    assert len(read_addresses([f"10.0.{n}.0/24" for n in range(MAX_ADDRESSES)])) == MAX_ADDRESSES
