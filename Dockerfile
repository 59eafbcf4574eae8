# livedraft in a container, for CPUs or NVIDIA GPUs:
#   docker build -t livedraft .                          docker run -p 8000:8000 -v livedraft:/data livedraft
#   docker build -t livedraft --build-arg DEVICE=gpu .   docker run --gpus all -p 8000:8000 -v livedraft:/data livedraft
# Models, drafts, traces and the compiled kernels are kept in /data. Any other verb: docker run -v livedraft:/data livedraft
# livedraft doctor
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY livedraft livedraft
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# cpu takes torch's CPU build, gpu the CUDA build that is PyPI's own; TORCH_INDEX names another place.
ARG DEVICE=cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
# The kernels are compiled where they run, for that CPU, so the compiler belongs to the image. Versions are not pinned here:
# torch's comes as an argument, livedraft's dependencies from its own wheel.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN case "$DEVICE" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        gpu) index=https://pypi.org/simple ;; \
        *) echo "DEVICE is cpu or gpu, not '$DEVICE'." >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --index-url "${TORCH_INDEX:-$index}" "$TORCH"
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN wheel="$(find /wheels -name 'livedraft-*.whl')" && pip install --no-cache-dir "${wheel}[structured]"

RUN useradd --create-home --uid 1000 livedraft && install --directory --owner=livedraft /data
USER 1000
WORKDIR /data
ENV LIVEDRAFT_MODEL__STATE=/data/state \
    LIVEDRAFT_MODELS=/data/models \
    LIVEDRAFT_SERVER__HOST=0.0.0.0 \
    XDG_CACHE_HOME=/data/cache
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# `exec`: SIGTERM reaches the server, which lets running requests finish.
CMD ["sh", "-c", "livedraft pull && exec livedraft serve"]
