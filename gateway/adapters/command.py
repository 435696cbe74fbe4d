"""`sluice adapters`: LoRA adapters of tenants."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from contract.object_store import S3_SCHEME
from gateway.adapters.checks import InvalidAdapterError
from gateway.adapters.schemas import RegisteredAdapterBody
from gateway.adapters.service import AdapterService
from gateway.database.paging import MAX_PAGE, PageRequest
from gateway.dispatch.catalogue import Catalogue
from gateway.redis_client import MeasuredConnection, connect, converting_errors
from gateway.tenancy.adapters import Adapter
from gateway.terminal.entities import prints, table, tenant_option
from gateway.terminal.options import Stores, with_stores

EPILOG = """\
\b
Examples:
  sluice adapters add --tenant acme support --base-model llama-8b --source ./support-lora
  sluice adapters add --tenant acme legal --base-model llama-8b --source s3://models/legal
  sluice adapters list --tenant acme
  sluice adapters delete --tenant acme support
"""


def _to_row(adapter: Adapter) -> tuple[str, ...]:
    return (
        adapter.id,
        adapter.full_name,
        "yes" if adapter.is_shared else "no",
        adapter.state.value,
        str(adapter.rank),
        str(adapter.size),
        adapter.reason or adapter.sha256[:12],
    )


_prints = prints(
    table(("ID", "MODEL", "SHARED", "STATE", "RANK", "BYTES", "DIGEST OR REASON"), _to_row),
    RegisteredAdapterBody.of,
)


@click.group("adapters", epilog=EPILOG)
def command() -> None:
    """Add, list and delete LoRA adapters of tenants."""


@command.command()
@tenant_option
@click.argument("name")
@click.option("--base-model", required=True, help="Id under which workers announce the model.")
@click.option(
    "--source",
    required=True,
    help="Local folder, or s3://BUCKET/PREFIX, with adapter_config.json and "
    "adapter_model.safetensors.",
)
@click.option("--shared", "is_shared", is_flag=True, help="Let every tenant use it.")
@_prints
@with_stores
async def add(
    stores: Stores, tenant_id: str, name: str, *, base_model: str, source: str, is_shared: bool
) -> Adapter:
    """Check the files of an adapter, copy them to the file store, and serve it as NAME."""
    place = source if source.startswith(S3_SCHEME) else _absolute(source)
    async with _service(stores) as adapters:
        try:
            return await adapters.add(
                tenant_id,
                name,
                base_model=base_model,
                source=place,
                is_shared=is_shared,
                actor=stores.actor,
            )
        except InvalidAdapterError as error:
            raise click.ClickException(str(error)) from None


@command.command("list")
@tenant_option
@click.option("--after", metavar="ID", help="Id of the last adapter of the previous page.")
@_prints
@with_stores
async def list_adapters(stores: Stores, tenant_id: str, *, after: str | None) -> list[Adapter]:
    """List the adapters of a tenant, oldest first."""
    async with _service(stores) as adapters:
        return (await adapters.page(tenant_id, PageRequest(after, MAX_PAGE))).entries


@command.command()
@tenant_option
@click.argument("adapter")
@with_stores
async def delete(stores: Stores, tenant_id: str, adapter: str) -> None:
    """Delete ADAPTER (its id or name). Requests that were admitted continue."""
    async with _service(stores) as adapters:
        deleted = await adapters.delete(tenant_id, adapter, actor=stores.actor)
    click.echo(f"Deleted {deleted.full_name}.")


def _absolute(folder: str) -> str:
    from pathlib import Path

    return str(Path(folder).absolute())


@asynccontextmanager
async def _service(stores: Stores) -> AsyncIterator[AdapterService]:
    settings = stores.settings
    # The commands of a shared connection take one of their own from the pool.
    redis = connect(settings.redis_url, max_connections=1)
    try:
        with converting_errors(redis):
            catalogue = Catalogue(MeasuredConnection(redis))
            await catalogue.refresh()
            yield AdapterService.of(settings, stores.database, stores.announcer, catalogue)
    finally:
        await redis.aclose()
