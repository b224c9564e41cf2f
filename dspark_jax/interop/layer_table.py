"""The renames of one decoder layer, as transformers names it in Llama, Qwen3 and Gemma 4."""

from dspark_jax.interop.names import Rename


def decoder_layer(*, ours: str, theirs: str, branch_norms: bool) -> list[Rename]:
    """`ours` and `theirs` are prefixes. Only what a LayerSpec has is looked up: norms of q and k, a value projection.

    Gemma calls the norm of the attention's output what Llama calls the norm of the feed-forward's input.
    """

    def norm(path: str, name: str, axis: str = "D") -> Rename:
        return Rename(path=f"{ours}{path}.scale", names=(f"{theirs}{name}.weight",), file=axis, ours=axis)

    def kernel(path: str, *names: str, file: str, ours_axes: str) -> Rename:
        weights = tuple(f"{theirs}{name}.weight" for name in names)
        return Rename(path=ours + path, names=weights, file=file, ours=ours_axes)

    if branch_norms:
        norms = [
            norm("attention_out_norm", "post_attention_layernorm"),
            norm("mlp_norm", "pre_feedforward_layernorm"),
            norm("mlp_out_norm", "post_feedforward_layernorm"),
            Rename(path=ours + "scalar", names=(theirs + "layer_scalar",), file="1", ours=""),
        ]
    else:
        norms = [norm("mlp_norm", "post_attention_layernorm")]
    return [
        norm("input_norm", "input_layernorm"),
        *norms,
        norm("attention.q_norm", "self_attn.q_norm", "C"),
        norm("attention.k_norm", "self_attn.k_norm", "C"),
        kernel("attention.q", "self_attn.q_proj", file="(HC)D", ours_axes="DHC"),
        kernel("attention.kv", "self_attn.k_proj", "self_attn.v_proj", file="(JC)D", ours_axes="D2JC"),
        kernel("attention.o", "self_attn.o_proj", file="D(HC)", ours_axes="HCD"),
        kernel("mlp.gate_up", "mlp.gate_proj", "mlp.up_proj", file="FD", ours_axes="D2F"),
        kernel("mlp.down", "mlp.down_proj", file="DF", ours_axes="FD"),
    ]
