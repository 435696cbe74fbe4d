"""Members: the people of a tenant."""

import asyncio
import re
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from gateway.accounts.members import MemberService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import (
    BadRequestError,
    ConflictError,
    InvalidParameterError,
    NotFoundError,
    PermissionDeniedError,
)
from gateway.records.records import Person
from gateway.records.scopes import Role, Scope
from tests.gateway.accounts.changes import announced, audited, grant
from tests.support.cases import all_cases
from tests.support.kinds import every_database

SUBJECT = "auth0|0123"


@pytest.fixture(autouse=True)
async def _two_tenants(tenants: TenantService) -> None:
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Other", tenant_id="other")


async def test_member_is_found_again_by_id_and_subject(members: MemberService) -> None:
    added = await members.add("acme", subject=SUBJECT, role=Role.VIEWER, name="Ada")
    assert re.fullmatch(r"mbr_[0-9a-f]{16}", added.id)
    assert (added.subject, added.name, added.role) == (SUBJECT, "Ada", Role.VIEWER)
    assert await members.get("acme", added.id) == await members.get("acme", SUBJECT) == added
    assert (await members.page("acme", PageRequest())).entries == [added]
    assert (await members.page("acme", PageRequest(limit=1))).entries == [added]


async def test_person_may_be_a_member_of_two_tenants_but_of_each_once(
    members: MemberService,
) -> None:
    added = await members.add("acme", subject=SUBJECT, role=Role.OWNER)
    others = await members.add("other", subject=SUBJECT, role=Role.VIEWER)
    assert added.name == SUBJECT
    with pytest.raises(ConflictError, match="is already a member"):
        await members.add("acme", subject=SUBJECT, role=Role.ADMIN)
    assert (await members.page("acme", PageRequest())).entries == [added]
    assert (await members.page("other", PageRequest())).entries == [others]


async def test_changes_are_audited_and_announced(
    members: MemberService, database: Database, redis: Redis
) -> None:
    added = await members.add("acme", subject=SUBJECT, role=Role.VIEWER, actor="jwt:boss")
    changed = await members.set_role("acme", SUBJECT, role=Role.ADMIN, actor="jwt:boss")
    assert changed == replace(added, role=Role.ADMIN) == await members.get("acme", added.id)
    assert await members.remove("acme", added.id, actor="jwt:boss") == changed
    assert (await members.page("acme", PageRequest())).entries == []
    assert await announced(redis) == [{b"tenant": b"acme"}] * 3
    rows = [row for row in await audited(database) if row.subject == added.id]
    assert [(row.action, row.actor, row.tenant, row.details) for row in rows] == [
        (
            *("member.add", "jwt:boss", "acme"),
            {"subject": SUBJECT, "name": SUBJECT, "role": "viewer"},
        ),
        ("member.change", "jwt:boss", "acme", {"role": "admin", "former_role": "viewer"}),
        ("member.remove", "jwt:boss", "acme", {"subject": SUBJECT, "role": "admin"}),
    ]


async def test_last_owner_cannot_be_removed(members: MemberService, redis: Redis) -> None:
    owner = await members.add("acme", subject="a", role=Role.OWNER)
    await members.add("acme", subject="b", role=Role.ADMIN)
    await members.add("other", subject="c", role=Role.OWNER)
    with pytest.raises(BadRequestError, match='"a" is the last owner'):
        await members.remove("acme", "a")
    with pytest.raises(BadRequestError, match='"a" is the last owner'):
        await members.set_role("acme", "a", role=Role.ADMIN)
    assert await members.get("acme", "a") == owner
    assert len(await announced(redis)) == 3
    await members.set_role("acme", "a", role=Role.OWNER)
    await members.set_role("acme", "b", role=Role.OWNER)
    await members.remove("acme", "a")
    assert [member.subject for member in (await members.page("acme", PageRequest())).entries] == [
        "b"
    ]


@every_database
async def test_owners_who_demote_each_other_at_the_same_time_leave_one(
    members: MemberService,
) -> None:
    for round_ in range(3):
        subjects = [f"{round_}-{n}" for n in range(3)]
        for subject in subjects:
            await members.add("acme", subject=subject, role=Role.OWNER)
        results = await asyncio.gather(
            *(members.set_role("acme", subject, role=Role.VIEWER) for subject in subjects),
            *(members.remove("acme", subject) for subject in subjects),
            return_exceptions=True,
        )
        owners = [
            each
            for each in (await members.page("acme", PageRequest())).entries
            if each.role is Role.OWNER
        ]
        assert len(owners) == 1
        refusals = [result for result in results if isinstance(result, BaseException)]
        assert {type(refusal) for refusal in refusals} <= {BadRequestError, NotFoundError}


