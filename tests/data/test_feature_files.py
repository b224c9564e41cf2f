"""What is written is read; what was cut is not there; the bound holds whatever the sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data.feature_files import FeatureFiles

KEY = {"seed": 1, "packing": True}
LAYOUT = (((3, 5), np.dtype(np.float32)), ((3,), np.dtype(np.int8)))


def opened(folder, key=KEY, **sizes) -> FeatureFiles:
    return FeatureFiles(folder, key=key, layout=LAYOUT, **{"max_bytes": 1e9, "file_bytes": 200} | sizes)


def arrays_of(rows):
    draws = [np.random.default_rng(row) for row in rows]
    return [
        np.stack([rng.normal(size=(3, 5)).astype(np.float32) for rng in draws]),
        np.stack([rng.integers(-127, 128, 3).astype(np.int8) for rng in draws]),
    ]


def assert_holds(files, rows):
    for held, expected in zip(files.read(rows), arrays_of(rows), strict=True):
        assert held.dtype == expected.dtype
        assert np.array_equal(held, expected)


def test_rows_come_back_in_any_order_from_memory_and_disk(tmp_path):
    files = opened(tmp_path)
    rows = [7, 2, 11, 5, 3]
    files.write(rows, arrays_of(rows))
    assert len(list(tmp_path.glob("*.arrayrecord"))) == 1, "three rows fill a file, two wait"
    assert_holds(files, [3, 11, 7, 7, 2])
    files.flush()
    again = opened(tmp_path)
    assert [row for row in range(12) if row in again] == sorted(rows)
    assert_holds(again, [5, 3, 2, 7, 11])
    with pytest.raises(KeyError):
        again.read([4])


def test_a_killed_writer_leaves_whole_files_and_the_next_goes_on(tmp_path):
    killed = opened(tmp_path)
    killed.write([0, 1, 2, 3], arrays_of([0, 1, 2, 3]))
    # Row 3 was waiting, and half of the next file is on disk.
    (tmp_path / ".0-of-1-000001.arrayrecord").write_bytes(b"half")
    files = opened(tmp_path)
    assert [row for row in range(5) if row in files] == [0, 1, 2]
    files.write([2, 3, 4], arrays_of([2, 3, 4]))
    files.flush()
    assert_holds(opened(tmp_path), [4, 3, 2, 1, 0])
    assert not list(tmp_path.glob(".*"))


@settings(max_examples=15, deadline=None)
@given(kilobytes=st.integers(0, 900), file_bytes=st.sampled_from((1, 1000, 10**9)), count=st.integers(1, 20))
def test_the_bound_holds_and_the_estimate_is_one(tmp_path_factory, kilobytes, file_bytes, count):
    folder = tmp_path_factory.mktemp("files")
    files = opened(folder, max_bytes=kilobytes * 1024.0, file_bytes=file_bytes)
    rows = list(range(count))
    files.write(rows, arrays_of(rows))
    files.flush()
    held = [row for row in rows if row in files]
    assert files.bytes_written == sum(file.stat().st_size for file in folder.glob("*.arrayrecord"))
    assert files.bytes_written <= min(files.max_bytes, files.size(len(held)))
    assert len(held) == count or not files.has_room()
    assert held or kilobytes < 256


def test_writers_share_a_folder_and_its_bound_and_find_each_others_rows(tmp_path):
    def pair(count, **sizes):
        return [opened(tmp_path, writer=f"{i}-of-{count}", writers=count, **sizes) for i in range(count)]

    one, two = pair(2, max_bytes=9.0 * 2**18)
    for row in range(20):
        one.write([row], arrays_of([row]))
        two.write([100 + row], arrays_of([100 + row]))
    one.flush()
    two.flush()
    sizes = [sum(file.stat().st_size for file in tmp_path.glob(f"{i}-of-2-*")) for i in range(2)]
    assert sizes[0] == sizes[1] > 2**19
    assert sum(sizes) <= 9 * 2**18
    theirs = [row for row in range(100, 120) if row in two]
    assert not any(row in one for row in theirs)
    one.look_again()
    assert_holds(one, theirs)
    # Another number of writers finds the same rows, and less room.
    for files in pair(3, max_bytes=9.0 * 2**18):
        assert_holds(files, [0, *theirs])
        assert not files.has_room()
    assert opened(tmp_path, writers=3).size(20) > opened(tmp_path).size(20)


def test_a_broken_file_is_named(tmp_path):
    files = opened(tmp_path)
    files.write([1], arrays_of([1]))
    files.flush()
    (file,) = tmp_path.glob("*.arrayrecord")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{file} is not whole \(.*\): delete it"):
        opened(tmp_path)


def test_files_of_something_else_are_refused_by_field(tmp_path):
    opened(tmp_path)
    with pytest.raises(ValueError, match=r"features\.directory: .* was made with seed 1, and this run has 2"):
        opened(tmp_path, {"seed": 2, "packing": True})
    with pytest.raises(ValueError, match="made with target None, and this run has x"):
        opened(tmp_path, KEY | {"target": "x"})
    opened(tmp_path)
