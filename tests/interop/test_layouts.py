"""Layouts told apart by their fields, and those that are only read: z-lab, SpecForge, DeepSeek-V4."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.interop.drafters import load_config, load_drafter
from dspark_jax.interop.layouts import layout_of

GOLDEN = Path(__file__).parents[1] / "golden"
HEADLESS, HEADED = GOLDEN / "drafters/dflash_qwen3", GOLDEN / "drafters/dspark_vanilla_qwen3"
# What says which kind a DeepSpec file is, and is elsewhere in the others'.
MOVED = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type")
MOVED += ("enable_confidence_head", "confidence_head_with_markov")


@pytest.mark.parametrize(
    ("directory", "name"),
    [(HEADED, "deepspec"), (HEADLESS, "deepspec"), (GOLDEN / "speculators/dspark_vanilla_qwen3", "speculators")],
)
def test_fields_decide(directory, name):
    assert layout_of(json.loads((directory / "config.json").read_text())).name == name


def test_a_dflash_by_name_that_is_a_dspark_by_its_fields(tmp_path):
    """DeepSpec's `dflash_*` releases: slot k predicts the token after it, and K slots draft K tokens."""
    config = load_config(HEADLESS)
    assert (config.markov_head, config.confidence) == (None, False)
    assert not config.slot_predicts_itself
    assert config.block_size == config.input_slots == 5


def test_modelopt_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"dflash_architecture_config \(ModelOpt\) is not supported"):
        layout_of({"dflash_architecture_config": {}})


@pytest.fixture
def write(tmp_path):
    """write(source, nested, **fields): a DeepSpec drafter's directory in the layout with a nested config."""

    def make(source, nested, *, without=(), **fields):
        config = json.loads((source / "config.json").read_text())
        nested = {field: config[field] for field in MOVED if field in config} | nested
        config = {field: value for field, value in config.items() if field not in MOVED} | fields
        config["dflash_config"] = {field: value for field, value in nested.items() if field not in without}
        (tmp_path / "config.json").write_text(json.dumps(config))
        tensors = load_file(source / "model.safetensors")
        for name in ("embed_tokens.weight", "lm_head.weight"):
            del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


def same_parameters(left, right):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), jax.tree.leaves(left), jax.tree.leaves(right)))


ZLAB = ("markov_rank", "enable_confidence_head")


class TestZLab:
    def test_it_drafts_one_token_fewer_than_it_has_slots(self, write):
        directory = write(HEADLESS, {}, without=ZLAB, architectures=["DFlashDraftModel"], block_size=6)
        drafter = load_drafter(directory)
        assert drafter.config == replace(load_config(HEADLESS), slot_predicts_itself=True)
        assert (drafter.config.block_size, drafter.config.input_slots) == (5, 6)
        assert same_parameters(drafter, load_drafter(HEADLESS))

    def test_the_block_size_of_newer_releases_is_nested(self, write):
        config = load_config(write(HEADLESS, {"block_size": 16}, without=ZLAB, block_size=3))
        assert config.block_size == 15


SHIFTED = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}


class TestSpecForge:
    def test_a_dspark_has_deepspecs_slots_and_heads(self, write):
        directory = write(HEADED, SHIFTED, architectures=["DSparkDraftModel"])
        drafter = load_drafter(directory)
        assert drafter.config == load_config(HEADED)
        assert same_parameters(drafter, load_drafter(HEADED))

    @pytest.mark.parametrize(("source", "there"), [(HEADED, True), (HEADLESS, False)])
    def test_the_file_says_whether_there_is_a_confidence_head(self, write, source, there):
        directory = write(source, SHIFTED, without=("enable_confidence_head",))
        assert load_drafter(directory).config.confidence is there

    @pytest.mark.parametrize(
        ("nested", "fields", "message"),
        [
            (
                {"projector_type": "domino"},
                {},
                "projector_type 'domino' is not .* None, 'dflash', 'dspark'",
            ),
            ({"attention_mode": "mla"}, {}, "dflash_config.attention_mode 'mla' is not supported"),
            ({"linear_context": {"a": 1}}, {}, "dflash_config.linear_context {'a': 1} is not supported"),
            ({}, {"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported; supported: 'qwen3'"),
            ({}, {"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ],
    )
    def test_what_cannot_be_built_is_refused_by_name(self, write, nested, fields, message):
        directory = write(HEADED, SHIFTED | nested, **fields)
        with pytest.raises(ValueError, match=message) as caught:
            load_drafter(directory)
        assert str(directory / "config.json") in str(caught.value)

    def test_damaged_weights_are_named_and_nothing_else(self, write):
        file = write(HEADED, SHIFTED, without=("enable_confidence_head",)) / "model.safetensors"
        file.write_bytes(b"")
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))} is damaged"):
            load_config(file.parent)

    def test_a_missing_field_is_named(self, write):
        with pytest.raises(ValueError, match="the field target_layer_ids is missing"):
            load_drafter(write(HEADED, SHIFTED, without=("target_layer_ids",)))


class TestDeepSeekV4:
    @pytest.fixture
    def bundle(self, tmp_path):
        """bundle(bias, **fields): a dense drafter bundled with its target."""

        def make(*, bias=True, **fields):
            config = json.loads((HEADED / "config.json").read_text())
            config = {field: value for field, value in config.items() if field not in MOVED}
            config |= {
                "architectures": ["DeepseekV4ForCausalLM"],
                "num_hidden_layers": 6,
                "num_nextn_predict_layers": 2,
                "dspark_block_size": 5,
                "dspark_markov_rank": 16,
                "dspark_markov_head_type": "vanilla",
                "dspark_noise_token_id": 319,
                "dspark_target_layer_ids": [0, 1, 2, 3, 4],
            }
            (tmp_path / "config.json").write_text(json.dumps(config | fields))
            tensors = {}
            for name, tensor in load_file(HEADED / "model.safetensors").items():
                stage, rest = name.split(".", 2)[1:] if name.startswith("layers.") else ("1", name)
                tensors[f"mtp.{stage}.{rest}"] = tensor
            for name in ("mtp.1.embed_tokens.weight", "mtp.1.lm_head.weight"):
                del tensors[name]
            if not bias:
                del tensors["mtp.1.confidence_head.proj.bias"]
            tensors["model.layers.0.mlp.experts.0.weight"] = np.zeros(3, np.float32)
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path

        return make

    def test_a_drafter_of_dense_layers_is_read(self, bundle):
        drafter, original = load_drafter(bundle()), load_drafter(HEADED)
        assert drafter.config == original.config
        assert same_parameters(drafter, original)

    def test_an_absent_confidence_bias_is_zero(self, bundle):
        assert load_drafter(bundle(bias=False)).confidence_head.b[...] == 0

    @pytest.mark.parametrize(
        ("field", "value"), [("hc_mult", 4), ("n_routed_experts", 256), ("q_lora_rank", 1536), ("kv_lora_rank", 512)]
    )
    def test_deepseeks_own_layers_are_refused_by_field(self, bundle, field, value):
        with pytest.raises(ValueError, match=rf"config\.json: {field} {value} is not supported"):
            load_drafter(bundle(**{field: value}))

    def test_a_tensor_of_another_layer_is_named(self, bundle):
        directory = bundle()
        tensors = load_file(directory / "model.safetensors")
        tensors["mtp.0.hc_attn_fn"] = np.zeros(3, np.float32)
        save_file(tensors, directory / "model.safetensors")
        with pytest.raises(ValueError, match=r"1 tensor without a place .*layers\.0\.hc_attn_fn"):
            load_drafter(directory)
