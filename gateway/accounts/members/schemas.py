"""Request and response bodies of members."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from gateway.accounts.shared.fields import ListBody, Name, RecordBody, RequestBody
from gateway.records.records import Role


class MemberAddition(RequestBody):
    """A member to add."""

    subject: Name | None = Field(None, description="The `sub` claim of the person's tokens.")
    email: Name | None = Field(
        None,
        description="Instead of a subject: the person who first logs in to the console with this "
        "e-mail, verified by the identity provider, becomes the member.",
    )
    role: Role
    name: Name | None = Field(None, description="Display name. Default: the subject or e-mail.")


class MemberChange(RequestBody):
    """Changes to a member."""

    role: Role


class MemberBody(RecordBody):
    """A member."""

    object: Literal["member"] = "member"
    id: str
    tenant_id: str
    subject: str | None = Field(description="Null until an invited person has logged in.")
    issuer: str | None = Field(
        description="The issuer that uses this subject. Null: the deployment's identity provider."
    )
    email: str | None
    name: str
    role: Role
    created_at: datetime


class MemberList(ListBody[MemberBody]):
    """A page of members, oldest first."""


class RemovedMember(BaseModel):
    """A removed member."""

    object: Literal["member.deleted"] = "member.deleted"
    id: str
    deleted: Literal[True] = True
