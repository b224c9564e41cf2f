"""Every test runs with the shape annotations of the package checked (jaxtyping + beartype).

A chat server says what a test tells it to.
Session fixtures: the tiny golden target and its drafter, the real small target where it can be had, modules of random
weights, and the slow twin of the sampling law.
"""

import gc
import inspect
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
from functools import cache
from pathlib import Path

# Most programs here run once, and nearly all of the time is their compilation: unoptimised, without the emitters that
# build every fusion as a module of its own and without splitting programs, it is a third. What several tests, workers
# or processes compile alike is compiled once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="dspark-tests-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import numpy as np
import pytest
from flax import nnx
from jaxtyping import install_import_hook

install_import_hook("dspark_jax", "beartype.beartype")
# Tracing makes many objects and little garbage: looking for it every 700 objects costs a tenth of the time.
gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def golden():
    """The folder of parity files."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden_folder(golden):
    """golden_folder("drafters/NAME"): in the checkout, or in the set that the variable DSPARK_GOLDEN points to."""

    def folder(name):
        for root in (golden, os.environ.get("DSPARK_GOLDEN")):
            if root and (Path(root) / name / "config.json").is_file():
                return Path(root) / name
        return pytest.skip(f"the parity files {name} are not in the checkout, and DSPARK_GOLDEN names no set with them")

    return folder


@pytest.fixture(scope="session")
def golden_target(golden_folder):
    """golden_target(family): the tiny target of that family in float32: 6 layers, width 64, vocabulary 320."""
    from dspark_jax.interop.huggingface import load_target

    return cache(lambda family: load_target(golden_folder(f"targets/{family}_tiny"), "float32"))


@pytest.fixture(scope="session")
def golden_drafter(golden_folder):
    """golden_drafter(name): a drafter trained for the tiny target that its name ends with, taps 0..4."""
    from dspark_jax.interop.drafters import load_drafter

    return cache(lambda name: load_drafter(golden_folder(f"drafters/{name}"), "float32"))


@pytest.fixture(scope="session")
def tiny_target(golden_target):
    return golden_target("llama")


@pytest.fixture(scope="session")
def tiny_drafter(golden_drafter):
    """A DSpark drafter trained for `tiny_target`: 2 layers, block size 5."""
    return golden_drafter("dspark_vanilla_llama")


@pytest.fixture(scope="session")
def smollm2():
    """The directory of SmolLM2-135M-Instruct; skipped only where the package index cannot be reached."""
    from dspark_jax.interop.smollm2 import default_target

    try:
        return default_target()
    except ConnectionError as error:
        pytest.skip(f"SmolLM2 is not cached and the package index cannot be reached: {error}")


@pytest.fixture
def read_only(monkeypatch):
    """read_only(folder): nothing can be written there, not even by root, whom modes do not stop."""
    access = os.access

    def forbid(folder):
        monkeypatch.setattr(
            os, "access", lambda path, mode: not Path(path).is_relative_to(folder) and access(path, mode)
        )

    return forbid


@pytest.fixture
def heard_sigint():
    """Ctrl-C raises KeyboardInterrupt; what starts in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def chat_server():
    """chat_server(reply) -> base address of a server that answers with reply(request's JSON, its headers)."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    running = []

    def start(reply):
        async def chat(request):
            response = reply(json.loads(await request.body()), request.headers)
            return await response if inspect.isawaitable(response) else response

        app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
        listener = socket.create_server(("127.0.0.1", 0))
        # No configuration of logs: that closes the handlers of others, and absl closes a captured stderr with its own.
        config = uvicorn.Config(app, log_config=None, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread, listener))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    yield start
    for server, thread, listener in running:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def built():
    """built(make, seed): the module `make` returns, its parameters from numpy (nothing is compiled for that)."""

    def build(make, seed=0):
        rng = np.random.default_rng(seed)
        leaves, structure = jax.tree.flatten(nnx.eval_shape(make))
        values = [
            rng.normal(loc=leaf.ndim == 1, scale=0.25 if leaf.ndim > 1 else 0.1, size=leaf.shape) for leaf in leaves
        ]
        arrays = [jax.numpy.asarray(value, leaf.dtype) for value, leaf in zip(values, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    return build


@pytest.fixture(scope="session")
def sorted_law():
    """sorted_law(logits, temperature, top_k, top_p): (the law by sorting, the masses at which top-p may cut)."""

    def law(logits_V, temperature, top_k=0, top_p=1.0):
        logits = np.asarray(logits_V, np.float64)
        if temperature == 0:
            return np.eye(len(logits))[np.argmax(logits)], np.zeros(0)
        if top_k:
            logits = np.where(logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1], logits, -np.inf)
        probs = np.exp((logits - logits.max()) / temperature)
        probs /= probs.sum()
        levels = np.unique(probs)[::-1]
        masses = np.array([probs[probs >= level].sum() for level in levels])
        if top_p < 1:
            probs = np.where(probs >= levels[np.argmax(masses >= top_p)], probs, 0)
        return probs / probs.sum(), masses

    return law
