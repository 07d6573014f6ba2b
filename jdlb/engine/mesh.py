"""The one device order, and the groups of workers that share a capacity.

A worker is one device. Worker `w` is the `w`-th device in the order fixed here, which
is the same on every process. Knows nothing of models, data or time.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"
SPLIT = PartitionSpec(DATA_AXIS)
WHOLE = PartitionSpec()


@runtime_checkable
class Device(Protocol):
    """What is used of `jax.Device`, for which JAX ships no type."""

    @property
    def id(self) -> int:
        """Unique in the job."""
        ...

    @property
    def process_index(self) -> int:
        """The process that the device belongs to."""
        ...

    @property
    def device_kind(self) -> str:
        """The model of the device."""
        ...


def data_mesh(devices: Sequence[Device]) -> Mesh:
    """A mesh of one axis, `data`, over `devices` in the order given."""
    return Mesh(np.array(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True)
class WorkerGroup:
    """Workers of this process that run one compiled `compute`."""

    capacity: int
    workers: tuple[int, ...]
    devices: tuple[Device, ...]

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the group alone."""
        return data_mesh(self.devices)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """(capacity, device set): what a compiled program is bound to."""
        return self.capacity, tuple(d.id for d in self.devices)


@dataclasses.dataclass(frozen=True)
class Workers:
    """All workers of a job as one process sees them."""

    devices: tuple[Device, ...]
    # Indices of the workers of this process, ascending.
    local: tuple[int, ...]

    @property
    def count(self) -> int:
        """W, the number of workers of the job."""
        return len(self.devices)

    @property
    def local_devices(self) -> tuple[Device, ...]:
        """The devices of this process, in worker order."""
        return tuple(self.devices[w] for w in self.local)

    @property
    def leads(self) -> bool:
        """Whether this process holds worker 0, and so decides and writes records."""
        return 0 in self.local

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all workers."""
        return data_mesh(self.devices)

    @cached_property
    def local_mesh(self) -> Mesh:
        """The mesh of this process's workers."""
        return data_mesh(self.local_devices)

    def groups(self, capacities: Sequence[int]) -> tuple[WorkerGroup, ...]:
        """This process's workers by capacity (`capacities` has one entry a worker)."""
        by_capacity: dict[int, list[int]] = {}
        for w in self.local:
            by_capacity.setdefault(capacities[w], []).append(w)
        return tuple(
            WorkerGroup(c, tuple(ws), tuple(self.devices[w] for w in ws))
            for c, ws in sorted(by_capacity.items())
        )


def order_workers(devices: Sequence[Device], process_index: int) -> Workers:
    """Worker order: by process, then by device id, whatever order they come in."""
    ordered = tuple(sorted(devices, key=lambda d: (d.process_index, d.id)))
    local = tuple(w for w, d in enumerate(ordered) if d.process_index == process_index)
    return Workers(ordered, local)


def split_array(mesh: Mesh, pieces: Sequence[jax.Array]) -> jax.Array:
    """One array over `mesh`, split along axis 0, of one piece a device: no copy.

    Args:
      mesh: the devices; those of other processes hold pieces of the same shape.
      pieces: [n, ...] for each device of this process, already on it, in mesh order.
    """
    first = pieces[0]
    shape = (first.shape[0] * mesh.size, *first.shape[1:])
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, SPLIT), list(pieces)
    )


def put_split(mesh: Mesh, pieces: Sequence[np.ndarray]) -> jax.Array:
    """Host arrays [n, ...], one a device of a mesh of this process, put and joined.

    The arrays must not be written to afterwards: a device may use their memory.
    """
    placed = [
        jax.device_put(piece, device)
        for piece, device in zip(pieces, mesh.devices.flat, strict=True)
    ]
    return split_array(mesh, placed)


def host_rows(workers: Workers, array: jax.Array) -> np.ndarray:
    """The rows [l, ...] of the local workers, one each, on the host."""
    pieces = pieces_by_device(array)
    return np.stack([np.asarray(pieces[d])[0] for d in workers.local_devices])


def pieces_by_device(array: jax.Array) -> dict[Device, jax.Array]:
    """The part of `array` that each device of this process holds: no copy."""
    return {shard.device: shard.data for shard in array.addressable_shards}
