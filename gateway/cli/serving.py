"""`sluice models`, `aliases`, `adapters` and `requests`: what is served now."""

from pathlib import Path
from typing import Any, Final

import click

from common.object_store import S3_SCHEME
from gateway.cli.calls import PAGE, Calls
from gateway.cli.client import AdminClient
from gateway.cli.terminal import Time, argument, choice, columns, option
from gateway.records.aliases import Sticky, read_weights
from gateway.records.errors import shown

MOST_LISTED: Final = 1000

# These are tables: a row is a command or an option.
# fmt: off
_MODELS: Final = "gateway.accounts.models"
models = Calls(
    "models", _MODELS,
    """List models, and remove those that are no longer served.

    A model is known from its first announcement by a worker. While no worker serves it, requests
    for it receive a retryable error.
    """,
    """\
  sluice models list
  sluice models remove llama-3.1-8b
""")
models.add(
    "list", "GET /admin/models",
    columns("MODEL=model ALIASES=names STATE=state WORKERS=ready_workers WAITING=waiting_jobs "
            "RUNNING=leased_jobs", names=lambda model: " ".join(model["aliases"])),
    "Show every known model, its workers and its load.")
models.add(
    "remove MODEL", "DELETE /admin/models/{model}",
    "Removed {model!r}. Gateways apply this within a second.",
    """Remove a model that no worker serves any more: requests for it get 404 instead of 503.

    It becomes known again as soon as a worker announces it.
    """)

aliases = Calls(
    "aliases", f"gateway.accounts.aliases {_MODELS}",
    "Define, list and remove aliases: names that split their requests over models.",
    """\
  sluice aliases set chat llama-8b=95 llama-8b-v2=5
  sluice aliases set chat llama-8b=50 llama-8b-v2=50 --sticky user --fallback llama-8b
  sluice aliases set chat-2025 llama-8b --sunset 2027-01-01 --replacement chat
  sluice aliases list
  sluice aliases remove chat
""")
_ALIAS: Final = columns(
    "ALIAS=name MODELS=models STICKY=sticky FALLBACK=fallback SUNSET=sunset_at:-",
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


aliases.add_call(
    "set ALIAS", _set_alias, _ALIAS,
    """Define ALIAS, or replace it, on every gateway within a second.

    Callers are divided over the models by weight, by default 1.
    """,
    argument("weights", nargs=-1, required=True, metavar="MODEL[=WEIGHT]...",
             callback=lambda _context, _param, given: read_weights(given)),
    choice("--sticky", Sticky, "Whose requests go to the same model: a tenant's, or those of each "
           "`user` of a tenant.", default=Sticky.TENANT.value, show_default=True),
    option("--fallback", "Model of requests whose own model has no worker."),
    option("--sunset sunset_at", "When requests for ALIAS begin to fail.", type=Time()),
    option("--replacement", "What the error after the sunset names.  [default: the model with the "
           "largest weight]"))
aliases.add("list", "GET /admin/aliases", _ALIAS, "List all aliases.")
aliases.add("remove ALIAS", "DELETE /admin/aliases/{alias}",
            "Removed {alias!r}. Gateways apply this within a second.",
            "Remove ALIAS: requests for it get 404.")

adapters = Calls(
    "adapters", "gateway.adapters.routes", "Add, list and delete LoRA adapters of tenants.",
    """\
  sluice adapters add --tenant acme support --base-model llama-8b --source ./support-lora
  sluice adapters add --tenant acme legal --base-model llama-8b --source s3://models/legal
  sluice adapters list --tenant acme
  sluice adapters delete --tenant acme support
""")
_ADAPTERS: Final = "/admin/tenants/{tenant}/adapters"
_ADAPTER: Final = columns(
    "ID=id MODEL=full_name SHARED=is_shared STATE=state RANK=rank BYTES=size "
    "DIGEST_OR_REASON=result",
    full_name=lambda adapter: f"{adapter['base_model']}:{adapter['name']}",
    result=lambda adapter: adapter["reason"] or adapter["sha256"][:12])


async def _add_adapter(client: AdminClient, tenant: str, **body: Any) -> Any:
    if client.stores is None:
        return await client.send(f"POST {_ADAPTERS}", {"tenant": tenant}, body=body)
    from gateway.cli.direct import add_adapter

    body["source"] = _absolute(body["source"])
    return await add_adapter(client.stores, tenant, **body)


def _absolute(source: str) -> str:
    return source if source.startswith(S3_SCHEME) else str(Path(source).absolute())


adapters.add_call(
    "add --tenant NAME", _add_adapter, _ADAPTER,
    """Check the files of an adapter, copy them to the file store, and serve it as NAME.

    With --url, background jobs do this: `sluice adapters list` shows when the adapter is ready.
    """,
    option("--base-model", "Id under which workers announce the model.", required=True),
    option("--source", "Local folder, or s3://BUCKET/PREFIX, with adapter_config.json and "
           "adapter_model.safetensors. With --url, a folder of the machines of `sluice jobs`.",
           required=True),
    option("--shared is_shared", "Let every tenant use it.", is_flag=True))
adapters.add("list --tenant", f"GET {_ADAPTERS}", _ADAPTER,
             "List the adapters of a tenant, oldest first.",
             option("--after ID", "Id of the last adapter of the previous page."),
             pages=PAGE)


async def _delete_adapter(client: AdminClient, **given: Any) -> dict[str, str]:
    found = await client.send(f"GET {_ADAPTERS}/{{adapter}}", given)
    await client.send(f"DELETE {_ADAPTERS}/{{adapter}}", {**given, "adapter": found["id"]})
    return {"name": f"{found['base_model']}:{found['name']}"}


adapters.add_call("delete --tenant ADAPTER", _delete_adapter, "Deleted {name}.",
                  "Delete ADAPTER (its id or name). Requests that were admitted continue.")

requests = Calls(
    "requests", "gateway.billing.live",
    "List and cancel the requests of a tenant that wait or run now.",
    """\
  sluice requests list --tenant acme
  sluice requests cancel --tenant acme cmpl-0123456789abcdef0123456789abcdef
""")
_LIVE: Final = "/admin/tenants/{tenant}/live-requests"
requests.add(
    "list --tenant", f"GET {_LIVE}",
    columns("ID=id MODEL=model KEY=key STATE=state SECONDS=seconds TOKENS_OUT=completion_tokens "
            "WORKER=by GATEWAY=gateway", seconds=lambda live: f"{live['age_ms'] / 1000:.1f}",
            by=lambda live: " ".join(live["workers"])),
    "List the oldest live requests of a tenant.",
    option("--limit", "Most requests to list.", type=click.IntRange(1, MOST_LISTED), default=100,
           show_default=True),
    pages=PAGE,
    note=lambda page, entries: f"These are the oldest {len(entries)} of {page['total']}."
    if page["has_more"] else None)


async def _cancel(client: AdminClient, **given: Any) -> dict[str, str]:
    cancelled = await client.send(f"POST {_LIVE}/{{request}}:cancel", given)
    waits = "has not ended within five seconds: its gateway does not react"
    return {**given, "outcome": "is cancelled" if cancelled["has_ended"] else waits}


requests.add_call("cancel --tenant REQUEST", _cancel, "{request} {outcome}.",
                  "Cancel REQUEST (its id); the tenant pays for the work so far.")
