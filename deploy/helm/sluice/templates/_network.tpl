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

{{/*
Some ports of the public internet: the addresses that gateway/platform/outbound/addresses.py accepts as
public. A client's URL thus reaches no other address, even if that code has an error. Takes ports.
*/}}
{{- define "sluice.toInternet" -}}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except:
          - 0.0.0.0/8
          - 10.0.0.0/8
          - 100.64.0.0/10
          - 127.0.0.0/8
          - 168.63.129.16/32
          - 169.254.0.0/16
          - 172.16.0.0/12
          - 192.0.0.0/24
          - 192.0.2.0/24
          - 192.88.99.0/24
          - 192.168.0.0/16
          - 198.18.0.0/15
          - 198.51.100.0/24
          - 203.0.113.0/24
          - 224.0.0.0/4
          - 240.0.0.0/4
    - ipBlock:
        # All public addresses of hosts.
        cidr: 2000::/3
        except: ["2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"]
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}

{{/* Trace collectors, and the additional rules from values. */}}
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

{{/*
Peers that may read metrics. Takes root, port and optionally others, which may connect to that port
as well.
*/}}
{{- define "sluice.fromMonitoring" -}}
- ports:
    - {protocol: TCP, port: {{ .port }}}
  from:
    {{- concat (.root.Values.networkPolicy.monitoringFrom | default (list (dict "namespaceSelector" dict))) (.others | default list) | toYaml | nindent 4 }}
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
