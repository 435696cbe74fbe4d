CREATE FUNCTION public.sluice_append_only() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
            BEGIN RAISE EXCEPTION 'rows of % are only ever added', TG_TABLE_NAME; END $$;
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.api_keys (
    id character varying(32) NOT NULL,
    tenant_id character varying(63) NOT NULL,
    prefix character varying(12) NOT NULL,
    digest bytea NOT NULL,
    name character varying(200) NOT NULL,
    scopes json NOT NULL,
    allowed_models json,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL,
    dialect character varying(32),
    project_id character varying(32),
    allowed_addresses json,
    limits json DEFAULT '{}'::json NOT NULL,
    old_prefix character varying(12),
    old_digest bytea,
    old_expires_at timestamp with time zone
);
CREATE TABLE public.audit_log (
    sequence bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    actor character varying(300) NOT NULL,
    action character varying(63) NOT NULL,
    tenant_id character varying(63),
    subject character varying(300) NOT NULL,
    details character varying NOT NULL,
    previous_hash bytea NOT NULL,
    hash bytea NOT NULL
);
CREATE TABLE public.credits (
    id character varying(32) NOT NULL,
    tenant_id character varying(63) NOT NULL,
    kind character varying(32) NOT NULL,
    amount_micros bigint NOT NULL,
    note character varying(200) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone,
    grant_id character varying(32),
    CONSTRAINT ck_credits_kind CHECK (((kind)::text = ANY ((ARRAY['grant'::character varying, 'adjustment'::character varying, 'expiry'::character varying])::text[])))
);
CREATE TABLE public.members (
    id character varying(32) NOT NULL,
    tenant_id character varying(63) NOT NULL,
    subject character varying(200) NOT NULL,
    name character varying(200) NOT NULL,
    role character varying(32) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT ck_members_role CHECK (((role)::text = ANY ((ARRAY['owner'::character varying, 'admin'::character varying, 'developer'::character varying, 'billing'::character varying, 'viewer'::character varying])::text[])))
);
CREATE TABLE public.plans (
    id character varying(63) NOT NULL,
    name character varying(200) NOT NULL,
    tenant_limits json NOT NULL,
    project_limits json NOT NULL,
    key_limits json NOT NULL,
    created_at timestamp with time zone NOT NULL
);
CREATE TABLE public.prices (
    id bigint NOT NULL,
    model character varying(200) NOT NULL,
    service_tier character varying(32) NOT NULL,
    prompt_micros bigint NOT NULL,
    cached_micros bigint NOT NULL,
    completion_micros bigint NOT NULL,
    effective_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT ck_prices_micros CHECK (((0 <= cached_micros) AND (cached_micros <= prompt_micros) AND (0 <= completion_micros)))
);
CREATE SEQUENCE public.prices_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.prices_id_seq OWNED BY public.prices.id;
CREATE TABLE public.projects (
    id character varying(32) NOT NULL,
    tenant_id character varying(63) NOT NULL,
    name character varying(200) NOT NULL,
    status character varying(32) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    limits json NOT NULL,
    CONSTRAINT ck_projects_status CHECK (((status)::text = ANY ((ARRAY['active'::character varying, 'archived'::character varying])::text[])))
);
CREATE TABLE public.tenants (
    id character varying(63) NOT NULL,
    name character varying(200) NOT NULL,
    weight double precision NOT NULL,
    status character varying(32) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    dialect character varying(32),
    strict_parameters boolean DEFAULT false NOT NULL,
    default_model character varying(200),
    plan_id character varying(63),
    limits json DEFAULT '{}'::json NOT NULL,
    billing character varying(32) DEFAULT 'postpaid'::character varying NOT NULL,
    service_tier character varying(32) DEFAULT 'default'::character varying NOT NULL,
    shows_cost boolean DEFAULT false NOT NULL,
    CONSTRAINT ck_tenants_status CHECK (((status)::text = ANY ((ARRAY['active'::character varying, 'suspended'::character varying])::text[]))),
    CONSTRAINT ck_tenants_weight_positive CHECK ((weight > (0)::double precision))
);
CREATE TABLE public.usage_dirty_hours (
    id bigint NOT NULL,
    hour timestamp with time zone NOT NULL
);
CREATE SEQUENCE public.usage_dirty_hours_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.usage_dirty_hours_id_seq OWNED BY public.usage_dirty_hours.id;
CREATE TABLE public.usage_ledger (
    request_id character varying NOT NULL,
    created_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone NOT NULL,
    tenant_id character varying NOT NULL,
    project_id character varying,
    credential_id character varying NOT NULL,
    model character varying NOT NULL,
    endpoint character varying NOT NULL,
    dialect character varying NOT NULL,
    service_tier character varying(32) NOT NULL,
    is_streamed boolean NOT NULL,
    is_prepaid boolean NOT NULL,
    gateway character varying NOT NULL,
    jobs bigint NOT NULL,
    prompt_price bigint NOT NULL,
    cached_price bigint NOT NULL,
    completion_price bigint NOT NULL,
    outcome character varying(32) NOT NULL,
    code character varying NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cost_micros bigint NOT NULL,
    first_token_ms bigint NOT NULL,
    free_prompt_tokens bigint DEFAULT '0'::bigint NOT NULL,
    free_cached_tokens bigint DEFAULT '0'::bigint NOT NULL,
    free_completion_tokens bigint DEFAULT '0'::bigint NOT NULL
)
PARTITION BY RANGE (created_at);
CREATE TABLE public.usage_rollups (
    period character varying(32) NOT NULL,
    start_at timestamp with time zone NOT NULL,
    tenant_id character varying NOT NULL,
    project_id character varying NOT NULL,
    credential_id character varying NOT NULL,
    model character varying NOT NULL,
    service_tier character varying(32) NOT NULL,
    requests bigint NOT NULL,
    failed_requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cost_micros bigint NOT NULL
);
CREATE TABLE public.webhook_events (
    id character varying(32) NOT NULL,
    webhook_id character varying(32) NOT NULL,
    kind character varying(63) NOT NULL,
    subject character varying(100) NOT NULL,
    period character varying(32) NOT NULL,
    threshold integer NOT NULL,
    body character varying NOT NULL,
    created_at timestamp with time zone NOT NULL,
    attempts bigint NOT NULL,
    next_attempt_at timestamp with time zone,
    delivered_at timestamp with time zone,
    last_error character varying(200) NOT NULL
);
CREATE TABLE public.webhooks (
    id character varying(32) NOT NULL,
    tenant_id character varying(63) NOT NULL,
    url character varying(2000) NOT NULL,
    secret character varying(100) NOT NULL,
    thresholds json NOT NULL,
    created_at timestamp with time zone NOT NULL,
    removed_at timestamp with time zone,
    sealed_secret bytea
);
ALTER TABLE ONLY public.prices ALTER COLUMN id SET DEFAULT nextval('public.prices_id_seq'::regclass);
ALTER TABLE ONLY public.usage_dirty_hours ALTER COLUMN id SET DEFAULT nextval('public.usage_dirty_hours_id_seq'::regclass);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT pk_api_keys PRIMARY KEY (id);
ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT pk_audit_log PRIMARY KEY (sequence);
ALTER TABLE ONLY public.credits
    ADD CONSTRAINT pk_credits PRIMARY KEY (id);
