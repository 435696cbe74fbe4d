"""Where the served APIs disagree about unknown parameters, absent models and end users."""

import asyncio
from collections.abc import Iterator

import pytest

from common.redis_url import redis_client
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from tests.e2e.examples import COUNTING, OPEN
from tests.e2e.seeds.calling import DIALECTS, Body, Caller, each_dialect, text_of
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 128
REQUIRING_A_MODEL = ("openai", "fireworks", "fireworks-2026", "omlx")


async def ignore_nothing(stack: Stack, tenant: str) -> None:
    """Let a tenant's unknown parameters be rejected."""
    database, redis = Database(stack.database_url), redis_client(stack.redis.url)
    try:
        tenants = TenantService(database, ChangeAnnouncer(redis))
        await tenants.update(tenant, strict_parameters=True)
    finally:
        await redis.aclose()
        await database.aclose()


@pytest.fixture(scope="module")
def strict_caller(stack: Stack) -> Iterator[Caller]:
    """A key of a tenant whose unknown parameters are rejected."""
    key = stack.key("strict", allowed_models=(MODEL,))
    asyncio.run(ignore_nothing(stack, "strict"))
    caller = Caller(stack.url, key)
    yield caller
    caller.close()


@each_dialect()
def test_conflict_23_unknown_parameter(caller: Caller, strict_caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 1, "frobnicate": 1, "zeta": {"a": 1}}

    response = caller.post(dialect, body)
    assert response.status_code == 200
    assert {"frobnicate", "zeta"} <= set(response.headers["x-ignored-params"].split(","))
    error = strict_caller.refused(dialect, body)
    assert "frobnicate" in error["message"]
    strict_caller.complete(dialect, {"prompt": OPEN, "max_tokens": 1})


@each_dialect("is_model_required")
def test_conflict_24_absent_model(caller: Caller, dialect: str) -> None:
    body = f'{{"prompt": "{COUNTING}", "max_tokens": 12, "temperature": 0}}'.encode()

    if dialect in REQUIRING_A_MODEL:
        assert "model" in caller.refused(dialect, body)["message"]
    else:
        assert text_of(caller.complete(dialect, body)).startswith(" 5, 6,")


@each_dialect()
def test_conflict_25_user_does_not_change_identity(
    stack: Stack, caller: Caller, dialect: str
) -> None:
    """Neither a parameter nor a header named `user` changes the identity of a request."""
    prompt = [11 + DIALECTS.index(dialect)] * (2 * BLOCK_TOKENS + 1)
    body: Body = {"prompt": prompt, "max_tokens": 1}
    caller.complete(dialect, body)

    answer = caller.post(dialect, body | {"user": "another-tenant"}, user="another-tenant").json()
    # The tenant's own prefix cache is used, and no other.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK_TOKENS
    stranger = Caller(stack.url, "sk-nonsense")
    assert stranger.post(dialect, body | {"user": "documents"}, user="documents").status_code == 401
    stranger.close()
    other = Caller(stack.url, stack.key("other", allowed_models=(MODEL,)))
    uncached = other.post(dialect, body | {"user": "documents"}, user="documents").json()
    assert uncached["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    other.close()
