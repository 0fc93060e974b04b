{{- define "topkd.name" -}}
{{- if contains "topkd" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-topkd" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "topkd.selector" -}}
app.kubernetes.io/name: topkd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "topkd.labels" -}}
{{ include "topkd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "topkd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "topkd.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "topkd.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- /* Longer than preStop, the drain, and the five seconds that a front has beyond it. */}}
{{- define "topkd.grace" -}}
{{ add .Values.server.preStopSeconds .Values.server.drainSeconds 10 }}
{{- end }}

{{- define "topkd.confined" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.sockets.group }}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "topkd.mpsEnv" -}}
{{- if .Values.mps.enabled }}
- {name: CUDA_MPS_PIPE_DIRECTORY, value: /run/nvidia-mps}
- {name: CUDA_MPS_LOG_DIRECTORY, value: /tmp}
# Under MPS a process has few hardware queues unless it asks: a stream that waits for a selection would hold up others.
- {name: CUDA_DEVICE_MAX_CONNECTIONS, value: "32"}
{{- end }}
{{- end }}

{{- define "topkd.mpsMounts" -}}
{{- if .Values.mps.enabled }}
- {name: mps, mountPath: /run/nvidia-mps}
{{- end }}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- /* The server's container; takes (dict "root" $ "sidecar" bool). */}}
{{- define "topkd.server" -}}
{{- $ := .root }}{{- $values := $.Values }}
name: server
image: {{ include "topkd.image" $ }}
imagePullPolicy: {{ $values.image.pullPolicy }}
{{- if .sidecar }}
restartPolicy: Always
{{- end }}
args:
  - serve
  - --devices={{ $values.server.devices }}
  - --metrics-host=0.0.0.0
  - --metrics-port={{ $values.metrics.port }}
  - --health-address=0.0.0.0:{{ $values.health.port }}
  - --drain-seconds={{ $values.server.drainSeconds }}
  - --spares={{ $values.server.spares }}
  - --log-level={{ $values.server.logLevel }}
  - --allow-gid={{ $values.sockets.group }}
  {{- range $name, $bound := $values.server.limits }}
  - --limit={{ $name }}={{ int64 $bound }}
  {{- end }}
  {{- if $values.tcp.enabled }}
  - --tcp=0.0.0.0:{{ $values.tcp.port }}
  {{- if $values.tcp.tokenSecret }}
  - --tcp-token-file=/etc/topkd/token/token
  {{- end }}
  {{- if $values.tcp.tlsSecret }}
  - --tls-cert=/etc/topkd/tls/tls.crt
  - --tls-key=/etc/topkd/tls/tls.key
  {{- end }}
  {{- if $values.tcp.clientCaSecret }}
  - --tls-client-ca=/etc/topkd/ca/ca.crt
  {{- end }}
  {{- if $values.tcp.allowInsecure }}
  - --allow-insecure-tcp
  {{- end }}
  {{- end }}
  {{- with $values.server.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - {name: TOPKD_SOCKET_DIR, value: {{ ternary "/run/topkd/server" "/run/topkd" .sidecar }}}
  {{- if and (not .sidecar) (eq $values.gpu.mode "all") }}
  - {name: NVIDIA_VISIBLE_DEVICES, value: all}
  {{- end }}
  {{- include "topkd.mpsEnv" $ | nindent 2 }}
  {{- with $values.server.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: metrics, containerPort: {{ $values.metrics.port }}}
  - {name: health, containerPort: {{ $values.health.port }}}
  {{- if $values.tcp.enabled }}
  {{- range $place := until (int $values.tcp.devices) }}
  - {name: tcp-{{ $place }}, containerPort: {{ add $values.tcp.port $place }}}
  {{- end }}
  {{- end }}
# The kubelet's probe speaks plain text to the pod's address. "live" is the process, "" is all of its devices: one broken GPU
# makes the pod unready and does not restart the others' servers.
startupProbe:
  grpc: {port: {{ $values.health.port }}, service: live}
  periodSeconds: 2
  failureThreshold: 90
livenessProbe:
  grpc: {port: {{ $values.health.port }}, service: live}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ $values.health.port }}}
  periodSeconds: 5
  timeoutSeconds: 3
lifecycle:
  preStop:
    sleep: {seconds: {{ $values.server.preStopSeconds }}}
securityContext:
  {{- include "topkd.confined" $ | nindent 2 }}
resources:
  {{- include "topkd.serverResources" . | nindent 2 }}
