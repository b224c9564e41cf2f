"""Filling a module from shards: what is in memory meanwhile, and where parameters end up."""

import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.core.mesh import make_mesh
from dspark_jax.interop.families import FAMILIES
from dspark_jax.interop.huggingface import load_target, read_spec
from dspark_jax.interop.parameters import fill, placing
from dspark_jax.interop.tensor_files import TensorFiles
from dspark_jax.nn.layers import RMSNorm
from dspark_jax.targets.model import Target

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/golden/targets/qwen3_tiny"


@pytest.fixture
def shards(tmp_path):
    """The tiny target in three shards, its layers' tensors dealt out like cards: stacked ones lie in two shards."""
    tensors = load_file(TINY / "model.safetensors")
    names = [f"model-{i:05}-of-00003.safetensors" for i in range(1, 4)]
    weight_map = {name: names[i % 3] for i, name in enumerate(sorted(tensors))}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ' + str(weight_map).replace("'", '"') + "}")
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    return tmp_path


def test_shards_are_the_same_target(shards):
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), load_target(shards), load_target(TINY)))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the mappings of a process are read from /proc"
)


@needs_proc
def test_a_loaded_target_has_left_the_files(shards):
    target = load_target(shards)
    assert str(shards) not in Path("/proc/self/maps").read_text()
    assert target.vocabulary.embedding.size


@needs_proc
def test_one_shard_and_one_parameter_at_a_time(shards, monkeypatch):
    spec = read_spec(shards)
    table = FAMILIES["Qwen3ForCausalLM"].table(spec)
    abstract = nnx.eval_shape(lambda: Target(spec, rngs=nnx.Rngs(0), dtype=jnp.float32))
    before, mapped = [], []

    def read(files, name, plain=TensorFiles.read):
        assert all(earlier() is None for earlier in before), name
        return plain(files, name)

    def place(path, tensor):
        before.append(weakref.ref(tensor))
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped.append({line.split()[-1] for line in maps if str(shards) in line})
        # A copy that JAX makes may hold on to the original for a while.
        return jnp.zeros(tensor.shape, tensor.dtype)

    monkeypatch.setattr(TensorFiles, "read", read)
    fill(abstract, table, TensorFiles(shards), place=place)
    assert len(before) == len(jax.tree.leaves(abstract))
    assert [len(files) for files in mapped] == [1] * len(mapped)
    assert len(set().union(*mapped)) == 3


@pytest.mark.parametrize("spread", [False, True])
def test_a_placed_parameter_is_a_copy(spread):
    """Aligned as XLA wants it, an array on the host's own device would otherwise be the file's pages."""
    raw = np.zeros(320, np.uint8)
    tensor = raw[-raw.ctypes.data % 64 :][:256].view(np.float32)
    abstract = nnx.eval_shape(lambda: RMSNorm(64, "model", eps=1e-6, dtype=jnp.float32))
    mesh = make_mesh(devices=jax.devices()[:1]) if spread else None
    placed = placing(mesh, abstract)("scale", tensor)
    tensor[:] = 1
    assert (np.asarray(placed) == 0).all()


ON_FOUR_DEVICES = """
import jax
from pathlib import Path
from dspark_jax.core.mesh import make_mesh, module_shardings
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.huggingface import load_target

def check(load):
    spread, plain = load(make_mesh(fsdp=2, tensor=2)), load(None)
    wanted = module_shardings(make_mesh(fsdp=2, tensor=2), plain)
    for one, other, sharding in zip(*map(jax.tree.leaves, (spread, plain, wanted)), strict=True):
        assert one.sharding.is_equivalent_to(sharding, one.ndim)
        assert (jax.device_get(one) == jax.device_get(other)).all()
    return spread

target = check(lambda mesh: load_target(Path("tests/golden/targets/qwen3_tiny"), mesh=mesh))
assert target.vocabulary.embedding[...].addressable_shards[0].data.shape == (160, 32)
check(lambda mesh: load_drafter(Path("tests/golden/drafters/dspark_rnn_qwen3"), mesh=mesh))
maps = Path("/proc/self/maps")
assert not maps.exists() or ".safetensors" not in maps.read_text()
"""


def test_parameters_go_to_their_device_shards(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run([sys.executable, "-c", ON_FOUR_DEVICES], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
