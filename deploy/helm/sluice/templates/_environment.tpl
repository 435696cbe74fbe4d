{{/*
Environment variables. Secrets are only referenced; passwords of the bundled servers become part of
URLs inside the pod.
*/}}

{{/*
A reference to a secret. Takes root, secret, secretKey and, for the chart's own Secret, ownKey and
own (its name).
*/}}
{{- define "sluice.secretKeyRef" -}}
valueFrom:
  secretKeyRef:
    {{- if .secret }}
    name: {{ .secret }}
    key: {{ .secretKey }}
    {{- else }}
    name: {{ .own | default (include "sluice.fullname" .root) }}
    key: {{ .ownKey }}
    {{- end }}
{{- end -}}

{{/* The URL of Redis with the user of a role. Takes root and role (gateway, worker, jobs). */}}
{{- define "sluice.redisEnvironment" -}}
{{- $redis := .root.Values.redis -}}
{{- if $redis.bundled.enabled -}}
- name: REDIS_PASSWORD
  {{- include "sluice.redisPassword" . | nindent 2 }}
- name: SLUICE_REDIS_URL
  value: {{ include "sluice.bundledRedisUrl" . | quote }}
{{- else -}}
- name: SLUICE_REDIS_URL
  {{- include "sluice.secretKeyRef" (dict "root" .root "secret" $redis.existingSecret "secretKey" (index $redis.roleKeys .role | default $redis.existingSecretKey) "ownKey" "redis-url") | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The password of a role of the bundled Redis. Takes root and role. */}}
{{- define "sluice.redisPassword" -}}
{{- $bundled := .root.Values.redis.bundled -}}
{{- include "sluice.secretKeyRef" (dict "root" .root "secret" $bundled.existingSecret "secretKey" (index $bundled.roleKeys .role) "ownKey" (printf "redis-%s-password" .role)) -}}
{{- end -}}

{{/*
The URL of the bundled Redis, into which the pod inserts the password. Takes root and role.
*/}}
{{- define "sluice.bundledRedisUrl" -}}
{{- $server := printf "%s:$(REDIS_PASSWORD)@%s-redis:6379/0" .role (include "sluice.fullname" .root) -}}
{{- if include "sluice.redisTls" .root -}}
rediss://{{ $server }}?ssl_cert_reqs=required&ssl_ca_certs={{ include "sluice.redisTrustFolder" . }}/ca.crt
{{- else -}}
redis://{{ $server }}
{{- end -}}
{{- end -}}

{{/* Whether the bundled Redis uses TLS. Takes the root. */}}
{{- define "sluice.redisTls" -}}
{{- if and .Values.redis.bundled.enabled .Values.redis.bundled.tls.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "sluice.redisTrustFolder" -}}/etc/sluice/redis{{- end -}}

{{/* The Secret with the CA certificate of Redis servers; empty without one. Takes the root. */}}
{{- define "sluice.redisTrust" -}}
{{- if .Values.redis.bundled.enabled -}}
{{- .Values.redis.bundled.tls.existingSecret -}}
{{- else -}}
{{- .Values.redis.caExistingSecret -}}
{{- end -}}
{{- end -}}

{{/*
The CA certificate with which clients verify Redis servers: a volume and its mount, or nothing. They
take the root.
*/}}
{{- define "sluice.redisTrustVolume" -}}
{{- with include "sluice.redisTrust" . -}}
- name: redis-trust
  secret:
    secretName: {{ . }}
    # Excludes the server's key.
    items:
      - key: ca.crt
        path: ca.crt
{{- end -}}
{{- end -}}
{{- define "sluice.redisTrustMount" -}}
{{- if include "sluice.redisTrust" . -}}
- name: redis-trust
  mountPath: {{ include "sluice.redisTrustFolder" . }}
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "sluice.databaseTrustFolder" -}}/etc/sluice/database{{- end -}}

