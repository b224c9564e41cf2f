"""`dspark convert` between layouts, and what it says when it cannot."""

import json
import shutil

import jax
import pytest
from safetensors.numpy import load_file

from dspark_jax.cli.main import main
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.huggingface import read_spec


@pytest.fixture
def convert(tmp_path):
    """convert(source, "deepspec", "--target", ...) -> (exit code, directory)."""

    def run(source, to, *flags):
        out = tmp_path / f"{to}_out"
        return main(["convert", "--in", str(source), "--out", str(out), "--to", to, *map(str, flags)]), out

    return run


def tensors_of(directory):
    return {name: tensor.tobytes() for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("name", ["dspark_vanilla_qwen3", "eagle3_qwen3"])
def test_to_speculators_and_back_is_the_identity(golden, convert, capsys, name):
    source, target = golden / "drafters" / name, golden / "targets/qwen3_tiny"
    code, there = convert(source, "speculators", "--target", target)
    assert code == 0
    assert f"the {'Eagle3' if 'eagle3' in name else 'DSpark'} drafter of" in capsys.readouterr().err
    verifier = json.loads((there / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"architectures": ["Qwen3ForCausalLM"], "name_or_path": str(target)}

    code, back = convert(there, "deepspec", "--target", target)
    assert code == 0
    assert tensors_of(back) == tensors_of(source)
    written, original = (json.loads((directory / "config.json").read_text()) for directory in (back, source))
    drafters_own = {"num_anchors", "transformers_version", "max_window_layers", "use_cache", "initializer_range"}
    drafters_own |= {"target_model_name_or_path"}
    assert {f: v for f, v in original.items() if f not in drafters_own}.items() <= written.items()


def test_a_deepspec_drafter_keeps_its_fields(golden, convert, capsys):
    source = golden / "drafters/eagle3_qwen3"
    code, out = convert(source, "deepspec")
    assert code == 0
    assert "give --target to have them" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), load_drafter(out), load_drafter(source)))


def test_a_speculators_file_names_its_verifier_itself(golden, convert, tmp_path):
    source = tmp_path / "named"
    shutil.copytree(golden / "speculators/dspark_vanilla_qwen3", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_target_layers": 6}))
    code, out = convert(source, "speculators")
    assert code == 0
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "qwen3_tiny"
    assert tensors_of(out) == tensors_of(source)
    spec = read_spec(golden / "targets/qwen3_tiny")
    assert load_drafter(out, target_spec=spec).config == load_drafter(source).config


@pytest.mark.parametrize(
    ("source", "to", "flags", "message"),
    [
        ("speculators/dspark_vanilla_qwen3", "deepspec", (), "num_target_layers is missing"),
        ("drafters/dspark_vanilla_qwen3", "speculators", (), "names its verifier: give --target"),
        ("drafters/dspark_vanilla_gemma4", "speculators", ("gemma4",), "only drafters with Qwen3's layer"),
        ("speculators/dspark_vanilla_qwen3_v192", "deepspec", ("qwen3",), "reduced_vocabulary has no DeepSpec layout"),
        ("drafters/dspark_vanilla_gemma4", "deepspec", ("llama",), "embed_tokens.weight differs from the target's"),
        ("speculators/dspark_vanilla_qwen3_v192", "speculators", ("llama",), "lm_head.weight differs from the"),
        ("drafters/nowhere", "deepspec", (), "has no config.json"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(golden, convert, capsys, source, to, flags, message):
    target = [flag for name in flags for flag in ("--target", golden / "targets" / f"{name}_tiny")]
    code, out = convert(golden / source, to, *target)
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_it_does_not_write_over_its_input(golden, capsys):
    source = str(golden / "drafters/eagle3_qwen3")
    assert main(["convert", "--in", source, "--out", source, "--to", "deepspec"]) == 2
    assert "write to another directory" in capsys.readouterr().err
