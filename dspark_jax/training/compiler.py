"""Processes that compile for TPUs that are not here."""

import importlib.util
import os
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
"""What a process that compiles has to find when it starts."""


def require_libtpu() -> None:
    """ValueError unless there is something to compile with."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("--topology needs libtpu: install it with pip install 'jax[tpu]'")


@contextmanager
def compilers(workers: int) -> Generator[ProcessPoolExecutor]:
    """Processes of their own: libtpu and JAX read their environment once, when they start."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
