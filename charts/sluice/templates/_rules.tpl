{{/* What the operator may do where InferenceServices live: the same rules as a ClusterRole or as a Role in each namespace.
     They are RIGHTS in operator/src/sluice_operator/cluster/kinds.py; a test compares the two. */}}
{{- define "sluice.rules" -}}
# Read what users ask for, and say what became of it.
- apiGroups: [sluice.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [sluice.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
# What an InferenceService becomes, applied server-side. Owner references delete it with the resource; what is not wanted
# any more is deleted earlier. PodMonitor and ScaledObject only where the cluster has their definitions.
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [list, watch, create, patch, delete]
# Which configuration is still in use, and what pods say when they fail.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# What `kubectl describe` shows of ours, and what the kubelet tells of mounts and probes that fail.
- apiGroups: [""]
  resources: [events]
  verbs: [create, list, patch]
{{- end }}
