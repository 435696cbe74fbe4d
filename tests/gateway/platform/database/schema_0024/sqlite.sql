CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE tenants (
    id VARCHAR(63) NOT NULL,
    name VARCHAR(200) NOT NULL,
    weight DOUBLE NOT NULL,
    status VARCHAR(32) NOT NULL,
    created_at DATETIME NOT NULL, dialect VARCHAR(32), strict_parameters BOOLEAN DEFAULT 0 NOT NULL, default_model VARCHAR(200), plan_id VARCHAR(63), limits JSON DEFAULT '{}' NOT NULL, billing VARCHAR(32) DEFAULT 'postpaid' NOT NULL, service_tier VARCHAR(32) DEFAULT 'default' NOT NULL, shows_cost BOOLEAN DEFAULT 0 NOT NULL, cors_origins JSON, stripe_customer_id VARCHAR(255),
    CONSTRAINT pk_tenants PRIMARY KEY (id),
    CONSTRAINT ck_tenants_weight_positive CHECK (weight > 0),
    CONSTRAINT ck_tenants_status CHECK (status IN ('active', 'suspended'))
);
CREATE TABLE api_keys (
    id VARCHAR(32) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    prefix VARCHAR(12) NOT NULL,
    digest BLOB NOT NULL,
    name VARCHAR(200) NOT NULL,
    scopes JSON NOT NULL,
    allowed_models JSON,
    expires_at DATETIME,
    revoked_at DATETIME,
    created_at DATETIME NOT NULL, dialect VARCHAR(32), project_id VARCHAR(32), allowed_addresses JSON, limits JSON DEFAULT '{}' NOT NULL, old_prefix VARCHAR(12), old_digest BLOB, old_expires_at DATETIME,
    CONSTRAINT pk_api_keys PRIMARY KEY (id),
    CONSTRAINT fk_api_keys_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT,
    CONSTRAINT uq_api_keys_prefix UNIQUE (prefix)
);
CREATE INDEX ix_api_keys_tenant_id ON api_keys (tenant_id);
CREATE INDEX ix_tenants_plan_id ON tenants (plan_id);
CREATE INDEX ix_api_keys_project_id ON api_keys (project_id);
CREATE INDEX ix_api_keys_old_prefix ON api_keys (old_prefix);
CREATE TABLE plans (
    id VARCHAR(63) NOT NULL,
    name VARCHAR(200) NOT NULL,
    tenant_limits JSON NOT NULL,
    project_limits JSON NOT NULL,
    key_limits JSON NOT NULL,
    created_at DATETIME NOT NULL,
    CONSTRAINT pk_plans PRIMARY KEY (id)
);
CREATE TABLE projects (
    id VARCHAR(32) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    name VARCHAR(200) NOT NULL,
    status VARCHAR(32) NOT NULL,
    created_at DATETIME NOT NULL,
    limits JSON NOT NULL,
    CONSTRAINT pk_projects PRIMARY KEY (id),
    CONSTRAINT ck_projects_status CHECK (status IN ('active', 'archived')),
    CONSTRAINT fk_projects_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT
);
CREATE INDEX ix_projects_tenant_id ON projects (tenant_id);
CREATE TABLE prices (
    id INTEGER NOT NULL,
    model VARCHAR(200) NOT NULL,
    service_tier VARCHAR(32) NOT NULL,
    prompt_micros BIGINT NOT NULL,
    cached_micros BIGINT NOT NULL,
    completion_micros BIGINT NOT NULL,
    effective_at DATETIME NOT NULL,
    created_at DATETIME NOT NULL,
    CONSTRAINT pk_prices PRIMARY KEY (id),
    CONSTRAINT ck_prices_micros CHECK (0 <= cached_micros AND cached_micros <= prompt_micros AND 0 <= completion_micros)
);
CREATE INDEX ix_prices_model ON prices (model, service_tier, effective_at);
CREATE TABLE credits (
    id VARCHAR(32) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    amount_micros BIGINT NOT NULL,
    note VARCHAR(200) NOT NULL,
    created_at DATETIME NOT NULL,
    expires_at DATETIME,
    grant_id VARCHAR(32),
    CONSTRAINT pk_credits PRIMARY KEY (id),
    CONSTRAINT ck_credits_kind CHECK (kind IN ('grant', 'adjustment', 'expiry')),
    CONSTRAINT fk_credits_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT,
    CONSTRAINT fk_credits_grant_id_credits FOREIGN KEY(grant_id) REFERENCES credits (id) ON DELETE RESTRICT,
    CONSTRAINT uq_credits_grant_id UNIQUE (grant_id)
);
CREATE INDEX ix_credits_tenant_id ON credits (tenant_id);
CREATE TABLE webhooks (
    id VARCHAR(32) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    url VARCHAR(2000) NOT NULL,
    secret VARCHAR(100) NOT NULL,
    thresholds JSON NOT NULL,
    created_at DATETIME NOT NULL,
    removed_at DATETIME, sealed_secret BLOB,
    CONSTRAINT pk_webhooks PRIMARY KEY (id),
    CONSTRAINT fk_webhooks_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT
);
CREATE INDEX ix_webhooks_tenant_id ON webhooks (tenant_id);
CREATE TABLE webhook_events (
    id VARCHAR(32) NOT NULL,
    webhook_id VARCHAR(32) NOT NULL,
    kind VARCHAR(63) NOT NULL,
    subject VARCHAR(100) NOT NULL,
    period VARCHAR(32) NOT NULL,
    threshold INTEGER NOT NULL,
    body VARCHAR NOT NULL,
    created_at DATETIME NOT NULL,
    attempts BIGINT NOT NULL,
    next_attempt_at DATETIME,
    delivered_at DATETIME,
    last_error VARCHAR(200) NOT NULL,
    CONSTRAINT pk_webhook_events PRIMARY KEY (id),
    CONSTRAINT fk_webhook_events_webhook_id_webhooks FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE RESTRICT,
    CONSTRAINT uq_webhook_events_webhook_id UNIQUE (webhook_id, kind, subject, period, threshold)
);
CREATE INDEX ix_webhook_events_due ON webhook_events (delivered_at, next_attempt_at);
CREATE TABLE audit_log (
    sequence INTEGER NOT NULL,
    at DATETIME NOT NULL,
    actor VARCHAR(300) NOT NULL,
    action VARCHAR(63) NOT NULL,
    tenant_id VARCHAR(63),
    subject VARCHAR(300) NOT NULL,
    details VARCHAR NOT NULL,
    previous_hash BLOB NOT NULL,
    hash BLOB NOT NULL,
    CONSTRAINT pk_audit_log PRIMARY KEY (sequence)
);
CREATE INDEX ix_audit_log_tenant_id ON audit_log (tenant_id);
CREATE TRIGGER prices_no_update BEFORE UPDATE ON prices BEGIN SELECT RAISE(ABORT, 'rows of prices are only ever added'); END;
CREATE TRIGGER prices_no_delete BEFORE DELETE ON prices BEGIN SELECT RAISE(ABORT, 'rows of prices are only ever added'); END;
CREATE TRIGGER credits_no_update BEFORE UPDATE ON credits BEGIN SELECT RAISE(ABORT, 'rows of credits are only ever added'); END;
CREATE TRIGGER credits_no_delete BEFORE DELETE ON credits BEGIN SELECT RAISE(ABORT, 'rows of credits are only ever added'); END;
CREATE TRIGGER audit_log_no_update BEFORE UPDATE ON audit_log BEGIN SELECT RAISE(ABORT, 'rows of audit_log are only ever added'); END;
CREATE TRIGGER audit_log_no_delete BEFORE DELETE ON audit_log BEGIN SELECT RAISE(ABORT, 'rows of audit_log are only ever added'); END;
CREATE TABLE usage_ledger (
    request_id VARCHAR NOT NULL,
    created_at DATETIME NOT NULL,
    ended_at DATETIME NOT NULL,
    tenant_id VARCHAR NOT NULL,
    project_id VARCHAR,
    credential_id VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    endpoint VARCHAR NOT NULL,
    dialect VARCHAR NOT NULL,
    service_tier VARCHAR(32) NOT NULL,
    is_streamed BOOLEAN NOT NULL,
    is_prepaid BOOLEAN NOT NULL,
    gateway VARCHAR NOT NULL,
    jobs BIGINT NOT NULL,
    prompt_price BIGINT NOT NULL,
    cached_price BIGINT NOT NULL,
    completion_price BIGINT NOT NULL,
    outcome VARCHAR(32) NOT NULL,
    code VARCHAR NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    cost_micros BIGINT NOT NULL,
    first_token_ms BIGINT NOT NULL, free_prompt_tokens BIGINT DEFAULT '0' NOT NULL, free_cached_tokens BIGINT DEFAULT '0' NOT NULL, free_completion_tokens BIGINT DEFAULT '0' NOT NULL, engine VARCHAR DEFAULT '' NOT NULL,
    CONSTRAINT pk_usage_ledger PRIMARY KEY (request_id, created_at)
);
CREATE INDEX ix_usage_ledger_tenant_id ON usage_ledger (tenant_id, created_at);
CREATE INDEX ix_usage_ledger_project_id ON usage_ledger (project_id, created_at);
CREATE INDEX ix_usage_ledger_credential_id ON usage_ledger (credential_id, created_at);
CREATE INDEX ix_usage_ledger_created_at ON usage_ledger (created_at);
CREATE INDEX ix_usage_ledger_prepaid ON usage_ledger (tenant_id, cost_micros) WHERE is_prepaid;
CREATE TABLE usage_rollups (
    period VARCHAR(32) NOT NULL,
    start_at DATETIME NOT NULL,
    tenant_id VARCHAR NOT NULL,
    project_id VARCHAR NOT NULL,
    credential_id VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    service_tier VARCHAR(32) NOT NULL,
    requests BIGINT NOT NULL,
    failed_requests BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    cost_micros BIGINT NOT NULL, first_token_le_8 BIGINT, first_token_le_11 BIGINT, first_token_le_16 BIGINT, first_token_le_23 BIGINT, first_token_le_32 BIGINT, first_token_le_45 BIGINT, first_token_le_64 BIGINT, first_token_le_91 BIGINT, first_token_le_128 BIGINT, first_token_le_181 BIGINT, first_token_le_256 BIGINT, first_token_le_362 BIGINT, first_token_le_512 BIGINT, first_token_le_724 BIGINT, first_token_le_1024 BIGINT, first_token_le_1448 BIGINT, first_token_le_2048 BIGINT, first_token_le_2896 BIGINT, first_token_le_4096 BIGINT, first_token_le_5793 BIGINT, first_token_le_8192 BIGINT, first_token_le_11585 BIGINT, first_token_le_16384 BIGINT, first_token_le_23170 BIGINT, first_token_le_32768 BIGINT, first_token_le_46341 BIGINT, first_token_le_65536 BIGINT, first_token_le_92682 BIGINT, first_token_le_131072 BIGINT, first_token_le_185364 BIGINT, first_token_le_262144 BIGINT, first_token_le_370728 BIGINT, first_token_le_524288 BIGINT, first_token_le_741455 BIGINT, first_token_le_1048576 BIGINT, first_token_more BIGINT,
    CONSTRAINT pk_usage_rollups PRIMARY KEY (period, start_at, tenant_id, project_id, credential_id, model, service_tier)
);
CREATE INDEX ix_usage_rollups_tenant_id ON usage_rollups (tenant_id, period, start_at);
CREATE TABLE usage_dirty_hours (
    id INTEGER NOT NULL,
    hour DATETIME NOT NULL,
    CONSTRAINT pk_usage_dirty_hours PRIMARY KEY (id)
);
CREATE TRIGGER usage_ledger_no_update BEFORE UPDATE ON usage_ledger BEGIN SELECT RAISE(ABORT, 'rows of usage_ledger are only ever added'); END;
CREATE TRIGGER usage_ledger_no_delete BEFORE DELETE ON usage_ledger BEGIN SELECT RAISE(ABORT, 'rows of usage_ledger are only ever added'); END;
CREATE TABLE files (
    id VARCHAR(63) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    project_id VARCHAR(32),
    name VARCHAR(255) NOT NULL,
    purpose VARCHAR(32) NOT NULL,
    size BIGINT NOT NULL,
    lines BIGINT NOT NULL,
    parts BIGINT NOT NULL,
    created_at DATETIME NOT NULL,
    expires_at DATETIME,
    is_visible BOOLEAN NOT NULL,
    CONSTRAINT pk_files PRIMARY KEY (id),
    CONSTRAINT fk_files_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT
);
CREATE INDEX ix_files_tenant_id ON files (tenant_id, created_at, id);
CREATE INDEX ix_files_expires_at ON files (expires_at);
CREATE TABLE file_parts (
    file_id VARCHAR(63) NOT NULL,
    number BIGINT NOT NULL,
    "key" VARCHAR(200) NOT NULL,
    start BIGINT NOT NULL,
    size BIGINT NOT NULL,
    CONSTRAINT pk_file_parts PRIMARY KEY (file_id, number),
    CONSTRAINT fk_file_parts_file_id_files FOREIGN KEY(file_id) REFERENCES files (id) ON DELETE CASCADE
);
CREATE TABLE batches (
    id VARCHAR(63) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    project_id VARCHAR(32),
    credential_id VARCHAR NOT NULL,
    allowed_models JSON,
    dialect VARCHAR(32),
    endpoint VARCHAR(63) NOT NULL,
    input_file_id VARCHAR(63) NOT NULL,
    output_file_id VARCHAR(63),
    error_file_id VARCHAR(63),
    completion_window VARCHAR(16) NOT NULL,
    metadata JSON,
    output_seconds BIGINT,
    status VARCHAR(32) NOT NULL,
    created_at DATETIME NOT NULL,
    expires_at DATETIME NOT NULL,
    in_progress_at DATETIME,
    progressed_at DATETIME,
    finalizing_at DATETIME,
    completed_at DATETIME,
    failed_at DATETIME,
    expired_at DATETIME,
    cancelling_at DATETIME,
    cancelled_at DATETIME,
    errors JSON,
    models JSON NOT NULL,
    total BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    reasoning_tokens BIGINT NOT NULL,
    claimed_until DATETIME NOT NULL,
    CONSTRAINT pk_batches PRIMARY KEY (id),
    CONSTRAINT fk_batches_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT
);
CREATE INDEX ix_batches_tenant_id ON batches (tenant_id, created_at, id);
CREATE INDEX ix_batches_status ON batches (status, expires_at);
CREATE INDEX ix_batches_input_file_id ON batches (input_file_id);
CREATE TABLE batch_chunks (
    batch_id VARCHAR(63) NOT NULL,
    number BIGINT NOT NULL,
    first_line BIGINT NOT NULL,
    lines BIGINT NOT NULL,
    start BIGINT NOT NULL,
    size BIGINT NOT NULL,
    state VARCHAR(32) NOT NULL,
    gateway VARCHAR(63) NOT NULL,
    leased_until DATETIME NOT NULL,
    CONSTRAINT pk_batch_chunks PRIMARY KEY (batch_id, number),
    CONSTRAINT fk_batch_chunks_batch_id_batches FOREIGN KEY(batch_id) REFERENCES batches (id) ON DELETE CASCADE
);
CREATE INDEX ix_batch_chunks_state ON batch_chunks (state, leased_until);
CREATE TABLE batch_feeds (
    tenant_id VARCHAR(63) NOT NULL,
    target BIGINT NOT NULL,
    rate FLOAT NOT NULL,
    done BIGINT NOT NULL,
    measured_at DATETIME NOT NULL,
    pushed_back_at DATETIME NOT NULL,
    CONSTRAINT pk_batch_feeds PRIMARY KEY (tenant_id)
);
CREATE TABLE adapters (
    id VARCHAR(63) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    name VARCHAR(63) NOT NULL,
    base_model VARCHAR(200) NOT NULL,
    source VARCHAR(1000) NOT NULL,
    is_shared BOOLEAN NOT NULL,
    state VARCHAR(32) NOT NULL,
    reason VARCHAR(500) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    rank BIGINT NOT NULL,
    target_modules JSON NOT NULL,
    size BIGINT NOT NULL,
    is_stored BOOLEAN NOT NULL,
    created_at DATETIME NOT NULL,
    deleted_at DATETIME,
    claimed_until DATETIME NOT NULL,
    CONSTRAINT pk_adapters PRIMARY KEY (id),
    CONSTRAINT fk_adapters_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT
);
CREATE INDEX ix_adapters_tenant_id ON adapters (tenant_id, created_at, id);
CREATE INDEX ix_adapters_state ON adapters (state, claimed_until);
CREATE INDEX ix_adapters_sha256 ON adapters (sha256);
CREATE TABLE model_aliases (
    name VARCHAR(200) NOT NULL,
    weights JSON NOT NULL,
    sticky VARCHAR(32) NOT NULL,
    fallback VARCHAR(200),
    sunset_at DATETIME,
    deprecated_at DATETIME,
    replacement VARCHAR(200) NOT NULL,
    created_at DATETIME NOT NULL,
    CONSTRAINT pk_model_aliases PRIMARY KEY (name)
);
CREATE TABLE "members" (
    id VARCHAR(32) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    subject VARCHAR(255),
    name VARCHAR(200) NOT NULL,
    role VARCHAR(32) NOT NULL,
    created_at DATETIME NOT NULL,
    issuer VARCHAR(255),
    email VARCHAR(200),
    CONSTRAINT pk_members PRIMARY KEY (id),
    CONSTRAINT ck_members_role CHECK (role IN ('owner', 'admin', 'developer', 'billing', 'viewer')),
    CONSTRAINT uq_members_tenant_id UNIQUE (tenant_id, subject),
    CONSTRAINT fk_members_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT,
    CONSTRAINT uq_members_email UNIQUE (tenant_id, email)
);
CREATE INDEX ix_members_subject ON members (subject);
CREATE INDEX ix_members_email ON members (email);
CREATE TABLE usage_positions (
    position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    request_id VARCHAR NOT NULL,
    created_at DATETIME NOT NULL
);
CREATE TABLE export_sinks (
    name VARCHAR(32) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    tag VARCHAR(8) NOT NULL,
    position BIGINT NOT NULL,
    closed_at DATETIME NOT NULL,
    created_at DATETIME NOT NULL,
    paused_at DATETIME,
    lease VARCHAR(32) NOT NULL,
    leased_until DATETIME NOT NULL,
    failures BIGINT NOT NULL,
    next_attempt_at DATETIME NOT NULL,
    last_error VARCHAR(200) NOT NULL,
    CONSTRAINT pk_export_sinks PRIMARY KEY (name)
);
CREATE TABLE export_batches (
    id INTEGER NOT NULL,
    sink VARCHAR(32) NOT NULL,
    state VARCHAR(32) NOT NULL,
    "after" BIGINT NOT NULL,
    upto BIGINT NOT NULL,
    rows BIGINT NOT NULL,
    oldest_at DATETIME NOT NULL,
    identifier VARCHAR(120) NOT NULL,
    tenant_id VARCHAR,
    customer VARCHAR(255) NOT NULL,
    cost_micros BIGINT,
    occurred_at DATETIME NOT NULL,
    attempts BIGINT NOT NULL,
    uncertain_since DATETIME,
    last_error VARCHAR(200) NOT NULL,
    CONSTRAINT pk_export_batches PRIMARY KEY (id),
    CONSTRAINT fk_export_batches_sink_export_sinks FOREIGN KEY(sink) REFERENCES export_sinks (name) ON DELETE CASCADE,
    CONSTRAINT ck_export_batches_state CHECK (state IN ('pending', 'held', 'rejected', 'uncertain'))
);
CREATE INDEX ix_export_batches_sink ON export_batches (sink, state, attempts, id);
CREATE INDEX ix_export_batches_identifier ON export_batches (sink, identifier);
CREATE TABLE service_rollups (
    period VARCHAR(32) NOT NULL,
    start_at DATETIME NOT NULL,
    model VARCHAR NOT NULL,
    requests BIGINT NOT NULL,
    failed_requests BIGINT NOT NULL,
    first_token_le_8 BIGINT,
    first_token_le_11 BIGINT,
    first_token_le_16 BIGINT,
    first_token_le_23 BIGINT,
    first_token_le_32 BIGINT,
    first_token_le_45 BIGINT,
    first_token_le_64 BIGINT,
    first_token_le_91 BIGINT,
    first_token_le_128 BIGINT,
    first_token_le_181 BIGINT,
    first_token_le_256 BIGINT,
    first_token_le_362 BIGINT,
    first_token_le_512 BIGINT,
    first_token_le_724 BIGINT,
    first_token_le_1024 BIGINT,
    first_token_le_1448 BIGINT,
    first_token_le_2048 BIGINT,
    first_token_le_2896 BIGINT,
    first_token_le_4096 BIGINT,
    first_token_le_5793 BIGINT,
    first_token_le_8192 BIGINT,
    first_token_le_11585 BIGINT,
    first_token_le_16384 BIGINT,
    first_token_le_23170 BIGINT,
    first_token_le_32768 BIGINT,
    first_token_le_46341 BIGINT,
    first_token_le_65536 BIGINT,
    first_token_le_92682 BIGINT,
    first_token_le_131072 BIGINT,
    first_token_le_185364 BIGINT,
    first_token_le_262144 BIGINT,
    first_token_le_370728 BIGINT,
    first_token_le_524288 BIGINT,
    first_token_le_741455 BIGINT,
    first_token_le_1048576 BIGINT,
    first_token_more BIGINT,
    CONSTRAINT pk_service_rollups PRIMARY KEY (period, start_at, model)
);
CREATE TABLE service_rejections (
    hour DATETIME NOT NULL,
    model VARCHAR NOT NULL,
    requests BIGINT NOT NULL,
    CONSTRAINT pk_service_rejections PRIMARY KEY (hour, model)
);
INSERT INTO alembic_version VALUES ('0024');
