{{/* The name of the operator's objects; at most 63 characters. */}}
{{- define "sluice.name" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ .Release.Name | trunc 54 | trimSuffix "-" }}-operator
{{- end -}}
{{- end }}

{{- define "sluice.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "sluice.name" .) "default") }}
{{- end }}

{{/* What never changes over an upgrade: a Deployment's selector is immutable. */}}
{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: sluice
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A full image reference. Takes (dict "root" $ "image" .Values.images.engine). */}}
{{- define "sluice.image" -}}
{{- $registry := .root.Values.images.registry -}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* A map as `name=value`, separated by commas. */}}
{{- define "sluice.pairs" -}}
{{- $pairs := list -}}
{{- range $name, $value := . -}}{{- $pairs = append $pairs (printf "%s=%s" $name $value) -}}{{- end -}}
{{ join "," $pairs }}
{{- end }}