volumeMounts:
  - {name: sockets, mountPath: /run/topkd}
  - {name: tmp, mountPath: /tmp}
  {{- include "topkd.mpsMounts" $ | nindent 2 }}
  {{- if $values.tcp.enabled }}
  {{- if $values.tcp.tokenSecret }}
  - {name: token, mountPath: /etc/topkd/token, readOnly: true}
  {{- end }}
  {{- if $values.tcp.tlsSecret }}
  - {name: tls, mountPath: /etc/topkd/tls, readOnly: true}
  {{- end }}
  {{- if $values.tcp.clientCaSecret }}
  - {name: ca, mountPath: /etc/topkd/ca, readOnly: true}
  {{- end }}
  {{- end }}
{{- end }}

{{- define "topkd.serverResources" -}}
{{- $resources := deepCopy .root.Values.server.resources }}
{{- if .sidecar }}
{{- if eq .root.Values.sidecar.gpu.mode "claim" }}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) }}
{{- else if eq .root.Values.sidecar.gpu.mode "shared" }}
{{- $_ := set $resources "limits" (merge (dict .root.Values.gpu.sharedResource 1) (default dict $resources.limits)) }}
{{- end }}
{{- else if eq .root.Values.gpu.mode "shared" }}
{{- $_ := set $resources "limits" (merge (dict .root.Values.gpu.sharedResource (int .root.Values.gpu.count)) (default dict $resources.limits)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /* An MPS daemon as a sidecar that is there before the server; takes (dict "root" $ "sidecar" bool). */}}
{{- define "topkd.mps" -}}
{{- $ := .root }}
name: mps
image: {{ include "topkd.image" $ }}
imagePullPolicy: {{ $.Values.image.pullPolicy }}
restartPolicy: Always
# The NVIDIA runtime puts the program into the container.
command: [nvidia-cuda-mps-control, -f]
env:
  {{- if not .sidecar }}
  - {name: NVIDIA_VISIBLE_DEVICES, value: all}
  {{- end }}
  {{- include "topkd.mpsEnv" $ | nindent 2 }}
startupProbe:
  exec:
    command: [python, -c, "import os, stat, sys; sys.exit(not stat.S_ISFIFO(os.stat('/run/nvidia-mps/control').st_mode))"]
  periodSeconds: 2
  failureThreshold: 30
securityContext:
  {{- include "topkd.confined" $ | nindent 2 }}
resources:
  requests: {cpu: 50m, memory: 64Mi}
  limits: {memory: 512Mi}
  {{- if and .sidecar (eq $.Values.sidecar.gpu.mode "claim") }}
  claims: [{name: gpu}]
  {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- include "topkd.mpsMounts" $ | nindent 2 }}
{{- end }}

{{- define "topkd.tcpVolumes" -}}
{{- if .Values.tcp.enabled }}
{{- with .Values.tcp.tokenSecret }}
- {name: token, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.tcp.tlsSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.tcp.clientCaSecret }}
- {name: ca, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- end }}

{{- /* The example engine's container; takes (dict "root" $ "sidecar" bool). */}}
{{- define "topkd.engine" -}}
{{- $ := .root }}{{- $engine := $.Values.engine }}
name: engine
image: {{ include "topkd.image" $ }}
imagePullPolicy: {{ $.Values.image.pullPolicy }}
command: [python, /engine/engine.py, {{ $engine.device }}]
env:
  {{- $sockets := ternary "/run/topkd/server" "/run/topkd" .sidecar }}
  {{- if eq $engine.device "cpu" }}
  # The folder of one device: nothing tells which of several CPU servers would be an engine's own.
  - {name: TOPKD_SOCKET_DIR, value: {{ $sockets }}/cpu-0}
  {{- else }}
  # Of several devices' servers the client takes the folder of its own GPU.
  - {name: TOPKD_SOCKET_DIR, value: {{ $sockets }}}
  {{- end }}
  {{- include "topkd.mpsEnv" $ | nindent 2 }}
securityContext:
  {{- include "topkd.confined" $ | nindent 2 }}
resources:
  {{- $resources := deepCopy $engine.resources }}
  {{- if and .sidecar (eq $.Values.sidecar.gpu.mode "claim") }}
  {{- $_ := set $resources "claims" (list (dict "name" "gpu")) }}
  {{- else if and .sidecar (eq $.Values.sidecar.gpu.mode "shared") }}
  {{- $_ := set $resources "limits" (merge (dict $.Values.gpu.sharedResource 1) (default dict $resources.limits)) }}
  {{- else if and (not .sidecar) (eq $.Values.gpu.mode "shared") }}
  {{- $_ := set $resources "limits" (merge (dict $.Values.gpu.sharedResource 1) (default dict $resources.limits)) }}
  {{- else if and (not .sidecar) (eq $engine.device "cuda") }}
  {{- $_ := set $resources "limits" (merge (dict $engine.gpuResource (int $engine.gpus)) (default dict $resources.limits)) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
volumeMounts:
  - {name: sockets, mountPath: /run/topkd, readOnly: true}
  - {name: program, mountPath: /engine, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- include "topkd.mpsMounts" $ | nindent 2 }}
{{- end }}
