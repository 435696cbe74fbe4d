"""The commands of `sluice` for the resources of the Admin API, except usage and the audit log."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from common.object_store import S3_SCHEME
from gateway.auth.api_key import public_name
from gateway.cli.calls import Call, Calls, secret_of
from gateway.cli.client import AdminClient
from gateway.cli.terminal import (
    LIMITS_HELP,
    Entity,
    argument,
    columns,
    option,
    print_columns,
    print_table,
    show,
)
from gateway.records.aliases import read_weights
from gateway.records.errors import shown
from gateway.records.limits import LimitScope
from gateway.records.money import Dollars, show_dollars
from gateway.records.records import MAX_AMOUNT_MICROS

_TENANT: Final = "/admin/tenants/{tenant_id}"


def _deletion_of(path: str, name: str) -> Call:
    """Return a coroutine function that deletes what it finds, by its id, and returns it."""

    async def delete(client: AdminClient, **given: Any) -> dict[str, Any]:
        found = await client.send(f"GET {path}/{{{name}}}", given)
        await client.send(f"DELETE {path}/{{{name}}}", {**given, name: found["id"]})
        return {**found, "person": found.get("subject") or found.get("email")}

    return delete


# These are tables: a row is a command.
# fmt: off
tenants = Calls(
    "tenants", "gateway.accounts.tenants.routes", _TENANT,
    "ID=id NAME=name WEIGHT=weight STATUS=status DIALECT=dialect STRICT=strict_parameters "
    "DEFAULT_MODEL=default_model PLAN=plan_id LIMITS=limits BILLING=billing TIER=service_tier "
    "CREATED=created_at",
    "create NAME, set, list, show, suspend, activate",
    f"""\
  sluice tenants create "Acme" --id acme --weight 2 --plan starter
  sluice tenants set acme --dialect llamacpp --strict --default-model llama-8b
  sluice tenants set acme --limit requests_per_minute=600 --limit budget=500
  sluice tenants set acme --billing prepaid --service-tier priority --show-cost

{LIMITS_HELP}""",
    "strict_parameters=--strict/--no-strict shows_cost=--show-cost/--no-show-cost "
    "zero_retention=--zero-retention/--no-zero-retention")

projects = Calls(
    "projects", "gateway.accounts.projects.routes", f"{_TENANT}/projects/{{project_id}}",
    "ID=id NAME=name STATUS=status LIMITS=limits CREATED=created_at",
    "create NAME, set, list, archive, activate",
    f"""\
  sluice projects create --tenant acme "web shop" --limit tokens_per_day=1000000
  sluice projects set --tenant acme prj_0123456789abcdef --limit tokens_per_day=plan

{LIMITS_HELP}""")
members = Calls(
    "members", "gateway.accounts.members", f"{_TENANT}/members/{{member_id}}",
    "ID=id SUBJECT=person NAME=name ROLE=role ADDED=created_at", "add [SUBJECT], set, list",
    """\
  sluice members add --tenant acme --email ada@acme.example --role owner
  sluice members add --tenant acme "auth0|0123" --role owner --name "Ada Lovelace"
  sluice members set --tenant acme "auth0|0123" --role developer
""",
    person=lambda member: member["subject"] or member["email"])
members.add("remove", "Removed {id} ({person}).",
            send=_deletion_of("/admin/tenants/{tenant}/members", "member"))

spend_limits = Calls(
    "spend-limits", "gateway.accounts.spend_limits", f"{_TENANT}/spend_limits/{{limit_id}}",
    "ID=id SCOPE=scope HOLDER=holder MODEL=model WINDOW=window AMOUNT=amount_micros "
    "REPEATS=repeats RAISED=raised_micros USED=used_micros RESETS=resets_at",
    "add, set, list, show, remove",
    """\
  sluice spend-limits add --tenant acme --scope key --holder key_0123456789abcdef \\
      --window day --amount 5
  sluice spend-limits add --tenant acme --scope user --window hour --amount 0.50
  sluice spend-limits set --tenant acme spl_0123456789abcdef --raised 50 \\
      --raised-until 2026-12-24 --raise-reason "launch"

