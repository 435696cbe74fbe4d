"""Spend limits of plans: each tenant of a plan has one of its own for each of them.

A plan names them `SCOPE/WINDOW` or `SCOPE/WINDOW/MODEL`, such as `tenant/month` or
`user/day/llama-8b`. Those of the scope `user` hold for each end user.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, bindparam, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import PlanRow, SpendLimitRow, TenantRow
from gateway.records.checks import check_name
from gateway.records.errors import InvalidParameterError, must, shown
from gateway.records.limits import MAX_LIMIT, SpendScope, Window
from gateway.records.spending import SpendLimit, new_limit_id
from gateway.records.times import utc_now

PARAM: Final = "spend_limits"
SCOPES: Final = (SpendScope.TENANT, SpendScope.USER)
MOST_OF_PLAN: Final = 100


class _Name(NamedTuple):
    scope: SpendScope
    window: Window
    model: str | None


def read_spend_limits(values: Mapping[str, Any]) -> dict[str, int | None]:
    """Validate spend limits of a plan in user input. Raises InvalidParameterError."""
    for name, amount in values.items():
        _read(name)
        if amount is not None and (type(amount) is not int or not 0 <= amount <= MAX_LIMIT):
            rule = f"be null or an integer from 0 to {MAX_LIMIT}"
            raise must(f"{PARAM}.{name}", rule, amount)
    return dict(values)


def changed_spend_limits(
    own: Mapping[str, int], changes: Mapping[str, int | None]
) -> dict[str, int]:
    """Return the spend limits of a plan after a change. Raises InvalidParameterError."""
    merged = {name: value for name, value in {**own, **changes}.items() if value is not None}
    if len(merged) > MOST_OF_PLAN:
        raise must(PARAM, f"have at most {MOST_OF_PLAN} members", len(merged))
    return merged


async def apply_plans(transaction: AsyncSession, *conditions: ColumnElement[bool]) -> None:
    """Let the tenants that meet the conditions have the spend limits of their plans, no others."""
    rows = await transaction.execute(
        select(TenantRow.id, PlanRow.spend_limits)
        .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
        .where(*conditions)
    )
    wanted = {
        (tenant_id, name): amount
        for tenant_id, of_plan in rows
        for name, amount in (of_plan or {}).items()
    }
    found = await transaction.scalars(
        select(SpendLimitRow).where(
            SpendLimitRow.is_from_plan.is_(True),
            SpendLimitRow.tenant_id.in_(select(TenantRow.id).where(*conditions)),
        )
    )
    stale, changed = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in found:
        name = "/".join(filter(None, (row.scope, row.window, row.model)))
        amount = wanted.pop((row.tenant_id, name), None)
        if amount is None:
            stale.append({"limit": row.id})
        elif amount != row.amount_micros:
            changed.append({"limit": row.id, "amount": amount})
    connection = await transaction.connection()
    is_it = SpendLimitRow.id == bindparam("limit")
    if stale:
        await connection.execute(delete(SpendLimitRow).where(is_it), stale)
    if changed:
        set_amount = update(SpendLimitRow).where(is_it).values(amount_micros=bindparam("amount"))
        await connection.execute(set_amount, changed)
    transaction.add_all(
        SpendLimitRow.of(_limit(tenant_id, _read(name), amount))
        for (tenant_id, name), amount in wanted.items()
    )


def _limit(tenant_id: str, name: _Name, amount: int) -> SpendLimit:
    return SpendLimit(
        id=new_limit_id(),
        tenant_id=tenant_id,
        scope=name.scope,
        holder=None,
        model=name.model,
        window=name.window,
        starts_on=1,
        amount_micros=amount,
        is_operators=True,
        is_from_plan=True,
        created_at=utc_now(),
    )


def _read(name: str) -> _Name:
    scope, _, rest = name.partition("/")
    window, has_model, model = rest.partition("/")
    if scope not in SCOPES or window not in list(Window):
        scopes, windows = ", ".join(SCOPES), ", ".join(Window)
        raise InvalidParameterError(
            f"'{PARAM}' has no member {shown(name)}: it must be SCOPE/WINDOW or "
            f"SCOPE/WINDOW/MODEL. Scopes: {scopes}. Windows: {windows}.",
            param=PARAM,
        )
    if has_model:
        check_name(model, param=f"{PARAM}.{name}")
    return _Name(SpendScope(scope), Window(window), model or None)
