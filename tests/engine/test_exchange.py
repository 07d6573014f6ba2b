"""What processes tell each other arrives bit for bit; a digest sees every bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from small_cluster import local_workers, mlp_params

from jdlb.engine.exchange import Digest, Exchange
from jdlb.engine.mesh import SPLIT, Workers

WORKERS = local_workers(4)
EXCHANGE = Exchange(WORKERS)
DIGEST = Digest(WORKERS)


@given(st.lists(st.integers(-(2**28), 2**28), min_size=12, max_size=12))
def test_total_is_exact(values: list[int]) -> None:
    rows = np.array(values, np.int32).reshape(4, 3)
    assert EXCHANGE.total(rows).tolist() == rows.sum(axis=0).tolist()


@given(st.lists(st.floats(width=64), min_size=8, max_size=8))
def test_floats_arrive_with_all_their_bits(values: list[float]) -> None:
    rows = np.array(values, np.float64).reshape(4, 2)
    assert EXCHANGE.gather(rows).tobytes() == rows.tobytes()


def test_what_the_lead_says_holds() -> None:
    values = np.array([3, 2**31 - 1, -(2**31)], np.int32)
    assert EXCHANGE.from_lead(values).tolist() == values.tolist()


class Follower(Exchange):
    """The last two of four workers, seen from a process that does not lead."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(WORKERS, local=(2, 3)))
        self.sent: Any = None

    def total(self, rows: np.ndarray) -> np.ndarray:
        self.sent = rows
        return rows.sum(axis=0, dtype=np.int32)


def test_a_process_that_does_not_lead_sends_nothing_of_its_own() -> None:
    follower = Follower()
    assert follower.from_lead(np.array([5, 6], np.int32)).tolist() == [0, 0]
    # And in a table it fills the rows of its own workers.
    table = follower.gather(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert table.tolist() == [[0, 0], [0, 0], [1, 2], [3, 4]]


def digests(params: Any, workers: Workers = WORKERS) -> list[int]:
    """Of one tree a worker."""
    sharding = NamedSharding(workers.local_mesh, SPLIT)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
    return DIGEST.of(jax.device_put(stacked, sharding)).tolist()


def test_equal_bits_have_equal_digests() -> None:
    assert len(set(digests([mlp_params()] * 4))) == 1


def changed(**leaves: np.ndarray) -> dict[str, np.ndarray]:
    return {**mlp_params(), **leaves}


def test_one_bit_anywhere_moves_the_digest() -> None:
    out = mlp_params()["out"]
    flipped = out.copy()
    flipped.view(np.uint32)[3] ^= 1
    negative = out.copy()
    negative[2] = -negative[2]
    got = digests(
        [mlp_params(), changed(out=flipped), changed(out=negative)] * 1 + [mlp_params()]
    )
    assert got[0] == got[3]
    assert len(set(got)) == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@settings(max_examples=20)
@given(places=st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True))
def test_position_and_sign_count_in_every_dtype(dtype: Any, places: list[int]) -> None:
    i, j = places
    with jax.enable_x64(dtype is jnp.float64):
        # Powers of two and their negatives: few bits differ, where a sum is weakest.
        usual = np.array([1, -1, 2, -2, 4, -4, 8, 16], dtype)
        swapped, signs, last = usual.copy(), usual.copy(), usual.copy()
        swapped[[i, j]] = usual[[j, i]]
        signs[[i, j]] = -usual[[i, j]]
        last.view(np.uint8)[0] ^= 1
        got = digests([{"a": x} for x in (usual, swapped, signs, last)])
        assert got[0] not in got[1:]


def test_values_that_change_leaves_move_the_digest() -> None:
    a, b = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    got = digests([{"a": a, "b": b}, {"a": b, "b": a}] * 2)
    assert got[0] == got[2] != got[1] == got[3]
