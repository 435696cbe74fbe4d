"""A Redis of each kind that the scripts must run on."""

from tests.contract.conftest import any_redis, any_redis_server

__all__ = ["any_redis", "any_redis_server"]