ALTER TABLE ONLY public.members
    ADD CONSTRAINT pk_members PRIMARY KEY (id);
ALTER TABLE ONLY public.plans
    ADD CONSTRAINT pk_plans PRIMARY KEY (id);
ALTER TABLE ONLY public.prices
    ADD CONSTRAINT pk_prices PRIMARY KEY (id);
ALTER TABLE ONLY public.projects
    ADD CONSTRAINT pk_projects PRIMARY KEY (id);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT pk_tenants PRIMARY KEY (id);
ALTER TABLE ONLY public.usage_dirty_hours
    ADD CONSTRAINT pk_usage_dirty_hours PRIMARY KEY (id);
ALTER TABLE ONLY public.usage_ledger
    ADD CONSTRAINT pk_usage_ledger PRIMARY KEY (request_id, created_at);
ALTER TABLE ONLY public.usage_rollups
    ADD CONSTRAINT pk_usage_rollups PRIMARY KEY (period, start_at, tenant_id, project_id, credential_id, model, service_tier);
ALTER TABLE ONLY public.webhook_events
    ADD CONSTRAINT pk_webhook_events PRIMARY KEY (id);
ALTER TABLE ONLY public.webhooks
    ADD CONSTRAINT pk_webhooks PRIMARY KEY (id);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT uq_api_keys_prefix UNIQUE (prefix);
