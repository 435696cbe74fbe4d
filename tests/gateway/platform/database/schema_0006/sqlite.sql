CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE tenants (
    id VARCHAR(63) NOT NULL,
    name VARCHAR(200) NOT NULL,
    weight DOUBLE NOT NULL,
    status VARCHAR(32) NOT NULL,
    created_at DATETIME NOT NULL, dialect VARCHAR(32), strict_parameters BOOLEAN DEFAULT 0 NOT NULL, default_model VARCHAR(200), plan_id VARCHAR(63), limits JSON DEFAULT '{}' NOT NULL, billing VARCHAR(32) DEFAULT 'postpaid' NOT NULL, service_tier VARCHAR(32) DEFAULT 'default' NOT NULL, shows_cost BOOLEAN DEFAULT 0 NOT NULL,
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
CREATE TABLE members (
    id VARCHAR(32) NOT NULL,
    tenant_id VARCHAR(63) NOT NULL,
    subject VARCHAR(200) NOT NULL,
    name VARCHAR(200) NOT NULL,
    role VARCHAR(32) NOT NULL,
    created_at DATETIME NOT NULL,
    CONSTRAINT pk_members PRIMARY KEY (id),
    CONSTRAINT ck_members_role CHECK (role IN ('owner', 'admin', 'developer', 'billing', 'viewer')),
    CONSTRAINT fk_members_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE RESTRICT,
    CONSTRAINT uq_members_tenant_id UNIQUE (tenant_id, subject)
);
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
    first_token_ms BIGINT NOT NULL, free_prompt_tokens BIGINT DEFAULT '0' NOT NULL, free_cached_tokens BIGINT DEFAULT '0' NOT NULL, free_completion_tokens BIGINT DEFAULT '0' NOT NULL,
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
    cost_micros BIGINT NOT NULL,
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
INSERT INTO alembic_version VALUES ('0006');
