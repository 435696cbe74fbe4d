"""Request and response bodies of projects."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from gateway.accounts.shared.fields import (
    BodyWithLimits,
    LimitsGiven,
    LimitsShown,
    ListBody,
    Name,
    RecordBody,
)
from gateway.records.records import ProjectStatus


class ProjectCreation(BodyWithLimits):
    """A project to create."""

    name: Name
    limits: LimitsGiven = Field(default_factory=dict)


class ProjectChange(BodyWithLimits):
    """Changes to a project; absent fields stay unchanged."""

    name: Name = Field(default_factory=str)
    limits: LimitsGiven = Field(default_factory=dict)


class ProjectBody(RecordBody):
    """A project."""

    object: Literal["project"] = "project"
    id: str
    tenant_id: str
    name: str
    status: ProjectStatus
    limits: LimitsShown
    created_at: datetime


class ProjectList(ListBody[ProjectBody]):
    """A page of projects, oldest first."""
