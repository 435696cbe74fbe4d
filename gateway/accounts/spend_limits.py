"""Spend limits of a tenant: add, change and remove.

Tenants have these routes at `/v1/spend_limits`, operators at
`/admin/tenants/{tenant_id}/spend_limits`. `/v1/organization/.../spend_limit` is OpenAI's form of
the monthly limits of a tenant and its projects.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal, Self, Unpack

from fastapi import APIRouter, Depends, Path
from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import Select, delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import By, Change, changing, require_room
from gateway.accounts.projects.routes import ProjectId
from gateway.accounts.projects.service import find_project
from gateway.accounts.routes_common import (
    MAX_TEXT_CHARACTERS,
    ChangeBody,
    ListBody,
    Name,
    OfTenant,
    RecordBody,
    RequestBody,
    TenantRouter,
    WantedPage,
    own_tenant,
    text_filter,
)
from gateway.accounts.tenants.service import find_tenant
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.limits.seeding import Seeder
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.paging import Page, PageRequest, read_page
from gateway.platform.database.tables import ApiKeyRow, MemberRow, SpendLimitRow
from gateway.records.checks import check_known, check_name, check_not_empty
from gateway.records.errors import (
    InvalidParameterError,
    NotFoundError,
    PermissionDeniedError,
    StateConflictError,
    must,
    shown,
)
from gateway.records.grants import Grant
from gateway.records.limits import (
    JWT_PREFIX,
    MAX_LIMIT,
    LimitName,
    LimitScope,
    LimitValues,
    SpendScope,
    Window,
    read_limits,
)
from gateway.records.scopes import Scope
from gateway.records.spending import (
    LAST_START,
    USER_LIMITS,
    SpendLimit,
    new_limit_id,
)
from gateway.records.times import in_utc, to_ms, to_time, utc_now

LIFTED: Final = timedelta(days=1)
LONGEST_RAISE: Final = timedelta(days=366)
MICROS_OF_CENT: Final = 10_000
_RAISE: Final = ("raised_micros", "raised_until", "raise_reason")


@dataclass(frozen=True, slots=True)
class SpendLimitUse:
    """A spend limit and what is spent in its current window."""

    limit: SpendLimit
    amount_micros: int | None
    """The amount in force."""
    used_micros: int | None
    """With what open requests may cost; None without an amount, or if each end user has it."""
    window_starts_at: datetime
    resets_at: datetime

    @property
    def id(self) -> str:
        """The id of the limit."""
        return self.limit.id


async def uses_of(
    seeder: Seeder, tenant_id: str, limits: Sequence[SpendLimit], *, user: str | None = None
) -> list[SpendLimitUse]:
    """Return what is spent of the limits of a tenant, first derived where Redis lacks it."""
    now_ms = to_ms(utc_now())
    subjects = [each.subject_at(now_ms, user=user or each.holder or "") for each in limits]
    counted = [(each.is_of_one or user is not None) and each.reserves_at(now_ms) for each in limits]
    known = [subject for subject, is_one in zip(subjects, counted, strict=True) if is_one]
    statuses = iter(await seeder.statuses(tenant_id, known))
    uses = list[SpendLimitUse]()
    for limit, subject, is_one in zip(limits, subjects, counted, strict=True):
        status = next(statuses) if is_one else None
        bounds = limit.bounds_at(now_ms if status is None else status.now_ms)
        uses.append(
            SpendLimitUse(
                limit,
                subject.limits.budget_micros,
                None if status is None else status.cost_this_month,
                to_time(bounds.start * 1000),
                to_time(bounds.end * 1000),
            )
        )
    return uses


@dataclass(eq=False)
class SpendLimitService:
    """Adds, changes and removes spend limits; every change is audited.

    A tenant's credential changes neither a limit that an operator has set nor one of its own key.
    """

    _database: Database
    _announcer: ChangeAnnouncer
    _seeder: Seeder

    async def add(
        self,
        tenant_id: str,
        *,
        scope: SpendScope,
        window: Window,
        amount_micros: int | None = None,
        holder: str | None = None,
        model: str | None = None,
        starts_on: int = 1,
        limits: Mapping[str, Any] | None = None,
        **by: Unpack[By],
    ) -> SpendLimit:
        """Add a spend limit. What its holder has spent in the current window counts."""
        check_known(tenant_id, "tenant")
        if model is not None:
            check_name(model, param="model")
        grantor = by.get("grantor")
        limit = SpendLimit(
            id=new_limit_id(),
            tenant_id=tenant_id,
            scope=scope,
            holder=_checked_holder(scope, holder),
            model=model,
            window=window,
            starts_on=_checked_start(window, starts_on),
            amount_micros=amount_micros,
            limits=_checked_limits(scope, limits or {}),
            is_operators=grantor is None,
            created_at=utc_now(),
        )
        if amount_micros is None and not limit.limits:
            raise InvalidParameterError("'amount_micros' is missing.", param="amount_micros")
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            limit = replace(limit, holder=await _find_holder(change.transaction, limit))
            await require_room(change.transaction, SpendLimitRow, tenant_id)
            await change.insert(SpendLimitRow.of(limit))
            await change.audit("spend_limit.add", limit.id, _details(limit))
            change.announce(self._announcer.tenant_changed, tenant_id)
            tenant = await find_tenant(change.transaction, tenant_id)
        return replace(limit, time_zone=tenant.time_zone)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[SpendLimitUse]:
        """Return a page of the tenant's spend limits, oldest first."""
        async with self._database.reading() as transaction:
            zone = (await find_tenant(transaction, tenant_id)).time_zone
            is_its = SpendLimitRow.tenant_id == tenant_id
            page = await read_page(transaction, SpendLimitRow, wanted, is_its)
        limits = [replace(each, time_zone=zone) for each in page.entries]
        return Page(await self.uses(tenant_id, limits), has_more=page.has_more)

    async def get(self, tenant_id: str, limit_id: str, *, user: str | None = None) -> SpendLimitUse:
        """Return a spend limit of the tenant, with what this end user has spent."""
        async with self._database.reading() as transaction:
            limit = await _find(transaction, tenant_id, limit_id)
        [use] = await self.uses(tenant_id, [limit], user=user)
        return use

    async def update(
        self,
        tenant_id: str,
        limit_id: str,
        *,
        actor: str = SYSTEM,
        grantor: Grant | None = None,
        **options: Any,
    ) -> SpendLimitUse:
        """Change the amount or the limits, or raise the amount for a time."""
        check_not_empty(options)
        changing_it = changing(
            self._database, tenant_id, actor=actor, grantor=grantor, is_locked=True
        )
        async with changing_it as change:
            limit = await _find(change.transaction, tenant_id, limit_id)
            _check_may_change(change, limit)
            if not options.keys() <= set(_RAISE):
                _check_not_of_plan(limit)
            if "limits" in options:
                options["limits"] = _checked_limits(limit.scope, options["limits"])
            changed = _with_raise(replace(limit, **options), options)
            if (changed.amount_micros, changed.repeats) == (None, None) and not changed.limits:
                raise must("amount_micros", "not be null without 'limits'", None)
            columns = {name: getattr(changed, name) for name in {*options, *_RAISE}}
            await change.set(SpendLimitRow, SpendLimitRow.id == limit.id, columns)
            await change.audit("spend_limit.change", limit.id, options)
            change.announce(self._announcer.tenant_changed, tenant_id)
        [use] = await self.uses(tenant_id, [changed])
        return use

    async def lift(self, tenant_id: str, limit_id: str, **by: Unpack[By]) -> SpendLimitUse:
        """Raise a limit beyond all amounts for a day."""
        until = utc_now() + LIFTED
        raised = {"raised_micros": MAX_LIMIT, "raised_until": until, "raise_reason": "lifted"}
        return await self.update(tenant_id, limit_id, **raised, **by)

    async def remove(self, tenant_id: str, limit_id: str, **by: Unpack[By]) -> SpendLimit:
        """Remove a spend limit; return it. Nothing that other limits hold is released."""
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            limit = await _find(change.transaction, tenant_id, limit_id)
            _check_may_change(change, limit)
            if limit.is_automatic:
                raise StateConflictError(
                    "An automatic spend limit cannot be removed: lift it, or change "
                    "'anomaly_factor' of the account."
                )
            _check_not_of_plan(limit)
            await change.transaction.execute(
                delete(SpendLimitRow).where(SpendLimitRow.id == limit.id)
            )
            await change.audit("spend_limit.remove", limit.id, _details(limit))
            change.announce(self._announcer.tenant_changed, tenant_id)
        return limit

    async def of_month(self, tenant_id: str, project: str | None) -> SpendLimitUse | None:
        """Return the first limit of a calendar month for all models of a tenant or a project."""
        async with self._database.reading() as transaction:
            await find_tenant(transaction, tenant_id)
            if project is not None:
                await find_project(transaction, tenant_id, project)
            limits = await spend_limits_of(transaction, SpendLimitRow.tenant_id == tenant_id)
        scope = SpendScope.TENANT if project is None else SpendScope.PROJECT
        found = [
            each
            for each in limits
            if (each.scope, each.holder, each.model) == (scope, project, None)
            and (each.window, each.starts_on) == (Window.MONTH, 1)
            and each.amount_micros is not None
        ]
        return (await self.uses(tenant_id, found[:1]))[0] if found else None

    async def uses(
        self, tenant_id: str, limits: Sequence[SpendLimit], *, user: str | None = None
    ) -> list[SpendLimitUse]:
        """Return what `uses_of` returns."""
        return await uses_of(self._seeder, tenant_id, limits, user=user)