{{/*
The CA certificate with which clients verify PostgreSQL: a volume and its mount, or nothing. They
take the root.
*/}}
{{- define "sluice.databaseTrustVolume" -}}
{{- with .Values.database.caExistingSecret -}}
- name: database-trust
  secret:
    secretName: {{ . }}
    items:
      - key: ca.crt
        path: ca.crt
{{- end -}}
{{- end -}}
{{- define "sluice.databaseTrustMount" -}}
{{- if .Values.database.caExistingSecret -}}
- name: database-trust
  mountPath: {{ include "sluice.databaseTrustFolder" . }}
  readOnly: true
{{- end -}}
{{- end -}}

{{/*
The key with which background jobs sign the audit log's head, and its destination; empty without a
key. Takes the root.
*/}}
{{- define "sluice.auditEnvironment" -}}
{{- if .Values.audit.existingSecret -}}
- name: SLUICE_AUDIT_KEY
  {{- include "sluice.secretKeyRef" (dict "secret" .Values.audit.existingSecret "secretKey" .Values.audit.existingSecretKey) | nindent 2 }}
- name: SLUICE_AUDIT_SINK
  value: {{ .Values.audit.sink | quote }}
{{- end -}}
{{- end -}}

{{/*
The issuer of people, and groups that give them roles: background jobs validate their batches with the
rights of the person. Takes the root.
*/}}
{{- define "sluice.peopleEnvironment" -}}
{{- with coalesce .Values.jwt.issuer .Values.oidc.issuer }}
- name: SLUICE_JWT_ISSUER
  value: {{ . | quote }}
{{- end }}
{{- with .Values.oidc.roles }}
- name: SLUICE_JWT_ROLE_CLAIM
  value: {{ coalesce $.Values.jwt.roleClaim $.Values.oidc.roleClaim | quote }}
- name: SLUICE_OIDC_ROLES
  value: {{ toJson . | quote }}
{{- end }}
{{- end -}}

{{/* The SMTP server and the sender of mail; empty without a server. Takes the root. */}}
{{- define "sluice.mailEnvironment" -}}
{{- if .Values.mail.existingSecret -}}
- name: SLUICE_SMTP_URL
  {{- include "sluice.secretKeyRef" (dict "secret" .Values.mail.existingSecret "secretKey" .Values.mail.existingSecretKey) | nindent 2 }}
- name: SLUICE_MAIL_FROM
  value: {{ .Values.mail.from | quote }}
{{- end -}}
{{- end -}}

