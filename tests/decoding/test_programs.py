"""What XLA is told when rounds are compiled."""

import jax
import pytest

from dspark_jax.decoding.programs import compiler_options


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_knows_every_option(platform):
    options = compiler_options(platform)
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    if options:
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
            jax.jit(lambda x: x + 1, compiler_options={f"{next(iter(options))}s": True})(1)
