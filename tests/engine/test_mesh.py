"""Worker order and worker groups."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_cluster import local_workers

from jdlb.engine.mesh import (
    Workers,
    host_rows,
    order_workers,
    pieces_by_device,
    put_split,
    split_array,
)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    device_kind: str = "fake"


@given(st.permutations([(7, 0), (1, 1), (3, 1), (2, 2), (9, 0)]))
def test_the_order_is_by_process_then_by_device(pairs: list[tuple[int, int]]) -> None:
    devices = [FakeDevice(id, process) for id, process in pairs]
    workers = order_workers(devices, process_index=1)
    assert [d.id for d in workers.devices] == [7, 9, 1, 3, 2]
    assert workers.local == (2, 3)
    assert [d.id for d in workers.local_devices] == [1, 3]
    assert not workers.leads
    assert order_workers(devices, process_index=0).leads


@given(st.lists(st.sampled_from([4, 8, 16]), min_size=5, max_size=5))
def test_groups_hold_every_local_worker_once_by_capacity(capacities: list[int]) -> None:
    devices = tuple(FakeDevice(10 + w, w % 2) for w in range(5))
    workers = Workers(devices, (1, 3, 4))
    groups = workers.groups(capacities)
    assert sorted(w for g in groups for w in g.workers) == [1, 3, 4]
    assert len({g.capacity for g in groups}) == len(groups)
    for group in groups:
        assert all(capacities[w] == group.capacity for w in group.workers)
        assert [d.id for d in group.devices] == [10 + w for w in group.workers]
        assert group.key == (group.capacity, tuple(d.id for d in group.devices))


def test_pieces_become_one_array_and_pieces_again_without_a_copy() -> None:
    workers = local_workers(3)
    pieces = [
        jax.device_put(np.full((2, 3), w, np.float32), device)
        for w, device in enumerate(workers.devices)
    ]
    whole = split_array(workers.mesh, pieces)
    assert whole.shape == (6, 3)
    again = pieces_by_device(whole)
    for device, piece in zip(workers.devices, pieces, strict=True):
        assert again[device].unsafe_buffer_pointer() == piece.unsafe_buffer_pointer()


def test_host_arrays_go_to_the_device_of_their_place() -> None:
    workers = local_workers(4)
    rows = [np.array([w, w + 10], np.int32)[None] for w in range(4)]
    array = put_split(workers.mesh, rows)
    assert host_rows(workers, array).tolist() == [[w, w + 10] for w in range(4)]
    for w, device in enumerate(workers.devices):
        assert np.asarray(pieces_by_device(array)[device]).tolist() == [[w, w + 10]]


def test_a_piece_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="longer"):
        put_split(local_workers(2).mesh, [np.zeros((1, 1))])
