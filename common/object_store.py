"""Connection to an object store: a local folder, or a bucket of an S3-compatible service."""

from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from obstore.store import LocalStore, S3Store

S3_SCHEME: Final = "s3://"
NO_STORE: Final = "none"
TIMEOUT: Final = timedelta(seconds=30)
"""Time limit of one request to S3."""
RETRIES: Final = 3


@cache
def open_store(place: str) -> "LocalStore | S3Store":
    """Return the store of a process, whose connections all users share.

    `place` is a folder or `s3://BUCKET/PREFIX`. The credentials of S3 are the standard variables
    `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION` and `AWS_ENDPOINT_URL`, or those of
    the machine. Call the blocking functions of obstore in threads: a process that exits just after
    one of its coroutines has ended may abort.
    """
    from obstore.store import LocalStore, S3Store

    if (folder := folder_of(place)) is not None:
        return LocalStore(folder, automatic_cleanup=True, mkdir=True)
    return S3Store.from_url(
        place,
        # The operator's endpoint decides whether to use TLS.
        client_options={"timeout": TIMEOUT, "connect_timeout": TIMEOUT, "allow_http": True},
        retry_config={"max_retries": RETRIES, "retry_timeout": TIMEOUT},
    )


def folder_of(place: str) -> Path | None:
    """Return the folder of a local store; None for S3."""
    return None if place.startswith(S3_SCHEME) else Path(place).absolute()
