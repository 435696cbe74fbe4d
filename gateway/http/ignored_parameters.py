"""Header that lists ignored parameters, so that none is ignored silently."""

import re
from collections.abc import Iterable
from typing import Final

IGNORED_HEADER: Final = "x-ignored-params"
MAX_NAMED_PARAMETERS: Final = 32

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header for these parameters, empty without any.

    The client chooses the names, so only those that are safe in a header are included.
    """
    safe = [name for name in names if _NAME.fullmatch(name)]
    return {IGNORED_HEADER: ",".join(safe[:MAX_NAMED_PARAMETERS])} if safe else {}
