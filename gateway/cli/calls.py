"""Commands that call the Admin API, of a gateway or in this process.

A group `Calls` makes a command from a description of its request and of what it prints. A command
that needs several requests is a coroutine function.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Final

import click
from click.core import ParameterSource

from gateway.cli.client import AdminClient, Target, connected, read_profile
from gateway.cli.terminal import (
    DATABASE,
    JSON,
    REDIS,
    Columns,
    argument,
    option,
    print_columns,
    print_json,
)

PAGE: Final = 100
"""Maximum entries of one page of most lists of the API."""

Call = Callable[..., Coroutine[Any, Any, Any]]
Note = Callable[[Mapping[str, Any], Sequence[Any]], str | None]
Shown = Columns | str | Callable[[Any], None]
"""What a command prints: a table with these columns, this text, or what a function prints."""


def _targets(*, key_flags: str) -> tuple[click.Option, ...]:
    """Return the options that select a gateway, or a deployment by its stores."""
    url_text = "Operators' port of a gateway, instead of the database.  [SLUICE_ADMIN_URL]"
    key_text = "Key with the scope admin, for --url or --profile.  [SLUICE_ADMIN_KEY]"
    profile_text = "URL and key of this name in profiles.toml.  [SLUICE_PROFILE]"
    return (
        option("--url gateway_url URL", url_text, envvar="SLUICE_ADMIN_URL"),
        option(f"{key_flags} operator_key KEY", key_text, envvar="SLUICE_ADMIN_KEY"),
        option("--profile NAME", profile_text, envvar="SLUICE_PROFILE"),
        DATABASE,
        REDIS,
    )


class Calls(click.Group):
    """Commands about one resource.

    Args:
        name: the name of the group.
        routers: modules of the routes that its commands call, separated by spaces.
        text: its description.
        examples: the end of its help.
    """

    def __init__(self, name: str, routers: str, text: str, examples: str) -> None:
        super().__init__(name, help=text, epilog=f"\b\nExamples:\n{examples}")
        self._routers = routers.split()

    def add(
        self,
        usage: str,
        call: str,
        shows: Shown,
        text: str,
        *params: click.Parameter,
        pages: int = 0,
        note: Note = lambda *_: None,
        **fixed: Any,
    ) -> None:
        """Add a command that sends one request, or one for each page of a list.

        Args:
            usage: its name and its arguments, such as `create NAME`; `--tenant` is an option.
            call: method and path. Parameters that it names in braces are parts of the path; the
                others are the query of a GET or DELETE, else the members of the body.
            shows: what it prints.
            text: its description.
            params: its further parameters, with the names that the request uses.
            pages: for a list: maximum entries of one page of the API; 0 if it has no pages. A
                parameter `limit` is the maximum of all pages; with `after`, one page is read.
            note: returns a message about a list, from its last page and all its entries.
            fixed: further members of the body.
        """

        async def send(client: AdminClient, **given: Any) -> Any:
            if pages:
                most = given.get("limit", pages if "after" in given else None)
                page, entries = await client.pages(call, given, size=pages, most=most)
                if (message := note(page, entries)) is not None:
                    click.echo(message, err=True)
                return entries
            if call.startswith(("GET", "DELETE")):
                found = await client.send(call, given)
            else:
                in_path = {name: given[name] for name in given if f"{{{name}}}" in call}
                body = {name: given[name] for name in given if name not in in_path}
                found = await client.send(call, in_path, body=body | fixed)
            if isinstance(shows, str):
                return {**given, **found}
            return found["data"] if found.get("object") == "list" else found

        self.add_call(usage, send, shows, text, *params)

    def add_call(
        self, usage: str, send: Call, shows: Shown, text: str, *params: click.Parameter
    ) -> None:
        """Add a command that sends requests with the client that `send` gets, and prints a result.

        The other parameters are those of `add`.
        """
        name, *takes = usage.split()
        is_taken = any("--key" in param.opts for param in params)
        targets = _targets(key_flags="--admin-key" if is_taken else "--admin-key --key")
        every = [*map(_param, takes), *params, *targets]
        if not isinstance(shows, str):
            every.append(JSON)

        @runs_async
        async def result_of(
            gateway_url: str | None,
            operator_key: str | None,
            profile: str | None,
            database_url: str | None,
            redis_url: str | None,
            **given: Any,
        ) -> Any:
            if (target := _target(gateway_url, operator_key, profile)) is not None:
                async with connected(target) as client:
                    return await send(client, **given)
            # Importing the database and the routes takes longer than a request to a gateway.
            from gateway.cli.deployment import serving

            async with serving(self._routers, database_url, redis_url) as client:
                return await send(client, **given)

        command = click.Command(name, callback=prints(shows)(result_of), help=text, params=every)
        self.add_command(command)


def _param(usage: str) -> click.Parameter:
    """Return the parameter of `--tenant`, `ARGUMENT` or `[ARGUMENT]`."""
    if usage == "--tenant":
        return option("--tenant", "Id of the tenant.", required=True)
    return argument(usage.strip("[]").lower(), required=not usage.startswith("["))


def _target(url: str | None, key: str | None, profile: str | None) -> Target | None:
    """Return the gateway that the options or the environment select, or None."""
    context = click.get_current_context()
    given = {
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    is_direct = bool(given & {"database_url", "redis_url"})
    if len(given & {"gateway_url", "profile"}) + is_direct > 1:
        raise click.UsageError(
            "Only one of --url, --profile, and --database-url with --redis-url is possible."
        )
    if profile and not is_direct and "gateway_url" not in given:
        return read_profile(profile, key=key if "operator_key" in given else None)
    if url and not is_direct:
        return Target(url, key or "")
    if "operator_key" in given:
        raise click.UsageError("--admin-key requires --url or --profile.")
    return None


def runs_async(function: Call) -> Callable[..., Any]:
    """Let click call a coroutine function."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return asyncio.run(function(*args, **options))

    return run


def prints(shows: Shown) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator that prints the result of a command, as JSON with the option JSON."""

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        @wraps(command)
        def run(*, as_json: bool = False, **options: Any) -> None:
            result = command(**options)
            if as_json:
                print_json(result)
            elif isinstance(shows, str):
                click.echo(shows.format_map(result), nl=bool(shows))
            elif callable(shows):
                shows(result)
            else:
                print_columns(shows, result)

        return run

    return decorate


def secret_of(field: str, note: str) -> Callable[[Any], None]:
    """Return a function that prints a secret alone, and a note about it for people."""

    def print_secret(entity: Any) -> None:
        click.echo(entity[field])
        what = note.format_map(entity)
        click.echo(f"\n{what} Store it now: it cannot be shown again.", err=True)

    return print_secret
