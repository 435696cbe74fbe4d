{{/* Rules of network policies, each a list item. They take the root. */}}

{{- define "sluice.toNames" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}

{{- define "sluice.toRedis" -}}
{{- $policy := .Values.networkPolicy -}}
{{- if .Values.redis.bundled.enabled -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "sluice.selectorLabels" (dict "root" . "component" "redis") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 6379}
{{- end }}
{{- if or (not .Values.redis.bundled.enabled) .Values.redis.brokerExistingSecret }}
- ports:
    {{- range $policy.redisPorts }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with $policy.redisTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "sluice.toDatabase" -}}
{{- $policy := .Values.networkPolicy -}}
{{- if .Values.database.bundled.enabled -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "sluice.selectorLabels" (dict "root" . "component" "postgresql") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 5432}
{{- else -}}
- ports:
    {{- range $policy.databasePorts }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with $policy.databaseTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The internet, but no private network. */}}
{{- define "sluice.toInternet" -}}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]
    - ipBlock:
        cidr: ::/0
        except: ["fc00::/7", "fe80::/10"]
{{- end -}}

{{/* Collectors of traces, and whatever else values name. */}}
{{- define "sluice.extraEgress" -}}
{{- if .Values.tracing.enabled -}}
- ports:
    {{- range .Values.networkPolicy.tracingPorts }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{ end -}}
{{- with .Values.networkPolicy.extraEgress -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Who may read metrics. Takes root and port. */}}
{{- define "sluice.fromMonitoring" -}}
- ports:
    - {protocol: TCP, port: {{ .port }}}
  {{- with .root.Values.networkPolicy.monitoringFrom }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Pods of this release. Takes root and components. */}}
{{- define "sluice.fromComponents" -}}
- from:
    - podSelector:
        matchLabels:
          app.kubernetes.io/name: {{ include "sluice.name" .root }}
          app.kubernetes.io/instance: {{ .root.Release.Name }}
        matchExpressions:
          - key: app.kubernetes.io/component
            operator: In
            values: {{ toJson .components }}
  ports:
    - {protocol: TCP, port: {{ .port }}}
{{- end -}}