async def _find(transaction: AsyncSession, tenant_id: str, limit_id: str) -> SpendLimit:
    check_known(tenant_id, "tenant")
    check_known(limit_id, "spend limit")
    found = await spend_limits_of(
        transaction, SpendLimitRow.tenant_id == tenant_id, SpendLimitRow.id == limit_id
    )
    if not found:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no spend limit {shown(limit_id)}.")
    return found[0]


async def _find_holder(transaction: AsyncSession, limit: SpendLimit) -> str | None:
    """Return the holder as limits name it. Raises NotFoundError if the tenant has none."""
    holder, of_tenant = limit.holder, limit.tenant_id
    if holder is None or limit.scope is SpendScope.USER:
        return holder
    if limit.scope is SpendScope.PROJECT:
        return (await find_project(transaction, of_tenant, holder)).id
    if limit.scope is SpendScope.KEY:
        is_its = ApiKeyRow.tenant_id == of_tenant
        query: Select[Any] = select(ApiKeyRow.id).where(is_its, ApiKeyRow.id == holder)
    else:
        # Requests name members by their subjects.
        query = select(MemberRow.subject).where(
            MemberRow.tenant_id == of_tenant,
            or_(MemberRow.id == holder, MemberRow.subject == holder),
        )
    found: str | None = await transaction.scalar(query) if holder.isprintable() else None
    if found is None:
        raise NotFoundError(f"The tenant {shown(of_tenant)} has no {limit.scope} {shown(holder)}.")
    return found


