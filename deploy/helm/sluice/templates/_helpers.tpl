{{/*
Names, labels and images. Helpers that need more than the root take a dict.
*/}}

{{- define "sluice.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 32 | trimSuffix "-" -}}
{{- end -}}

{{/*
Prefix of object names. Short enough for `-worker-` and the name of a pool in 63 characters.
*/}}
{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 32 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "sluice.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 32 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 32 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Selector labels of pods, which never change. Takes root, component and, for a worker, pool.
*/}}
{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: {{ include "sluice.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
sluice.io/pool: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of objects. Takes the same. */}}
{{- define "sluice.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "sluice.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ include "sluice.name" .root }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Labels of pods. Takes the same, and podLabels. They have no version, so that a new chart alone
restarts no server.
*/}}
{{- define "sluice.podLabels" -}}
{{- $own := fromYaml (include "sluice.selectorLabels" .) -}}
{{- toYaml (merge $own (.podLabels | default dict) .root.Values.commonLabels) -}}
{{- end -}}

{{/* Operators' ports of a gateway's processes: a list of names and ports. */}}
{{- define "sluice.operatorPorts" -}}
{{- range until (int .Values.gateway.processes) }}
- {name: operators{{ if . }}-{{ add . 1 }}{{ end }}, port: {{ add 9463 . }}}
{{- end }}
{{- end -}}

{{/* Annotations of pods. Takes root, podAnnotations and, for pods with metrics, port. */}}
{{- define "sluice.podAnnotations" -}}
{{- if and .port .root.Values.metrics.scrapeAnnotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
prometheus.io/path: /metrics
{{- end }}
{{- with .podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "sluice.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Reference of one of Sluice's images. Takes root and image. */}}
{{- define "sluice.image" -}}
{{- $tag := .image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- include "sluice.imageReference" (merge (dict "registry" .root.Values.image.registry "tag" $tag) .image) -}}
{{- end -}}

{{/* Reference of an image: takes registry, repository, tag and digest. */}}
{{- define "sluice.imageReference" -}}
{{- .registry }}/{{ .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end -}}
{{- end -}}

{{/*
Common fields of every pod of Sluice. Takes root and the values of the component; `spread` has the
labels for the spread.
*/}}
{{- define "sluice.podSpec" -}}
serviceAccountName: {{ .serviceAccountName | default (include "sluice.serviceAccountName" .root) }}
automountServiceAccountToken: false
{{- /* A Service called `sluice` would otherwise set SLUICE_PORT in every pod of the namespace. */}}
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- include "sluice.scheduling" . }}
{{- end -}}

{{/* Scheduling of pods. Takes the same. */}}
{{- define "sluice.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else if .spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .spread | nindent 8 }}
{{- end }}
{{- end -}}

{{/*
A setting as the value of an environment variable; large numbers are written without exponent.
*/}}
{{- define "sluice.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if kindIs "map" . -}}
{{- toJson . -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%d" (int64 .) -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/*
Environment variable of a setting in camel case: `maxWaitingJobs` is SLUICE_MAX_WAITING_JOBS.
*/}}
{{- define "sluice.variable" -}}
SLUICE_{{ regexReplaceAll "([A-Z])" . "_${1}" | upper }}
{{- end -}}

{{/* The pool merged with worker.defaults, as YAML. Takes root and pool. */}}
{{- define "sluice.pool" -}}
{{- $pool := dict -}}
{{- range $key, $value := .root.Values.worker.defaults -}}
{{- $_ := set $pool $key (deepCopy (dict "value" $value)).value -}}
{{- end -}}
{{- include "sluice.overlay" (dict "base" $pool "over" .pool) -}}
{{- end -}}

{{/*
`base` overridden by `over`, as YAML. Values 0, false and empty override too, which Sprig's merge
ignores. Free-form maps of `over` (selectors, settings, engine arguments) add to those of `base`.
*/}}
{{- define "sluice.overlay" -}}
{{- $base := .base -}}
{{- range $key, $value := .over -}}
{{- $before := get $base $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $before) -}}
{{- $_ := set $base $key (fromYaml (include "sluice.overlay" (dict "base" $before "over" $value))) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $base -}}
{{- end -}}

{{/*
The pool once for each of its models, as YAML: a host's models override parts of the pool. Takes the
pool.
*/}}
{{- define "sluice.workers" -}}
{{- if .host -}}
{{- range .host.models }}
- {{- include "sluice.overlay" (dict "base" (omit $ "host" | deepCopy) "over" .) | nindent 2 }}
{{- end }}
{{- else -}}
{{- list . | toYaml -}}
{{- end -}}
{{- end -}}

{{/* Name under which a model is served. Takes one of the pool's workers. */}}
{{- define "sluice.modelName" -}}
{{- .model.name | default (base .model.path) -}}
{{- end -}}

{{/* Names of the models of a pool, as YAML. Takes the pool. */}}
{{- define "sluice.modelNames" -}}
{{- range fromYamlArray (include "sluice.workers" .) }}
- {{ include "sluice.modelName" . | quote }}
{{- end }}
{{- end -}}

{{/* Whether a worker of the pool has adapters, which are in the file store. Takes the pool. */}}
{{- define "sluice.usesAdapters" -}}
{{- range fromYamlArray (include "sluice.workers" .) -}}
{{- if .config.adapterSlots -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether a pool is a host. Takes the root. */}}
{{- define "sluice.hasHosts" -}}
{{- range .Values.worker.pools -}}{{- if .host -}}true{{- end -}}{{- end -}}
{{- end -}}

{{/* Number of GPUs among which a pool's model is split. Takes the pool. */}}
{{- define "sluice.tensorParallelSize" -}}
{{- if kindIs "invalid" .gpu.tensorParallelSize -}}
{{- max 1 (div (int .gpu.count) (int (include "sluice.otherParallelism" .))) -}}
{{- else -}}
{{- int .gpu.tensorParallelSize -}}
{{- end -}}
{{- end -}}

{{/*
Number of such splits, by the engine arguments. Takes the pool. A rank of data parallelism is in one
worker; the other ranks are in other workers, with GPUs of their own.
*/}}
{{- define "sluice.otherParallelism" -}}
{{- $arguments := .engine.arguments -}}
{{- $ranks := ternary 1 (int (default 1 $arguments.data_parallel_size)) (hasKey $arguments "data_parallel_rank") -}}
{{- mul (int (default 1 $arguments.pipeline_parallel_size)) $ranks -}}
{{- end -}}

{{/*
Grace period of a gateway in seconds: its drain, its shutdown after that (6 s), and a margin.
*/}}
{{- define "sluice.gatewayGraceSeconds" -}}
{{- add (int .Values.gateway.drain.delaySeconds) (int .Values.gateway.drain.timeoutSeconds) 15 -}}
{{- end -}}

{{/*
Grace period of a worker in seconds: its drain, the return of jobs (6 s), the stop of the engine,
and a margin.
*/}}
{{- define "sluice.workerGraceSeconds" -}}
{{- add (int .drainSeconds) 30 -}}
{{- end -}}

{{/* A volume for temporary files and its mount; all other files are read-only. */}}
{{- define "sluice.temporaryVolume" -}}
- name: tmp
  emptyDir: {}
{{- end -}}
{{- define "sluice.temporaryMount" -}}
- name: tmp
  mountPath: /tmp
{{- end -}}

{{/*
A container that succeeds once the database schema is current, and is retried until then: the
containers after it would exit immediately on an older schema. Takes the root.
*/}}
{{- define "sluice.schemaContainer" -}}
- name: schema
  image: {{ include "sluice.image" (dict "root" . "image" .Values.gateway.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: ["db", "status"]
  env:
    {{- include "sluice.databaseEnvironment" (dict "root" .) | nindent 4 }}
  {{- with .Values.migration.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    {{- include "sluice.temporaryMount" . | nindent 4 }}
    {{- include "sluice.databaseTrustMount" . | nindent 4 }}
{{- end -}}

{{/* Resources of a worker with its GPUs, whose requests and limits are equal. Takes the pool. */}}
{{- define "sluice.workerResources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- if gt (int .gpu.count) 0 -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (set (get $resources $kind | default dict) $.gpu.resourceName (int $.gpu.count)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Name of the migration's service account. Takes the root. */}}
{{- define "sluice.migrationAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- include "sluice.fullname" . }}-migration
{{- else -}}
{{- include "sluice.serviceAccountName" . -}}
{{- end -}}
{{- end -}}

{{/*
The pod of the migration. A sidecar of the values is an init container that always restarts: it
starts before the migration, and ends with it. Takes the root.
*/}}
{{- define "sluice.migrationTemplate" -}}
{{- $migration := .Values.migration -}}
{{- $of := dict "root" . "component" "migration" "podLabels" $migration.podLabels -}}
metadata:
  labels:
    {{- include "sluice.podLabels" $of | nindent 4 }}
  {{- with $migration.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "sluice.podSpec" (dict "root" . "values" $migration "serviceAccountName" (include "sluice.migrationAccountName" .)) | nindent 2 }}
  restartPolicy: Never
  {{- with $migration.sidecars }}
  initContainers:
    {{- range . }}
    - {{- merge (dict "restartPolicy" "Always") . | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: migration
      image: {{ include "sluice.image" (dict "root" . "image" .Values.gateway.image) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: ["db", "upgrade"]
      env:
        {{- include "sluice.databaseEnvironment" (dict "root" . "own" (printf "%s-migration" (include "sluice.fullname" .))) | nindent 8 }}
        {{- with $migration.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $migration.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml .Values.containerSecurityContext | nindent 8 }}
      volumeMounts:
        {{- include "sluice.temporaryMount" . | nindent 8 }}
        {{- include "sluice.databaseTrustMount" . | nindent 8 }}
        {{- with $migration.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "sluice.temporaryVolume" . | nindent 4 }}
    {{- include "sluice.databaseTrustVolume" . | nindent 4 }}
    {{- with $migration.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/*
The annotations of the migration and of its dependencies, or nothing: those of the values, and on an
upgrade those of a hook. Takes root, weight and more annotations.
*/}}
{{- define "sluice.migrationAnnotations" -}}
{{- $annotations := merge dict (.annotations | default dict) .root.Values.migration.annotations -}}
{{- if .root.Release.IsUpgrade -}}
{{- $_ := set $annotations "helm.sh/hook" "pre-upgrade" -}}
{{- $_ := set $annotations "helm.sh/hook-weight" .weight -}}
{{- $_ := set $annotations "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" -}}
{{- end -}}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