{{/* Billing systems to which background jobs export the ledger, and their tokens. Takes the root. */}}
{{- define "sluice.exportsEnvironment" -}}
{{- with .Values.exports -}}
{{- if .sinks -}}
- name: SLUICE_EXPORT_SINKS
  value: {{ .sinks | toJson | quote }}
{{- if .existingSecret }}
- name: SLUICE_EXPORT_TOKENS
  {{- include "sluice.secretKeyRef" (dict "secret" .existingSecret "secretKey" .existingSecretKey) | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The URL of Celery's broker, if that is another Redis. Takes the root. */}}
{{- define "sluice.brokerEnvironment" -}}
{{- with .Values.redis.brokerExistingSecret -}}
- name: SLUICE_CELERY_BROKER_URL
  {{- include "sluice.secretKeyRef" (dict "secret" . "secretKey" $.Values.redis.brokerExistingSecretKey) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The URL of the database. Takes root and, for another copy of the chart's own Secret, own. */}}
{{- define "sluice.databaseEnvironment" -}}
{{- $database := .root.Values.database -}}
{{- if $database.bundled.enabled -}}
- name: POSTGRES_PASSWORD
  {{- include "sluice.secretKeyRef" (dict "root" .root "own" .own "secret" $database.bundled.existingSecret "secretKey" $database.bundled.existingSecretKey "ownKey" "postgresql-password") | nindent 2 }}
- name: SLUICE_DATABASE_URL
  value: postgresql+asyncpg://{{ $database.bundled.name }}:$(POSTGRES_PASSWORD)@{{ include "sluice.fullname" .root }}-postgresql:5432/{{ $database.bundled.name }}
{{- else -}}
- name: SLUICE_DATABASE_URL
  {{- include "sluice.secretKeyRef" (dict "root" .root "own" .own "secret" $database.existingSecret "secretKey" $database.existingSecretKey "ownKey" "database-url") | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Encryption keys of secrets in the database, for processes that write or use such a secret. Takes the
root.
*/}}
{{- define "sluice.encryptionKeys" -}}
{{- with .Values.encryption.existingSecret -}}
- name: SLUICE_ENCRYPTION_KEYS
  {{- include "sluice.secretKeyRef" (dict "secret" . "secretKey" $.Values.encryption.existingSecretKey) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The store of files, and credentials of S3. Takes the root. */}}
{{- define "sluice.filesEnvironment" -}}
{{- $files := .Values.files -}}
- name: SLUICE_FILE_STORE
  value: {{ ternary (include "sluice.filesFolder" .) $files.store (not (empty (include "sluice.filesClaim" .))) | quote }}
{{- $isLogged := ne $files.promptLogStore "none" }}
{{- if $isLogged }}
- name: SLUICE_PROMPT_LOG_STORE
  value: {{ $files.promptLogStore | quote }}
{{- end }}
{{- if or $isLogged (not (include "sluice.filesClaim" .)) }}
{{- with $files.s3.endpointUrl }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with $files.s3.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- with $files.s3.existingSecret }}
- name: AWS_ACCESS_KEY_ID
  {{- include "sluice.secretKeyRef" (dict "secret" . "secretKey" $files.s3.existingSecretIdKey) | nindent 2 }}
- name: AWS_SECRET_ACCESS_KEY
  {{- include "sluice.secretKeyRef" (dict "secret" . "secretKey" $files.s3.existingSecretKey) | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "sluice.filesFolder" -}}/var/lib/sluice/files{{- end -}}

{{/* The claim of the volume of files; empty if they are in a bucket. Takes the root. */}}
{{- define "sluice.filesClaim" -}}
{{- .Values.files.existingClaim | default (ternary (printf "%s-files" (include "sluice.fullname" .)) "" .Values.files.bundled.enabled) -}}
{{- end -}}

{{/* The volume of files and its mount, or nothing. They take the root. */}}
{{- define "sluice.filesVolume" -}}
{{- with include "sluice.filesClaim" . -}}
- name: files
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end -}}
{{- end -}}
{{- define "sluice.filesMount" -}}
{{- if include "sluice.filesClaim" . -}}
- name: files
  mountPath: {{ include "sluice.filesFolder" . }}
{{- end -}}
{{- end -}}

{{/*
Settings of gateways for JWTs, the identity provider and the cache salt. Background jobs would require these secrets for
nothing. Takes the root.
*/}}
{{- define "sluice.gatewayAccess" -}}
- name: SLUICE_CACHE_SALT_SECRET
  {{- include "sluice.secretKeyRef" (dict "root" . "secret" .Values.cacheSalt.existingSecret "secretKey" .Values.cacheSalt.existingSecretKey "ownKey" "cache-salt") | nindent 2 }}
{{- $jwt := .Values.jwt }}
{{- with $jwt.algorithms }}
- name: SLUICE_JWT_ALGORITHMS
  value: {{ join "," . | quote }}
- name: SLUICE_JWT_ISSUER
  value: {{ $jwt.issuer | quote }}
- name: SLUICE_JWT_AUDIENCE
  value: {{ $jwt.audience | quote }}
- name: SLUICE_JWT_TENANT_CLAIM
  value: {{ $jwt.tenantClaim | quote }}
- name: SLUICE_JWT_LEEWAY
  value: {{ include "sluice.text" $jwt.leewaySeconds | quote }}
{{- with $jwt.operatorClaim }}
- name: SLUICE_JWT_OPERATOR_CLAIM
  value: {{ . | quote }}
{{- end }}
{{- with $jwt.operatorValue }}
- name: SLUICE_JWT_OPERATOR_VALUE
  value: {{ . | quote }}
{{- end }}
{{- with $jwt.operatorReaderValue }}
- name: SLUICE_JWT_OPERATOR_READER_VALUE
  value: {{ . | quote }}
{{- end }}
{{- with $jwt.roleClaim }}
- name: SLUICE_JWT_ROLE_CLAIM
  value: {{ . | quote }}
{{- end }}
{{- with $jwt.jwksUrl }}
- name: SLUICE_JWT_JWKS_URL
  value: {{ . | quote }}
{{- end }}
{{- if include "sluice.usesJwks" $ }}
- name: SLUICE_JWT_JWKS_FILE
  value: {{ include "sluice.jwksFolder" $ }}/{{ $jwt.existingSecretJwksKey }}
{{- end }}
{{- end }}
{{- if has "HS256" $jwt.algorithms }}
- name: SLUICE_JWT_SECRET
  {{- include "sluice.secretKeyRef" (dict "secret" .Values.jwt.existingSecret "secretKey" .Values.jwt.existingSecretKey) | nindent 2 }}
{{- end }}
{{- with .Values.oidc.roles }}
- name: SLUICE_OIDC_ROLES
  value: {{ toJson . | quote }}
{{- end }}
{{- include "sluice.identityProvider" . }}
{{- include "sluice.tracingSecret" . }}
{{- end -}}

{{/* Settings of gateways for the OpenID provider of the console. Takes the root. */}}
{{- define "sluice.identityProvider" -}}
{{- $oidc := .Values.oidc }}
{{- with $oidc.issuer }}
- name: SLUICE_OIDC_ISSUER
  value: {{ . | quote }}
- name: SLUICE_OIDC_CLIENT_ID
  value: {{ $oidc.clientId | quote }}
- name: SLUICE_OIDC_SCOPES
  value: {{ join "," $oidc.scopes | quote }}
{{- with $oidc.operatorClaim }}
- name: SLUICE_OIDC_OPERATOR_CLAIM
  value: {{ . | quote }}
{{- end }}
{{- with $oidc.operatorValues }}
- name: SLUICE_OIDC_OPERATOR_VALUES
  value: {{ join "," . | quote }}
{{- end }}
{{- with $oidc.operatorReaderValues }}
- name: SLUICE_OIDC_OPERATOR_READER_VALUES
  value: {{ join "," . | quote }}
{{- end }}
{{- with $oidc.roleClaim }}
- name: SLUICE_OIDC_ROLE_CLAIM
  value: {{ . | quote }}
{{- end }}
{{- with $oidc.emailTenants }}
- name: SLUICE_OIDC_EMAIL_TENANTS
  value: {{ join "," . | quote }}
{{- end }}
- name: SLUICE_CONSOLE_KEY_LOGIN
  value: {{ $oidc.keyLogin | quote }}
{{- if $oidc.existingSecret }}
- name: SLUICE_OIDC_CLIENT_SECRET
  {{- include "sluice.secretKeyRef" (dict "secret" $oidc.existingSecret "secretKey" $oidc.existingSecretKey) | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Whether JWTs are verified with public keys of a file. Takes the root. */}}
{{- define "sluice.usesJwks" -}}
{{- if and (without .Values.jwt.algorithms "HS256") (not .Values.jwt.jwksUrl) -}}true{{- end -}}
{{- end -}}

{{/*
The mount path of the public keys: a folder, since a changed Secret does not update a mounted file.
*/}}
{{- define "sluice.jwksFolder" -}}/etc/sluice/jwt{{- end -}}

{{/*
Settings that depend on the model by their names in camel case, as YAML. Takes one of the pool's
workers.
*/}}
{{- define "sluice.modelSettings" -}}
{{- $model := .model -}}
{{- $engine := .engine -}}
{{- $arguments := deepCopy $engine.arguments -}}
{{- $split := int (include "sluice.tensorParallelSize" .) -}}
{{- if gt $split 1 -}}
{{- $_ := set $arguments "tensor_parallel_size" $split -}}
{{- end -}}
{{- $settings := dict "modelPath" $model.path "modelName" (include "sluice.modelName" .) "engine" $engine.kind "maxSequences" $engine.maxSequences "cpuKvCacheGib" $engine.cpuKvCacheGib -}}
{{- range $key, $value := dict "modelAliases" $model.aliases "dialect" $model.dialect "runner" $model.runner "toolParser" $model.toolParser "reasoningParser" $model.reasoningParser "engineArguments" $arguments -}}
{{- if $value -}}{{- $_ := set $settings $key $value -}}{{- end -}}
{{- end -}}
{{- range $key, $value := dict "contextWindow" $engine.contextWindow "enforceEager" $engine.enforceEager -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $settings $key $value -}}{{- end -}}
{{- end -}}
{{- with $model.chatTemplate -}}
{{- $_ := set $settings "chatTemplate" (printf "%s/%s" (include "sluice.modelFolder" $) (include "sluice.chatTemplateFile" .)) -}}
{{- end -}}
{{- toYaml (mustMerge $settings .config) -}}
{{- end -}}

{{/* The mount path of the files of a pool's models. */}}
{{- define "sluice.modelFolder" -}}/etc/sluice/model{{- end -}}

{{/* The file name of a chat template, which differs for each of a host. Takes the text. */}}
{{- define "sluice.chatTemplateFile" -}}chat_template_{{ sha256sum . | trunc 8 }}.jinja{{- end -}}

{{/*
Files of a pool's models by name, as JSON: chat templates that replace the models' own, and a host's
models. Takes the pool.
*/}}
{{- define "sluice.modelFiles" -}}
{{- $files := dict -}}
{{- $models := list -}}
{{- range fromYamlArray (include "sluice.workers" .) -}}
{{- with .model.chatTemplate -}}
{{- $_ := set $files (include "sluice.chatTemplateFile" .) . -}}
{{- end -}}
{{- $fields := dict -}}
{{- range $key, $value := fromYaml (include "sluice.modelSettings" .) -}}
{{- $_ := set $fields (include "sluice.variable" $key | trimPrefix "SLUICE_" | lower) $value -}}
{{- end -}}
{{- $models = append $models $fields -}}
{{- end -}}
{{- if .host -}}
{{- $_ := set $files "models.json" (toPrettyJson $models) -}}
{{- end -}}
{{- toJson $files -}}
{{- end -}}

{{/* Environment variables of a worker or a host. Takes root and pool. */}}
{{- define "sluice.workerEnvironment" -}}
{{- $pool := .pool -}}
{{- $telemetry := fromYaml (include "sluice.telemetrySettings" .root) -}}
{{ include "sluice.redisEnvironment" (dict "root" .root "role" "worker") }}
{{- if $pool.host }}
- name: SLUICE_HOST_REDIS_URL
  value: $(SLUICE_REDIS_URL)
- name: SLUICE_HOST_MODELS
  value: {{ include "sluice.modelFolder" . }}/models.json
- name: SLUICE_HOST_LOG_FORMAT
  value: {{ $telemetry.SLUICE_LOG_FORMAT | quote }}
- name: SLUICE_HOST_HEALTH_HOST
  value: {{ .root.Values.listenAddress | quote }}
- name: SLUICE_HOST_HEALTH_PORT
  value: "9465"
{{- range $key, $value := $pool.host.config }}
- name: {{ include "sluice.variable" $key | replace "SLUICE_" "SLUICE_HOST_" }}
  value: {{ include "sluice.text" $value | quote }}
{{- end }}
{{- else }}
{{- range $key, $value := fromYaml (include "sluice.modelSettings" $pool) }}
- name: {{ include "sluice.variable" $key }}
  value: {{ include "sluice.text" $value | quote }}
{{- end }}
{{- if and $pool.autoscaling.enabled (eq (int $pool.autoscaling.minReplicas) 0) }}
- name: SLUICE_SCALES_TO_ZERO
  value: "true"
{{- end }}
{{- end }}
- name: SLUICE_LEASE_SECONDS
  value: {{ include "sluice.text" $pool.leaseSeconds | quote }}
- name: SLUICE_DRAIN_SECONDS
  value: {{ include "sluice.text" $pool.drainSeconds | quote }}
{{- range $name, $value := $telemetry }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- include "sluice.tracingSecret" .root }}
- name: SLUICE_HEALTH_HOST
  value: {{ .root.Values.listenAddress | quote }}
