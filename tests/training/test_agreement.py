"""What several processes decide together, with threads for processes: none waits for one that went another way."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grain
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from dspark_jax.data.feature_files import FeatureFiles
from dspark_jax.interop.huggingface import load_target
from dspark_jax.training import features as feature_module
from dspark_jax.training.features import FeatureConfig, require_room
from dspark_jax.training.hosts import all_succeed, everyone, here, in_turn, most, sharing


@pytest.fixture
def together(monkeypatch):
    """Runs a function in so many threads, each of which takes itself for a process; what they return."""

    def run(count, work):
        local, barrier, said = threading.local(), threading.Barrier(count, timeout=20.0), [None] * count

        def gather(value, tiled=False):
            said[local.index] = np.asarray(value)
            barrier.wait()
            values = np.stack(said)
            barrier.wait()
            return values

        def process(index):
            local.index = index
            return work(index)

        monkeypatch.setattr(jax, "process_index", lambda: local.index)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda what: barrier.wait())
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(process, range(count)))

    return run


def test_what_fails_on_one_fails_on_all_in_its_words(together):
    def make():
        if here().index == 1:
            raise OSError("the disk is full: make room")
        return here().index

    def work(index):
        with pytest.raises(ValueError, match=r"^process 1: the disk is full: make room$"):
            all_succeed(make)
        with pytest.raises(ValueError, match=r"^process 1: the disk is full: make room$"):
            in_turn(make)
        return all_succeed(lambda: index), everyone("é" * 600 * index)[2], most(7 - index)

    assert together(3, work) == [(index, "é" * 512, 7) for index in range(3)]


@pytest.mark.parametrize(
    ("disks", "expected"),
    [("aaaa", ["0123"] * 4), ("abcd", ["0", "1", "2", "3"]), ("abab", ["02", "13", "02", "13"])],
)
def test_who_shares_a_folder_is_found_out(together, tmp_path, disks, expected):
    for disk in disks:
        (tmp_path / disk).mkdir(exist_ok=True)
    found = together(4, lambda index: sharing(tmp_path / disks[index]))
    assert ["".join(map(str, processes)) for processes in found] == expected
    assert not list(tmp_path.glob("*/*"))


def test_processes_fill_a_folder_together_and_read_each_others_rows(
    together, tmp_path, small_target, monkeypatch, caching, numbered, owners
):
    target = load_target(small_target)
    monkeypatch.setattr(feature_module, "FeatureFiles", partial(FeatureFiles, file_bytes=64))
    shares = [[numbered(0, 3), numbered(6, -1)], [numbered(1, 4), numbered(-1, -1)], [numbered(2, 5), numbered(-1, -1)]]

    def work(index):
        features, look, _ = caching(tmp_path, writers=3, kind="cached")
        said = []
        features.fill(target, grain.MapDataset.source(shares[index]), range(7), said.append)
        return len(look.looked), owners(features(target, numbered(6, 4, 2))), len(look.looked), said[-1]

    for found in together(3, work):
        assert found == (2, [6.0, 4.0, 2.0], 2, "All rows are cached, in 0.000918 GB.")
    assert {file.name[:6] for file in tmp_path.glob("*.arrayrecord")} == {"0-of-3", "1-of-3", "2-of-3"}


@pytest.mark.parametrize("kind", ["cached", "mixed"])
def test_what_one_process_lacks_all_compute(together, tmp_path, small_target, caching, numbered, owners, kind):
    target = load_target(small_target)
    for index in range(2):
        (tmp_path / str(index)).mkdir()

    def work(index):
        features, look, _ = caching(tmp_path / str(index), kind=kind)
        if kind == "cached":
            said = []
            features.fill(target, grain.MapDataset.source([numbered(5, 6)]), [5, 6, 7][: 2 + index], said.append)
            assert "Some rows are not in the cache" in said[-1]
        else:
            features(target, numbered(5, 6))
        before = len(look.looked)
        asked = [[5, 6], [5, 7 - index], [5, 6], [5, 7 - index]]
        assert [owners(features(target, numbered(*rows))) for rows in asked] == asked
        return look.looked[before:]

    # Row 7 is new to process 0 alone.
    assert together(2, work) == [[[5, 7]], [[5, 6]]]


def test_what_does_not_fit_on_one_disk_is_refused_on_all_after_all_are_told(together, tmp_path, monkeypatch, caching):
    monkeypatch.setattr(FeatureFiles, "bytes_free", property(lambda self: int(1e9 if self.folder.name == "0" else 1e5)))

    def work(index):
        _, _, files = caching(tmp_path / str(index))
        said = []
        with pytest.raises(
            ValueError, match=rf"^process 1: the cache needs .* and {tmp_path / '1'} has 0\.0001 GB free"
        ):
            require_room(FeatureConfig(kind="cached", dtype="float32"), files, 5000 + index, said.append)
        return said

    first, second = together(2, work)
    assert first == second
    assert [line.partition(" rows")[0] for line in first] == [
        f"Process {index}: The target's outputs of 5,00{index}" for index in range(2)
    ]
