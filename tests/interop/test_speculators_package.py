"""What is written loads in the speculators package itself and computes there what it computes here.

The package needs torch, so it lives in an environment of its own:

    python -m venv speculators && speculators/bin/pip install speculators
    speculators/bin/pip uninstall -y torchvision torchaudio   # not needed; their builds may not match torch's
    DSPARK_SPECULATORS_PYTHON=speculators/bin/python pytest tests/interop/test_speculators_package.py
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.mtp import Mtp, MtpConfig
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.huggingface import load_target
from dspark_jax.interop.speculators import save_speculators

GOLDEN = Path(__file__).parents[1] / "golden"
VERIFIER = GOLDEN / "targets/qwen3_tiny"
PYTHON = os.environ.get("DSPARK_SPECULATORS_PYTHON")
STEPS = 3
# Name -> the package's class.
KINDS = {
    "dspark_vanilla_qwen3": "DSparkDraftModel",
    "dspark_gated_qwen3": "DSparkDraftModel",
    "dspark_rnn_qwen3": "DSparkDraftModel",
    "dflash_qwen3": "DSparkDraftModel",
    "dflash_itself": "DFlashDraftModel",
    "eagle3_qwen3": "Eagle3DraftModel",
    "mtp": "MTPDraftModel",
}

# The package's own forward passes; what they would compare with the target is taken on the way to the loss.
FORWARD = """
import sys
from pathlib import Path
import numpy as np, torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash
from speculators.models.dspark import core as dspark

root = Path(sys.argv[1])
given = {name: torch.from_numpy(value) for name, value in np.load(root / "inputs.npz").items()}
tokens, features, last, anchors = (given[name] for name in ("tokens", "features", "last", "anchors"))
seen = {}

def block_metrics(logits, targets, confidence, *others, **options):
    seen.update(logits=logits, confidence=confidence)
    return None, {}

dspark.compute_metrics = dflash.compute_metrics = block_metrics
dflash.select_anchors = lambda mask, number, block: (anchors, torch.ones(number, dtype=torch.bool))
for directory in map(Path, sys.argv[2:]):
    seen.clear()
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(directory, config=config).eval()
    held, stored = model.state_dict(), load_file(directory / "model.safetensors")
    assert all((held[name] == tensor).all() for name, tensor in stored.items())
    assert {name.split(".")[0] for name in held.keys() - stored.keys()} <= {
        "embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"
    }
    steps = []
    model.lm_head.register_forward_hook(lambda module, args, out: steps.append(out))
    kind = config.speculators_model_type
    documents = torch.zeros_like(tokens)
    with torch.no_grad():
        if kind == "mtp":
            model(tokens, last)
        elif kind == "eagle3":
            model(features[:, :-1], tokens[:, 1:], documents[:, 1:], ttt_steps=int(given["steps"]))
        else:
            mask = torch.ones_like(tokens)
            model(features, tokens, mask, last, documents, max_anchors=len(anchors))
            steps = [seen["logits"].view(len(anchors), config.block_size, -1)]
    found = {"logits": torch.stack(steps).numpy(), "kind": type(model).__name__}
    if kind == "dspark" and seen["confidence"] is not None:
        found["confidence"] = seen["confidence"].view(len(anchors), -1).numpy()
    np.savez(directory / "found.npz", **found)
"""


def drafter_of(name):
    if name == "mtp":
        layer = load_drafter(GOLDEN / "drafters/eagle3_qwen3").config.layer
        return Mtp(MtpConfig(vocab_size=320, layer=layer, num_target_layers=6), rngs=nnx.Rngs(0))
    if name == "dflash_itself":
        config = load_drafter(GOLDEN / "drafters/dflash_qwen3").config
        return DSpark(replace(config, slot_predicts_itself=True), rngs=nnx.Rngs(0))
    return load_drafter(GOLDEN / "drafters" / name)


@pytest.fixture(scope="module")
def inputs():
    reference = np.load(GOLDEN / "drafters/dspark_vanilla_qwen3/train_reference.npz")
    return {
        "tokens": reference["input_ids"][:1].astype(np.int64),
        "features": reference["target_hidden_states"][:1],
        "last": reference["target_last_hidden_states"][:1],
        "anchors": np.array([0, 4, 5, 11, 17]),
        "steps": STEPS,
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory, inputs):
    """Name -> what the package computed, all in one process."""
    if not PYTHON:
        pytest.skip("DSPARK_SPECULATORS_PYTHON names no interpreter that has speculators; see the top of this file")
    root = tmp_path_factory.mktemp("exported")
    np.savez(root / "inputs.npz", **inputs)
    fields = json.loads((VERIFIER / "config.json").read_text())
    for name in KINDS:
        save_speculators(
            root / name,
            drafter_of(name),
            verifier=str(VERIFIER),
            verifier_architectures=fields["architectures"],
            target_config=fields,
            vocabulary=load_target(VERIFIER).vocabulary,
        )
    command = [PYTHON, "-c", FORWARD, str(root), *(str(root / name) for name in KINDS)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return {name: np.load(root / name / "found.npz") for name in KINDS}


@jax.jit
def chain_logits(drafter, vocabulary, tokens, features):
    outputs = drafter.unrolled(vocabulary, tokens, features, jnp.zeros(tokens.shape, bool), drafter.block_size)
    return vocabulary.logits(outputs)


@jax.jit
def block_logits(drafter, vocabulary, tokens, features, anchors):
    hidden = drafter.training_blocks(vocabulary, tokens, features, anchors[None])
    previous = tokens[0][anchors[:, None] + jnp.arange(drafter.block_size)]
    return drafter.head_logits(vocabulary, hidden, previous[None])


@pytest.mark.parametrize("name", KINDS)
def test_the_packages_own_forward_gives_our_logits(package, inputs, name):
    found, drafter, vocabulary = package[name], drafter_of(name), load_target(VERIFIER).vocabulary
    assert str(found["kind"]) == KINDS[name]
    tokens, features, anchors = (jnp.asarray(inputs[part]) for part in ("tokens", "features", "anchors"))
    if name == "mtp":
        # The package leaves out the last entries, whose tokens nobody knows.
        ours = chain_logits(drafter, vocabulary, tokens, jnp.asarray(inputs["last"]))[:, :, :-2]
    elif name == "eagle3_qwen3":
        ours = chain_logits(drafter, vocabulary, tokens, features)[:, :, :-1]
    else:
        ours, confidence = block_logits(drafter, vocabulary, tokens, features, anchors)
        if drafter.confidence_head is not None:
            np.testing.assert_allclose(confidence[0], found["confidence"], atol=2e-4)
    theirs = found["logits"]
    if name == "dflash_itself":
        theirs = theirs[:, :, 1:]
    assert theirs.shape == ours.shape
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
