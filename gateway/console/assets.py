"""Files that pages load: the stylesheet and scripts, under names that change with their content.

A browser never shows a page with the script of another version, and caches each file for a year.
"""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Final, NamedTuple

from fastapi import APIRouter, Response

from gateway.records.errors import NotFoundError

_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Asset(NamedTuple):
    """One file."""

    content: bytes
    media_type: str


def _read() -> tuple[Mapping[str, Asset], Mapping[str, str]]:
    assets, paths = {}, {}
    for file in files("gateway.console").joinpath("static").iterdir():
        stem, _, kind = file.name.rpartition(".")
        if kind in _TYPES:
            content = file.read_bytes()
            name = f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.{kind}"
            assets[name] = Asset(content, _TYPES[kind])
            paths[file.name] = f"/console/static/{name}"
    return MappingProxyType(assets), MappingProxyType(paths)


ASSETS, PATHS = _read()
"""The files by their names in URLs, and those URLs by the names of the files."""

router = APIRouter()


@router.get("/console/static/{name}", include_in_schema=False)
async def get_asset(name: str) -> Response:
    """Return a file. Raises NotFoundError."""
    asset = ASSETS.get(name)
    if asset is None:
        raise NotFoundError("There is no such file.")
    headers = {
        "cache-control": "public, max-age=31536000, immutable",
        "x-content-type-options": "nosniff",
    }
    return Response(asset.content, media_type=asset.media_type, headers=headers)
