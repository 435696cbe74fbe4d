"""Plans, projects, members, limits, prices, credits, webhooks and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

APPEND_ONLY = ("prices", "credits", "audit_log")
"""Tables whose rows cannot be changed or removed."""

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _extend_tenants_and_keys()
    _create_plans_projects_and_members()
    _create_prices_and_credits()
    _create_webhooks()
    _create_audit_log()
    for table in APPEND_ONLY:
        _forbid_changes(table)


def downgrade() -> None:
    for table in ("webhook_events", "webhooks", *APPEND_ONLY, "members", "projects", "plans"):
        op.drop_table(table)
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION sluice_append_only()")
    op.drop_index(op.f("ix_api_keys_old_prefix"), "api_keys")
    op.drop_index(op.f("ix_api_keys_project_id"), "api_keys")
    op.drop_index(op.f("ix_tenants_plan_id"), "tenants")
    for column in (
        "old_expires_at",
        "old_digest",
        "old_prefix",
        "limits",
        "allowed_addresses",
        "project_id",
    ):
        op.drop_column("api_keys", column)
    for column in ("shows_cost", "service_tier", "billing", "limits", "plan_id"):
        op.drop_column("tenants", column)


def _extend_tenants_and_keys() -> None:
    # The previous release continues to insert rows without these columns.
    op.add_column("tenants", sa.Column("plan_id", sa.String(63), nullable=True))
    op.add_column("tenants", sa.Column("limits", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column(
        "tenants",
        sa.Column("billing", sa.String(32), nullable=False, server_default="postpaid"),
    )
    op.add_column(
        "tenants",
        sa.Column("service_tier", sa.String(32), nullable=False, server_default="default"),
    )
    op.add_column(
        "tenants",
        sa.Column("shows_cost", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_index(op.f("ix_tenants_plan_id"), "tenants", ["plan_id"])
    op.add_column("api_keys", sa.Column("project_id", sa.String(32), nullable=True))
    op.add_column("api_keys", sa.Column("allowed_addresses", sa.JSON(), nullable=True))
    op.add_column("api_keys", sa.Column("limits", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("api_keys", sa.Column("old_prefix", sa.String(12), nullable=True))
    op.add_column("api_keys", sa.Column("old_digest", sa.LargeBinary(32), nullable=True))
    op.add_column(
        "api_keys", sa.Column("old_expires_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"])
    op.create_index(op.f("ix_api_keys_old_prefix"), "api_keys", ["old_prefix"])


def _create_plans_projects_and_members() -> None:
    op.create_table(
        "plans",
        sa.Column("id", sa.String(63), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("tenant_limits", sa.JSON(), nullable=False),
        sa.Column("project_limits", sa.JSON(), nullable=False),
        sa.Column("key_limits", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'archived')", name=op.f("ck_projects_status")),
        _tenant_key("projects"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
    )
    op.create_index(op.f("ix_projects_tenant_id"), "projects", ["tenant_id"])
    op.create_table(
        "members",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "role IN ('owner', 'admin', 'developer', 'billing', 'viewer')",
            name=op.f("ck_members_role"),
        ),
        _tenant_key("members"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_members")),
        sa.UniqueConstraint("tenant_id", "subject", name=op.f("uq_members_tenant_id")),
    )


def _create_prices_and_credits() -> None:
    op.create_table(
        "prices",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("service_tier", sa.String(32), nullable=False),
        sa.Column("prompt_micros", sa.BigInteger(), nullable=False),
        sa.Column("cached_micros", sa.BigInteger(), nullable=False),
        sa.Column("completion_micros", sa.BigInteger(), nullable=False),
        sa.Column("effective_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "0 <= cached_micros AND cached_micros <= prompt_micros AND 0 <= completion_micros",
            name=op.f("ck_prices_micros"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
    )
    op.create_index("ix_prices_model", "prices", ["model", "service_tier", "effective_at"])
    op.create_table(
        "credits",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("amount_micros", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.String(200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("grant_id", sa.String(32), nullable=True),
        sa.CheckConstraint(
            "kind IN ('grant', 'adjustment', 'expiry')", name=op.f("ck_credits_kind")
        ),
        _tenant_key("credits"),
        sa.ForeignKeyConstraint(
            ["grant_id"],
            ["credits.id"],
            name=op.f("fk_credits_grant_id_credits"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credits")),
        sa.UniqueConstraint("grant_id", name=op.f("uq_credits_grant_id")),
    )
    op.create_index(op.f("ix_credits_tenant_id"), "credits", ["tenant_id"])


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("secret", sa.String(100), nullable=False),
        sa.Column("thresholds", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        _tenant_key("webhooks"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index(op.f("ix_webhooks_tenant_id"), "webhooks", ["tenant_id"])
    op.create_table(
        "webhook_events",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("webhook_id", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(63), nullable=False),
        sa.Column("subject", sa.String(100), nullable=False),
        sa.Column("period", sa.String(32), nullable=False),
        sa.Column("threshold", sa.Integer(), nullable=False),
        sa.Column("body", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.String(200), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name=op.f("fk_webhook_events_webhook_id_webhooks"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_events")),
        sa.UniqueConstraint(
            "webhook_id",
            "kind",
            "subject",
            "period",
            "threshold",
            name=op.f("uq_webhook_events_webhook_id"),
        ),
    )
    op.create_index("ix_webhook_events_due", "webhook_events", ["delivered_at", "next_attempt_at"])


def _create_audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("sequence", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("action", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=True),
        sa.Column("subject", sa.String(300), nullable=False),
        sa.Column("details", sa.String(), nullable=False),
        sa.Column("previous_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_tenant_id"), "audit_log", ["tenant_id"])


def _tenant_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"],
        ["tenants.id"],
        name=op.f(f"fk_{table}_tenant_id_tenants"),
        ondelete="RESTRICT",
    )


def _forbid_changes(table: str) -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            """
            CREATE OR REPLACE FUNCTION sluice_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'rows of % are only ever added', TG_TABLE_NAME; END $$
            """
        )
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION sluice_append_only()"
        )
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, 'rows of {table} are only ever added'); END"
        )
