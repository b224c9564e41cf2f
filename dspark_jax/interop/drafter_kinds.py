"""The module and the tensor names behind each drafter config."""

import jax
import numpy as np
from flax import nnx

from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3, Eagle3Config
from dspark_jax.drafters.heads import GatedMarkov, RnnMarkov
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.interop.deepspec_config import DrafterConfig
from dspark_jax.interop.names import Table
from dspark_jax.interop.tables import deepspec_dspark, deepspec_eagle3, deepspec_mtp, with_markov_mix
from dspark_jax.nn.layers import Vocabulary

FileDrafter = DSpark | Eagle3 | Mtp

# Frozen copies of the target's, which a file may hold and a drafter never does.
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def abstract_drafter(config: DrafterConfig, dtype: jax.typing.DTypeLike) -> FileDrafter:
    """The drafter's shapes: nothing is allocated."""

    def make() -> FileDrafter:
        rngs = nnx.Rngs(0)
        match config:
            case DSparkConfig():
                return DSpark(config, rngs=rngs, dtype=dtype)
            case Eagle3Config():
                return Eagle3(config, rngs=rngs, dtype=dtype)
            case MtpConfig():
                return Mtp(config, rngs=rngs, dtype=dtype)

    return nnx.eval_shape(make)


def drafter_table(config: DrafterConfig) -> Table:
    """DeepSpec's names, which every layout this package reads shares."""
    gemma = config.layer.branch_norms
    match config:
        case Eagle3Config():
            return deepspec_eagle3(branch_norms=gemma)
        case MtpConfig():
            return deepspec_mtp(branch_norms=gemma)
        case DSparkConfig(markov_head=GatedMarkov()):
            return with_markov_mix(deepspec_dspark(branch_norms=gemma), "gate_proj")
        case DSparkConfig(markov_head=RnnMarkov()):
            return with_markov_mix(deepspec_dspark(branch_norms=gemma), "joint_proj")
        case DSparkConfig():
            return deepspec_dspark(branch_norms=gemma)


def vocabulary_tensors(vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    """A target's embedding and LM head under the names of their copies in a drafter's file."""
    embedding = np.asarray(vocabulary.embedding[...])
    head = embedding if vocabulary.head is None else np.ascontiguousarray(np.asarray(vocabulary.head[...]).T)
    return {EMBEDDING: embedding, LM_HEAD: head}
