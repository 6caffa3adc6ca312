# One image for TPUs and GPUs:
#   docker build --build-arg ACCELERATOR=tpu --tag IMAGE .      (or cuda13, cuda12, cpu)
#   docker run IMAGE --config=configs/quickstart.py --workdir=/runs/quickstart
FROM python:3.12-slim

# What pip installs of JAX: jax[tpu], jax[cuda13], jax[cuda12] or plain jax.
ARG ACCELERATOR=tpu

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /app

# Requirements alone first: a change of the code does not fetch them again. gcsfs is for checkpoints
# in a bucket.
COPY requirements.txt ./
RUN case "$ACCELERATOR" in \
        tpu | cuda12 | cuda13) jax="jax[$ACCELERATOR]" ;; \
        cpu) jax=jax ;; \
        *) echo "error: ACCELERATOR: got '$ACCELERATOR'; allowed: tpu, cuda13, cuda12, cpu." >&2; \
           exit 2 ;; \
    esac && pip install --requirement requirements.txt "$jax" gcsfs

COPY . .
RUN pip install --no-deps --editable . \
    && useradd --create-home --uid 1000 seeupo \
    && mkdir /runs \
    && chown seeupo /runs

# What an environment needs besides: docker build --build-arg SETUP='sh third_party/bfcl/setup.sh python'
ARG SETUP
RUN sh -c "$SETUP"

# Where a platform gives its devices to root alone: docker build --build-arg RUN_AS=root ...
ARG RUN_AS=seeupo
USER $RUN_AS

ENTRYPOINT ["python", "-m", "seeupo_jax.train"]
