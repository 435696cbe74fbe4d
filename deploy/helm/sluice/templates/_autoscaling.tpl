{{/*
KEDA's queries to Prometheus, on the metrics of docs/metrics.md. Every gateway reports the same
queue, so the queries use the maximum. A host's jobs are those of all its models. A gateway that cannot read Redis reports NaN, which `>= 0`
drops: if all do, the result is empty instead of a wrong number.
*/}}

{{/*
Label matchers of gateways' metrics. Takes root, pool and more, a list of further matchers.
*/}}
{{- define "sluice.matchers" -}}
{{- $prometheus := .pool.autoscaling.prometheus -}}
{{- $matchers := list -}}
{{- with $prometheus.namespaceLabel -}}
{{- $matchers = append $matchers (printf "%s=%s" . (quote $.root.Release.Namespace)) -}}
{{- end -}}
{{- range $label, $value := $prometheus.matchLabels -}}
{{- $matchers = append $matchers (printf "%s=%s" $label (quote $value)) -}}
{{- end -}}
{{- join "," (concat $matchers .more) -}}
{{- end -}}

{{/* The queries, as YAML. Takes root and pool. */}}
{{- define "sluice.queries" -}}
{{- $names := list -}}
{{- range fromYamlArray (include "sluice.modelNames" .pool) -}}
{{- $names = append $names (regexQuoteMeta .) -}}
{{- end -}}
{{- $model := printf "model=~%s" (join "|" $names | quote) -}}
{{- $ofModel := include "sluice.matchers" (dict "root" .root "pool" .pool "more" (list $model)) -}}
{{- $refused := include "sluice.matchers" (dict "root" .root "pool" .pool "more" (list $model "reason=~\"no_worker|model_loading\"")) -}}
{{- $jobs := printf "sum(max by (model) (sluice_queue_waiting_jobs{%s} >= 0)) + sum(max by (model) (sluice_queue_leased_jobs{%s} >= 0))" $ofModel $ofModel -}}
{{- if ne (float64 .pool.autoscaling.share) 1.0 -}}
{{- $jobs = printf "(%s) * %v" $jobs .pool.autoscaling.share -}}
{{- end -}}
{{- $oldestWait := printf "max(sluice_queue_oldest_wait_seconds{%s} >= 0) or vector(0)" $ofModel -}}
{{- $wake := printf "clamp_max((max(sluice_queue_waiting_batch_jobs{%s} >= 0) or vector(0)) + (sum(increase(sluice_gateway_refused_requests_total{%s}[5m])) or vector(0)), 1)" $ofModel $refused -}}
{{- toYaml (dict "jobs" $jobs "oldestWait" $oldestWait "wake" $wake) -}}
{{- end -}}

{{/* Sequences of the batch of the pool's smallest engine. Takes the pool. */}}
{{- define "sluice.leastSequences" -}}
{{- $sizes := list -}}
{{- range fromYamlArray (include "sluice.workers" .) -}}
{{- $sizes = append $sizes (int .engine.maxSequences) -}}
{{- end -}}
{{- $least := first $sizes -}}
{{- range $sizes -}}{{- $least = min $least . -}}{{- end -}}
{{- $least -}}
{{- end -}}

{{/* Target number of jobs for each worker. Takes the pool. */}}
{{- define "sluice.jobsPerReplica" -}}
{{- if kindIs "invalid" .autoscaling.jobsPerReplica -}}
{{- max 1 (div (mul (int (include "sluice.leastSequences" .)) 4) 5) -}}
{{- else -}}
{{- int .autoscaling.jobsPerReplica -}}
{{- end -}}
{{- end -}}

{{- define "sluice.triggerAuthentication" -}}
{{- with .prometheus.authenticationRef -}}
authenticationRef:
  name: {{ . }}
{{- end }}
{{- end -}}