- name: SLUICE_HEALTH_PORT
  value: {{ empty $pool.host | ternary "9465" "9466" | quote }}
{{- if include "sluice.usesAdapters" $pool }}
{{ include "sluice.filesEnvironment" .root }}
{{- end }}
{{- $cache := $pool.modelCache }}
{{- /*
The only writable folders. USER is set because torch needs a name and the image may have none for
the uid.
*/}}
- name: HOME
  value: /tmp
- name: USER
  value: sluice
- name: HF_HOME
  value: {{ ternary "/tmp" $cache.mountPath $cache.readOnly }}/huggingface
- name: VLLM_CACHE_ROOT
  value: {{ ternary "/tmp" $cache.mountPath $cache.readOnly }}/vllm
{{- with $pool.huggingFace.existingSecret }}
- name: HF_TOKEN
  {{- include "sluice.secretKeyRef" (dict "secret" . "secretKey" $pool.huggingFace.existingSecretKey) | nindent 2 }}
{{- end }}
{{- with $pool.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The database URL or password from values, as YAML. Takes the root. */}}
{{- define "sluice.databaseSecretData" -}}
{{- $database := .Values.database -}}
{{- $data := dict -}}
{{- if and $database.url (not $database.bundled.enabled) -}}
{{- $_ := set $data "database-url" $database.url -}}
{{- end -}}
{{- if and $database.bundled.enabled $database.bundled.password (not $database.bundled.existingSecret) -}}
{{- $_ := set $data "postgresql-password" $database.bundled.password -}}
{{- end -}}
{{- toYaml $data -}}
{{- end -}}

