"""Rename tables, one per file format."""

from dspark_jax.interop.names import Rename, Table

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


def huggingface_llama(*, tied: bool) -> Table:
    """A Llama checkpoint as transformers writes it. `tied`: the LM head is the embedding."""
    vocabulary = [
        Rename(path="vocabulary.embedding", names=(_EMBEDDING,), file="VD", ours="VD"),
        Rename(path="vocabulary.head", names=(_LM_HEAD,), file="VD", ours="DV"),
        Rename(path="norm.scale", names=("model.norm.weight",), file="D", ours="D"),
    ]
    return Table(
        renames=(*vocabulary, *_layer(prefix="model.")),
        copies={_LM_HEAD: _EMBEDDING} if tied else {},
        buffers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )


def deepspec_dspark() -> Table:
    """A DSpark drafter as DeepSpec saves it, without the copies of the target's embedding and LM head."""
    heads = [
        Rename(path="fc", names=("fc.weight",), file="DE", ours="ED"),
        Rename(path="hidden_norm.scale", names=("hidden_norm.weight",), file="D", ours="D"),
        Rename(path="norm.scale", names=("norm.weight",), file="D", ours="D"),
        Rename(path="markov_head.w1", names=("markov_head.markov_w1.weight",), file="VR", ours="VR"),
        Rename(path="markov_head.w2", names=("markov_head.markov_w2.weight",), file="VR", ours="VR"),
        # The input of the confidence head: hidden state, then Markov embedding (D + R).
        Rename(path="confidence_head.w", names=("confidence_head.proj.weight",), file="1E", ours="E"),
        Rename(path="confidence_head.b", names=("confidence_head.proj.bias",), file="1", ours=""),
    ]
    return Table(renames=(*heads, *_layer(prefix="")), copies={}, buffers=())


def _layer(*, prefix: str) -> list[Rename]:
    """One decoder layer in the naming of transformers' Llama and Qwen3; the q/k norms exist where the spec has them."""
    ours, theirs = "layers.{n}.", prefix + "layers.{n}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    return [
        Rename(path=ours + "input_norm.scale", names=(theirs + "input_layernorm.weight",), file="D", ours="D"),
        Rename(path=ours + "attention.q", names=(attention + "q_proj.weight",), file="(HC)D", ours="DHC"),
        Rename(
            path=ours + "attention.kv",
            names=(attention + "k_proj.weight", attention + "v_proj.weight"),
            file="(JC)D",
            ours="D2JC",
        ),
        Rename(path=ours + "attention.o", names=(attention + "o_proj.weight",), file="D(HC)", ours="HCD"),
        Rename(path=ours + "attention.q_norm.scale", names=(attention + "q_norm.weight",), file="C", ours="C"),
        Rename(path=ours + "attention.k_norm.scale", names=(attention + "k_norm.weight",), file="C", ours="C"),
        Rename(
            path=ours + "post_attention_norm.scale",
            names=(theirs + "post_attention_layernorm.weight",),
            file="D",
            ours="D",
        ),
        Rename(
            path=ours + "mlp.gate_up",
            names=(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            file="FD",
            ours="D2F",
        ),
        Rename(path=ours + "mlp.down", names=(mlp + "down_proj.weight",), file="DF", ours="FD"),
    ]
