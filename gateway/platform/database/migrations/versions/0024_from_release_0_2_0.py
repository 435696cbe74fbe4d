"""What the previews of release 0.3.0 added in several revisions, for databases of release 0.2.0."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0006"
branch_labels = None
depends_on = None

_KINDS: dict[str, Any] = {
    "bool": sa.Boolean(),
    "float": sa.Float(),
    "int": sa.BigInteger(),
    "json": sa.JSON(),
    "serial": sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
    "state": sa.Enum(
        *("pending", "held", "rejected", "uncertain"),
        name="state",
        native_enum=False,
        create_constraint=True,
        length=32,
    ),
    "text": sa.String(),
    "time": sa.DateTime(timezone=True),
}
_OF_TENANT = ("tenant_id", "tenants.id", "RESTRICT")
_BOUNDS_MS = (
    *(8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096),
    *(5793, 8192, 11585, 16384, 23170, 32768, 46341, 65536, 92682, 131072, 185364, 262144, 370728),
    *(524288, 741455, 1048576),
)
_BUCKETS = "; ".join(
    f"first_token_{each} int?" for each in (*map("le_{}".format, _BOUNDS_MS), "more")
)


def upgrade() -> None:
    _add("tenants", "cors_origins json?; stripe_customer_id 255?")
    # Rows are never changed: the engine of earlier rows is unknown.
    _add("usage_ledger", "engine text", server_default="")
    # The hourly reconciliation computes the new sums of the last days. It would take long for all.
    _add("usage_rollups", _BUCKETS)
    with op.batch_alter_table("members") as members:
        members.alter_column(
            "subject", existing_type=sa.String(200), type_=sa.String(255), nullable=True
        )
        for column in _columns("issuer 255?; email 200?"):
            members.add_column(column)
        members.create_unique_constraint(op.f("uq_members_email"), ["tenant_id", "email"])
    _create(
        "files",
        "id 63; tenant_id 63; project_id 32?; name 255; purpose 32; size int; lines int; parts int;"
        "created_at time; expires_at time?; is_visible bool",
        owner=_OF_TENANT,
    )
    _create(
        "file_parts",
        "file_id 63; number int; key 200; start int; size int",
        key=("file_id", "number"),
        owner=("file_id", "files.id", "CASCADE"),
    )
    _create(
        "batches",
        "id 63; tenant_id 63; project_id 32?; credential_id text; allowed_models json?;"
        "dialect 32?; endpoint 63; input_file_id 63; output_file_id 63?; error_file_id 63?;"
        "completion_window 16; metadata json?; output_seconds int?; status 32; created_at time;"
        "expires_at time; in_progress_at time?; progressed_at time?; finalizing_at time?;"
        "completed_at time?; failed_at time?; expired_at time?; cancelling_at time?;"
        "cancelled_at time?; errors json?; models json; total int; completed int; failed int;"
        "tokens int; prompt_tokens int; cached_tokens int; completion_tokens int;"
        "reasoning_tokens int; claimed_until time",
        owner=_OF_TENANT,
    )
    _create(
        "batch_chunks",
        "batch_id 63; number int; first_line int; lines int; start int; size int; state 32;"
        "gateway 63; leased_until time",
        key=("batch_id", "number"),
        owner=("batch_id", "batches.id", "CASCADE"),
    )
    _create(
        "batch_feeds",
        "tenant_id 63; target int; rate float; done int; measured_at time; pushed_back_at time",
        key=("tenant_id",),
    )
    _create(
        "adapters",
        "id 63; tenant_id 63; name 63; base_model 200; source 1000; is_shared bool; state 32;"
        "reason 500; sha256 64; rank int; target_modules json; size int; is_stored bool;"
        "created_at time; deleted_at time?; claimed_until time",
        owner=_OF_TENANT,
    )
    _create(
        "model_aliases",
        "name 200; weights json; sticky 32; fallback 200?; sunset_at time?; deprecated_at time?;"
        "replacement 200; created_at time",
        key=("name",),
    )
    _create(
        "usage_positions",
        "position serial; request_id text; created_at time",
        key=("position",),
        sqlite_autoincrement=True,
    )
    _create(
        "export_sinks",
        "name 32; kind 32; tag 8; position int; closed_at time; created_at time; paused_at time?;"
        "lease 32; leased_until time; failures int; next_attempt_at time; last_error 200",
        key=("name",),
    )
    _create(
        "export_batches",
        "id serial; sink 32; state state; after int; upto int; rows int; oldest_at time;"
        "identifier 120; tenant_id text?; customer 255; cost_micros int?; occurred_at time;"
        "attempts int; uncertain_since time?; last_error 200",
        owner=("sink", "export_sinks.name", "CASCADE"),
    )
    _create(
        "service_rollups",
        f"period 32; start_at time; model text; requests int; failed_requests int; {_BUCKETS}",
        key=("period", "start_at", "model"),
    )
    _create("service_rejections", "hour time; model text; requests int", key=("hour", "model"))
    for name, table, columns in (
        ("subject", "members", ["subject"]),
        ("email", "members", ["email"]),
        ("tenant_id", "files", ["tenant_id", "created_at", "id"]),
        ("expires_at", "files", ["expires_at"]),
        ("tenant_id", "batches", ["tenant_id", "created_at", "id"]),
        ("status", "batches", ["status", "expires_at"]),
        ("input_file_id", "batches", ["input_file_id"]),
        ("state", "batch_chunks", ["state", "leased_until"]),
        ("tenant_id", "adapters", ["tenant_id", "created_at", "id"]),
        ("state", "adapters", ["state", "claimed_until"]),
        ("sha256", "adapters", ["sha256"]),
        ("sink", "export_batches", ["sink", "state", "attempts", "id"]),
        ("identifier", "export_batches", ["sink", "identifier"]),
    ):
        op.create_index(op.f(f"ix_{table}_{name}"), table, columns)


def _columns(text: str, **options: Any) -> "list[sa.Column[Any]]":
    """Return columns from their names and types; a number is the length of a string."""
    columns = []
    for name, kind in map(str.split, text.split(";")):
        word = kind.rstrip("?")
        type_ = sa.String(int(word)) if word.isdecimal() else _KINDS[word]
        columns.append(sa.Column(name, type_, nullable=kind != word, **options))
    return columns


def _add(table: str, columns: str, **options: Any) -> None:
    for column in _columns(columns, **options):
        op.add_column(table, column)


def _create(
    name: str,
    columns: str,
    *,
    key: tuple[str, ...] = ("id",),
    owner: tuple[str, str, str] | None = None,
    **options: Any,
) -> None:
    """Create a table; `owner` is a column, what it refers to, and the rule of a removal."""
    constraints: list[Any] = [sa.PrimaryKeyConstraint(*key, name=op.f(f"pk_{name}"))]
    if owner is not None:
        column, target, rule = owner
        label = op.f(f"fk_{name}_{column}_{target.partition('.')[0]}")
        constraints += [sa.ForeignKeyConstraint([column], [target], name=label, ondelete=rule)]
    op.create_table(name, *_columns(columns), *constraints, **options)