def _check_may_change(change: Change, limit: SpendLimit) -> None:
    grantor = change.grantor
    if grantor is None:
        return
    if limit.is_operators:
        raise PermissionDeniedError("Only an operator can change this spend limit.")
    check_not_own(grantor, limit)


def _check_not_of_plan(limit: SpendLimit) -> None:
    if limit.is_from_plan:
        raise StateConflictError(
            "This spend limit is the plan's: change the plan, or raise the limit."
        )


def check_not_own(grantor: Grant, limit: SpendLimit) -> None:
    """Raise PermissionDeniedError if a credential changes a limit of its own."""
    if grantor.credential_id in (limit.holder, f"{JWT_PREFIX}{limit.holder}"):
        raise PermissionDeniedError(
            "A credential cannot change a spend limit of its own: use another credential."
        )


def _checked_holder(scope: SpendScope, holder: str | None) -> str | None:
    if scope is SpendScope.TENANT:
        if holder is not None:
            raise must("holder", "be absent for the scope 'tenant'", holder)
    elif holder is not None:
        if not 0 < len(holder) <= MAX_TEXT_CHARACTERS:
            raise must("holder", f"have 1 to {MAX_TEXT_CHARACTERS} characters", holder)
        if not holder.isprintable():
            raise must("holder", "not contain control characters", holder)
    elif scope is not SpendScope.USER:
        raise InvalidParameterError(
            f"'holder' is missing: it names the {scope} of the limit.", param="holder"
        )
    return holder


