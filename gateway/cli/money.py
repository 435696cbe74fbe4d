"""`sluice plans`, `prices`, `credits` and `exports`: what usage may be and what it costs."""

from collections.abc import Callable
from typing import Any, Final

import click

from contract.tier import ServiceTier
from gateway.cli.calls import PAGE, Calls
from gateway.cli.client import AdminClient
from gateway.cli.terminal import (
    LIMITS_HELP,
    Entity,
    Time,
    argument,
    choice,
    columns,
    default_limit_option,
    option,
    print_table,
    show,
)
from gateway.records.limits import LimitScope
from gateway.records.money import Dollars
from gateway.records.records import MAX_AMOUNT_MICROS, MAX_PRICE_MICROS

# These are tables: a row is a command or an option.
# fmt: off
plans = Calls(
    "plans", "gateway.accounts.plans.routes",
    "Create, change and list plans: default limits for groups of tenants.",
    f"""\
  sluice plans create starter --key-limit requests_per_minute=60
  sluice plans set starter --tenant-limit budget=50
  sluice plans set starter --key-limit requests_per_minute=none
  sluice plans list

{LIMITS_HELP}""")
_PLAN: Final = columns("ID=id NAME=name TENANT_LIMITS=tenant_limits PROJECT_LIMITS=project_limits "
                       "KEY_LIMITS=key_limits CREATED=created_at")
_PLAN_LIMITS: Final = tuple(map(default_limit_option, ("tenant", "project", "key")))


def _print_limits(plan: Entity) -> None:
    click.echo(f"{plan['id']}: {plan['name']}")
    rows = [
        (scope.value, *pair.partition("=")[::2])
        for scope in LimitScope
        for pair in show(plan[f"{scope}_limits"], missing="").split(",")
        if pair
    ]
    print_table(("SCOPE", "LIMIT", "VALUE"), rows)


plans.add("create", "POST /admin/plans", _PLAN,
          "Add a plan with the id PLAN. `sluice tenants set TENANT --plan PLAN` uses it.",
          argument("id", metavar="PLAN"),
          option("--name", "Display name.  [default: the id]"), *_PLAN_LIMITS)
plans.add("set PLAN", "PATCH /admin/plans/{plan}", _PLAN,
          "Change the given settings of PLAN on every gateway within a second.",
          option("--name", "Display name."), *_PLAN_LIMITS)
plans.add("list", "GET /admin/plans", _PLAN, "List all plans.")
plans.add("show PLAN", "GET /admin/plans/{plan}", _print_limits, "Show PLAN with all its limits.")

prices = Calls(
    "prices", "gateway.billing.prices", "Add, list and remove model prices.",
    """\
  sluice prices add llama-8b --prompt 0.15 --cached 0.05 --completion 0.60
  sluice prices add llama-8b --tier flex --prompt 0.08 --completion 0.30
  sluice prices add llama-8b --prompt 0.12 --completion 0.50 --effective-at 2027-01-01
  sluice prices list
  sluice prices list --model llama-8b --history
  sluice prices remove 7

Amounts are in dollars per million tokens or seconds, with at most six decimals. A model without a
price is free.
""")
_PRICE: Final = columns("ID=id MODEL=model TIER=service_tier PROMPT=prompt_micros "
                        "CACHED=cached_micros COMPLETION=completion_micros "
                        "AUDIO=audio_micros EFFECTIVE=effective_at")
_DOLLARS: Final = Dollars(0, MAX_PRICE_MICROS)
prices.add(
    "add MODEL", "POST /admin/prices", _PRICE,
    "Set the price of MODEL. The history keeps older prices; earlier usage is charged by them.",
    option("--prompt prompt_micros", "Dollars per million prompt tokens.", type=_DOLLARS,
           required=True),
    option("--cached cached_micros", "Dollars per million cached prompt tokens.  [default: the "
           "prompt price]", type=_DOLLARS),
    option("--completion completion_micros", "Dollars per million completion tokens.",
           type=_DOLLARS, required=True),
    option("--audio audio_micros", "Dollars per million seconds of audio.", type=_DOLLARS),
    choice("--tier service_tier", ServiceTier, "Service tier; a tier without a price has the price "
           "of the default tier.", default=ServiceTier.DEFAULT.value, show_default=True),
    option("--effective-at", "When the price takes effect.  [default: now]", type=Time()))
prices.add("list", "GET /admin/prices", _PRICE, "List the prices in force.",
           option("--model", "Only this model."),
           option("--history", "Include past, future and removed prices.", is_flag=True))
prices.add("remove PRICE", "DELETE /admin/prices/{price}", "Removed the price {price}.",
           "Remove the PRICE (its id) in force, from now on, or a future one. The model is then "
           "free, or has the price of the default tier. Earlier usage keeps its cost.")

