"""Fixtures of the accounts' tests: each runs on SQLite and on a real PostgreSQL."""

import pytest
from redis.asyncio import Redis

from gateway.database.engine import Database
from gateway.management.keys.service import KeyService
from gateway.management.members.service import MemberService
from gateway.management.projects.service import ProjectService
from gateway.management.tenants.service import TenantService
from gateway.tenancy.changes import ChangeAnnouncer


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
