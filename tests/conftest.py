"""Every test runs with the shape annotations of the package checked (jaxtyping + beartype)."""

from jaxtyping import install_import_hook

install_import_hook("dspark_jax", "beartype.beartype")
