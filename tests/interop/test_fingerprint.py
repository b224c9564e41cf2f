"""A drafter's fingerprint follows its config and weights and nothing else."""

import shutil

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