Amounts are in dollars, with at most six decimals.
""")
spend_limits.add("lift", "Lifted {id} until {raised_until}.", call="POST /{limit_id}/lift")
keys = Calls(
    "keys", "gateway.accounts.keys.routes", f"{_TENANT}/keys/{{key_id}}",
    "ID=id PREFIX=prefix NAME=name SCOPES=scopes MODELS=models DIALECT=dialect "
    "PROJECT=project_id LIMITS=limits EXPIRES=expires_at REVOKED=revoked_at:no",
    "list",
    f"""\
  sluice keys create --tenant acme --name "web site"
  sluice keys create --tenant acme --name trial --expires-in 30d --model llama-8b
  sluice keys create --tenant acme --name shop --project prj_0123456789abcdef \\
      --address 192.0.2.0/24 --limit requests_per_minute=60
  sluice keys rotate --tenant acme --grace 12h key_0123456789abcdef
  sluice keys rotate --tenant acme --grace 0 --made-keys all key_0123456789abcdef

{LIMITS_HELP}""",
    "allowed_models=--model allowed_addresses=--address expires_at=--expires-in",
    models=lambda key: key["allowed_models"] or "all")
_SECRET: Final = secret_of("key", "This is the key {id} of tenant {tenant_id}.")
# A whole key must not be part of a URL, which servers log.
_KEY: Final = argument("key", callback=lambda _context, _param, key: public_name(key))


async def _revoke(client: AdminClient, **given: Any) -> dict[str, str]:
    revoked = await client.send("DELETE /admin/tenants/{tenant}/keys/{key}", given)
    made = (f"\nRevoked {each}, which it made." for each in revoked.get("made_keys", ()))
    return {"key": given["key"], "made": "".join(made)}


keys.add("create", _SECRET)
keys.add("show", None, _KEY)
keys.add("set", None, _KEY)
keys.add("rotate", _SECRET, _KEY)
keys.add("revoke", "Revoked {key}.{made}", _KEY, call="DELETE /{key_id}", send=_revoke)

plans = Calls(
    "plans", "gateway.accounts.plans.routes", "/admin/plans/{plan_id}",
    "ID=id NAME=name TENANT_LIMITS=tenant_limits PROJECT_LIMITS=project_limits "
    "KEY_LIMITS=key_limits SPEND_LIMITS=spend_limits CREATED=created_at",
    "create PLAN, set, list",
    f"""\
  sluice plans create starter --key-limit requests_per_minute=60
  sluice plans set starter --tenant-limit budget=50 --key-limit requests_per_minute=none
  sluice plans set starter --spend-limit tenant/day=20 --spend-limit user/hour=0.50

{LIMITS_HELP}""",
    "id=PLAN")


def _print_limits(plan: Entity) -> None:
    click.echo(f"{plan['id']}: {plan['name']}")
    rows = [
        (scope.value, *pair.partition("=")[::2])
        for scope in LimitScope
        for pair in show(plan[f"{scope}_limits"], missing="").split(",")
        if pair
    ]
    print_table(("SCOPE", "LIMIT", "VALUE"), rows)


plans.add("show", _print_limits)

prices = Calls(
    "prices", "gateway.billing.prices", "/admin/prices/{price}",
    "ID=id MODEL=model TIER=service_tier PROMPT=prompt_micros CACHED=cached_micros "
    "COMPLETION=completion_micros AUDIO=audio_micros EFFECTIVE=effective_at",
    "add MODEL, list",
    """\
  sluice prices add llama-8b --prompt 0.15 --cached 0.05 --completion 0.60
  sluice prices add llama-8b --tier flex --prompt 0.08 --completion 0.30
  sluice prices add llama-8b --prompt 0.12 --completion 0.50 --effective-at 2027-01-01

