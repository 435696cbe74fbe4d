"""Request and response bodies of members."""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, Field

from gateway.database.paging import Page
from gateway.management.shared.fields import ListBody, Name, RequestBody
from gateway.tenancy.records import Member, Role


class MemberAddition(RequestBody):
    """A member to add."""

    subject: Name = Field(description="The `sub` claim of the person's tokens.")
    role: Role
    name: Name | None = Field(None, description="Display name. Default: the subject.")


class MemberChange(RequestBody):
    """Changes to a member."""

    role: Role


class MemberBody(BaseModel):
    """A member."""

    object: Literal["member"] = "member"
    id: str
    tenant_id: str
    subject: str
    name: str
    role: Role
    created_at: datetime

    @classmethod
    def of(cls, member: Member) -> Self:
        """Return the response body of a member."""
        return cls(
            id=member.id,
            tenant_id=member.tenant_id,
            subject=member.subject,
            name=member.name,
            role=member.role,
            created_at=member.created_at,
        )


class MemberList(ListBody[MemberBody]):
    """A page of members, oldest first."""

    @classmethod
    def of(cls, page: Page[Member]) -> Self:
        """Return the response body of a page."""
        return cls(data=[MemberBody.of(each) for each in page.entries], has_more=page.has_more)


class RemovedMember(BaseModel):
    """A removed member."""

    object: Literal["member.deleted"] = "member.deleted"
    id: str
    deleted: Literal[True] = True
