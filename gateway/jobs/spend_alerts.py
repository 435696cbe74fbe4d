"""Spend alerts: mail that a tenant or a project has spent an amount in this month."""

import logging
from datetime import datetime
from email.message import EmailMessage
from typing import Final

from sqlalchemy import select, update

from common.tasks import each_apart
from gateway.billing.alerts import costs_since
from gateway.jobs.mail import Mailer
from gateway.jobs.outbound import DeliveryError
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import list_records
from gateway.platform.database.tables import SpendAlertRow
from gateway.records.limits import LimitScope, subject_of
from gateway.records.money import show_dollars
from gateway.records.spending import SpendAlert
from gateway.records.times import month_start

AT_ONCE: Final = 8
"""Mails that are sent side by side."""

logger = logging.getLogger(__name__)


async def send_spend_alerts(database: Database, mailer: Mailer | None, now: datetime) -> int:
    """Mail each alert whose amount is spent in the month of `now`, once. Return how many.

    One that cannot be sent is repeated by the next run, and delays no other. An alert is sent
    twice if the process ends between the mail and the commit. Raises StoreUnavailableError.
    """
    if mailer is None:
        return 0
    month, sent = f"{now:%Y-%m}", list[str]()
    is_open = SpendAlertRow.sent_month != month
    async with database.reading() as transaction:
        tenants = await transaction.scalars(
            select(SpendAlertRow.tenant_id).where(is_open).distinct()
        )

    async def send(alert: SpendAlert, spent: int) -> None:
        try:
            await mailer.deliver(_message(alert, spent, month), *alert.recipients)
        except DeliveryError as error:
            logger.warning("the spend alert %s cannot be sent: %s", alert.id, error)
            return
        async with database.writing() as transaction:
            is_it = SpendAlertRow.id == alert.id
            await transaction.execute(update(SpendAlertRow).where(is_it).values(sent_month=month))
        sent.append(alert.id)

    async def look(tenant_id: str) -> None:
        async with database.reading() as transaction:
            alerts = await list_records(
                transaction, SpendAlertRow, is_open, SpendAlertRow.tenant_id == tenant_id
            )
            costs = await costs_since(transaction, tenant_id, month_start(now))
        spent = [(each, costs.get(_subject(each), 0)) for each in alerts]
        reached = [(alert, cost) for alert, cost in spent if cost >= alert.amount_micros]
        await each_apart(lambda each: send(*each), reached, at_once=AT_ONCE)

    await each_apart(look, list(tenants), at_once=1)
    return len(sent)


def _subject(alert: SpendAlert) -> str:
    if alert.project_id is None:
        return subject_of(LimitScope.TENANT, alert.tenant_id)
    return subject_of(LimitScope.PROJECT, alert.project_id)


def _message(alert: SpendAlert, spent: int, month: str) -> EmailMessage:
    of = alert.tenant_id if alert.project_id is None else f"{alert.tenant_id}, {alert.project_id}"
    message = EmailMessage()
    amount = show_dollars(alert.amount_micros)
    subject = f"{amount} spent in {month}: {of}"
    message["Subject"] = " ".join(filter(None, (alert.subject_prefix, subject)))
    message["Message-ID"] = f"<{alert.id}.{month}@sluice>"
    message.set_content(f"{of} has spent {show_dollars(spent)} in {month}.\n\nAlert {alert.id}")
    return message
