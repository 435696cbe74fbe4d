"""Client of the Admin API: of a gateway by its URL, or of any application."""

import re
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import click
import httpx

from contract.dialect import Dialect
from gateway.cli.terminal import NULL
from gateway.records.errors import must

TIMEOUT: Final = httpx.Timeout(60.0, connect=10.0)
HEADERS: Final = {"X-Api-Dialect": Dialect.OPENAI.value}
"""The gateway's default dialect may have another form of errors."""
_MEMBERS: Final = {"url", "key"}
_NAMES: Final = re.compile(r"\{(\w+)\}")


class Target(NamedTuple):
    """A gateway's operators' port, and the key of an operator."""

    url: str
    key: str


def read_profile(name: str, *, key: str | None) -> Target:
    """Return the gateway of a profile; a `key` has priority over its own. Raises ClickException."""
    file = Path(click.get_app_dir("sluice")) / "profiles.toml"
    try:
        profiles = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.ClickException(f"{file} cannot be read: {reason}.") from None
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        known = ", ".join(sorted(profiles)) or "none"
        raise click.ClickException(f"{file} has no profile {name!r}. Its profiles: {known}.")
    unknown = sorted(profile.keys() - _MEMBERS)
    if unknown or "url" not in profile or not all(isinstance(x, str) for x in profile.values()):
        what = f"{unknown[0]!r} is unknown" if unknown else "'url' and 'key' must be text"
        raise click.ClickException(f"The profile {name!r} in {file}: {what}.")
    return Target(profile["url"], key or profile.get("key", ""))


class AdminClient:
    """Sends requests of the Admin API, and raises its errors as ClickException.

    `stores` are the resources of a deployment that this process itself manages.
    """

    def __init__(self, http: httpx.AsyncClient, where: str, stores: Any = None) -> None:
        self._http = http
        self._where = where
        self.stores = stores

    async def send(
        self, call: str, given: Mapping[str, Any], *, body: Mapping[str, Any] | None = None
    ) -> Any:
        """Send a request such as `GET /admin/tenants/{tenant}`; return the JSON of its response.

        Args:
            call: method and path; names in braces are taken from `given`.
            given: the rest is the query. Values that are None or empty are left out.
            body: the JSON body, in which NULL is null.
        """
        response = await self.fetch(call, given, body=body)
        found = _json(response)
        if "object" not in found:
            raise self._stranger(response)
        return found

    async def fetch(
        self, call: str, given: Mapping[str, Any], *, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Do the same as `send`, and return the whole response, of any media type."""
        method, path = call.split(" ")
        left = [name for name in given if f"{{{name}}}" not in path]
        query = {name: given[name] for name in left if given[name] not in (None, ())}
        try:
            response = await self._http.request(
                method, _filled(path, given), params=query, json=_plain(body)
            )
        except httpx.TimeoutException:
            check = "" if method == "GET" else " Check whether the change was made."
            raise click.ClickException(f"{self._where} has not responded in time.{check}") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise click.ClickException(f"{self._where} cannot be reached: {reason}.") from None
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise click.ClickException(f"The request cannot be sent: {error}.") from None
        if response.is_success:
            return response
        error_ = _json(response).get("error")
        if isinstance(error_, dict) and isinstance(error_.get("message"), str):
            raise click.ClickException(error_["message"])
        raise self._stranger(response)

    def _stranger(self, response: httpx.Response) -> click.ClickException:
        return click.ClickException(
            f"{self._where} responded with status {response.status_code}, but not as the "
            "operators' port of a gateway does. Check the URL."
        )

    async def pages(
        self, call: str, given: Mapping[str, Any], *, size: int, most: int | None = None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the last page and all entries of a list, until there are `most`.

        A request is for at most `size` entries.
        """
        entries: list[Any] = []
        after = given.get("after")
        while True:
            limit = size if most is None else min(size, most - len(entries))
            page = await self.send(call, {**given, "after": after, "limit": limit})
            entries += page["data"]
            if not page["has_more"] or len(entries) == most:
                return page, entries
            after = page["next"] if "next" in page else page["data"][-1]["id"]


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[AdminClient]:
    """Open a client of a gateway. Raises ClickException for a URL or key that cannot be one."""
    url, key = target
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.ClickException(f"'--url' must be http(s)://HOST[:PORT]. Given: {url!r}.")
    if not key:
        raise click.ClickException(
            "A URL requires an operator's key: set SLUICE_ADMIN_KEY, or `key` in the profile."
        )
    if re.fullmatch("[!-~]+", key) is None:
        raise click.ClickException("The operator's key contains characters that no key has.")
    headers = {**HEADERS, "Authorization": f"Bearer {key}"}
    try:
        http = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT)
    except (httpx.InvalidURL, ValueError, OSError) as error:
        raise click.ClickException(f"{url!r} cannot be used: {error}.") from None
    async with http:
        yield AdminClient(http, f"The gateway at {url}")


def _filled(path: str, given: Mapping[str, Any]) -> str:
    def quoted(match: re.Match[str]) -> str:
        value = str(given[match[1]])
        if value in ("", ".", ".."):
            raise must(match[1], "be an id", value)
        return quote(value, safe="")

    return _NAMES.sub(quoted, path)


def _plain(body: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    return {
        name: None if value is NULL else value
        for name, value in body.items()
        if value not in (None, ())
    }


def _json(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response; empty if it is none."""
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
