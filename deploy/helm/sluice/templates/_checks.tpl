{{/*
Checks that the schema cannot express: each conflict between values fails with a message. Takes the
root.
*/}}
{{- define "sluice.check" -}}
{{- $problems := concat
  (fromYamlArray (include "sluice.problemsOfServers" .))
  (fromYamlArray (include "sluice.problemsOfGateways" .))
  (fromYamlArray (include "sluice.problemsOfPools" .)) -}}
{{- if $problems -}}
{{- fail (printf "\n\nThese values cannot be used:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "sluice.problemsOfServers" -}}
{{- $problems := list -}}
{{- range $name, $tag := dict "image.tag" .Values.image.tag "gateway.image.tag" .Values.gateway.image.tag "worker.image.tag" .Values.worker.image.tag "redis.bundled.image.tag" .Values.redis.bundled.image.tag "database.bundled.image.tag" .Values.database.bundled.image.tag -}}
{{- if eq $tag "latest" -}}
{{- $problems = append $problems (printf "%s: set a version instead of `latest`, so that all pods run the same version after a restart." $name) -}}
{{- end -}}
{{- end -}}
{{- $redis := .Values.redis -}}
{{- $database := .Values.database -}}
{{- $redisSources := compact (list $redis.existingSecret $redis.url (ternary "bundled" "" $redis.bundled.enabled)) -}}
{{- if not $redisSources -}}
{{- $problems = append $problems "redis: set redis.existingSecret to a Secret with the URL of Redis, or redis.bundled.enabled to install one." -}}
{{- else if gt (len $redisSources) 1 -}}
{{- $problems = append $problems "redis: only one of redis.existingSecret, redis.url and redis.bundled.enabled can be used." -}}
{{- end -}}
{{- if and $redis.bundled.enabled (not $redis.bundled.existingSecret) (not $redis.bundled.password) -}}
{{- $problems = append $problems "redis.bundled: set redis.bundled.existingSecret to a Secret with the passwords." -}}
{{- end -}}
{{- if and $redis.caExistingSecret $redis.bundled.enabled -}}
{{- $problems = append $problems "redis.caExistingSecret: the bundled Redis has its CA certificate in redis.bundled.tls.existingSecret." -}}
{{- end -}}
{{- if and (regexMatch "[?&]cluster=true" $redis.url) (not $redis.brokerExistingSecret) -}}
{{- $problems = append $problems "redis.url: a cluster requires redis.brokerExistingSecret, since Celery has no cluster." -}}
{{- end -}}
{{- if and $database.caExistingSecret $database.bundled.enabled -}}
{{- $problems = append $problems "database.caExistingSecret: the bundled PostgreSQL has no TLS." -}}
{{- end -}}
{{- if and .Values.migration.sidecars (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- $problems = append $problems (printf "migration.sidecars: Kubernetes 1.29 or newer is required, or a sidecar keeps the migration's pod alive. Given: %s." .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $databaseSources := compact (list $database.existingSecret $database.url (ternary "bundled" "" $database.bundled.enabled)) -}}
{{- if not $databaseSources -}}
{{- $problems = append $problems "database: set database.existingSecret to a Secret with the URL of PostgreSQL, or database.bundled.enabled to install one." -}}
{{- else if gt (len $databaseSources) 1 -}}
{{- $problems = append $problems "database: only one of database.existingSecret, database.url and database.bundled.enabled can be used." -}}
{{- end -}}
{{- if and $database.bundled.enabled (not $database.bundled.existingSecret) (not $database.bundled.password) -}}
{{- $problems = append $problems "database.bundled: set database.bundled.existingSecret to a Secret with the password." -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "sluice.problemsOfGateways" -}}
{{- $problems := list -}}
{{- $gateway := .Values.gateway -}}
{{- $jwt := .Values.jwt -}}
{{- if and (not .Values.cacheSalt.existingSecret) (not .Values.cacheSalt.value) -}}
{{- $problems = append $problems "cacheSalt: set cacheSalt.existingSecret to a Secret with a random text, so that tenants cannot guess each other's prefix-cache salt." -}}
{{- end -}}
{{- if and .Values.metrics.scrapeAnnotations (gt (int $gateway.processes) 1) -}}
{{- $problems = append $problems "gateway.processes: metrics.scrapeAnnotations can name the port of only one process. Use metrics.serviceMonitor.enabled, or one process and more gateway.replicaCount." -}}
{{- end -}}
{{- if $jwt.algorithms -}}
{{- if or (not $jwt.issuer) (not $jwt.audience) -}}
{{- $problems = append $problems "jwt: jwt.issuer and jwt.audience are required with jwt.algorithms." -}}
{{- end -}}
{{- if ne (empty $jwt.operatorClaim) (and (empty $jwt.operatorValue) (empty $jwt.operatorReaderValue)) -}}
{{- $problems = append $problems "jwt: jwt.operatorClaim requires jwt.operatorValue or jwt.operatorReaderValue, and either of them requires jwt.operatorClaim." -}}
{{- end -}}
{{- if and (not $jwt.existingSecret) (or (has "HS256" $jwt.algorithms) (not $jwt.jwksUrl)) -}}
{{- $problems = append $problems "jwt: set jwt.existingSecret to a Secret with the HS256 secret or the public keys." -}}
{{- end -}}
{{- end -}}
{{- $oidc := .Values.oidc -}}
{{- if ne (empty $oidc.issuer) (empty $oidc.clientId) -}}
{{- $problems = append $problems "oidc: oidc.issuer and oidc.clientId require each other." -}}
{{- end -}}
{{- if ne (empty $oidc.operatorClaim) (and (empty $oidc.operatorValues) (empty $oidc.operatorReaderValues)) -}}
{{- $problems = append $problems "oidc: oidc.operatorClaim requires oidc.operatorValues or oidc.operatorReaderValues, and either of them requires oidc.operatorClaim." -}}
{{- end -}}
{{- if and (not $oidc.issuer) (or $oidc.operatorClaim (not $oidc.keyLogin)) -}}
{{- $problems = append $problems "oidc: oidc.operatorClaim and oidc.keyLogin=false require oidc.issuer." -}}
{{- end -}}
{{- if ne (empty $oidc.roles) (and (empty (and $oidc.issuer $oidc.roleClaim)) (empty (and $jwt.algorithms $jwt.roleClaim))) -}}
{{- $problems = append $problems "oidc: oidc.roles requires oidc.roleClaim with oidc.issuer, or jwt.roleClaim with jwt.algorithms, and either of them requires oidc.roles." -}}
{{- end -}}
{{- if and .Values.tracing.enabled (not .Values.tracing.endpoint) -}}
{{- $problems = append $problems "tracing: set tracing.endpoint to the address of the collector." -}}
{{- end -}}
{{- if and .Values.mail.existingSecret (not .Values.mail.from) -}}
{{- $problems = append $problems "mail.from: set the address of the sender, since mail.existingSecret is set." -}}
{{- end -}}
{{- if and .Values.audit.sink (ne .Values.audit.sink "log") (not .Values.audit.existingSecret) -}}
{{- $problems = append $problems "audit: set audit.existingSecret to a Secret with the signing key; without it, nothing is sent to audit.sink." -}}
{{- end -}}
{{- $autoscaling := $gateway.autoscaling -}}
{{- if $autoscaling.enabled -}}
{{- if gt (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas) -}}
{{- $problems = append $problems (printf "gateway.autoscaling: minReplicas (%d) must not be more than maxReplicas (%d)." (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if not (dig "requests" "cpu" "" $gateway.resources) -}}
{{- $problems = append $problems "gateway.autoscaling: targetCPUUtilizationPercentage requires gateway.resources.requests.cpu, which is not set." -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.hosts) -}}
{{- $problems = append $problems "gateway.ingress: set gateway.ingress.hosts to at least one host." -}}
{{- end -}}
{{- if and $gateway.httpRoute.enabled (not $gateway.httpRoute.parentRefs) -}}
{{- $problems = append $problems "gateway.httpRoute: set gateway.httpRoute.parentRefs to the Gateways of the route." -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "sluice.problemsOfPools" -}}
{{- $problems := list -}}
{{- $resumeAfter := .Values.config.resumeAfter | default 5 -}}
{{- $names := list -}}
{{- range .Values.worker.pools -}}
{{- $pool := fromYaml (include "sluice.pool" (dict "root" $ "pool" .)) -}}
{{- $where := printf "worker.pools, %s" $pool.name -}}
{{- if has $pool.name $names -}}
{{- $problems = append $problems (printf "%s: the pool's name is not unique." $where) -}}
{{- end -}}
{{- $names = append $names $pool.name -}}
{{- range $problem := fromYamlArray (include "sluice.problemsOfPool" (dict "pool" $pool "resumeAfter" $resumeAfter)) -}}
{{- $problems = append $problems (printf "%s: %s" $where $problem) -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "sluice.problemsOfPool" -}}
{{- $problems := list -}}
{{- $pool := .pool -}}
{{- if and $pool.host $pool.model -}}
{{- $problems = append $problems "only one of model and host can be used." -}}
{{- end -}}
{{- $names := list -}}
{{- range fromYamlArray (include "sluice.workers" $pool) -}}
{{- $name := include "sluice.modelName" . -}}
{{- $where := ternary (printf "host.models, %s: " $name) "" (not (empty $pool.host)) -}}
{{- if has $name $names -}}
{{- $problems = append $problems (printf "%sthe model's name is not unique." $where) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- range $problem := fromYamlArray (include "sluice.problemsOfEngine" .) -}}
{{- $problems = append $problems (printf "%s%s" $where $problem) -}}
{{- end -}}
{{- end -}}
{{- if ge (float64 $pool.leaseSeconds) (float64 .resumeAfter) -}}
{{- $problems = append $problems (printf "leaseSeconds (%v) must be less than config.resumeAfter (%v), or gateways resume jobs that workers still hold." $pool.leaseSeconds .resumeAfter) -}}
{{- end -}}
{{- $autoscaling := $pool.autoscaling -}}
{{- $mostReplicas := ternary $autoscaling.maxReplicas $pool.replicas $autoscaling.enabled -}}
{{- if $autoscaling.enabled -}}
{{- if not $autoscaling.prometheus.serverAddress -}}
{{- $problems = append $problems "autoscaling.prometheus.serverAddress is required: KEDA reads the number of jobs from Prometheus." -}}
{{- end -}}
{{- if gt (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas) -}}
{{- $problems = append $problems (printf "autoscaling.minReplicas (%d) must not be more than maxReplicas (%d)." (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas)) -}}
{{- end -}}
{{- with $autoscaling.jobsPerReplica -}}
{{- $least := int (include "sluice.leastSequences" $pool) -}}
{{- if gt (int .) $least -}}
{{- $problems = append $problems (printf "autoscaling.jobsPerReplica (%d) must not be more than engine.maxSequences (%d), or a full worker does not start another one." (int .) $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $cache := $pool.modelCache -}}
{{- if and (eq $cache.type "claim") (gt (int $mostReplicas) 1) (not (has "ReadWriteMany" $cache.accessModes)) -}}
{{- $problems = append $problems (printf "modelCache: %d workers cannot share a claim without the access mode ReadWriteMany." (int $mostReplicas)) -}}
{{- end -}}
{{- if and (eq $cache.type "existingClaim") (not $cache.existingClaim) -}}
{{- $problems = append $problems "modelCache: set modelCache.existingClaim to the name of the claim." -}}
{{- end -}}
{{- if and $cache.readOnly (ne $cache.type "existingClaim") -}}
{{- $problems = append $problems "modelCache: only an existing claim can be read-only, since other volumes start empty." -}}
{{- end -}}
{{- if and (eq (toString $pool.maxSurge) "0") (eq (toString $pool.maxUnavailable) "0") -}}
{{- $problems = append $problems "maxSurge and maxUnavailable cannot both be 0: no worker could be replaced." -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}

{{- define "sluice.problemsOfEngine" -}}
{{- $problems := list -}}
{{- $gpus := int .gpu.count -}}
{{- $split := int (include "sluice.tensorParallelSize" .) -}}
{{- $others := int (include "sluice.otherParallelism" .) -}}
{{- if hasKey .engine.arguments "tensor_parallel_size" -}}
{{- $problems = append $problems "set gpu.tensorParallelSize instead of engine.arguments.tensor_parallel_size." -}}
{{- else if and (gt $gpus 0) (ne (mul $split $others) (int64 $gpus)) -}}
{{- $problems = append $problems (printf "gpu.count is %d, but the model is split over %d GPUs (tensorParallelSize %d, times %d by engine.arguments)." $gpus (mul $split $others) $split $others) -}}
{{- end -}}
{{- if and (eq .engine.kind "scripted") (gt $gpus 0) -}}
{{- $problems = append $problems "the scripted engine uses no GPU: set gpu.count to 0." -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end -}}
