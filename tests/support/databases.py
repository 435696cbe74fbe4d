"""SQLite databases with the current schema, copied from one that is made once in a run.

An upgrade takes longer than most tests.
"""

import asyncio
import fcntl
import shutil
from pathlib import Path

from gateway.platform.database import schema
from tests.support.preloaded import begin_run


def sqlite_url(path: Path) -> str:
    """Return the SQLAlchemy URL of a file."""
    return f"sqlite+aiosqlite:///{path}"


def create_sqlite(path: Path) -> str:
    """Make a database with only the current schema in a file, and return its URL."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(make_template(), path)
    return sqlite_url(path)


def make_template() -> Path:
    """Make the template database if it does not exist. Not in a running event loop."""
    template = begin_run() / "sluice.db"
    with (begin_run() / "sluice.db.lock").open("ab") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        if not template.exists():
            draft = template.with_suffix(".draft")
            asyncio.run(schema.upgrade(sqlite_url(draft)))
            draft.rename(template)
    return template
