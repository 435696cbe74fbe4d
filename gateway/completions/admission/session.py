"""Sessions of agents: what their requests name, so that each finds the work of the one before."""

from typing import Any, Final, NamedTuple

from fastapi import Request

MOST_CHARACTERS: Final = 1024
"""Maximum characters of a name; the rest does not count."""

_FIRST: Final = (b"x-session-affinity", b"x-claude-code-session-id")
_LATER: Final = (b"session_id", b"session-id", b"conversation_id", b"conversation-id")
"""Before and after `prompt_cache_key` of the body."""
_AGENT: Final = (b"x-claude-code-agent-id", b"x-openai-subagent")
_PARENT: Final = (b"x-claude-code-parent-agent-id",)
_NAMES: Final = frozenset((*_FIRST, *_LATER, *_AGENT, *_PARENT))


class Session(NamedTuple):
    """The session of a request, as its client names it; empty texts if it does not."""

    id: str = ""
    agent: str = ""
    """The agent of the session, if it has several."""
    parent_agent: str = ""

    @property
    def key(self) -> str:
        """Equal for requests of one agent in one session; empty without a session."""
        return self.id and f"{self.id} {self.agent}"


def session_of(request: Request, body: dict[str, Any]) -> Session:
    """Return the session that headers or the body name. Values of other types do not count."""
    # One pass: most requests have none of these headers.
    found = {name: value.decode("latin-1") for name, value in request.headers.raw if name in _NAMES}
    metadata = body.get("metadata")
    session = _first(
        *map(found.get, _FIRST),
        body.get("prompt_cache_key"),
        *map(found.get, _LATER),
        body.get("session_id"),
        metadata.get("user_id") if isinstance(metadata, dict) else None,
    )
    if not found:
        return Session(session)
    return Session(session, _first(*map(found.get, _AGENT)), _first(*map(found.get, _PARENT)))


def _first(*names: Any) -> str:
    return next((e[:MOST_CHARACTERS] for e in names if isinstance(e, str) and e), "")
