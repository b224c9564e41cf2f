"""Rename tables: the same table read forwards and backwards, and every mistake in a file named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.interop.names import Rename, skipped_tensors, to_parameters, to_tensors
from dspark_jax.interop.parameters import fill, named_parameters
from dspark_jax.interop.tables import deepspec_dspark, huggingface_decoder
from dspark_jax.interop.tensor_files import TensorFiles
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.ops.rope import RopeSpec
from dspark_jax.targets.model import Target, TargetSpec

LAYER = LayerSpec(d_model=12, ffw=20, heads=4, kv_heads=2, head_dim=6, rope=RopeSpec(), norm_eps=1e-5)


def target(*, tied=True, layers=2):
    vocabulary = VocabularySpec(size=30, d_model=12, tied=tied)
    spec = TargetSpec(family="llama", vocabulary=vocabulary, layers=(LAYER,) * layers, norm_eps=1e-5, max_len=64)
    return Target(spec, rngs=nnx.Rngs(0))


def tensors_of(module, table):
    return to_tensors(table, {path: np.asarray(leaf) for path, leaf in named_parameters(module).items()})


def write(directory, tensors):
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return TensorFiles(directory)


def same(left, right):
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        (a == b).all() and a.dtype == b.dtype
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_target_comes_back_from_its_own_tensors(tmp_path, tied):
    module, table = target(tied=tied), huggingface_decoder(tied=tied)
    files = write(tmp_path, tensors_of(module, table))
    assert same(fill(jax.eval_shape(lambda: module), table, files), module)


@pytest.mark.parametrize("confidence", [True, False])
def test_a_drafter_comes_back_from_its_own_tensors(tmp_path, confidence):
    config = DSparkConfig(
        vocab_size=30,
        layer=LayerSpec(**{**LAYER.__dict__, "qk_norm": True}),
        num_target_layers=4,
        tapped_layers=(0, 2),
        mask_token_id=29,
        num_layers=2,
        markov_head=VanillaMarkov(rank=5),
        confidence=confidence,
    )
    module = DSpark(config, rngs=nnx.Rngs(0))
    files = write(tmp_path, tensors_of(module, deepspec_dspark()))
    assert same(fill(jax.eval_shape(lambda: module), deepspec_dspark(), files), module)


def test_projections_compute_what_the_files_matrices_compute():
    module = target(tied=False)
    tensors = tensors_of(module, huggingface_decoder(tied=False))
    x = np.random.default_rng(0).standard_normal(12).astype(np.float32)
    attention, mlp = module.layers[1].attention, module.layers[1].mlp
    prefix = "model.layers.1."

    def matrix(name):
        return tensors[f"{prefix}{name}.weight"]

    def close(ours, theirs):
        np.testing.assert_allclose(np.asarray(ours).reshape(-1), theirs, rtol=1e-5, atol=1e-6)

    close(jnp.einsum("d,dhc->hc", x, attention.q[...]), matrix("self_attn.q_proj") @ x)
    keys, values = jnp.einsum("d,dpjc->pjc", x, attention.kv[...])
    close(keys, matrix("self_attn.k_proj") @ x)
    close(values, matrix("self_attn.v_proj") @ x)
    mixed = np.arange(24, dtype=np.float32).reshape(4, 6)
    close(jnp.einsum("hc,hcd->d", mixed, attention.o[...]), matrix("self_attn.o_proj") @ mixed.reshape(-1))
    gate, up = jnp.einsum("d,dpf->pf", x, mlp.gate_up[...])
    close(gate, matrix("mlp.gate_proj") @ x)
    close(up, matrix("mlp.up_proj") @ x)
    inner = np.arange(20, dtype=np.float32)
    close(inner @ mlp.down[...], matrix("mlp.down_proj") @ inner)
    close(x @ module.vocabulary.head[...], tensors["lm_head.weight"] @ x)


@settings(max_examples=50)
@given(st.permutations("2DJC"), st.permutations(["D", "(JC)", "1"]), st.data())
def test_any_layout_is_undone_exactly(ours, file, data):
    sizes = {axis: data.draw(st.integers(1, 4)) for axis in "DJC"} | {"2": 2}
    rename = Rename(path="p", names=("k", "v"), file="".join(file), ours="".join(ours))
    shape = tuple(sizes[axis] for axis in ours)
    parameter = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensors = rename.to_tensors(parameter)
    assert all(tensor.shape == rename.tensor_shape(shape) for tensor in tensors.values())
    np.testing.assert_array_equal(rename.to_parameter([tensors["k"], tensors["v"]], shape), parameter)


class TestMistakes:
    @pytest.fixture
    def tensors(self):
        return tensors_of(target(), huggingface_decoder(tied=True))

    def read(self, directory, tensors, **kinds):
        shapes = {path: leaf.shape for path, leaf in named_parameters(target()).items()}
        return dict(to_parameters(huggingface_decoder(tied=True), write(directory, tensors), shapes, **kinds))

    def test_a_missing_tensor_is_named_with_its_parameter(self, tmp_path, tensors):
        del tensors["model.layers.1.self_attn.v_proj.weight"]
        with pytest.raises(
            ValueError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight \(layers\.1\.attention\.kv\)"
        ):
            self.read(tmp_path, tensors)

    def test_a_tensor_without_a_place_is_named(self, tmp_path, tensors):
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match=r"1 tensor without a place .*model\.layers\.2\.mlp\.up_proj\.weight"):
            self.read(tmp_path, tensors)

    def test_tensors_of_the_callers_are_left_to_it(self, tmp_path, tensors):
        tensors["extra"] = np.zeros(3, np.float32)
        assert "extra" not in self.read(tmp_path, tensors, elsewhere=("extra",))

    def test_another_shape_is_named_with_both(self, tmp_path, tensors):
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((12, 24), np.float32)
        with pytest.raises(ValueError, match=r"q_proj\.weight has shape \[12, 24\], config\.json needs \[24, 12\]"):
            self.read(tmp_path, tensors)

    def test_a_repeated_embedding_must_be_the_same(self, tmp_path, tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        self.read(tmp_path, tensors)
        tensors["lm_head.weight"][3, 3] += 1
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            self.read(tmp_path, tensors)

    def test_buffers_that_follow_from_the_config_may_be_there(self, tmp_path, tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
        self.read(tmp_path, tensors)

    def test_skipped_parts_are_counted_and_their_lookalikes_refused(self, tmp_path, tensors):
        tensors["model.vision_tower.a"] = tensors["model.vision_tower.b"] = np.zeros(3, np.float32)
        table = replace(huggingface_decoder(tied=True), skipped=("model.vision_tower.", "model.audio_tower."))
        files = write(tmp_path, tensors)
        shapes = {path: leaf.shape for path, leaf in named_parameters(target()).items()}
        assert dict(to_parameters(table, files, shapes)).keys() == shapes.keys()
        assert skipped_tensors(table, files) == {"model.vision_tower.": 2}
        tensors["model.vision_towers.a"] = tensors["model.vision_tower.a"]
        with pytest.raises(ValueError, match=r"1 tensor without a place .*model\.vision_towers\.a"):
            to_parameters(table, write(tmp_path, tensors), shapes)

    def test_a_parameter_that_the_format_does_not_know(self):
        with pytest.raises(ValueError, match=r"no tensor for the parameter layers\.0\.novelty"):
            to_tensors(huggingface_decoder(tied=True), {"layers.0.novelty": np.zeros(3, np.float32)})
