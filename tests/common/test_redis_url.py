"""URLs of Redis, and errors in them."""

import re

import pytest

from common.redis_url import check_redis_url, cluster_address, sentinel_address
from tests.support.cases import all_cases


def test_url_of_sentinels_has_addresses_and_master_name() -> None:
    url = (
        "redis+sentinel://u%40x:p%2Fw@one:26380,[::1]:26381,three/my-master/3"
        "?sentinel_username=su&sentinel_password=s%26p"
    )
    assert check_redis_url(url) == url
    address = sentinel_address(url)
    assert address is not None
    assert address.hosts == (("one", 26380), ("::1", 26381), ("three", 26379))
    assert (address.service, address.database) == ("my-master", 3)
    assert address.server_options == {"db": 3, "username": "u@x", "password": "p/w"}
    assert address.sentinel_options == {"username": "su", "password": "s&p"}
    assert "p/w" not in repr(address)
    assert "s&p" not in repr(address)


def test_database_and_credentials_of_sentinels_may_be_left_out() -> None:
    address = sentinel_address("redis+sentinel://one,two/main")
    assert address is not None
    assert address.server_options == {"db": 0, "username": None, "password": None}
    assert address.sentinel_options == {"username": None, "password": None}


def test_url_of_a_cluster_has_servers_and_passes_other_options_on() -> None:
    url = "rediss://u%40x:p%2Fw@one:7000,[::1]:7001,three/0?cluster=true&ssl_ca_certs=ca.pem"
    assert check_redis_url(url) == url
    address = cluster_address(url)
    assert address is not None
    assert address.hosts == (("one", 7000), ("::1", 7001), ("three", 6379))
    assert (address.username, address.password) == ("u@x", "p/w")
    assert (address.scheme, address.query) == ("rediss", "ssl_ca_certs=ca.pem")
    assert "p/w" not in repr(address)
    assert cluster_address("redis://h?cluster=false") is None


@all_cases("url", ["redis://h", "rediss://u:p@h:1/2", "redis://[::1]:6379/0"])
def test_url_of_a_server_has_no_sentinels(url: str) -> None:
    assert check_redis_url(url) == url
    assert sentinel_address(url) is None


@all_cases(
    ("url", "complaint"),
    [
        ("http://h:hidden@h", "must begin with redis://, rediss://, redis+sentinel://"),
        ("127.0.0.1:6379", "must begin with"),
        ("redis://:hidden@", "a host must follow redis://"),
        ("redis://h:port", "a port must be a number from 0 to 65535"),
        ("redis://h:70000", "a port must be a number"),
        ("rediss://h?ssl_cert_reqs=NONE", "one of required, optional, none. Given: NONE"),
        ("rediss://h?ssl_cert_reqs=none&ssl_cert_reqs=required", "must have one value"),
        ("redis://h?ssl_ca_certs=ca.pem", "options that begin with ssl_ need rediss://"),
        ("redis://h/zero", "the database must be a number of at least 0. Given: zero"),
        ("redis://:hidden@a,b", "several hosts need ?cluster=true"),
        ("redis://:hidden@a,b?cluster=yes", "cluster must be true or false. Given: yes"),
        ("redis://:hidden@a,b/1?cluster=true", "a cluster has only the database 0. Given: 1"),
        ("redis://:hidden@a,b:x?cluster=true", "a port must be a number"),
        ("redis+sentinel://h:26379", "the name of the master must follow the sentinels"),
        ("redis+sentinel://:hidden@h:x/main", "a port must be a number"),
        ("redis+sentinel://h,/main", "each server must be HOST or HOST:PORT"),
        ("redis+sentinel://h/main/-1", "the database must be a number"),
        ("redis+sentinel://h/main?sentinel_pass=hidden", "Given: sentinel_pass"),
    ],
)
def test_errors_in_a_url_hide_passwords(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        check_redis_url(url)
    assert "hidden" not in str(caught.value)
