"""Request and response bodies of projects."""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, Field

from gateway.database.paging import Page
from gateway.management.shared.fields import (
    BodyWithLimits,
    LimitsGiven,
    LimitsShown,
    ListBody,
    Name,
)
from gateway.tenancy.records import Project, ProjectStatus


class ProjectCreation(BodyWithLimits):
    """A project to create."""

    name: Name
    limits: LimitsGiven = Field(default_factory=dict)


class ProjectChange(BodyWithLimits):
    """Changes to a project; absent fields stay unchanged."""

    name: Name = Field(default_factory=str)
    limits: LimitsGiven = Field(default_factory=dict)


class ProjectBody(BaseModel):
    """A project."""

    object: Literal["project"] = "project"
    id: str
    tenant_id: str
    name: str
    status: ProjectStatus
    limits: LimitsShown
    created_at: datetime

    @classmethod
    def of(cls, project: Project) -> Self:
        """Return the response body of a project."""
        return cls(
            id=project.id,
            tenant_id=project.tenant_id,
            name=project.name,
            status=project.status,
            limits={name.value: value for name, value in project.limits.items()},
            created_at=project.created_at,
        )


class ProjectList(ListBody[ProjectBody]):
    """A page of projects, oldest first."""

    @classmethod
    def of(cls, page: Page[Project]) -> Self:
        """Return the response body of a page."""
        return cls(data=[ProjectBody.of(each) for each in page.entries], has_more=page.has_more)
