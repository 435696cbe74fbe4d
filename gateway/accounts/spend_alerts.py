"""Spend alerts: mail when a tenant or a project has spent an amount in a calendar month.

They have OpenAI's form and paths, `/v1/organization/.../spend_alerts`.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Final, Literal, Self, Unpack

from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field
from sqlalchemy import ColumnElement, and_, delete
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.changes import By, changing, require_room
from gateway.accounts.projects.service import find_project
from gateway.accounts.routes_common import Name, OfTenant, PageSize, RequestBody, own_tenant
from gateway.accounts.spend_limits import MICROS_OF_CENT, no_project, project_of_path
from gateway.accounts.tenants.service import find_tenant
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import SpendAlertRow
from gateway.platform.settings import Settings
from gateway.records.checks import check_known, checked_email
from gateway.records.errors import InvalidParameterError, NotFoundError, shown
from gateway.records.limits import MAX_LIMIT
from gateway.records.scopes import Scope
from gateway.records.spending import SpendAlert
from gateway.records.times import utc_now

MOST_RECIPIENTS: Final = 10


class SpendAlertService:
    """Adds, changes and removes spend alerts; every change is audited."""

    def __init__(self, database: Database, *, sends_mail: bool) -> None:
        self._database = database
        self._sends_mail = sends_mail

    @classmethod
    def of(cls, settings: Settings, database: Database) -> Self:
        """Return the spend alerts of a deployment."""
        return cls(database, sends_mail=settings.smtp_url is not None)

    async def page(
        self, tenant_id: str, project: str | None, wanted: PageRequest
    ) -> Page[SpendAlert]:
        """Return a page of the alerts of a tenant, or of one of its projects."""
        async with self._database.reading() as transaction:
            await _check_holder(transaction, tenant_id, project)
            return await read_page(transaction, SpendAlertRow, wanted, _of(tenant_id, project))

    async def get(self, tenant_id: str, project: str | None, alert_id: str) -> SpendAlert:
        """Return an alert. Raises NotFoundError."""
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, project, alert_id)

    async def add(
        self, tenant_id: str, project: str | None, options: Mapping[str, Any], **by: Unpack[By]
    ) -> SpendAlert:
        """Add an alert. It is sent at once if its amount is spent already."""
        self._check(options)
        alert = SpendAlert(
            id=f"alert_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            project_id=project,
            created_at=utc_now(),
            **options,
        )
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            await _check_holder(change.transaction, tenant_id, project)
            await require_room(change.transaction, SpendAlertRow, tenant_id)
            await change.insert(SpendAlertRow(**asdict(alert)))
            await change.audit("spend_alert.add", alert.id, dict(options))
        return alert

    async def update(
        self,
        tenant_id: str,
        project: str | None,
        alert_id: str,
        options: Mapping[str, Any],
        **by: Unpack[By],
    ) -> SpendAlert:
        """Change an alert, which is then sent again in this month."""
        self._check(options)
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            alert = await _find(change.transaction, tenant_id, project, alert_id)
            columns = {**options, "sent_month": ""}
            await change.set(SpendAlertRow, SpendAlertRow.id == alert.id, columns)
            await change.audit("spend_alert.change", alert.id, dict(options))
        return replace(alert, **columns)

    async def remove(
        self, tenant_id: str, project: str | None, alert_id: str, **by: Unpack[By]
    ) -> None:
        """Remove an alert. Raises NotFoundError."""
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            alert = await _find(change.transaction, tenant_id, project, alert_id)
            await change.transaction.execute(
                delete(SpendAlertRow).where(SpendAlertRow.id == alert.id)
            )
            await change.audit("spend_alert.remove", alert.id, {})

    def _check(self, options: Mapping[str, Any]) -> None:
        if not self._sends_mail:
            raise InvalidParameterError(
                "'notification_channel' cannot be 'email': this deployment sends no mail.",
                param="notification_channel",
            )
        for number, address in enumerate(options["recipients"]):
            checked_email(address, param=f"notification_channel.recipients[{number}]")


def _of(tenant_id: str, project: str | None) -> ColumnElement[bool]:
    return and_(SpendAlertRow.tenant_id == tenant_id, SpendAlertRow.project_id == project)


async def _check_holder(transaction: AsyncSession, tenant_id: str, project: str | None) -> None:
    check_known(tenant_id, "tenant")
    await find_tenant(transaction, tenant_id)
    if project is not None:
        await find_project(transaction, tenant_id, project)


async def _find(
    transaction: AsyncSession, tenant_id: str, project: str | None, alert_id: str
) -> SpendAlert:
    await _check_holder(transaction, tenant_id, project)
    check_known(alert_id, "spend alert")
    is_it = SpendAlertRow.id == alert_id
    found = await find_record(transaction, SpendAlertRow, _of(tenant_id, project), is_it)
    if found is None:
        raise NotFoundError(f"There is no spend alert {shown(alert_id)}.")
    return found


class NotificationChannel(RequestBody):
    """Who gets the mail of a spend alert."""

    type: Literal["email"]
    recipients: list[str] = Field(min_length=1, max_length=MOST_RECIPIENTS)
    subject_prefix: Name | None = Field(None, description="Beginning of the subject.")


class OpenAiSpendAlert(RequestBody):
    """OpenAI's form of a spend alert."""

    threshold_amount: int = Field(
        strict=True, ge=1, le=MAX_LIMIT // MICROS_OF_CENT, description="Cents."
    )
    currency: Literal["USD"]
    interval: Literal["month"]
    notification_channel: NotificationChannel

    def options(self) -> dict[str, Any]:
        """Return the fields of the alert."""
        channel = self.notification_channel
        return {
            "amount_micros": self.threshold_amount * MICROS_OF_CENT,
            "recipients": channel.recipients,
            "subject_prefix": channel.subject_prefix,
        }


