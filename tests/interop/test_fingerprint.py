"""A drafter's fingerprint follows its config and weights and nothing else; that of its rounds needs no weights."""

import shutil

import pytest

from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.rejection import Rule
from dspark_jax.interop.drafter_kinds import abstract_drafter
from dspark_jax.interop.drafters import load_config, load_drafter
from dspark_jax.interop.fingerprint import drafter_fingerprint


def test_it_changes_with_config_and_weights_alone(golden, tmp_path):
    source = golden / "drafters" / "dspark_vanilla_llama"
    copy = tmp_path / "elsewhere"
    shutil.copytree(source, copy)
    known = drafter_fingerprint(source)
    (copy / "README.md").write_text("words")
    (copy / "calibration.json").write_text("{}")
    assert drafter_fingerprint(copy) == known
    for name in ("config.json", "model.safetensors"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert drafter_fingerprint(copy) != known
        (copy / name).write_bytes(content)
    (copy / "model-2.safetensors").write_bytes(b"")
    assert drafter_fingerprint(copy) != known


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "drafters/dspark_vanilla_llama"),
        ("gemma4", "drafters/dflash_gemma4"),
        ("qwen3", "drafters/eagle3_qwen3"),
        ("qwen3", "speculators/dspark_vanilla_qwen3_v192"),
    ],
)
def test_what_a_step_curve_belongs_to_is_known_before_anything_is_loaded(golden_target, golden_folder, family, name):
    target, rule = golden_target(family), Rule.TOKEN
    shapes = abstract_drafter(load_config(golden_folder(name), target.spec), "float32")
    loaded = load_drafter(golden_folder(name), target=target)
    assert Fingerprint.expected(target.spec, shapes, dtype="float32", rule=rule) == Fingerprint.of(
        target, loaded, dtype="float32", rule=rule
    )
