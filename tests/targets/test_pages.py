"""The target over a cache in pages computes what it does over one in rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.nn.paged_attention import KernelPages, PlainPages
from dspark_jax.nn.paged_cache import PagedCache
from dspark_jax.ops.packing import packing
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.targets.model import Target, TargetSpec

TAPS = (0, -1)
SPAN, PAGE, WIDTH, VOCAB = 24, 4, 6, 11


@partial(jax.jit, static_argnames="size")
def extend(target, cache, tokens, start, counts=None, size=None):
    placed = None if size is None else packing(counts, tokens.shape[1], size)
    return target.extend(cache, tokens, start, TAPS, placed)


def in_pages(target, batch, attention):
    """A cache of small pages in any order."""
    table = np.random.default_rng(0).permutation(batch * SPAN // PAGE).reshape(batch, -1)
    pages = tuple(
        jnp.zeros((table.size, PAGE, 2 * spec.kv_heads, spec.head_dim), jnp.float32) for spec in target.spec.layers
    )
    return PagedCache(pages=pages, pages_BI=jnp.asarray(table), attention=attention)


class Careless(PlainPages):
    """Leaves behind the last token what a kernel may."""

    def attend(self, spec, q_NHC, pages_PSXC, pages_BI, start_B, count_B):
        mixed_NHC = super().attend(spec, q_NHC, pages_PSXC, pages_BI, start_B, count_B)
        is_token_N = jnp.arange(len(q_NHC)) < jnp.sum(count_B)
        return jnp.where(is_token_N[:, None, None], mixed_NHC, jnp.nan)


@pytest.fixture(scope="module")
def target(built):
    """A layer that sees 5 positions and one that sees all, of different heads."""
    layer = {"d_model": 16, "ffw": 24, "heads": 4, "rope": RopeSpec(), "norm_eps": 1e-5}
    layers = LayerSpec(**layer, kv_heads=2, head_dim=8, window=5), LayerSpec(**layer, kv_heads=1, head_dim=12)
    vocabulary = VocabularySpec(size=VOCAB, d_model=16, tied=True)
    spec = TargetSpec(family="llama", vocabulary=vocabulary, layers=layers, norm_eps=1e-5, max_len=SPAN)
    return built(lambda: Target(spec, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("attention", [Careless(), KernelPages(interpret=True)], ids=["plain", "kernel"])
def test_prefill_packed_verification_and_rollback_equal_those_over_rows(target, attention):
    """Every round a row keeps 2 of the tokens it verifies, or as many as there are. Row 0 has nobody in it and wanders
    off: its next page would be another's."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4, SPAN))
    rows, pages = target.init_cache(4, SPAN, jnp.float32), in_pages(target, 4, attention)
    start = np.zeros(4, np.int32)
    for counts in (None, [0, 6, 3, 0], [0, 1, 6, 6], None, [0, 2, 2, 2], [0, 0, 0, 0]):
        piece = np.stack([row[at : at + WIDTH] for row, at in zip(tokens, start % 12, strict=True)])
        size, counted = (None, None) if counts is None else (16, np.int32(counts))
        whole, found = (extend(target, cache, piece, start, counted, size=size) for cache in (rows, pages))
        seen = slice(WIDTH, None) if counts is None else slice(sum(counts))
        for pair in ((found.hidden_BTD, whole.hidden_BTD), (found.features_BTE, whole.features_BTE)):
            a, b = (np.asarray(x).reshape(-1, x.shape[-1]) for x in pair)
            np.testing.assert_allclose(a[seen], b[seen], atol=1e-4)
            assert np.isfinite(a).all()
        rows, pages = whole.cache, found.cache
        start = start + np.int32([8, 2, 2, 2] if counts is None else [8, *np.minimum(counts[1:], 2)])


@pytest.mark.parametrize("paged", [False, True])
def test_a_broken_row_touches_no_other_that_is_packed_beside_it(target, paged):
    cache = in_pages(target, 3, PlainPages()) if paged else target.init_cache(3, SPAN, jnp.float32)
    broken = cache.pages_BI[1] if paged else 1
    cache = jax.tree.map(lambda x: x.at[broken].set(jnp.nan) if x.dtype == jnp.float32 else x, cache)
    out = extend(target, cache, np.ones((3, WIDTH), int), np.int32([5, 5, 5]), np.int32([2, 3, 4]), size=16)
    assert (
        np.isnan(np.asarray(out.hidden_BTD)).any(axis=-1).ravel()[:9].tolist() == [False] * 2 + [True] * 3 + [False] * 4
    )