router = APIRouter(
    prefix="/v1/organization",
    tags=["Spend limits"],
    route_class=BoundedRoute,
    dependencies=[Depends(own_tenant(Scope.KEYS, of_tenant=True))],
)

SpendAlerts = Annotated[SpendAlertService, made(SpendAlertService.of)]
AlertId = Annotated[str, Path(description="Id of the spend alert.")]
After = Annotated[str | None, Query(description="`last_id` of the page before.")]
Order = Annotated[Literal["asc", "desc"], Query(description="`desc`: the newest first.")]


def _kind(project: str | None) -> str:
    return "organization.spend_alert" if project is None else "project.spend_alert"


def _body(alert: SpendAlert) -> dict[str, Any]:
    return {
        "id": alert.id,
        "object": _kind(alert.project_id),
        "threshold_amount": alert.amount_micros // MICROS_OF_CENT,
        "currency": "USD",
        "interval": "month",
        "notification_channel": {
            "type": "email",
            "recipients": list(alert.recipients),
            "subject_prefix": alert.subject_prefix,
        },
    }


def _add_routes(path: str, of: Callable[..., Awaitable[str | None]], name: str, what: str) -> None:
    """Add the routes of the alerts of what `of` returns."""
    of_project = Annotated[str | None, Depends(of)]
    one = f"{path}/{{alert_id}}"

    @router.get(path, name=f"list_{name}s", summary=f"List the spend alerts{what} (OpenAI)")
    async def list_(
        alerts: SpendAlerts,
        caller: OfTenant,
        project: of_project,
        after: After = None,
        limit: PageSize = 20,
        order: Order = "asc",
    ) -> dict[str, Any]:
        """List spend alerts, by default the oldest first."""
        wanted = PageRequest(after, limit, is_newest_first=order == "desc")
        page = await alerts.page(caller.tenant_id, project, wanted)
        data = list(map(_body, page.entries))
        first, last = (data[at]["id"] if data else None for at in (0, -1))
        ends = {"first_id": first, "last_id": last, "has_more": page.has_more}
        return {"object": "list", "data": data, **ends}

    @router.post(path, name=f"create_{name}", summary=f"Create a spend alert{what} (OpenAI)")
    async def create(
        alerts: SpendAlerts, caller: OfTenant, project: of_project, body: OpenAiSpendAlert
    ) -> dict[str, Any]:
        """Create an alert that is mailed once in a calendar month, in UTC."""
        options = body.options()
        return _body(await alerts.add(caller.tenant_id, project, options, **caller.by))

    @router.get(one, name=f"get_{name}", summary=f"Get a spend alert{what} (OpenAI)")
    async def get(
        alerts: SpendAlerts, caller: OfTenant, project: of_project, alert_id: AlertId
    ) -> dict[str, Any]:
        """Get a spend alert."""
        return _body(await alerts.get(caller.tenant_id, project, alert_id))

    @router.post(one, name=f"update_{name}", summary=f"Change a spend alert{what} (OpenAI)")
    async def update(
        alerts: SpendAlerts,
        caller: OfTenant,
        project: of_project,
        alert_id: AlertId,
        body: OpenAiSpendAlert,
    ) -> dict[str, Any]:
        """Change a spend alert. It is mailed again if its amount is spent."""
        options = body.options()
        return _body(await alerts.update(caller.tenant_id, project, alert_id, options, **caller.by))

    @router.delete(one, name=f"remove_{name}", summary=f"Remove a spend alert{what} (OpenAI)")
    async def remove(
        alerts: SpendAlerts, caller: OfTenant, project: of_project, alert_id: AlertId
    ) -> dict[str, Any]:
        """Remove a spend alert."""
        await alerts.remove(caller.tenant_id, project, alert_id, **caller.by)
        return {"id": alert_id, "object": f"{_kind(project)}.deleted", "deleted": True}


_add_routes("/spend_alerts", no_project, "spend_alert", "")
_add_routes(
    "/projects/{project}/spend_alerts", project_of_path, "project_spend_alert", " of a project"
)
