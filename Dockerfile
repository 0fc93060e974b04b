# syntax=docker/dockerfile:1
# The server: what it runs with, the kernels compiled for every architecture, nothing to build with.
#   docker build -t topkd .                         starts without compiling; has no compiler
#   docker build -t topkd:compiler --target compiler .   can compile what was not compiled ahead of time
#   docker build -t topkd:cpu --build-arg TORCH=cpu --build-arg TORCH_INDEX=URL --target cpu .
#                                                   the CPU backend alone; URL: an index of CPU builds of torch
#   docker run --read-only --tmpfs /tmp --stop-timeout 20 --gpus all -v topkd:/run/topkd topkd
# The steps are deploy/image/steps; `make image-check` takes them without Docker.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1

FROM base AS libraries
ARG TORCH=cuda
ARG TORCH_INDEX=
COPY deploy/image/ /image/
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY kernels kernels
COPY proto/topkd proto/topkd
RUN /image/steps wheel /src /dist \
 && /image/steps install /opt/topkd /dist "$TORCH"

FROM libraries AS with-compiler
RUN /image/steps compiler /opt/topkd

FROM with-compiler AS kernels
ARG ARCHS=all
ARG JOBS=
# The linker of the compiled kernels. Its version does not matter to them, and Debian keeps only the newest.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
# hadolint ignore=SC2086
RUN /image/steps kernels /opt/topkd /opt/topkd-kernels ${ARCHS}

# What every variant that runs has in common.
FROM base AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="topkd" \
      org.opencontainers.image.description="GPU top-k selection as a service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
RUN groupadd --gid 10001 topkd \
 && useradd --uid 10001 --gid topkd --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin topkd \
 && install -d -m 0750 -o topkd -g topkd /run/topkd \
 && install -d -m 0755 -o topkd -g topkd /run/nvidia-mps
# Nothing is written but sockets in /run/topkd and scratch files in /tmp: the root may be read-only.
ENV PATH=/opt/topkd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOPKD_SOCKET_DIR=/run/topkd \
    TOPKD_CACHE_DIR=off
USER 10001:10001
VOLUME /run/topkd
# Metrics, health checks.
EXPOSE 9477 9479
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["topkd", "health"]
ENTRYPOINT ["topkd"]
CMD ["serve", "--metrics-host", "0.0.0.0", "--health-address", "0.0.0.0:9479"]

FROM runtime AS cpu
COPY --from=libraries /opt/topkd /opt/topkd

FROM runtime AS gpu
ENV TOPKD_PRECOMPILED_DIR=/opt/topkd-kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=kernels /opt/topkd-kernels /opt/topkd-kernels

# A cache that outlives the container needs a volume at /var/cache/topkd.
FROM gpu AS compiler
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -m 0700 -o topkd -g topkd /var/cache/topkd
USER 10001:10001
ENV TOPKD_CACHE_DIR=/var/cache/topkd
COPY --from=with-compiler /opt/topkd /opt/topkd

# The last is what `docker build .` makes.
FROM gpu AS server
COPY --from=libraries /opt/topkd /opt/topkd
