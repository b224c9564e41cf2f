"""What is written loads in the speculators package itself, which needs torch and so an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.speculators import save_speculators

GOLDEN = Path(__file__).parents[1] / "golden"
PYTHON = os.environ.get("DSPARK_SPECULATORS_PYTHON")

LOAD = """
import sys
from safetensors.torch import load_file
from speculators import SpeculatorModel

model = SpeculatorModel.from_pretrained(sys.argv[1])
held, stored = model.state_dict(), load_file(sys.argv[1] + "/model.safetensors")
assert all((held[name] == tensor).all() for name, tensor in stored.items())
assert {name.split(".")[0] for name in held.keys() - stored.keys()} <= {
    "embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"
}
config = model.config
print(type(model).__name__, config.aux_hidden_state_layer_ids, config.block_size, config.sample_from_anchor)
"""


@pytest.mark.skipif(not PYTHON, reason="DSPARK_SPECULATORS_PYTHON names no interpreter that has speculators")
@pytest.mark.parametrize("name", ["dspark_vanilla_qwen3", "dspark_gated_qwen3", "dspark_rnn_qwen3", "dflash_qwen3"])
def test_it_loads_with_every_tensor_in_place(tmp_path, name):
    verifier = GOLDEN / "targets/qwen3_tiny"
    fields = json.loads((verifier / "config.json").read_text())
    save_speculators(
        tmp_path / "out",
        load_drafter(GOLDEN / "drafters" / name),
        verifier=str(verifier),
        verifier_architectures=fields["architectures"],
        target_config=fields,
    )
    command = [PYTHON, "-c", LOAD, str(tmp_path / "out")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "DSparkDraftModel [1, 2, 3, 4, 5] 5 True"