async def test_roles_beyond_own_rights_cannot_be_granted_changed_or_removed(
    members: MemberService,
) -> None:
    for subject in ("a", "b"):
        await members.add("acme", subject=subject, role=Role.OWNER)
    few = grant(scopes=frozenset({Scope.MEMBERS, Scope.USAGE}))
    await members.add("acme", subject="c", role=Role.VIEWER, grantor=few)
    with pytest.raises(
        PermissionDeniedError, match="cannot manage the role 'owner', which has more"
    ):
        await members.add("acme", subject="d", role=Role.OWNER, grantor=few)
    with pytest.raises(PermissionDeniedError):
        await members.set_role("acme", "c", role=Role.OWNER, grantor=few)
    with pytest.raises(PermissionDeniedError):
        await members.set_role("acme", "a", role=Role.VIEWER, grantor=few)
    with pytest.raises(PermissionDeniedError):
        await members.remove("acme", "a", grantor=few)
    await members.remove("acme", "c", grantor=few)
    roles = [member.role for member in (await members.page("acme", PageRequest())).entries]
    assert roles == [Role.OWNER, Role.OWNER]


async def test_tenants_do_not_see_each_others_members(members: MemberService) -> None:
    added = await members.add("acme", subject=SUBJECT, role=Role.VIEWER)
    for name in (added.id, SUBJECT):
        with pytest.raises(NotFoundError, match='"other" has no member'):
            await members.get("other", name)
        with pytest.raises(NotFoundError):
            await members.remove("other", name)
        with pytest.raises(NotFoundError):
            await members.set_role("other", name, role=Role.OWNER)
    assert (await members.page("acme", PageRequest())).entries == [added]


async def test_subject_equal_to_anothers_id_does_not_hide_that_member(
    members: MemberService,
) -> None:
    first = await members.add("acme", subject="a", role=Role.VIEWER)
    await members.add("acme", subject=first.id, role=Role.OWNER)
    assert await members.get("acme", first.id) == first


@all_cases("subject", ["", "  ", "x" * 201, "a\x00b", "\ud800"])
async def test_subject_out_of_bounds_is_refused(members: MemberService, subject: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await members.add("acme", subject=subject, role=Role.VIEWER)
    assert caught.value.param == "subject"
    with pytest.raises(NotFoundError):
        await members.get("acme", subject)


@every_database
async def test_invitation_is_accepted_by_one_person_once(members: MemberService) -> None:
    ada, eve = (Person("https://login.example", subject, False) for subject in ("ada", "eve"))
    email = "ada@acme.example"
    invited = await members.add("acme", email="Ada@Acme.example", role=Role.OWNER)
    with pytest.raises(ConflictError, match="is already a member"):
        await members.add("acme", email=email, role=Role.VIEWER)
    assert await members.log_in(ada, None, {}) == []
    both = await asyncio.gather(members.log_in(ada, email, {}), members.log_in(eve, email, {}))
    assert [found for found in both if found] == [[("acme", "Acme", Role.OWNER)]]
    joined = await members.get("acme", invited.id)
    assert (joined.email, joined.issuer) == (email, "https://login.example")
    # Who is a member already does not become a second one.
    await members.add("acme", email="other@acme.example", role=Role.VIEWER)
    person = ada if joined.subject == "ada" else eve
    found = await members.log_in(person, "other@acme.example", {})
    assert found == [("acme", "Acme", Role.OWNER)]
    # Groups replace the role of a member, and need none.
    assert await members.log_in(person, None, {"acme": Role.VIEWER, "none": Role.OWNER}) == [
        ("acme", "Acme", Role.VIEWER)
    ]
    other = Person("https://login.example", "gus", False)
    assert await members.of_person(other, {"acme": Role.BILLING}) == [
        ("acme", "Acme", Role.BILLING)
    ]
    for wrong in ("", "ada", "ada@", "a da@acme.example", "\N{KELVIN SIGN}im@acme.example"):
        with pytest.raises(InvalidParameterError, match="'email' must be an address"):
            await members.add("acme", email=wrong, role=Role.VIEWER)
    for subject, given in ((None, None), ("x", email)):
        with pytest.raises(InvalidParameterError, match="either 'subject' or 'email'"):
            await members.add("acme", subject=subject, email=given, role=Role.VIEWER)
