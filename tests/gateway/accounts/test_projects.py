"""Projects: parts of a tenant with separate keys and limits."""

import asyncio
import re
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import InvalidParameterError, NotFoundError
from gateway.records.limits import FromPlan, LimitChanges, LimitName
from gateway.records.records import ProjectStatus
from tests.gateway.accounts.changes import announced, audited
from tests.support.cases import case
from tests.support.kinds import every_database


@pytest.fixture(autouse=True)
async def _two_tenants(tenants: TenantService) -> None:
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Other", tenant_id="other")


async def test_project_has_all_its_options(projects: ProjectService) -> None:
    limits = {LimitName.TOKENS_PER_DAY: 5, LimitName.BUDGET: None}
    made = await projects.create("acme", name="shop", limits=limits)
    assert re.fullmatch(r"prj_[0-9a-f]{16}", made.id)
    assert (made.status, made.limits) == (ProjectStatus.ACTIVE, limits)
    assert await projects.get("acme", made.id) == made
    assert (await projects.page("acme", PageRequest())).entries == [made]


async def test_options_are_changed_one_by_one_audited_and_announced(
    projects: ProjectService, database: Database, redis: Redis
) -> None:
    made = await projects.create("acme", name="shop", limits={LimitName.TOKENS_PER_DAY: 5})
    renamed = await projects.update("acme", made.id, name="store", actor="key:k")
    assert renamed == replace(made, name="store") == await projects.get("acme", made.id)
    changes: LimitChanges = {
        LimitName.TOKENS_PER_DAY: FromPlan.FROM_PLAN,
        LimitName.REQUESTS_PER_DAY: 7,
    }
    changed = await projects.update("acme", made.id, limits=changes)
    assert changed == replace(renamed, limits={LimitName.REQUESTS_PER_DAY: 7})
    assert await projects.get("acme", made.id) == changed
    assert await announced(redis) == [{b"tenant": b"acme"}] * 2
    rows = [row for row in await audited(database) if row.subject == made.id]
    assert [(row.action, row.actor, row.tenant, row.details) for row in rows] == [
        ("project.create", "system", "acme", {"name": "shop", "limits": {"tokens_per_day": 5}}),
        ("project.update", "key:k", "acme", {"name": "store"}),
        (
            *("project.update", "system", "acme"),
            {"limits": {"requests_per_day": 7, "tokens_per_day": "plan"}},
        ),
    ]


@every_database
async def test_concurrent_changes_of_limits_are_all_stored(projects: ProjectService) -> None:
    made = await projects.create("acme", name="shop")
    await asyncio.gather(
        *(projects.update("acme", made.id, limits={name: 1}) for name in LimitName)
    )
    assert set((await projects.get("acme", made.id)).limits) == set(LimitName)


async def test_archiving_is_saved_and_audited_once_and_announced_each_time(
    projects: ProjectService, database: Database, redis: Redis
) -> None:
    made = await projects.create("acme", name="shop")
    for _ in range(2):
        archived = await projects.archive("acme", made.id, actor="cli:ada")
        assert archived == replace(made, status=ProjectStatus.ARCHIVED)
    assert await projects.get("acme", made.id) == archived
    assert await projects.activate("acme", made.id) == made
    assert await announced(redis) == [{b"tenant": b"acme"}] * 3
    rows = [(row.action, row.actor) for row in await audited(database) if row.subject == made.id]
    assert rows[1:] == [("project.archive", "cli:ada"), ("project.activate", "system")]


async def test_tenants_do_not_see_each_others_projects(projects: ProjectService) -> None:
    made = await projects.create("acme", name="shop")
    assert (await projects.page("other", PageRequest())).entries == []
    for action in (projects.get, projects.archive, projects.activate):
        with pytest.raises(NotFoundError, match='"other" has no project'):
            await action("other", made.id)
    with pytest.raises(NotFoundError):
        await projects.update("other", made.id, name="mine")
    assert await projects.get("acme", made.id) == made


@every_database
async def test_invalid_id_is_not_found(projects: ProjectService) -> None:
    for id_ in ["", "\x00", "a" * 64, "prj 1", "é", "'; --"]:
        with case(id_):
            with pytest.raises(NotFoundError):
                await projects.get("acme", id_)
            with pytest.raises(NotFoundError):
                await projects.get(id_, "prj_1")
            with pytest.raises(NotFoundError):
                await projects.create(id_, name="shop")


async def test_invalid_projects_and_changes_are_refused(
    projects: ProjectService, redis: Redis
) -> None:
    made = await projects.create("acme", name="shop")
    for name in ("", "  ", "x" * 201, "a\x00b", "a\nb"):
        with pytest.raises(InvalidParameterError):
            await projects.create("acme", name=name)
        with pytest.raises(InvalidParameterError):
            await projects.update("acme", made.id, name=name)
    with pytest.raises(InvalidParameterError, match="Nothing to change"):
        await projects.update("acme", made.id)
    with pytest.raises(NotFoundError, match='no tenant "nobody"'):
        await projects.page("nobody", PageRequest())
    assert (await projects.page("acme", PageRequest())).entries == [made]
    assert await announced(redis) == []


@every_database
async def test_pages_follow_each_other_without_gap_or_repetition(projects: ProjectService) -> None:
    # Created concurrently, so that many have the same millisecond.
    await asyncio.gather(*(projects.create("acme", name=f"p{n}") for n in range(10)))
    await projects.create("other", name="other")
    everything = (await projects.page("acme", PageRequest())).entries
    seen, after, has_more = [], None, True
    while has_more:
        page = await projects.page("acme", PageRequest(after=after, limit=3))
        seen += page.entries
        after, has_more = page.entries[-1].id, page.has_more
    assert seen == everything
    assert len(seen) == 10


@every_database
async def test_page_after_nothing_of_the_list_is_refused(projects: ProjectService) -> None:
    for after in ["", "nothing", "\x00", "\ud800", "x" * 5000]:
        with case(after):
            with pytest.raises(InvalidParameterError, match="'after' must be the id") as caught:
                await projects.page("acme", PageRequest(after=after))
            assert caught.value.param == "after"


async def test_page_after_anothers_entry_is_refused(projects: ProjectService) -> None:
    others = await projects.create("other", name="other")
    with pytest.raises(InvalidParameterError, match="'after' must be the id"):
        await projects.page("acme", PageRequest(after=others.id))
