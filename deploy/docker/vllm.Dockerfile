# An engine's image with the connector in it: vLLM's own, plus our wheel, which changes no version that is there.
#
#   docker build -f deploy/docker/vllm.Dockerfile -t prefixd-vllm .
#   docker build -f deploy/docker/vllm.Dockerfile -t prefixd-vllm:cpu --build-arg VLLM_IMAGE=IMAGE-OF-THE-CPU-BUILD .
#
# vLLM 0.26 to 0.33. It runs as the server's user, 10001, so that the server's sockets are open to it; HOME is where
# vLLM and the libraries below it keep their caches, and has to be writable (a volume, where the root is read-only).
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.33.0
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim-trixie

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY deploy/docker/build-requirements.txt ./
RUN python3 -m venv /opt/build \
  && /opt/build/bin/pip install --no-cache-dir --require-hashes -r build-requirements.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

# hadolint ignore=DL3006
FROM ${VLLM_IMAGE}
# What is installed first is the constraint of the second command: a conflict fails here, not in an engine.
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
  python3 -m pip list --format=freeze >/tmp/constraints.txt \
  && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt /dist/*.whl \
  && rm /tmp/constraints.txt \
  && useradd --uid 10001 --user-group --create-home --home-dir /home/engine --shell /usr/sbin/nologin engine
ENV HOME=/home/engine
USER 10001:10001
WORKDIR /home/engine
