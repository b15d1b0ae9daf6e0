# Images of the trainer, one a kind of hardware:
#
#   docker build --build-arg=HARDWARE=tpu --tag=REGISTRY/trainer:1.0-tpu .     # cpu (default), gpu or tpu;
#                                           jax, jax-gpu or jax-tpu for --backend=jax
#
# Kubernetes and Vertex AI replace CMD by the command of the job: there is no ENTRYPOINT in its way. An image with a model
# of your own (--model=my_models.net) is two lines more: FROM REGISTRY/trainer:1.0-tpu, COPY my_models my_models.
ARG HARDWARE=cpu

# 3.11: constraints.txt was resolved on it.
FROM python:3.11.15-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN useradd --uid=1000 --create-home trainer
WORKDIR /app
# Metadata only, so that the packages below are installed anew when they change, and not with every line of code.
COPY setup.cfg pyproject.toml constraints.txt ./

FROM base AS cpu
RUN pip install --constraint=constraints.txt '.[cpu]'
USER 1000

FROM base AS gpu
RUN pip install --constraint=constraints.txt '.[gpu]'
# CUDA comes with the wheels, the driver from the host: GKE mounts it here, NVIDIA's container runtime reads the other two.
# https://pkg.go.dev/github.com/GoogleCloudPlatform/container-engine-accelerators/cmd/nvidia_gpu
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000

# As root, to whom a node's chips (/dev/accel*, /dev/vfio/*) belong.
FROM base AS tpu
# TensorFlow's PJRT runtime, which v5e and later need: https://docs.cloud.google.com/tpu/docs/tensorflow-pods
ENV NEXT_PLUGGABLE_DEVICE_USE_C_API=true \
    TF_PLUGGABLE_DEVICE_LIBRARY_PATH=/usr/local/lib/python3.11/site-packages/libtpu/libtpu.so
RUN pip install --constraint=constraints.txt '.[tpu]' && test -f "$TF_PLUGGABLE_DEVICE_LIBRARY_PATH"

FROM base AS jax
RUN pip install --constraint=constraints.txt '.[jax]'
USER 1000

FROM base AS jax-gpu
RUN pip install --constraint=constraints.txt '.[jax-gpu]'
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000

# As root, as for tpu. TensorFlow, which only reads data, is told nothing of libtpu.
FROM base AS jax-tpu
RUN pip install --constraint=constraints.txt '.[jax-tpu]'

FROM ${HARDWARE}
WORKDIR /app
COPY data data
COPY trainer trainer
COPY scripts/supervise scripts/supervise
# No shell around it: as process 1 the trainer itself gets SIGTERM, and it handles that from its first moment on.
CMD ["python", "-m", "trainer.main", "--help"]
