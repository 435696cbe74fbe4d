"""Fixtures of the accounts' tests: each runs on SQLite and on a real PostgreSQL."""

import pytest
from redis.asyncio import Redis

from gateway.accounts.keys.service import KeyService
from gateway.accounts.members.service import MemberService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database


@pytest.fixture
def tenants(database: Database, redis: Redis) -> TenantService:
    """The rules of tenants, on the database."""
    return TenantService(database, ChangeAnnouncer(redis))


@pytest.fixture
def projects(database: Database, redis: Redis) -> ProjectService:
    """The rules of projects, on the database."""
    return ProjectService(database, ChangeAnnouncer(redis))


@pytest.fixture
def members(database: Database, redis: Redis) -> MemberService:
    """The rules of members, on the database."""
    return MemberService(database, ChangeAnnouncer(redis))


@pytest.fixture
def keys(database: Database, redis: Redis) -> KeyService:
    """The rules of keys, on the database."""
    return KeyService(database, ChangeAnnouncer(redis))
