"""What is saved comes back bit for bit; what does not fit is refused by name; half a save is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.checkpoint import CheckpointConfig, Checkpoints

CONFIG = {"drafter.block_size": 7, "drafter.tapped_layers": [1, 2], "log_every": 10}


def state(seed: int) -> dict:
    key = jax.random.key(seed)
    return {
        "w": [jax.random.normal(key, (3, 2)), jnp.float32(jnp.inf)],
        "half": jax.random.normal(key, (5,)).astype(jnp.bfloat16),
        "step": jnp.int32(seed),
        "key": key,
    }


def same(a, b) -> bool:
    a, b = [
        jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == jax.random.key(0).dtype else x, t) for t in (a, b)
    ]
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.fixture
def open_(tmp_path):
    opened = []

    def open_(**config) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "checkpoints", CheckpointConfig(**config)))
        return opened[-1]

    yield open_
    for checkpoints in opened:
        checkpoints.close()


def test_round_trip_of_state_data_and_step(open_):
    first = open_()
    first.save(4, state(4), {"next_index": 17}, CONFIG)
    first.close()
    again = open_()
    assert again.latest == 4
    restored = again.restore(state(0))
    assert (restored.step, restored.data) == (4, {"next_index": 17})
    assert same(restored.state, state(4))


def test_the_saved_arrays_are_those_of_the_call_even_when_donated_next(open_):
    checkpoints = open_()
    live = state(1)
    kept = jax.tree.map(jnp.copy, live)
    checkpoints.save(1, live, {}, CONFIG)
    jax.block_until_ready(
        jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(
            {name: live[name] for name in ("w", "half", "step")}
        )
    )
    checkpoints.close()
    assert same(open_().restore(state(0)).state, kept)


def test_only_the_newest_stay(open_):
    checkpoints = open_(keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {}, CONFIG)
    checkpoints.close()
    assert open_().latest == 3


def test_the_best_stays_beside_the_newest(open_):
    checkpoints = open_(keep=1)
    for step, accepted_length in ((1, 1.0), (2, 3.0), (3, None), (4, 2.0), (5, None)):
        checkpoints.save(step, state(step), {}, CONFIG, accepted_length)
    checkpoints.close()
    again = open_(keep=1)
    assert (again.best, again.latest) == (2, 5)
    assert same(again.restore(state(0), 2).state, state(2))
    with pytest.raises(FileNotFoundError):
        again.restore(state(0), 4)
    again.save(6, state(6), {}, CONFIG, 3.0)
    again.wait()
    assert again.best == 6, "of those alike the newest"


def test_where_none_was_judged_the_newest_is_best(open_):
    checkpoints = open_()
    assert checkpoints.best is None
    for step in (1, 2):
        checkpoints.save(step, state(step), {}, CONFIG)
    assert checkpoints.best == 2


def test_a_step_saved_already_is_not_written_again(open_):
    checkpoints = open_()
    checkpoints.save(1, state(1), {"a": 1}, CONFIG)
    checkpoints.close()
    again = open_()
    again.save(1, state(2), {"a": 2}, CONFIG)
    assert again.restore(state(0)).data == {"a": 1}


def test_an_unfinished_save_is_not_the_latest(open_, tmp_path):
    checkpoints = open_()
    checkpoints.save(1, state(1), {}, CONFIG)
    checkpoints.close()
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir()
    assert open_().latest == 1


def test_another_config_is_refused_by_field_unless_it_is_free(open_):
    checkpoints = open_()
    checkpoints.save(1, state(1), {}, CONFIG)
    checkpoints.close()
    other = CONFIG | {"drafter.block_size": 5, "log_every": 1}
    with pytest.raises(ValueError, match=r"drafter\.block_size was 7 when this run started and is 5 now"):
        open_().require(other, frozenset({"log_every"}))
    open_().require(CONFIG | {"log_every": 1}, frozenset({"log_every"}))


def test_without_a_checkpoint_any_config_fits(open_):
    open_().require(CONFIG, frozenset())
