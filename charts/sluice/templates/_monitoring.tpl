{{/* Whether to install an object of a kind of Prometheus Operator: "true" or nothing.
     Takes (dict "root" $ "switch" "Auto" "kind" "PrometheusRule"). */}}
{{- define "sluice.monitors" -}}
{{- if eq .switch "Enabled" }}true
{{- else if and (eq .switch "Auto") (.root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind)) }}true
{{- end }}
{{- end }}