{{/*
The URL under which customers reach gateways: config.publicUrl, else that of the first host of the
Ingress or the HTTPRoute without a wildcard; empty without one. Takes the root.
*/}}
{{- define "sluice.publicUrl" -}}
{{- $ingress := .Values.gateway.ingress -}}
{{- $route := .Values.gateway.httpRoute -}}
{{- $hosts := ternary $ingress.hosts (ternary $route.hostnames list $route.enabled) $ingress.enabled -}}
{{- $scheme := ternary "http" "https" (and $ingress.enabled (empty $ingress.tls)) -}}
{{- $urls := list -}}
{{- range $hosts -}}
{{- if not (hasPrefix "*" .) -}}
{{- $urls = append $urls (printf "%s://%s" $scheme .) -}}
{{- end -}}
{{- end -}}
{{- .Values.config.publicUrl | default (first (append $urls "")) -}}
{{- end -}}

{{/* Settings of gateways and background jobs that are not secret, as YAML. Takes the root. */}}
{{- define "sluice.settings" -}}
{{- $settings := dict -}}
{{- range $key, $value := .Values.config -}}
{{- $_ := set $settings (include "sluice.variable" $key) (include "sluice.text" $value) -}}
{{- end -}}
{{- with include "sluice.publicUrl" . -}}
{{- $_ := set $settings "SLUICE_PUBLIC_URL" . -}}
{{- end -}}
{{- $_ := mustMerge $settings (fromYaml (include "sluice.telemetrySettings" .)) -}}
{{- if .Values.tracing.enabled -}}
{{- $_ := set $settings "SLUICE_TRACE_CONTENT" (toString .Values.tracing.content) -}}
{{- end -}}
{{- with .Values.metrics.tenants -}}
{{- $_ := set $settings "SLUICE_METRICS_TENANTS" (join "," .) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Secrets from values, as YAML. Takes the root. */}}
{{- define "sluice.secretData" -}}
{{- $data := dict -}}
{{- if and .Values.cacheSalt.value (not .Values.cacheSalt.existingSecret) -}}
{{- $_ := set $data "cache-salt" .Values.cacheSalt.value -}}
{{- end -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.url (not $redis.bundled.enabled) -}}
{{- $_ := set $data "redis-url" $redis.url -}}
{{- end -}}
{{- if and $redis.bundled.enabled $redis.bundled.password (not $redis.bundled.existingSecret) -}}
{{- /* For a trial one password is enough: those of the roles are derived from it. */ -}}
{{- $_ := set $data "redis-password" $redis.bundled.password -}}
{{- range list "gateway" "worker" "jobs" -}}
{{- $_ := set $data (printf "redis-%s-password" .) (printf "%s of %s" . $redis.bundled.password | sha256sum) -}}
{{- end -}}
{{- end -}}
{{- $_ := mustMerge $data (fromYaml (include "sluice.databaseSecretData" .)) -}}
{{- toYaml $data -}}
{{- end -}}

