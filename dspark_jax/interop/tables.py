"""Rename tables of whole models, one function per file format."""

from dspark_jax.interop.layer_table import decoder_layer
from dspark_jax.interop.names import Rename, Table

_LM_HEAD = "lm_head.weight"


def huggingface_decoder(
    *, tied: bool, branch_norms: bool = False, prefix: str = "model.", skipped: tuple[str, ...] = ()
) -> Table:
    """A decoder as transformers writes it. `tied`: the LM head is the embedding; `branch_norms`: Gemma's layer.

    `prefix`: before every name but the LM head's; `skipped`: prefixes of parts that a text model does without.
    """
    embedding = prefix + "embed_tokens.weight"
    vocabulary = [
        Rename(path="vocabulary.embedding", names=(embedding,), file="VD", ours="VD"),
        Rename(path="vocabulary.head", names=(_LM_HEAD,), file="VD", ours="DV"),
        Rename(path="norm.scale", names=(prefix + "norm.weight",), file="D", ours="D"),
    ]
    layer = decoder_layer(ours="layers.{n}.", theirs=prefix + "layers.{n}.", branch_norms=branch_norms)
    return Table(
        renames=(*vocabulary, *layer),
        copies={_LM_HEAD: embedding} if tied else {},
        buffers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        skipped=skipped,
    )


def deepspec_dspark(*, branch_norms: bool = False) -> Table:
    """A DSpark drafter as DeepSpec saves it, without the copies of the target's embedding and LM head."""
    heads = [
        Rename(path="fc", names=("fc.weight",), file="DE", ours="ED"),
        Rename(path="hidden_norm.scale", names=("hidden_norm.weight",), file="D", ours="D"),
        Rename(path="norm.scale", names=("norm.weight",), file="D", ours="D"),
        # Only in the view of a file with a reduced vocabulary.
        Rename(path="draft_bias", names=("draft_bias",), file="V", ours="V"),
        Rename(path="markov_head.w1", names=("markov_head.markov_w1.weight",), file="VR", ours="VR"),
        Rename(path="markov_head.w2", names=("markov_head.markov_w2.weight",), file="VR", ours="VR"),
        # The input of the confidence head: hidden state, then Markov embedding (D + R).
        Rename(path="confidence_head.w", names=("confidence_head.proj.weight",), file="1E", ours="E"),
        Rename(path="confidence_head.b", names=("confidence_head.proj.bias",), file="1", ours=""),
    ]
    layer = decoder_layer(ours="layers.{n}.", theirs="layers.{n}.", branch_norms=branch_norms)
    return Table(renames=(*heads, *layer))


def with_markov_mix(table: Table, projection: str) -> Table:
    """Adds the one linear of a richer Markov head, `gate_proj` or `joint_proj`; its inputs lie in the same order."""
    name = f"markov_head.{projection}."
    mix = (
        Rename(path="markov_head.mix.w", names=(name + "weight",), file="RE", ours="ER"),
        Rename(path="markov_head.mix.b", names=(name + "bias",), file="R", ours="R"),
    )
    return Table(renames=(*mix, *table.renames))


def deepspec_eagle3(*, branch_norms: bool = False) -> Table:
    """An Eagle3 drafter as DeepSpec saves it: both input norms are the layer's."""
    heads = [
        Rename(path="fc", names=("fc.weight",), file="DE", ours="ED"),
        Rename(path="embedding_norm.scale", names=("layers.0.input_layernorm.weight",), file="D", ours="D"),
        Rename(path="hidden_norm.scale", names=("layers.0.hidden_norm.weight",), file="D", ours="D"),
        Rename(path="norm.scale", names=("norm.weight",), file="D", ours="D"),
    ]
    layer = decoder_layer(ours="layer.", theirs="layers.0.", branch_norms=branch_norms)
    return Table(renames=(*heads, *layer))


def deepspec_mtp(*, branch_norms: bool = False) -> Table:
    """An MTP drafter in DeepSpec's manner, which has none: the names are those of DeepSeek-V3's MTP module."""
    heads = [
        Rename(path="embedding_norm.scale", names=("enorm.weight",), file="D", ours="D"),
        Rename(path="hidden_norm.scale", names=("hnorm.weight",), file="D", ours="D"),
        # The input of the projection: embedding, then hidden state (2 D).
        Rename(path="projection", names=("eh_proj.weight",), file="DE", ours="ED"),
        Rename(path="norm.scale", names=("norm.weight",), file="D", ours="D"),
    ]
    layer = decoder_layer(ours="layer.", theirs="layers.0.", branch_norms=branch_norms)
    return Table(renames=(*heads, *layer))
