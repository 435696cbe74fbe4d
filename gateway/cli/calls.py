"""Commands that call the Admin API, of a gateway or in this process.

A group `Calls` makes a command from an operation of the API and of what it prints. A command that
needs several requests is a coroutine function.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Final

import click
from click.core import ParameterSource

from gateway.cli.client import AdminClient, Target, connected, read_profile
from gateway.cli.parameters import argument_of, operations, option_of, words
from gateway.cli.terminal import (
    DATABASE,
    JSON,
    REDIS,
    Columns,
    Entity,
    columns,
    option,
    print_columns,
    print_fields,
    print_json,
)

PAGE: Final = 100
"""What a list shows at once if it has the option `--after`."""
_HIDDEN: Final = {"after", "format", "limit"}
"""Parameters that are options only where a resource gives them flags."""
_IN_PATH: Final = re.compile(r"\{(\w+)\}")

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


_VERBS: Final[Mapping[str, tuple[str, Shown | None]]] = {
    "create": ("POST", None),
    "add": ("POST", None),
    "set": ("PATCH {item}", None),
    "list": ("GET", None),
    "show": ("GET {item}", print_fields),
    "remove": ("DELETE {item}", "Removed {id}."),
    "delete": ("DELETE {item}", "Deleted {id}."),
}
"""What commands call and print by default. Others call `POST {item}:NAME` and print the table."""


class Calls(click.Group):
    """Commands about one resource.

    Args:
        name: the name of the group.
        routers: modules of the routes that its commands call, separated by spaces.
        path: the path of an item in the Admin API; it ends with `/` if items have none.
        table: the columns of items, as for `columns`.
        verbs: its commands that need no more than their names, as for `add`, with commas.
        examples: the end of its help.
        flags: `NAME=FLAGS` of parameters, separated by spaces, where those that `option_of` makes
            of their names do not suit; for an argument, `NAME=ARGUMENT`.
        computed: columns that are no fields of an item.
    """

    def __init__(
        self,
        name: str,
        routers: str,
        path: str,
        table: str,
        verbs: str,
        examples: str,
        flags: str = "",
        **computed: Callable[[Entity], Any],
    ) -> None:
        super().__init__(name, epilog=f"\b\nExamples:\n{examples}")
        self._routers = routers.split()
        self._path, slash, item = path.rpartition("/")
        self._item = slash + item
        self.table = columns(table, **computed)
        self._flags = dict(each.split("=", 1) for each in flags.split())
        for usage in filter(None, verbs.split(", ")):
            self.add(usage)

    def add(
        self,
        usage: str,
        shows: Shown | None = None,
        *params: click.Parameter,
        call: str = "",
        text: str = "",
        send: Call | None = None,
        note: Note = lambda *_: None,
        **fixed: Any,
    ) -> None:
        """Add a command with the parameters of an operation.

        Args:
            usage: its name, and its arguments that are no part of the path: `create NAME`.
            shows: what it prints, if not what `_VERBS` says.
            params: parameters in place of those of the operation with their names, or beside them.
            call: method and end of the path, if not what `_VERBS` says. Parameters in this end are
                arguments, those in the path before are required options.
            text: its description, if that of the operation does not suit.
            send: sends its requests. By default, it sends one, or one for each page of a list. An
                option `limit` is the maximum of all pages; with an option `after`, the maximum is
                `PAGE`.
            note: returns a message about a list, from its last page and all its entries.
            fixed: members of the body that are no parameters.
        """
        name, *takes = usage.split()
        usual_call, usual = _VERBS.get(name, (f"POST {{item}}:{name}", None))
        method, _, rest = (call or usual_call.format(item=self._item)).partition(" ")
        printed = shows or usual or self.table
        operation = operations()[f"{method} {self._path}{rest}"]
        names = {each: self._shown(each) for each in _IN_PATH.findall(self._path + rest)}
        path = _IN_PATH.sub(lambda match: f"{{{names[match[1]]}}}", self._path + rest)
        own = {param.name for param in params} | fixed.keys()
        texts = [text or operation.text]
        arguments: list[click.Parameter] = []
        options: list[click.Parameter] = []
        for each, parameter in operation.given.items():
            shown, metavar = names.get(each, each), self._shown(each).upper()
            is_optional, flags = f"[{metavar}]" in takes, self._flags.get(each, "")
            if f"{{{each}}}" in rest or is_optional or metavar in takes:
                texts.append(words(f"{metavar}: {parameter.text}"))
                made = argument_of(shown, parameter, metavar, required=not is_optional)
                arguments += [made] if shown not in own else []
            elif shown not in own and (flags or each not in _HIDDEN):
                options.append(option_of(shown, parameter, flags, method=method))
        size = operation.given["limit"].most if operation.given.keys() >= {"after", "limit"} else 0

        async def send_one(client: AdminClient, **given: Any) -> Any:
            if size:
                most = given.get("limit", PAGE if "after" in given else None)
                page, entries = await client.pages(f"{method} {path}", given, size=size, most=most)
                if (message := note(page, entries)) is not None:
                    click.echo(message, err=True)
                return entries
            if method in ("GET", "DELETE"):
                found = await client.send(f"{method} {path}", given)
            else:
                in_path = {name: given[name] for name in given if name in names.values()}
                body = {name: given[name] for name in given if name not in in_path} | fixed
                found = await client.send(f"{method} {path}", in_path, body=body)
            if isinstance(printed, str):
                return {**given, **found}
            return found["data"] if found.get("object") == "list" else found

        every = [*arguments, *options, *params]
        self.add_call(name, send or send_one, printed, "\n\n".join(texts), *every)

    def _shown(self, name: str) -> str:
        """Return the name of an argument."""
        flags = self._flags.get(name, "")
        return flags.lower() if flags.isupper() else name.removesuffix("_id")

    def add_call(
        self, name: str, send: Call, shows: Shown, text: str, *params: click.Parameter
    ) -> None:
        """Add a command that sends requests with the client that `send` gets, and prints a result.

        The other parameters are those of `add`.
        """
        is_taken = any("--key" in param.opts for param in params)
        targets = _targets(key_flags="--admin-key" if is_taken else "--admin-key --key")
        every = [*params, *targets]
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
