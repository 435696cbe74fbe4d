"""Plans: default limits for groups of tenants."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from sqlalchemy.exc import IntegrityError

from gateway.database.engine import Database
from gateway.errors import ConflictError, NotFoundError, must, shown
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.plans.store import PlanStore
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known, check_name, check_not_empty
from gateway.tenancy.limits import LimitScope, LimitValues
from gateway.tenancy.records import Plan
from gateway.tenancy.times import utc_now

_PLAN_ID: Final = re.compile(r"[a-z0-9-]{1,63}")

ScopedLimits = Mapping[LimitScope, LimitValues]
"""Limits for tenants, projects and keys. In a plan, None and an absent limit both mean no limit."""


class PlanService:
    """Creates and changes plans. Plans are never removed, so that no tenant loses its limits."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def create(
        self,
        plan_id: str,
        *,
        name: str | None = None,
        limits: ScopedLimits | None = None,
        actor: str = SYSTEM,
    ) -> Plan:
        """Create a plan; without a name, its id is its name."""
        _check_id(plan_id)
        if name is not None:
            check_name(name)
        plan = Plan(
            id=plan_id,
            name=name or plan_id,
            limits=_merged({}, limits or {}),
            created_at=utc_now(),
        )
        try:
            async with self._database.writing() as transaction:
                await PlanStore(transaction).add(plan)
                await AuditLog(transaction).append(
                    "plan.create", plan_id, actor=actor, details=_details(plan)
                )
        except IntegrityError as error:
            raise ConflictError(f"The plan {shown(plan_id)} already exists.") from error
        return plan

    async def update(
        self,
        plan_id: str,
        *,
        name: str | None = None,
        limits: ScopedLimits | None = None,
        actor: str = SYSTEM,
    ) -> Plan:
        """Change the name and the given limits, for all holders without their own limits."""
        check_known(plan_id, "plan")
        given = any((limits or {}).values())
        check_not_empty({} if name is None and not given else {"name": name})
        if name is not None:
            check_name(name)
        async with self._database.writing() as transaction:
            store = PlanStore(transaction)
            old = _found(await store.get(plan_id, for_update=True), plan_id)
            plan = replace(old, name=name or old.name, limits=_merged(old.limits, limits or {}))
            await store.set_options(plan_id, name=plan.name, limits=plan.limits)
            await AuditLog(transaction).append(
                "plan.update", plan_id, actor=actor, details=_details(plan)
            )
        await self._announcer.plan_changed()
        return plan

    async def list_all(self) -> list[Plan]:
        """Return all plans, oldest first."""
        async with self._database.reading() as transaction:
            return await PlanStore(transaction).list_all()

    async def get(self, plan_id: str) -> Plan:
        """Return the plan."""
        check_known(plan_id, "plan")
        async with self._database.reading() as transaction:
            return _found(await PlanStore(transaction).get(plan_id), plan_id)


def _merged(old: ScopedLimits, new: ScopedLimits) -> ScopedLimits:
    return {scope: _set({**old.get(scope, {}), **new.get(scope, {})}) for scope in LimitScope}


def _set(limits: LimitValues) -> LimitValues:
    """Return the limits without those that mean no limit."""
    return {name: value for name, value in limits.items() if value is not None}


def _check_id(plan_id: str) -> None:
    if _PLAN_ID.fullmatch(plan_id) is None:
        raise must("id", "have 1 to 63 characters from a-z, 0-9 and '-'", plan_id)


def _found(plan: Plan | None, plan_id: str) -> Plan:
    if plan is None:
        raise NotFoundError(f"There is no plan {shown(plan_id)}.")
    return plan


def _details(plan: Plan) -> dict[str, Any]:
    return {"name": plan.name, **{f"{scope}_limits": plan.limits[scope] for scope in LimitScope}}