Amounts are in dollars per million tokens or seconds, with at most six decimals. A model without a
price is free.
""",
    "service_tier=--tier")
prices.add("remove", "Removed the price {id}.")

credits_ = Calls(
    "credits", "gateway.billing.credits.routes", f"{_TENANT}/credits/",
    "ID=id KIND=kind AMOUNT=amount_micros CREATED=created_at EXPIRES=expires_at "
    "OF_GRANT=grant_id NOTE=note",
    "list",
    """\
  sluice credits grant --tenant acme 25 --note "trial" --expires-at 2027-01-01
  sluice credits adjust --tenant acme -3.50 --note "granted twice"

Amounts are in dollars, with at most six decimals. Credits apply to tenants with prepaid billing.
""",
    "amount_micros=AMOUNT")


async def _balance(client: AdminClient, tenant: str) -> dict[str, Any]:
    given = {"tenant": tenant, "limit": 1}
    found = await client.send("GET /admin/tenants/{tenant}/credits", given)
    return {"tenant": tenant, **found["balance"]}


credits_.add("grant", None, argument("amount_micros", metavar="AMOUNT",
                                    type=Dollars(1, MAX_AMOUNT_MICROS)),
             call="POST", kind="grant")
credits_.add("adjust AMOUNT", None, option("--note", "Why.", required=True),
             call="POST", kind="adjustment", expires_at=None)
for _name in ("grant", "adjust"):
    # Without this, an amount such as -3.50 is parsed as an option.
    credits_.commands[_name].context_settings = {"ignore_unknown_options": True}
credits_.add("balance",
             columns("TENANT=tenant GRANTED=granted_micros SPENT=spent_micros "
                     "BALANCE=balance_micros"),
             call="GET", send=_balance,
             text="Show the balance. Usage is included a few seconds after it ends.")

invoices = Calls(
    "invoices", "gateway.billing.invoices", f"{_TENANT}/invoices/{{month}}",
    "MODEL=model TIER=service_tier REQUESTS=requests FAILED=failed_requests PROMPT=prompt_tokens "
    "CACHED=cached_tokens COMPLETION=completion_tokens AUDIO=audio_seconds COST=cost_micros", "",
    """\
  sluice invoices show --tenant acme 2026-11
""")


def _print_invoice(invoice: Entity) -> None:
    state = "open, so the amounts grow" if invoice["is_open"] else "ended"
    click.echo(f"{invoice['tenant_name']} ({invoice['tenant']}), {invoice['month']} ({state})")
    print_columns(invoices.table, invoice["lines"])
    click.echo(f"Total: {show_dollars(invoice['total_micros'])}")


invoices.add("show", _print_invoice)

_STATES: Final = ("pending", "held", "rejected", "uncertain")


def _batches(state: str, export: Entity) -> int:
    return int(export["batches"][state])


exports = Calls(
    "exports", "gateway.billing.exports.routes", "/admin/exports/{name}",
    "SINK=name KIND=kind STATE=state ROWS=lag_rows OLDEST=oldest_at:- PENDING=pending "
    "HELD=held REJECTED=rejected UNCERTAIN=uncertain LAST_ERROR=last_error",
    "list",
    """\
  sluice exports batches stripe --state rejected
  sluice exports retry stripe                  all rejected batches
  sluice exports retry stripe 17
  sluice exports discard stripe 18