credits_ = Calls(
    "credits", "gateway.billing.credits.routes", "Grant, adjust and show prepaid credits.",
    """\
  sluice credits grant --tenant acme 100
  sluice credits grant --tenant acme 25 --note "trial" --expires-at 2027-01-01
  sluice credits adjust --tenant acme -3.50 --note "granted twice"
  sluice credits balance --tenant acme
  sluice credits list --tenant acme

Amounts are in dollars, with at most six decimals. Credits apply to tenants with prepaid billing.
""")
_CREDITS: Final = "/admin/tenants/{tenant}/credits"
_CREDIT: Final = columns("ID=id KIND=kind AMOUNT=amount_micros CREATED=created_at "
                         "EXPIRES=expires_at OF_GRANT=grant_id NOTE=note")


def _amount(least_micros: int) -> click.Argument:
    return argument("amount_micros", metavar="AMOUNT",
                    type=Dollars(least_micros, MAX_AMOUNT_MICROS))


credits_.add("grant --tenant", f"POST {_CREDITS}", _CREDIT,
             "Grant AMOUNT dollars to a tenant.", _amount(1),
             option("--note", "Purpose of the grant.", default=""),
             option("--expires-at", "When the rest of the grant expires.", type=Time()))
credits_.add("adjust --tenant", f"POST {_CREDITS}", _CREDIT,
             "Add AMOUNT dollars to the balance of a tenant, or deduct them if negative.",
             _amount(-MAX_AMOUNT_MICROS), option("--note", "Why.", required=True),
             kind="adjustment")
for _name in ("grant", "adjust"):
    # Without this, an amount such as -3.50 is parsed as an option.
    credits_.commands[_name].context_settings = {"ignore_unknown_options": True}


async def _balance(client: AdminClient, tenant: str) -> dict[str, Any]:
    found = await client.send(f"GET {_CREDITS}", {"tenant": tenant, "limit": 1})
    return {"tenant": tenant, **found["balance"]}


credits_.add_call(
    "balance --tenant", _balance,
    columns("TENANT=tenant GRANTED=granted_micros SPENT=spent_micros BALANCE=balance_micros"),
    "Show the balance of a tenant. Usage is included a few seconds after it ends.")
credits_.add("list --tenant", f"GET {_CREDITS}", _CREDIT,
             "List the changes to the balance of a tenant, except usage.", pages=PAGE)

exports = Calls(
    "exports", "gateway.billing.exports.routes",
    "List, pause and repair the export of the ledger to billing systems.",
    """\
  sluice exports list
  sluice exports batches stripe --state rejected
  sluice exports retry stripe                  all rejected batches
  sluice exports retry stripe 17
  sluice exports discard stripe 18
  sluice exports pause stripe
""")
_SINK: Final = "/admin/exports/{sink}"
_STATES: Final = ("pending", "held", "rejected", "uncertain")


def _number_of(state: str) -> Callable[[Entity], int]:
    return lambda export: int(export["batches"][state])


exports.add(
    "list", "GET /admin/exports",
    columns("SINK=name KIND=kind STATE=state ROWS=lag_rows OLDEST=oldest_at:- PENDING=pending "
            "HELD=held REJECTED=rejected UNCERTAIN=uncertain LAST_ERROR=last_error",
            state=lambda export: "paused" if export["paused_at"] else "active",
            **{state: _number_of(state) for state in _STATES}),
    "List all sinks, and how far the export is.")
exports.add(
    "batches SINK", f"GET {_SINK}/batches",
    columns("BATCH=id STATE=state ROWS=rows EVENT=identifier TENANT=tenant_id "
            "COST=cost_micros ATTEMPTS=attempts LAST_ERROR=last_error"),
    "List at most 100 batches that SINK has not confirmed.",
    choice("--state", _STATES, "Only batches in this state."),
    option("--after", "Id of the last batch shown.", type=click.IntRange(min=0)), pages=PAGE)
exports.add("pause SINK", f"POST {_SINK}:pause", "Paused {sink}.",
            "Send nothing more to SINK; new usage waits.")
exports.add("resume SINK", f"POST {_SINK}:resume", "Resumed {sink}.",
            "Send to SINK again, at once.")


async def _retry(client: AdminClient, sink: str, batch: int | None) -> Any:
    one = "" if batch is None else "/batches/{batch}"
    return await client.send(f"POST {_SINK}{one}:retry", {"sink": sink, "batch": batch})


exports.add_call(
    "retry SINK", _retry, "{batches} batches are sent again within seconds.",
    "Send the rejected or uncertain BATCH (its id) to SINK again; default: all rejected ones.",
    argument("batch", type=int, required=False))
exports.add("discard SINK", f"DELETE {_SINK}/batches/{{batch}}", "Discarded {batch}.",
            "Never send the rejected or uncertain BATCH (its id), because SINK has its event.",
            argument("batch", type=int))
exports.add("remove SINK", f"DELETE {_SINK}", "Removed {sink}.",
            "Remove SINK, which is no longer configured, with its position and batches.")
