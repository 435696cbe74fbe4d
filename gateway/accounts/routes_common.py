"""Fields, parameters and callers that routes of several resources share.

Tenants have routes under `/v1`, operators under `/admin/tenants/{tenant_id}`. A `TenantRouter`
authorizes the caller and sets the tenant.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Self, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from typing_extensions import override

from gateway.http.authorization import authorize_operator, requires
from gateway.http.bounded_route import BoundedRoute
from gateway.platform.database.paging import MAX_PAGE, PageRequest
from gateway.records.checks import MAX_NAME_CHARACTERS
from gateway.records.grants import Grant
from gateway.records.limits import (
    FromPlan,
    LimitScope,
    names_of,
    range_of,
    read_limit_changes,
)
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

T = TypeVar("T")
C = TypeVar("C", int, str)


def limits_schema(scope: LimitScope, *also: dict[str, str], **keywords: Any) -> WithJsonSchema:
    """Return the schema of limits by name: numbers, null or what `also` says."""
    limits = dict[str, Any]()
    for name in names_of(scope):
        least, most = range_of(name)
        number = {"type": "integer", "minimum": least, "maximum": most}
        limits[name.value] = {"anyOf": [number, {"type": "null"}, *also]}
    return WithJsonSchema({"type": "object", **keywords, "properties": limits})


def _given(scope: LimitScope) -> WithJsonSchema:
    return limits_schema(
        scope,
        {"const": FromPlan.FROM_PLAN.value},
        description="Own limits; absent ones stay unchanged. Null: unlimited; `plan`: the plan's "
        "limit.",
        additionalProperties=False,
    )


_SHOWN: Final = "Own limits. Null: no limit; absent: the plan's limit."
LimitsGiven = Annotated[dict[str, Any], _given(LimitScope.KEY)]
TenantLimitsGiven = Annotated[dict[str, Any], _given(LimitScope.TENANT)]
LimitsShown = Annotated[dict[str, int | None], limits_schema(LimitScope.KEY, description=_SHOWN)]
TenantLimitsShown = Annotated[
    dict[str, int | None], limits_schema(LimitScope.TENANT, description=_SHOWN)
]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
DisplayName = Annotated[Name, Field(description="Display name.")]


class RequestBody(BaseModel):
    """A request body; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    def given(self) -> dict[str, Any]:
        """Return the parsed values of the fields that the body contains."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def _without_defaults(schema: dict[str, Any]) -> None:
    for each in schema["properties"].values():
        each.pop("default", None)


class ChangeBody(RequestBody):
    """A request body with changes. Absent fields stay unchanged, so defaults are not described."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)


class RecordBody(BaseModel):
    """A response body with fields of a record."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, record: object) -> Self:
        """Return the response body of a record."""
        return cls.model_validate(record)


class PageBody(BaseModel):
    """A page of a list. With entries of the type `KeyBody`, the document calls it `KeyList`."""

    model_config = ConfigDict(from_attributes=True)
    object: Literal["list"] = "list"

    @classmethod
    @override
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        return f"{params[0].__name__.removesuffix('Body')}List"


class ListBody(PageBody, Generic[T]):
    """A page of a list, made of a `Page` of records."""

    data: list[T] = Field(validation_alias="entries")
    has_more: bool = Field(description="Whether more entries follow; request them with `after`.")


class CursorPage(PageBody, Generic[T, C]):
    """A page of a list whose cursor is not the id of an entry."""

    data: list[T]
    has_more: bool
    next: C | None = Field(description="`after` for the next page; null on the last page.")


class BodyWithLimits(RequestBody):
    """A request body with the field `limits`, of this holder."""

    holder: ClassVar = LimitScope.KEY
    limits: LimitsGiven = Field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the arguments for the service. Raises InvalidParameterError."""
        options = self.given()
        if "limits" in options:
            options["limits"] = read_limit_changes(options["limits"], self.holder)
        return options


MAX_TEXT_CHARACTERS: Final = 300
MAX_CURSOR_CHARACTERS: Final = 4096

PRINTABLE: Final = r"^[^\x00-\x1f\x7f]+$"
"""Text without control characters: PostgreSQL rejects a comparison with NUL."""