""",
    "name=SINK after=--after",
    state=lambda export: "paused" if export["paused_at"] else "active",
    **{state: partial(_batches, state) for state in _STATES})


async def _retry(client: AdminClient, sink: str, batch: int | None) -> Any:
    one = "" if batch is None else "/batches/{batch}"
    given = {"sink": sink, "batch": batch}
    return await client.send(f"POST /admin/exports/{{sink}}{one}:retry", given)


exports.add("batches",
            columns("BATCH=id STATE=state ROWS=rows EVENT=identifier TENANT=tenant_id "
                    "COST=cost_micros ATTEMPTS=attempts LAST_ERROR=last_error"),
            call="GET /{name}/batches")
exports.add("pause", "Paused {sink}.")
exports.add("resume", "Resumed {sink}.")
exports.add("retry", "{batches} batches are sent again within seconds.",
            argument("batch", type=int, required=False), send=_retry,
            text="Send the rejected or uncertain BATCH (its id) to SINK again; default: all "
                 "rejected ones.")
exports.add("discard", "Discarded {batch}.", call="DELETE /{name}/batches/{batch_id}")
exports.add("remove", "Removed {sink}.")

webhooks = Calls(
    "webhooks", "gateway.accounts.webhooks.routes", f"{_TENANT}/webhooks/{{webhook_id}}",
    "ID=id URL=url THRESHOLDS=thresholds CREATED=created_at", "list, remove",
    """\
  sluice webhooks create --tenant acme https://example.com/hooks
  sluice webhooks create --tenant acme https://example.com/hooks --threshold 90 --threshold 100
""")
webhooks.add("create URL",
             secret_of("secret", "This is the secret of the webhook {id} of tenant {tenant_id}."))
webhooks.add("test", "The event {id} will be sent within seconds.")

prompt_log = Calls(
    "prompt-log", "gateway.accounts.prompt_log", f"{_TENANT}/prompt_log",
    "TENANT=tenant_id DAYS=days", "show",
    """\
  sluice prompt-log set --tenant acme --days 30 --public-key "$(cat public.pem)"
  sluice prompt-log stop --tenant acme
""")
prompt_log.add("set", None, call="PUT /prompt_log")
prompt_log.add("stop", "No further requests of tenant {tenant_id} are logged.",
               call="DELETE /prompt_log")

files = Calls(
    "files", "gateway.batches.files.routes", f"{_TENANT}/files/{{file_id}}",
    "ID=id NAME=filename PURPOSE=purpose BYTES=bytes LINES=lines EXPIRES=expires_at:-",
    "list, delete",
    """\
  sluice files list --tenant acme --purpose batch_output
  sluice files delete --tenant acme file-0123456789abcdef0123456789abcdef
""",
    "after=--after")

batches = Calls(
    "batches", "gateway.batches.routes", f"{_TENANT}/batches/{{batch_id}}",
    "ID=id STATUS=status COMPLETED=completed FAILED=failed CREATED=created_at DEADLINE=expires_at",
    "list, show",
    """\
  sluice batches list --tenant acme
  sluice batches cancel --tenant acme batch_0123456789abcdef0123456789abcdef
""",
    "after=--after",
    completed=lambda batch: "{completed}/{total}".format_map(batch["request_counts"]),
    failed=lambda batch: batch["request_counts"]["failed"])
batches.add("cancel", "{batch} is {status}.", call="POST /{batch_id}/cancel")

models = Calls(
    "models", "gateway.accounts.models", "/admin/models/{name}",
    "MODEL=model ALIASES=names STATE=state WORKERS=ready_workers WAITING=waiting_jobs "
    "RUNNING=leased_jobs",
    "list",
    """\
  sluice models list
  sluice models remove llama-3.1-8b
""",
    "name=MODEL", names=lambda model: " ".join(model["aliases"]))
models.add("remove", "Removed {model!r}. Gateways apply this within a second.")

aliases = Calls(
    "aliases", "gateway.accounts.aliases gateway.accounts.models", "/admin/aliases/{name}",
    "ALIAS=name MODELS=models STICKY=sticky FALLBACK=fallback SUNSET=sunset_at:-", "list",
    """\
  sluice aliases set chat llama-8b=95 llama-8b-v2=5
  sluice aliases set chat llama-8b=50 llama-8b-v2=50 --sticky user --fallback llama-8b
  sluice aliases set chat-2025 llama-8b --sunset 2027-01-01 --replacement chat
