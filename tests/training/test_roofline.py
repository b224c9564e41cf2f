"""Predicted rounds: the arithmetic, and once the whole way with libtpu."""

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from dspark_jax.decoding.profile import Shape
from dspark_jax.decoding.rejection import Rule
from dspark_jax.training.compiler import ENVIRONMENT
from dspark_jax.training.roofline import (
    OVERHEAD,
    Subject,
    fingerprint_of,
    predicted_round,
    predicted_seconds,
    tpu_kind,
)
from dspark_jax.training.topology import ACCELERATORS


def test_a_round_takes_what_its_scarcer_resource_does_and_the_overhead():
    assert predicted_seconds("v5e", 197e12, 0.0) == pytest.approx(1 + OVERHEAD)
    assert predicted_seconds("v5e", 0.0, 819e9) == pytest.approx(1 + OVERHEAD)
    assert predicted_seconds("v5e", 2 * 197e12, 3 * 819e9) == pytest.approx(3 + OVERHEAD)
    assert predicted_seconds("tpu7x", 2307e12, 0.0) == pytest.approx(2 + OVERHEAD), "a chip is two devices"


@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_kind_of_tpu_is_known_in_any_size(kind):
    assert tpu_kind(f"{kind}:2x2") == tpu_kind(f"{kind}:1") == kind
    # What a device computes in the time it reads a byte: between 100 and 1000 operations, for all of them.
    assert 100 < ACCELERATORS[kind].flops / ACCELERATORS[kind].bandwidth < 1000


def test_what_is_no_tpu_is_refused():
    with pytest.raises(ValueError, match=r"h200:8: programs are compiled ahead for TPUs only \(v4, v5e"):
        tpu_kind("h200:8")
    with pytest.raises(ValueError, match="known kinds are"):
        tpu_kind("v9:2x2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_rounds_of_a_tpu_that_is_not_here(tiny_target, tiny_drafter, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # The predicting process compiles for a TPU with every optimisation.
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    subject = Subject(kind="v5e", spec=tiny_target.spec, drafter=tiny_drafter.config, dtype="bfloat16", rule=Rule.TOKEN)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        fingerprint = pool.submit(fingerprint_of, subject).result()
        (plain, cheap), (full, dear) = (pool.submit(predicted_round, subject, 2, 256, i).result() for i in (0, -1))
    assert (fingerprint.device, fingerprint.devices, fingerprint.mesh) == ("TPU v5 lite", 1, "1")
    assert (plain, full) == (Shape(2, 256, 2, 0), Shape(2, 256, 12, 5))
    assert OVERHEAD < cheap < dear < 1