def _checked_start(window: Window, starts_on: int) -> int:
    most = {Window.WEEK: 7, Window.MONTH: LAST_START}.get(window, 1)
    if not 1 <= starts_on <= most:
        raise must("starts_on", f"be from 1 to {most} for the window '{window}'", starts_on)
    return starts_on


def _checked_limits(scope: SpendScope, limits: Mapping[str, Any]) -> LimitValues:
    if limits and scope is not SpendScope.USER:
        raise must("limits", "be empty unless the scope is 'user'", dict(limits))
    values = read_limits(limits, LimitScope.KEY)
    for name in values:
        if name not in USER_LIMITS:
            known = ", ".join(sorted(USER_LIMITS))
            raise InvalidParameterError(
                f"'limits.{name}' is no limit of end users. Known: {known}.",
                param=f"limits.{name}",
            )
    return values


def _with_raise(limit: SpendLimit, options: Mapping[str, Any]) -> SpendLimit:
    """Return a limit after a change, whose raise is whole or absent."""
    if not options.keys() & set(_RAISE):
        return limit
    if limit.raised_micros is None:
        return replace(limit, raised_until=None, raise_reason=None)
    for name in ("raised_until", "raise_reason"):
        if getattr(limit, name) is None:
            raise InvalidParameterError(f"'{name}' is missing beside 'raised_micros'.", param=name)
    now, until = utc_now(), in_utc(limit.raised_until or utc_now(), param="raised_until")
    if not now < until <= now + LONGEST_RAISE:
        rule = f"be in the future, and at most {LONGEST_RAISE.days} days from now"
        raise must("raised_until", rule, until.isoformat())
    has_any = limit.amount_micros is not None or limit.repeats is not None
    if not has_any or limit.raised_micros < (limit.amount_micros or 0):
        rule = f"be at least 'amount_micros', {limit.amount_micros}"
        raise must("raised_micros", rule, limit.raised_micros)
    check_name(limit.raise_reason or "", param="raise_reason")
    return replace(limit, raised_until=until)


def _details(limit: SpendLimit) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(limit).items()
        if name not in ("id", "tenant_id", "time_zone", "created_at", "is_operators")
        and value not in (None, {})
    }


Amount = Annotated[int, Field(strict=True, ge=0, le=MAX_LIMIT)]
UserLimits = Annotated[
    dict[LimitName, Annotated[int, Field(strict=True, ge=0, le=MAX_LIMIT)] | None],
    Field(description=f"Limits of each end user: {', '.join(sorted(USER_LIMITS))}."),
]


class SpendLimitAddition(RequestBody):
    """A spend limit to add."""

    scope: SpendScope = Field(description="What it counts.")
    holder: str | None = Field(
        None,
        max_length=MAX_TEXT_CHARACTERS,
        description="Id of the key or project, id or subject of the member, or an end user. "
        "Absent: the account, or each end user without a limit of its own.",
    )
    model: Name | None = Field(
        None, description="Full name of a model or adapter. Absent: all models."
    )
    window: Window = Field(description="A calendar window in the account's time zone.")
    starts_on: int = Field(
        1,
        strict=True,
        ge=1,
        le=LAST_START,
        description="Day of the week (1: Monday) or of the month on which the window begins.",
    )
    amount_micros: Amount | None = Field(None, description="Micro-dollars.")
    limits: UserLimits = Field(default_factory=dict)


class SpendLimitChange(ChangeBody):
    """Changes of a spend limit; absent fields stay unchanged."""

    amount_micros: Amount | None = Field(None, description="Micro-dollars.")
    limits: UserLimits = Field(default_factory=dict)
    raised_micros: Amount | None = Field(
        None, description="The amount until `raised_until`. Null ends the raise."
    )
    raised_until: AwareDatetime | None = None
    raise_reason: Name | None = Field(None, description="Recorded in the audit log.")