{{/* Files of the bundled Redis, by name, as YAML. Takes the root. */}}
{{- define "sluice.redisFiles" -}}
{{- range $path, $_ := .Files.Glob "redis/*" }}
{{ base $path }}: |
  {{- $.Files.Get $path | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Probe command of the bundled Redis. Takes the root. */}}
{{- define "sluice.redisPing" -}}
{{- if include "sluice.redisTls" . -}}
["redis-cli", "-e", "--tls", "--insecure", "ping"]
{{- else -}}
["redis-cli", "-e", "ping"]
{{- end -}}
{{- end -}}

{{/* Arguments of the bundled Redis other than its files. Takes the root. */}}
{{- define "sluice.redisArguments" -}}
{{- $bundled := .Values.redis.bundled -}}
{{- $arguments := list "--dir" "/data" "--maxmemory" (printf "%dmb" (int $bundled.maxMemoryMiB)) -}}
{{- if include "sluice.redisTls" . -}}
{{- $arguments = concat $arguments (list "--port" "0" "--tls-port" "6379" "--tls-auth-clients" "no" "--tls-cert-file" "/etc/redis-tls/tls.crt" "--tls-key-file" "/etc/redis-tls/tls.key") -}}
{{- else -}}
{{- $arguments = concat $arguments (list "--port" "6379") -}}
{{- end -}}
{{- toYaml $arguments -}}
{{- end -}}

