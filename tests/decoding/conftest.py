"""Small models for the decode round, and a drafter that knows the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jax import lax
from jax.scipy.special import logit

from dspark_jax.decoding.generate import Job, generate
from dspark_jax.decoding.slots import DecodeSlots
from dspark_jax.drafters.base import CERTAIN, Proposal
from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import KVCache, write
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.ops.sampling import law_probs, sample
from dspark_jax.targets.model import Target, TargetSpec


@struct.dataclass
class Oracle:
    """Drafts from the target's own law, its tokens moved on by shift_KV[slot, previous token].

    Zeros make it perfect, ones always wrong at temperature 0, anything else a mixture. The confidence of a slot is
    confidence_KV[slot, previous token].
    """

    target: Target
    shift_KV: jax.Array
    confidence_KV: jax.Array

    tapped_layers = (-1,)

    @property
    def block_size(self):
        return self.shift_KV.shape[0]

    def init_state(self, batch, span, dtype):
        return self.target.init_cache(batch, span, dtype)

    def extend(self, state, vocabulary, features_BTE, next_tokens_BT, start_B, count_B):
        """The features are embeddings: the tokens are found by the nearest one."""
        embedding = self.target.vocabulary.embedding[...]
        closeness = 2 * jnp.einsum("bte,ve->btv", features_BTE, embedding) - jnp.sum(embedding**2, axis=-1)
        return self.target.extend(state, jnp.argmax(closeness, axis=-1), start_B, ()).cache

    def propose(self, vocabulary, state, anchor_B, start_B, law, drafts=None):
        def slot(carry, inputs):
            cache, previous_B = carry
            offset, shift_V, confidence_V = inputs
            out = self.target.extend(cache, previous_B[:, None], start_B + offset, ())
            probs_BV = law_probs(vocabulary.logits(out.hidden_BTD), law)[:, 0]
            vocab = probs_BV.shape[1]
            source_BV = (jnp.arange(vocab) - shift_V[previous_B][:, None]) % vocab
            probs_BV = jnp.take_along_axis(probs_BV, source_BV, axis=1)
            token_B = sample(probs_BV, jax.vmap(lambda key: jax.random.fold_in(key, offset))(law.keys_B))
            return (out.cache, token_B), (token_B, probs_BV, confidence_V[previous_B])

        slots = (jnp.arange(self.block_size)[:drafts], self.shift_KV[:drafts], self.confidence_KV[:drafts])
        (state, _), (tokens, probs, confidence) = lax.scan(slot, (state, anchor_B), slots)
        proposal = Proposal(
            tokens_BK=tokens.swapaxes(0, 1),
            probs_BKV=probs.swapaxes(0, 1),
            logit_BK=logit(confidence.swapaxes(0, 1)),
            top_BK2=jnp.zeros((*tokens.shape[::-1], 2)),
        )
        return proposal, state


def oracle(target, *, block, shift):
    """An Oracle whose every shift is `shift`; None: drawn at random."""
    rng = np.random.default_rng(5)
    vocab = target.spec.vocab_size
    shifts = rng.integers(0, vocab, (block, vocab)) * (rng.random((block, vocab)) < 0.6)
    return Oracle(
        target=target,
        shift_KV=jnp.asarray(shifts if shift is None else np.full((block, vocab), shift), jnp.int32),
        confidence_KV=jnp.asarray(rng.random((block, vocab)), jnp.float32),
    )


@struct.dataclass
class Recorder:
    """Drafts `token` all along and remembers, by position, which token it was told comes next."""

    token: jax.Array

    block_size = 2
    tapped_layers = ()

    def init_state(self, batch, span, dtype):
        # The shape of a layer's keys: one head of one channel.
        return KVCache(keys=(jnp.full((batch, 1, span, 1), -1.0),), values=())

    def extend(self, state, vocabulary, features_BTE, next_tokens_BT, start_B, count_B):
        """Only the tokens that are committed; -1 for the others."""
        committed = jnp.arange(next_tokens_BT.shape[1]) < count_B[:, None]
        told_BT = jnp.where(committed, next_tokens_BT, -1).astype(jnp.float32)
        return KVCache(keys=(write(state.keys[0], told_BT[:, None, :, None], start_B),), values=())

    def propose(self, vocabulary, state, anchor_B, start_B, law, drafts=None):
        tokens_BK = jnp.broadcast_to(self.token, (anchor_B.shape[0], 2))[:, :drafts]
        probs_BKV = jax.nn.one_hot(tokens_BK, vocabulary.embedding.shape[0])
        certain = jnp.full(tokens_BK.shape, CERTAIN)
        return Proposal(
            tokens_BK=tokens_BK, probs_BKV=probs_BKV, logit_BK=certain, top_BK2=jnp.zeros((*tokens_BK.shape, 2))
        ), state


def small_models(built, *, vocab, layers, block):
    """(target, drafter) with random weights that know nothing of each other."""
    layer = {"d_model": 16, "ffw": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "rope": RopeSpec(), "norm_eps": 1e-5}
    spec = TargetSpec(
        family="llama",
        vocabulary=VocabularySpec(size=vocab, d_model=16, tied=False),
        layers=(LayerSpec(**layer),) * layers,
        norm_eps=1e-5,
        max_len=1024,
    )
    config = DSparkConfig(
        vocab_size=vocab,
        layer=LayerSpec(**layer, qk_norm=True),
        num_target_layers=layers,
        tapped_layers=(-1, 0)[:layers],
        mask_token_id=vocab - 1,
        num_layers=1,
        block_size=block,
        markov_head=VanillaMarkov(rank=4),
    )
    target = built(lambda: Target(spec, rngs=nnx.Rngs(0)), seed=1)
    return target, built(lambda: DSpark(config, rngs=nnx.Rngs(0)), seed=2)


@pytest.fixture(scope="session")
def small(built):
    """A target of 2 layers and 16 tokens, and a drafter of block size 3 that is right about as often as chance."""
    return small_models(built, vocab=16, layers=2, block=3)


@pytest.fixture(scope="session")
def five(built):
    """A target of 1 layer and 5 tokens, and a drafter of block size 2 that knows nothing of it."""
    return small_models(built, vocab=5, layers=1, block=2)


@pytest.fixture(scope="session")
def thin(built):
    """A target of 1 layer and 16 tokens, and a drafter of block size 2 that is right about as often as chance."""
    return small_models(built, vocab=16, layers=1, block=2)


@pytest.fixture(scope="session")
def oracle_of():
    return oracle


MAX_LEN = 60


@pytest.fixture(scope="session")
def warm(small):
    """Slots of 8 rows and 60 positions, warmed up once."""
    slots = DecodeSlots(*small, max_batch=8, max_len=MAX_LEN)
    slots.warm_up()
    return slots


@pytest.fixture
def slots(warm):
    """The warm slots, empty before and after."""
    assert warm.live == ()
    yield warm
    for handle in warm.live:
        warm.release(handle)


@pytest.fixture(scope="session")
def alone():
    """alone(slots, prompt, sampling, tokens): the text of one request, that many tokens."""

    def text(slots, prompt, sampling, tokens):
        (done,) = generate(slots, [Job(prompt=tuple(prompt), sampling=sampling, max_new_tokens=tokens)])
        return list(done.tokens)

    return text


@pytest.fixture(scope="session")
def is_greedy():
    """is_greedy(target, prompts, texts, length): whether each text is the target's own, by one causal pass."""
    logits_of = jax.jit(lambda target, tokens: target.vocabulary.logits(target.encode(tokens, ()).hidden_BTD))

    def check(target, prompts, texts, length=MAX_LEN + 4):
        tokens = np.zeros((64, length), np.int32)
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            tokens[row, : len(prompt) + len(text)] = [*prompt, *text]
        best = np.argmax(logits_of(target, tokens), axis=-1)
        return all(
            best[row, len(prompt) - 1 : len(prompt) - 1 + len(text)].tolist() == list(text)
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        )

    return check


@pytest.fixture(scope="session")
def recorder():
    return Recorder(token=jnp.array(3))
