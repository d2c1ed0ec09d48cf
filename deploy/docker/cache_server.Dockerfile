# The cache server: Python, its few dependencies and nothing else. No torch, no compiler, no root.
#
#   docker build -f deploy/docker/cache_server.Dockerfile -t prefixd .       (or podman, buildah; from the repository)
#   docker run --read-only -v prefixd:/run/prefixd prefixd serve --memory 16GiB
#
# The file system may be read-only: the server writes its sockets into /run/prefixd and nothing else. Blocks lie in
# anonymous memory, so the size of /dev/shm does not matter; a memory limit has to hold --memory and some more
# (deploy/README.md).
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim-trixie

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY deploy/docker/requirements.txt deploy/docker/build-requirements.txt ./
RUN python3 -m venv /opt/build && python3 -m venv /opt/prefixd \
  && /opt/build/bin/pip install --no-cache-dir --require-hashes -r build-requirements.txt \
  && /opt/prefixd/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r requirements.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
  && /opt/prefixd/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl \
  && /opt/prefixd/bin/pip uninstall --yes pip

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
# The number is part of the interface: engines of the same user may open the sockets, and manifests name it.
RUN groupadd --gid 10001 prefixd \
  && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin prefixd \
  && install -d -o 10001 -g 10001 -m 0750 /run/prefixd
COPY --from=build /opt/prefixd /opt/prefixd
ENV PATH=/opt/prefixd/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /
# Kubernetes does not read this: its probes run the same command.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=2 CMD ["prefixd", "health"]
ENTRYPOINT ["prefixd"]
CMD ["serve"]