{{/* Settings of logs and of the export of spans for every process, as YAML. Takes the root. */}}
{{- define "sluice.telemetrySettings" -}}
{{- $tracing := .Values.tracing -}}
{{- $settings := dict "SLUICE_LOG_FORMAT" .Values.logs.format -}}
{{- if $tracing.enabled -}}
{{- $_ := set $settings "SLUICE_TRACES" "true" -}}
{{- $_ := set $settings "OTEL_EXPORTER_OTLP_ENDPOINT" $tracing.endpoint -}}
{{- $_ := set $settings "OTEL_TRACES_SAMPLER" $tracing.sampler -}}
{{- with $tracing.samplerArgument -}}
{{- $_ := set $settings "OTEL_TRACES_SAMPLER_ARG" . -}}
{{- end -}}
{{- $_ := set $settings "OTEL_RESOURCE_ATTRIBUTES" (printf "k8s.namespace.name=%s" .Release.Namespace) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Headers for the trace collector. Takes the root; begins with a line break. */}}
{{- define "sluice.tracingSecret" -}}
{{- if and .Values.tracing.enabled .Values.tracing.existingSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  {{- include "sluice.secretKeyRef" (dict "secret" .Values.tracing.existingSecret "secretKey" .Values.tracing.existingSecretKey) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The volumes of gateways and of their check, and the mounts. They take the root. */}}
{{- define "sluice.gatewayMounts" -}}
{{- include "sluice.temporaryMount" . }}
{{- include "sluice.filesMount" . | nindent 0 }}
{{- include "sluice.redisTrustMount" . | nindent 0 }}
{{- include "sluice.databaseTrustMount" . | nindent 0 }}
{{- if include "sluice.usesJwks" . }}
- name: jwt
  mountPath: {{ include "sluice.jwksFolder" . }}
  readOnly: true
{{- end }}
{{- with .Values.gateway.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- define "sluice.gatewayVolumes" -}}
{{- include "sluice.temporaryVolume" . }}
{{- include "sluice.filesVolume" . | nindent 0 }}
{{- include "sluice.redisTrustVolume" . | nindent 0 }}
{{- include "sluice.databaseTrustVolume" . | nindent 0 }}
{{- if include "sluice.usesJwks" . }}
- name: jwt
  secret:
    secretName: {{ .Values.jwt.existingSecret }}
    items:
      - key: {{ .Values.jwt.existingSecretJwksKey }}
        path: {{ .Values.jwt.existingSecretJwksKey }}
{{- end }}
{{- with .Values.gateway.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