class SpendLimitBody(RecordBody):
    """A spend limit and what is spent in its current window."""

    object: Literal["spend_limit"] = "spend_limit"
    id: str
    scope: SpendScope
    holder: str | None
    model: str | None
    window: Window
    starts_on: int
    time_zone: str
    amount_micros: int | None
    repeats: int | None = Field(
        description="The most equal requests of the key in the window; automatic limits have it."
    )
    limits: dict[LimitName, int | None]
    raised_micros: int | None
    raised_until: datetime | None
    raise_reason: str | None
    is_automatic: bool = Field(
        description="Whether it was learned from what the key usually spends."
    )
    is_enforced: bool = Field(description="Whether it rejects requests, or is only reported.")
    is_operators: bool = Field(description="Whether only operators can change it.")
    is_from_plan: bool = Field(description="Whether the account's plan has it.")
    used_micros: int | None = Field(
        description="Cost of ended requests, plus the maximum cost of running ones. Null without "
        "an amount, or if each end user has it."
    )
    remaining_micros: int | None
    window_starts_at: datetime
    resets_at: datetime
    created_at: datetime

    @classmethod
    def of_use(cls, use: SpendLimitUse) -> Self:
        """Return the response body of a spend limit."""
        amount, used = use.amount_micros, use.used_micros
        return cls(
            **{
                name: value for name, value in asdict(use.limit).items() if name in cls.model_fields
            },
            used_micros=used,
            remaining_micros=None if amount is None or used is None else max(amount - used, 0),
            window_starts_at=use.window_starts_at,
            resets_at=use.resets_at,
        )


class RemovedSpendLimit(BaseModel):
    """A removed spend limit."""

    object: Literal["spend_limit.deleted"] = "spend_limit.deleted"
    id: str
    deleted: Literal[True] = True


router = TenantRouter("/spend_limits", "Spend limits", own_tenant(Scope.KEYS, of_tenant=True))

SpendLimits = Annotated[SpendLimitService, made(SpendLimitService)]
SpendLimitId = Annotated[str, Path(description="Id of the spend limit.")]


@router.get("", summary="List spend limits", response_model=ListBody[SpendLimitBody])
async def list_spend_limits(
    limits: SpendLimits, caller: OfTenant, wanted: WantedPage
) -> Page[SpendLimitBody]:
    """List spend limits, oldest first.

    All routes under `/v1/spend_limits` need the scope `keys`.
    """
    page = await limits.page(caller.tenant_id, wanted)
    data = [SpendLimitBody.of_use(each) for each in page.entries]
    return Page(data, has_more=page.has_more)


@router.post("", summary="Add a spend limit")
async def add_spend_limit(
    limits: SpendLimits, caller: OfTenant, body: SpendLimitAddition
) -> SpendLimitBody:
    """Add a spend limit, which every gateway enforces within a second.

    What was spent in its current window counts. An amount below that stops requests at once.
    """
    limit = await limits.add(caller.tenant_id, **body.given(), **caller.by)
    [use] = await limits.uses(caller.tenant_id, [limit])
    return SpendLimitBody.of_use(use)


@router.get("/{limit_id}", summary="Get a spend limit")
async def get_spend_limit(
    limits: SpendLimits,
    caller: OfTenant,
    limit_id: SpendLimitId,
    user: Annotated[str | None, text_filter("End user whose use is shown.")] = None,
) -> SpendLimitBody:
    """Get a spend limit with what is spent in its window."""
    return SpendLimitBody.of_use(await limits.get(caller.tenant_id, limit_id, user=user))


@router.patch("/{limit_id}", summary="Change a spend limit")
async def change_spend_limit(
    limits: SpendLimits, caller: OfTenant, limit_id: SpendLimitId, body: SpendLimitChange
) -> SpendLimitBody:
    """Change the amount, or raise it until a time. The raise ends by itself."""
    options = {**body.given(), **caller.by}
    return SpendLimitBody.of_use(await limits.update(caller.tenant_id, limit_id, **options))


@router.post("/{limit_id}/lift", summary="Lift a spend limit")
async def lift_spend_limit(
    limits: SpendLimits, caller: OfTenant, limit_id: SpendLimitId
) -> SpendLimitBody:
    """Lift a spend limit for a day, such as one that stops a key by mistake."""
    return SpendLimitBody.of_use(await limits.lift(caller.tenant_id, limit_id, **caller.by))


