# syntax=docker/dockerfile:1
# The server. Two stages: the first builds the wheel, the second holds what it needs to run and nothing to build with.
#   docker build -t topkd .                                   with kernels for GPUs, and torch with CUDA
#   docker build -t topkd --build-arg EXTRA=cpu-server \
#     --build-arg TORCH_INDEX=URL .                           without; URL: a package index of CPU builds of torch
#   docker run --gpus all -v topkd:/run/topkd topkd
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY constraints-dev.txt ./
RUN pip install --no-cache-dir -c constraints-dev.txt setuptools
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY kernels kernels
COPY proto/topkd proto/topkd
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

FROM python:${PYTHON}-slim
ARG EXTRA=server
ARG TORCH_INDEX=
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="topkd" \
      org.opencontainers.image.description="GPU top-k selection as a service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PYTHONUNBUFFERED=1 \
    TOPKD_SOCKET_DIR=/run/topkd \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN groupadd --gid 10001 topkd \
 && useradd --uid 10001 --gid topkd --no-create-home --shell /usr/sbin/nologin topkd \
 && install -d -m 0750 -o topkd -g topkd /run/topkd
COPY constraints.txt constraints-torch.txt /tmp/
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps -c /tmp/constraints-torch.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && pip install --no-cache-dir -c /tmp/constraints.txt -c /tmp/constraints-torch.txt "$(ls /dist/*.whl)[${EXTRA}]" \
 && rm /tmp/constraints*.txt
USER 10001:10001
VOLUME /run/topkd
EXPOSE 9477
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["topkd", "health"]
ENTRYPOINT ["topkd"]
CMD ["serve", "--metrics-host", "0.0.0.0"]
