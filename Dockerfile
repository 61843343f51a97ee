# The image of rlx, for Kubernetes (docs/cluster.md) or docker run:
#
#   docker build -t registry.example.com/rlx:0.1.0 .                        # for GPUs
#   docker build --build-arg EXTRA=cpu -t rlx:cpu .                         # without
#   docker run --gpus all --shm-size 8g -v "$PWD/outputs:/runs" registry.example.com/rlx:0.1.0 train run.dir=/runs/mine
#
# Two stages: the first installs the tested versions of constraints.txt with uv, the second has no build tools but the C compiler and
# headers that Triton needs at run time. The process is user 1000, to whom /runs belongs.

FROM python:3.12.12-slim-bookworm AS build
ARG EXTRA=gpu
ARG UV_VERSION=0.13.9
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
RUN pip install --no-cache-dir "uv==${UV_VERSION}" && python -m venv /opt/rlx
WORKDIR /src
# The packages first: this layer stays as long as their lists do.
COPY pyproject.toml constraints.txt overrides.txt README.md LICENSE ./
# PyPI's torch is the CUDA build; the CPU build comes from PyTorch's own index.
RUN backend="$([ "$EXTRA" = cpu ] && echo --torch-backend=cpu || true)" \
    && uv pip compile pyproject.toml --python-version 3.12 --extra "$EXTRA" --extra wandb --extra tensorboard --extra gguf \
        --constraint constraints.txt --override overrides.txt --output-file requirements.txt --quiet $backend \
    && uv pip install --python /opt/rlx/bin/python --no-cache --no-deps --requirement requirements.txt $backend
COPY rlx rlx
COPY conf conf
COPY slurm slurm
COPY sweeps sweeps
COPY environments environments
RUN uv pip install --python /opt/rlx/bin/python --no-cache --no-deps . \
    && RLX_PYTHONS=/opt/pythons /opt/rlx/bin/rlx env install rlx

FROM python:3.12.12-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 procps \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 rlx && useradd --uid 1000 --gid 1000 --create-home rlx \
    && mkdir /runs && chown 1000:1000 /runs
COPY --from=build --chown=0:0 /opt/rlx /opt/rlx
COPY --from=build --chown=0:0 /opt/pythons /opt/pythons
ENV PATH=/opt/rlx/bin:$PATH RLX_PYTHONS=/opt/pythons PYTHONUNBUFFERED=1 LC_ALL=C.UTF-8
USER 1000
WORKDIR /runs
VOLUME /runs
ENTRYPOINT ["rlx"]
CMD ["--help"]