@router.delete("/{limit_id}", summary="Remove a spend limit")
async def remove_spend_limit(
    limits: SpendLimits, caller: OfTenant, limit_id: SpendLimitId
) -> RemovedSpendLimit:
    """Remove a spend limit. Other limits stay as they are."""
    await limits.remove(caller.tenant_id, limit_id, **caller.by)
    return RemovedSpendLimit(id=limit_id)


class OpenAiSpendLimit(RequestBody):
    """OpenAI's form of a monthly spend limit."""

    threshold_amount: int = Field(strict=True, ge=1, le=MAX_LIMIT // MICROS_OF_CENT)
    currency: Literal["USD"]
    interval: Literal["month"]


OF_ORGANIZATION: Final = "organization.spend_limit"
OF_PROJECT: Final = "project.spend_limit"

organization = APIRouter(
    prefix="/v1/organization",
    tags=["Spend limits"],
    route_class=BoundedRoute,
    dependencies=[Depends(router.authorize)],
)


async def _monthly(limits: SpendLimitService, tenant_id: str, project: str | None) -> SpendLimitUse:
    use = await limits.of_month(tenant_id, project)
    if use is None:
        raise NotFoundError("There is no monthly spend limit.")
    return use


def _openai_body(use: SpendLimitUse, project: str | None) -> dict[str, Any]:
    amount, used = use.amount_micros or 0, use.used_micros or 0
    return {
        "object": OF_ORGANIZATION if project is None else OF_PROJECT,
        # Cents are rounded down: the limit is never larger than shown.
        "threshold_amount": amount // MICROS_OF_CENT,
        "currency": "USD",
        "interval": "month",
        "enforcement": {"status": "enforcing" if used >= amount else "inactive"},
    }


async def no_project() -> None:
    """Name no project, in the paths of the whole account."""


async def project_of_path(project: ProjectId) -> str:
    """Return the project that a path names."""
    return project


def _add_routes(path: str, of: Callable[..., Awaitable[str | None]], name: str, what: str) -> None:
    """Add the routes of the monthly limit of what `of` returns."""

    @organization.get(
        path, name=f"get_{name}", summary=f"Get the monthly spend limit{what} (OpenAI)"
    )
    async def get(
        limits: SpendLimits, caller: OfTenant, project: Annotated[str | None, Depends(of)]
    ) -> dict[str, Any]:
        """Get the limit of a calendar month for all models. 404 without one."""
        return _openai_body(await _monthly(limits, caller.tenant_id, project), project)

    @organization.post(
        path, name=f"set_{name}", summary=f"Set the monthly spend limit{what} (OpenAI)"
    )
    async def set_(
        limits: SpendLimits,
        caller: OfTenant,
        body: OpenAiSpendLimit,
        project: Annotated[str | None, Depends(of)],
    ) -> dict[str, Any]:
        """Set the limit of a calendar month for all models, in cents."""
        tenant_id, amount = caller.tenant_id, body.threshold_amount * MICROS_OF_CENT
        use = await limits.of_month(tenant_id, project)
        if use is None:
            scope = SpendScope.TENANT if project is None else SpendScope.PROJECT
            given = {"scope": scope, "holder": project, "window": Window.MONTH, **caller.by}
            await limits.add(tenant_id, amount_micros=amount, **given)
        else:
            await limits.update(tenant_id, use.limit.id, amount_micros=amount, **caller.by)
        return _openai_body(await _monthly(limits, tenant_id, project), project)

    @organization.delete(
        path, name=f"remove_{name}", summary=f"Remove the monthly spend limit{what} (OpenAI)"
    )
    async def remove(
        limits: SpendLimits, caller: OfTenant, project: Annotated[str | None, Depends(of)]
    ) -> dict[str, Any]:
        """Remove the limit of a calendar month for all models."""
        use = await _monthly(limits, caller.tenant_id, project)
        await limits.remove(caller.tenant_id, use.limit.id, **caller.by)
        kind = OF_ORGANIZATION if project is None else OF_PROJECT
        return {"object": f"{kind}.deleted", "deleted": True}


_add_routes("/spend_limit", no_project, "spend_limit", "")
_add_routes(
    "/projects/{project}/spend_limit", project_of_path, "project_spend_limit", " of a project"
)
