"""Several processes train as one does, with and without a cache, and fail together."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dspark_jax.training.hosts import add_flags, join
from dspark_jax.training.report import read_report

ROOT = Path(__file__).parents[2]
CONFIG = """
from dataclasses import replace
from dspark_jax.drafters.heads import VanillaMarkov
from dspark_jax.training.checkpoint import CheckpointConfig
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.draft import DSparkShape
from dspark_jax.training.evaluate import EvaluationConfig
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.sources import SelfSampled

config = TrainConfig(
    target={target!r},
    data=SelfSampled(sequences=61, prompt_tokens=3, temperature=0.7, validation=0.2),
    drafter=DSparkShape(
        mask_token_id=47, num_layers=1, block_size=3, tapped_layers=(-1, 0), markov_head=VanillaMarkov(rank=4)
    ),
    batch_size=8,
    sequence_length=16,
    anchors=4,
    steps=20,
    optimizer=OptimizerConfig(learning_rate=5e-3),
    evaluation=EvaluationConfig(every=20, batches=1, prompts=2, new_tokens=4),
    checkpoint=CheckpointConfig(every=20),
    precision="float32",
    log_every=5,
    fsdp={fsdp},
)
"""


def start(folder: Path, target: Path, *flags: str, devices: int = 1, fsdp: int = 1) -> subprocess.Popen:
    config = folder.parent / f"{folder.name}.py"
    config.write_text(CONFIG.format(target=str(target), fsdp=fsdp))
    command = [sys.executable, "train.py", "--config", str(config), "--run-dir", str(folder), *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return out


def restored(folder: Path, like: dict | None = None) -> dict:
    """The state after 20 steps, on devices that are here: those of `like`, which was saved on one."""
    manager = ocp.CheckpointManager((folder / "checkpoints").absolute())
    shapes = like and jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
    )
    state = manager.restore(20, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))).state
    manager.close()
    return state


def meeting_place() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
def test_two_processes_of_four_devices_train_like_one_device(small_target, tmp_path):
    """A signal to one stops both after the same step, the same call goes on, and after 20 steps the parameters are
    those of one device to 1e-4."""
    one, two = tmp_path / "one", tmp_path / "two"

    def pair() -> list[subprocess.Popen]:
        flags = ("--coordinator", meeting_place(), "--processes", "2", "--process")
        return [start(two, small_target, *flags, str(i), devices=4, fsdp=2) for i in range(2)]

    stopped = pair()
    for line in stopped[0].stdout:
        if line.startswith("step 5/20"):
            stopped[1].send_signal(signal.SIGTERM)
            break
    said = [process.communicate(timeout=400) for process in stopped]
    assert [process.returncode for process in stopped] == [128 + signal.SIGTERM] * 2, said
    assert "all of it saved" in said[0][0]
    said = [finished(process) for process in pair()]
    assert "Resuming" in said[0]
    assert "step 20" in said[0]
    assert "step" not in said[1]
    finished(start(one, small_target))
    theirs = restored(one)
    ours = restored(two, theirs)
    for name in (name for name in ours if name.startswith(".drafter")):
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, err_msg=name)
    losses = [[line["loss"] for line in read_report(folder, "train")] for folder in (two, one)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("disks", ["shared", "own"])
def test_two_processes_with_a_cache_train_like_two_without(small_target, tmp_path, disks):
    """Also when they were killed in the middle of filling it, or one of them lost part of its own."""
    flags = ("--set", "features.dtype=float32", "--set", "steps=10", "--set", "checkpoint.every=10")

    def losses(name: str, kind: str, folders: list[Path], cut: str = "") -> list[float]:
        place = meeting_place()
        processes = [
            start(
                tmp_path / name,
                small_target,
                *("--set", f"features.kind={kind}", "--set", f"features.directory={folder}", *flags),
                *("--coordinator", place, "--processes", "2", "--process", str(i)),
                devices=2,
                fsdp=2,
            )
            for i, folder in enumerate(folders)
        ]
        if cut:
            assert any(cut in line for line in processes[0].stdout)
            for process in processes:
                process.kill()
                process.communicate()
            return []
        said = [finished(process) for process in processes]
        assert "Sampling" not in said[1]
        print(said[0])
        return [line["loss"] for line in read_report(tmp_path / name, "train")]

    folders = [tmp_path / ("features" if disks == "shared" else f"features_{i}") for i in range(2)]
    expected = losses("online", "online", folders)
    assert len(expected) == 2
    losses("cached", "cached", folders, cut="Caching the target's outputs: 0 of")
    np.testing.assert_allclose(losses("cached", "cached", folders), expected, rtol=1e-4)
    written = {file.name for folder in folders for file in folder.glob("[!.]*.arrayrecord")}
    assert written == {"0-of-2-000000.arrayrecord", "1-of-2-000000.arrayrecord"}
    (folders[1] / "1-of-2-000000.arrayrecord").unlink()
    np.testing.assert_allclose(losses("mixed", "mixed", folders), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--processes", "2"], "belong together"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "from 0 to 1, not 2"),
    ],
)
def test_half_a_meeting_is_refused(flags, sentence):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(ValueError, match=sentence):
        join(parser.parse_args(flags))
