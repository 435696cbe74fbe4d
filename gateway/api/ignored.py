"""The header that names parameters without effect: nothing is ignored in silence."""

import re
from collections.abc import Iterable
from typing import Final

IGNORED_HEADER: Final = "x-ignored-params"
MAX_NAMED_PARAMETERS: Final = 32

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header for these parameters, empty without any.

    Names come from the client: only such as are safe in a header are repeated.
    """
    safe = [name for name in names if _NAME.fullmatch(name)]
    return {IGNORED_HEADER: ",".join(safe[:MAX_NAMED_PARAMETERS])} if safe else {}
