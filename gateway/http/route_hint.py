"""The address that a client probably meant: most APIs are under `/v1`, once."""

from fastapi import Request
from starlette.routing import Match

_VERSION = "/v1"


def route_hint(request: Request) -> str:
    """Return a sentence that names an existing route, or "" if none is similar."""
    path, method = request.url.path, request.method
    versioned = path.rfind(f"{_VERSION}/")
    for meant in (_VERSION + path, path[versioned:] if versioned > 0 else ""):
        scope = {**request.scope, "path": meant}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return f"Use {method} {meant[:200]}. "
    return ""
