"""Chat template store: fetch templates that workers publish in Redis, and try them out."""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from redis.exceptions import RedisError

from gateway.completions.prompt.templates.template import ChatTemplate, WrongTemplateError
from gateway.records.errors import (
    ModelMisconfiguredError,
    ServiceUnavailableError,
    queue_unavailable,
)

MAX_TEMPLATES: Final = 16
"""The templates of one model."""
MAX_TEMPLATE_CHARACTERS: Final = 512 * 1024
DEFAULT: Final = "default"
_FOR_TOOLS: Final = "tool_use"

logger = logging.getLogger(__name__)

_read_file = msgspec.json.Decoder(dict[str, str]).decode


class TemplateSet:
    """The templates of one model, by name."""

    def __init__(self, templates: Mapping[str, ChatTemplate]) -> None:
        self._templates = templates

    @property
    def sources(self) -> dict[str, str]:
        """The sources of the templates by name."""
        return {name: template.source for name, template in self._templates.items()}

    def choose(self, *, has_tools: bool) -> ChatTemplate:
        """Return the template for a chat with or without tools."""
        if has_tools and _FOR_TOOLS in self._templates:
            return self._templates[_FOR_TOOLS]
        return self._templates[DEFAULT]


class ChatTemplates:
    """The chat templates of all served models; each digest is fetched and tried out once."""

    def __init__(
        self,
        fetch: Callable[[str], Awaitable[bytes | None]],
        try_out: Callable[[str], Awaitable[str]],
    ) -> None:
        """Create an empty store.

        Args:
            fetch: Returns a worker's file by its digest: zlib-compressed JSON, name -> source.
            try_out: Returns why a source is unusable, or an empty string; renders it in a sandbox.
        """
        self._fetch = fetch
        self._try_out = try_out
        self._known: dict[str, TemplateSet | str] = {}
        """By digest: the templates, or the reason why they are unusable."""
        self._lock = asyncio.Lock()

    async def get(self, digest: str) -> TemplateSet:
        """Return the templates of a model by their digest.

        Raises ServiceUnavailableError if they no longer exist, ModelMisconfiguredError if they are
        unusable, StoreUnavailableError without Redis, and OverloadedError if the trial did not
        finish in time.
        """
        known = self._known.get(digest)
        if known is None:
            async with self._lock:
                if digest not in self._known:
                    self._known[digest] = await self._load(digest)
                known = self._known[digest]
        if isinstance(known, str):
            raise ModelMisconfiguredError(f"The model's chat template is unusable: {known}.")
        return known

    async def _load(self, digest: str) -> TemplateSet | str:
        try:
            compressed = await self._fetch(digest)
        except RedisError:
            raise queue_unavailable() from None
        if compressed is None:
            raise ServiceUnavailableError(
                "The model's chat template is not published yet.", retry_after_seconds=1.0
            )
        sources = _sources(compressed)
        if isinstance(sources, str):
            reason = sources
        else:
            reason = await self._why_not(sources)
            if not reason:
                return await asyncio.to_thread(_compiled, sources)
        logger.warning("the chat template %s is unusable: %s", digest, reason)
        return reason

    async def _why_not(self, sources: Mapping[str, str]) -> str:
        for source in sources.values():
            if reason := await self._try_out(source):
                return reason
        return ""


def _sources(compressed: bytes) -> dict[str, str] | str:
    """Return the templates by name, or the reason why they cannot be read."""
    decompressor = zlib.decompressobj()
    most = MAX_TEMPLATES * MAX_TEMPLATE_CHARACTERS
    try:
        sources = _read_file(decompressor.decompress(compressed, most))
    except (zlib.error, msgspec.MsgspecError):
        return "its published file cannot be read"
    if DEFAULT not in sources:
        return f"it has no template named '{DEFAULT}'"
    if len(sources) > MAX_TEMPLATES:
        return f"it must have at most {MAX_TEMPLATES} templates. Given: {len(sources)}"
    longest = max(map(len, sources.values()))
    if longest > MAX_TEMPLATE_CHARACTERS:
        return f"it must have at most {MAX_TEMPLATE_CHARACTERS} characters. Given: {longest}"
    return sources


def _compiled(sources: Mapping[str, str]) -> TemplateSet | str:
    try:
        return TemplateSet({name: ChatTemplate(source) for name, source in sources.items()})
    except WrongTemplateError as error:
        return str(error)