def _plain(value: Any) -> Any:
    if isinstance(value, str) and not _INTEGER.fullmatch(value):
        raise ValueError("must be an integer in plain digits")
    return value


PLAIN: Final = BeforeValidator(_plain)
"""Refuses what pydantic reads as an integer too, such as ` 1`, `1.0` and `1_0`."""
FLAG: Final = BeforeValidator(lambda value: {"true": True, "false": False}.get(value, value))
"""Takes `true` and `false` in a query, before a strict boolean."""
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")

AnyName = Annotated[
    str,
    Path(
        max_length=MAX_TEXT_CHARACTERS,
        pattern=PRINTABLE,
        description="Name of the alias or model; may contain slashes.",
    ),
]
TenantId = Annotated[str, Path(description="Id of the tenant.")]
PageSize = Annotated[
    int, Query(ge=1, le=MAX_PAGE, description="Maximum entries of one page."), PLAIN
]

AfterId = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        description="`id` of the last entry of the previous page; absent: the first page.",
    ),
]


async def _wanted_page(after: AfterId = None, limit: PageSize = 20) -> PageRequest:
    return PageRequest(after, limit)


WantedPage = Annotated[PageRequest, Depends(_wanted_page)]


def text_filter(description: str) -> object:
    """Return the declaration of an optional text parameter of the query."""
    return Query(
        min_length=1, max_length=MAX_TEXT_CHARACTERS, pattern=PRINTABLE, description=description
    )


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal, and the tenant that its request concerns."""

    principal: Principal
    tenant_id: str

    @property
    def actor(self) -> str:
        """The name that the audit log stores."""
        return self.principal.actor

    @property
    def grant(self) -> Grant | None:
        """Rights of a tenant's credential; None for operators."""
        return None if self.principal.is_operator else self.principal.grant

    @property
    def by(self) -> dict[str, Any]:
        """Who makes a change (`gateway.accounts.changes.By`)."""
        return {"actor": self.actor, "grantor": self.grant}

    @property
    def key_by(self) -> dict[str, Any]:
        """Who creates or changes a key. For operators too, there is an upper bound of rights."""
        principal = self.principal
        grant = principal.operator_grant if principal.is_operator else principal.grant
        return {"actor": self.actor, "grantor": grant}


def own_tenant(*scopes: Scope, of_tenant: bool = False) -> Callable[[Request], Awaitable[None]]:
    """Return a dependency that authorizes a caller for its own tenant, as `requires` does."""
    authorized = requires(*scopes, of_tenant=of_tenant)

    async def dependency(request: Request) -> None:
        principal = await authorized(request)
        request.state.management_caller = Caller(principal, principal.tenant_id)

    return dependency


async def any_tenant(request: Request, tenant_id: TenantId) -> None:
    """Authorize an operator for the tenant in the path."""
    request.state.management_caller = Caller(await authorize_operator(request), tenant_id)


class TenantRouter(APIRouter):
    """The routes of a resource of tenants.

    Its own routes are for customers, at `/v1`, and for operators, at `/admin/tenants/{tenant_id}`.
    Those of `of_customers` and `of_operators` are for one audience.
    """

    def __init__(
        self, prefix: str, tag: str, authorize: Callable[[Request], Awaitable[object]]
    ) -> None:
        options: dict[str, Any] = {"prefix": prefix, "tags": [tag], "route_class": BoundedRoute}
        super().__init__(**options)
        self.of_customers, self.of_operators = APIRouter(**options), APIRouter(**options)
        self.authorize = authorize
        """Authorizes a customer."""

    @property
    def customers(self) -> APIRouter:
        """All routes for customers."""
        return self._all("/v1", self.authorize, self.of_customers)

    @property
    def operators(self) -> APIRouter:
        """All routes for operators."""
        return self._all("/admin/tenants/{tenant_id}", any_tenant, self.of_operators)

    def _all(
        self, prefix: str, authorize: Callable[..., Awaitable[object]], own: APIRouter
    ) -> APIRouter:
        router = APIRouter(prefix=prefix, dependencies=[Depends(authorize)])
        router.include_router(self)
        router.include_router(own)
        return router


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.management_caller
    return caller


OfTenant = Annotated[Caller, Depends(_caller)]