""",
    "name=ALIAS sunset_at=--sunset fallbacks=--further-fallback",
    models=lambda alias: " ".join(f"{model}={of}" for model, of in alias["weights"].items()))


async def _set_alias(client: AdminClient, alias: str, **body: Any) -> Any:
    made = await client.send("PUT /admin/aliases/{alias}", {"alias": alias}, body=body)
    known = (await client.send("GET /admin/models", {}))["data"]
    names = {name for each in known for name in (each["model"], *each["aliases"])}
    if unknown := [model for model in made["weights"] if model not in names]:
        click.echo(
            f"Warning: No worker has announced {', '.join(map(shown, unknown))}. "
            "Until one does, requests for that model get 404.", err=True)
    return made


aliases.add(
    "set", None,
    argument("weights", nargs=-1, required=True, metavar="MODEL[=WEIGHT]...",
             callback=lambda _context, _param, given: read_weights(given)),
    text="Define ALIAS, or replace it, on every gateway within a second.\n\n"
         "Callers are divided over the models by weight, by default 1.",
    call="PUT /{name}", send=_set_alias)
aliases.add("remove", "Removed {alias!r}. Gateways apply this within a second.")

adapters = Calls(
    "adapters", "gateway.adapters.routes", f"{_TENANT}/adapters/{{adapter_id}}",
    "ID=id MODEL=full_name SHARED=is_shared STATE=state RANK=rank BYTES=size "
    "DIGEST_OR_REASON=result",
    "list",
    """\
  sluice adapters add --tenant acme support --base-model llama-8b --source ./support-lora
  sluice adapters add --tenant acme legal --base-model llama-8b --source s3://models/legal
  sluice adapters delete --tenant acme support
""",
    "after=--after",
    full_name=lambda adapter: f"{adapter['base_model']}:{adapter['name']}",
    result=lambda adapter: adapter["reason"] or adapter["sha256"][:12])


async def _add_adapter(client: AdminClient, tenant: str, **body: Any) -> Any:
    if client.stores is None:
        path = "POST /admin/tenants/{tenant}/adapters"
        return await client.send(path, {"tenant": tenant}, body=body)
    from gateway.cli.direct import add_adapter

    return await add_adapter(client.stores, tenant, **body | {"source": _absolute(body["source"])})


def _absolute(source: str) -> str:
    return source if source.startswith(S3_SCHEME) else str(Path(source).absolute())


adapters.add(
    "add NAME", send=_add_adapter,
    text="Check the files of an adapter, copy them to the file store, and serve it as NAME.\n\n"
         "With --url, background jobs do this: `sluice adapters list` shows when the adapter is "
         "ready, and the source is a folder of their machines. Otherwise, it is a local folder.")
adapters.add("delete", "Deleted {base_model}:{name}.",
             send=_deletion_of("/admin/tenants/{tenant}/adapters", "adapter"))

requests = Calls(
    "requests", "gateway.billing.live", f"{_TENANT}/live-requests/{{request_id}}",
    "ID=id MODEL=model KEY=key STATE=state SECONDS=seconds TOKENS_OUT=completion_tokens "
    "WORKER=by GATEWAY=gateway",
    "",
    """\
  sluice requests list --tenant acme
  sluice requests cancel --tenant acme cmpl-0123456789abcdef0123456789abcdef
""",
    seconds=lambda live: f"{live['age_ms'] / 1000:.1f}",
    by=lambda live: " ".join(live["workers"]))


async def _cancel(client: AdminClient, **given: Any) -> dict[str, str]:
    path = "POST /admin/tenants/{tenant}/live-requests/{request}:cancel"
    cancelled = await client.send(path, given)
    waits = "has not ended within five seconds: its gateway does not react"
    return {**given, "outcome": "is cancelled" if cancelled["has_ended"] else waits}


requests.add(
    "list", None,
    option("--limit", "Most requests to list.", type=click.IntRange(1, 1000), default=100,
           show_default=True),
    note=lambda page, entries: f"These are the oldest {len(entries)} of {page['total']}."
    if page["has_more"] else None)
requests.add("cancel", "{request} {outcome}.", send=_cancel)
