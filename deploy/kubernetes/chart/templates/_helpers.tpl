{{- /* Names: of the release, or "prefixd" in front of it. */ -}}
{{- define "prefixd.name" -}}
{{- if hasPrefix "prefixd" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-prefixd" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{- /* What pods are selected by. Called with (list . COMPONENT SUFFIX). */ -}}
{{- define "prefixd.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "prefixd.name" $root }}{{ index . 2 }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "prefixd.labels" -}}
{{- $root := index . 0 -}}
{{ include "prefixd.selector" . }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{- /* Called with (list . IMAGE). */ -}}
{{- define "prefixd.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{- /* A size of the values ("16GiB") in MiB. */ -}}
{{- define "prefixd.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "TiB" . }}{{ mul $number 1048576 }}
{{- else if hasSuffix "GiB" . }}{{ mul $number 1024 }}
{{- else }}{{ $number }}{{ end -}}
{{- end -}}

{{- /* What the server's container needs for a --memory: the blocks, page tables, generations and index (a 64th), and
       the process with its messages in flight. */ -}}
{{- define "prefixd.limit" -}}
{{- $memory := include "prefixd.mebibytes" . | int64 -}}
{{ add $memory (div (add $memory 63) 64) 256 }}Mi
{{- end -}}

{{- define "prefixd.redisLimit" -}}
{{- $memory := include "prefixd.mebibytes" . | int64 -}}
{{ div (mul $memory 5) 4 }}Mi
{{- end -}}

{{- /* Its own units, which mean the same. */ -}}
{{- define "prefixd.redisMemory" -}}
{{- if hasSuffix "MiB" . }}{{ trimSuffix "MiB" . }}mb{{ else }}{{ div (include "prefixd.mebibytes" . | int64) 1024 }}gb{{ end -}}
{{- end -}}

{{- define "prefixd.redisUrl" -}}
{{- $redis := printf "%s-redis" (include "prefixd.name" .) -}}
{{- if eq .Values.redis.mode "external" }}{{ .Values.redis.url }}
{{- else if eq .Values.redis.mode "single" }}redis://{{ $redis }}:6379
{{- else }}redis+cluster://{{ range $i := until 3 }}{{ if $i }},{{ end }}{{ $redis }}-{{ $i }}.{{ $redis }}:6379{{ end }}
{{- end -}}
{{- end -}}

{{- define "prefixd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Called with a user's number, which is its group's. */ -}}
{{- define "prefixd.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* The pod of the server, in both modes. */ -}}
{{- define "prefixd.serverPod" -}}
serviceAccountName: {{ include "prefixd.name" . }}
automountServiceAccountToken: false
enableServiceLinks: false
# 3 s for calls in flight, 20 s for what still waits to be written to Redis.
terminationGracePeriodSeconds: 30
{{- if eq .Values.server.mode "node" }}
{{- with .Values.server.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
securityContext: {{- include "prefixd.podSecurity" 10001 | nindent 2 }}
{{- if and (eq .Values.server.mode "node") .Values.server.hostPath.prepare }}
initContainers:
  # The kubelet makes the folder as root's. This gives it to the server.
  - name: socket-folder
    image: {{ include "prefixd.image" (list . .Values.server.image) }}
    {{- include "prefixd.pull" .Values.server.image | nindent 4 }}
    command: ["install", "-d", "-o", "10001", "-g", "10001", "-m", "0750", "/run/prefixd"]
    resources:
      requests: {cpu: 10m, memory: 32Mi}
      limits: {memory: 32Mi}
    securityContext:
      runAsNonRoot: false
      runAsUser: 0
      runAsGroup: 0
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
        add: [CHOWN, DAC_OVERRIDE, FOWNER]
    volumeMounts:
      - {name: socket, mountPath: /run/prefixd}
{{- end }}
containers:
  - name: prefixd
    image: {{ include "prefixd.image" (list . .Values.server.image) }}
    {{- include "prefixd.pull" .Values.server.image | nindent 4 }}
    args:
      - serve
      - --listen=unix:///run/prefixd/prefixd.sock
      - --memory={{ .Values.server.memory }}
      {{- if eq .Values.server.mode "remote" }}
      - --listen=0.0.0.0:{{ .Values.server.port }}
      {{- if not (contains "--tls-cert-file" (join " " .Values.server.extraArgs)) }}
      - --insecure
      {{- end }}
      {{- end }}
      {{- if ne .Values.redis.mode "none" }}
      - --redis={{ include "prefixd.redisUrl" . }}
      {{- if .Values.redis.passwordSecret }}
      - --redis-password-file=/run/secrets/redis/password
      {{- end }}
      {{- end }}
      {{- range .Values.server.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    {{- if eq .Values.server.mode "remote" }}
    ports:
      - {name: grpc, containerPort: {{ .Values.server.port }}}
    {{- end }}
    resources:
      # No limit of processor time: a server that is throttled lets engines wait.
      requests: {cpu: {{ .Values.server.cpu | quote }}, memory: {{ include "prefixd.limit" .Values.server.memory }}}
      limits: {memory: {{ include "prefixd.limit" .Values.server.memory }}}
    securityContext: {{- include "prefixd.containerSecurity" . | nindent 6 }}
    # It asks the server's event loop, not Redis and not the memory; one that is stuck is restarted within 25 s.
    startupProbe:
      exec: &health
        command: ["prefixd", "health"]
      periodSeconds: 1
      timeoutSeconds: 5
      failureThreshold: 60
    readinessProbe:
      exec: *health
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 2
    livenessProbe:
      exec: *health
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 2
    volumeMounts:
      - {name: socket, mountPath: /run/prefixd}
      {{- if and (ne .Values.redis.mode "none") .Values.redis.passwordSecret }}
      - {name: redis-password, mountPath: /run/secrets/redis, readOnly: true}
      {{- end }}
volumes:
  - name: socket
    {{- if eq .Values.server.mode "node" }}
    hostPath: {path: {{ .Values.server.hostPath.path }}, type: DirectoryOrCreate}
    {{- else }}
    emptyDir: {sizeLimit: 1Mi}
    {{- end }}
  {{- if and (ne .Values.redis.mode "none") .Values.redis.passwordSecret }}
  - name: redis-password
    secret: {secretName: {{ .Values.redis.passwordSecret }}, defaultMode: 0440}
  {{- end }}
{{- end -}}

{{- /* Only where it is not Kubernetes' own choice for a tag. */ -}}
{{- define "prefixd.pull" -}}
imagePullPolicy: {{ .pullPolicy | default "IfNotPresent" }}
{{- end -}}