ALTER TABLE ONLY public.credits
    ADD CONSTRAINT uq_credits_grant_id UNIQUE (grant_id);
ALTER TABLE ONLY public.members
    ADD CONSTRAINT uq_members_tenant_id UNIQUE (tenant_id, subject);
ALTER TABLE ONLY public.webhook_events
    ADD CONSTRAINT uq_webhook_events_webhook_id UNIQUE (webhook_id, kind, subject, period, threshold);
CREATE INDEX ix_api_keys_old_prefix ON public.api_keys USING btree (old_prefix);
CREATE INDEX ix_api_keys_project_id ON public.api_keys USING btree (project_id);
CREATE INDEX ix_api_keys_tenant_id ON public.api_keys USING btree (tenant_id);
CREATE INDEX ix_audit_log_tenant_id ON public.audit_log USING btree (tenant_id);
CREATE INDEX ix_credits_tenant_id ON public.credits USING btree (tenant_id);
CREATE INDEX ix_prices_model ON public.prices USING btree (model, service_tier, effective_at);
CREATE INDEX ix_projects_tenant_id ON public.projects USING btree (tenant_id);
CREATE INDEX ix_tenants_plan_id ON public.tenants USING btree (plan_id);
CREATE INDEX ix_usage_ledger_created_at ON ONLY public.usage_ledger USING btree (created_at);
CREATE INDEX ix_usage_ledger_credential_id ON ONLY public.usage_ledger USING btree (credential_id, created_at) INCLUDE (prompt_tokens, completion_tokens, cost_micros);
CREATE INDEX ix_usage_ledger_prepaid ON ONLY public.usage_ledger USING btree (tenant_id, cost_micros) WHERE is_prepaid;
CREATE INDEX ix_usage_ledger_project_id ON ONLY public.usage_ledger USING btree (project_id, created_at) INCLUDE (prompt_tokens, completion_tokens, cost_micros);
CREATE INDEX ix_usage_ledger_tenant_id ON ONLY public.usage_ledger USING btree (tenant_id, created_at) INCLUDE (prompt_tokens, completion_tokens, cost_micros);
CREATE INDEX ix_usage_rollups_tenant_id ON public.usage_rollups USING btree (tenant_id, period, start_at);
CREATE INDEX ix_webhook_events_due ON public.webhook_events USING btree (delivered_at, next_attempt_at);
CREATE INDEX ix_webhooks_tenant_id ON public.webhooks USING btree (tenant_id);
CREATE TRIGGER audit_log_append_only BEFORE DELETE OR UPDATE ON public.audit_log FOR EACH ROW EXECUTE FUNCTION public.sluice_append_only();
CREATE TRIGGER credits_append_only BEFORE DELETE OR UPDATE ON public.credits FOR EACH ROW EXECUTE FUNCTION public.sluice_append_only();
CREATE TRIGGER prices_append_only BEFORE DELETE OR UPDATE ON public.prices FOR EACH ROW EXECUTE FUNCTION public.sluice_append_only();
CREATE TRIGGER usage_ledger_append_only BEFORE DELETE OR UPDATE ON public.usage_ledger FOR EACH ROW EXECUTE FUNCTION public.sluice_append_only();
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT fk_api_keys_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE RESTRICT;
ALTER TABLE ONLY public.credits
    ADD CONSTRAINT fk_credits_grant_id_credits FOREIGN KEY (grant_id) REFERENCES public.credits(id) ON DELETE RESTRICT;
ALTER TABLE ONLY public.credits
    ADD CONSTRAINT fk_credits_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE RESTRICT;
ALTER TABLE ONLY public.members
    ADD CONSTRAINT fk_members_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE RESTRICT;
ALTER TABLE ONLY public.projects
    ADD CONSTRAINT fk_projects_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE RESTRICT;
ALTER TABLE ONLY public.webhook_events
    ADD CONSTRAINT fk_webhook_events_webhook_id_webhooks FOREIGN KEY (webhook_id) REFERENCES public.webhooks(id) ON DELETE RESTRICT;
ALTER TABLE ONLY public.webhooks
    ADD CONSTRAINT fk_webhooks_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE RESTRICT;
INSERT INTO alembic_version VALUES ('0006');
