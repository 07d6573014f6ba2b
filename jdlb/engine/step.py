"""The step of one process: state, program table, dispatch.

Holds the replicas of this process's workers and runs the three programs of
`programs` over them. `compute` has one compiled program a (capacity, device set);
`reduce` and `apply` have one each. Knows no data source, no policy and no clock.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jdlb.engine import programs
from jdlb.engine.layout import Layout, Statistics, layout_of
from jdlb.engine.mesh import (
    SPLIT,
    WHOLE,
    Device,
    WorkerGroup,
    Workers,
    pieces_by_device,
    put_split,
    split_array,
)
from jdlb.engine.programs import LossFunction, ReplicaState
from jdlb.errors import UserError

MAX_PROGRAMS = 128
"""Compiled programs kept a process; the one unused for longest is dropped."""


@runtime_checkable
class WorkerRows(Protocol):
    """The rows of one worker for one step, padded to its capacity c."""

    @property
    def fields(self) -> Mapping[str, np.ndarray]:
        """Arrays [c, ...]."""
        ...

    @property
    def mask(self) -> np.ndarray:
        """Booleans [c]: which rows are real; real rows come first."""
        ...

    @property
    def index(self) -> np.ndarray:
        """Example index of each row [c], int32."""
        ...


class GroupInputs(NamedTuple):
    """What `compute` of one worker group takes beside the parameters (axis n = G*c)."""

    fields: dict[str, jax.Array]
    mask: jax.Array
    example_index: jax.Array
    worker: jax.Array
    seed_epoch: jax.Array


class StepHandles(NamedTuple):
    """Handles on one dispatched step; waiting on any of them is safe (never donated).

    `contributed` and `reduced` have one entry a local worker.
    """

    contributed: tuple[jax.Array, ...]
    reduced: tuple[jax.Array, ...]
    summary: jax.Array


class StepOutcome(NamedTuple):
    """What came of one step, read from its summary; sums over the global batch."""

    counted: bool
    statistics: Statistics

    @property
    def failed(self) -> tuple[int, ...]:
        """Workers that could not compute their share."""
        return tuple(np.flatnonzero(self.statistics.failed).tolist())


class Compilation(NamedTuple):
    """One compilation of `compute`: for which worker group, how long."""

    workers: tuple[int, ...]
    capacity: int
    seconds: float


class StepEngine:
    """The three programs over one process's share of the workers."""

    def __init__(
        self,
        workers: Workers,
        loss: LossFunction,
        optimizer: optax.GradientTransformation,
        params: PyTree,
        example: Mapping[str, np.ndarray],
        *,
        max_programs: int = MAX_PROGRAMS,
    ):
        """Put `params` on every local worker and compile `reduce` and `apply`.

        Args:
          workers: all workers of the job.
          loss: per-example losses; see `programs.LossFunction`.
          optimizer: any optax transformation; it sees the mean gradient of the
            global batch.
          params: floating-point arrays; they are copied, so donation never deletes
            the caller's.
          example: one example of the source, without a leading axis.
          max_programs: how many compiled `compute` programs are kept.

        Raises:
          UserError: the parameters or the loss function do not fit.
        """
        self.workers = workers
        self._example = {
            name: jax.ShapeDtypeStruct(
                np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)
            )
            for name, x in example.items()
        }
        # Before any device work: what does not fit is said here.
        taken = {"index", "key"} & self._example.keys()
        if taken:
            raise UserError(
                f"the source has a field {min(taken)!r}: rename it, the batch that a "
                "loss function sees has its own under this name"
            )
        layout = layout_of(params, (), workers.count)
        names = programs.metric_names_of(loss, params, self._batch_shapes(2), 2)
        self.layout: Layout = dataclasses.replace(layout, metric_names=names)
        self._optimizer = optimizer
        self._compute_body = functools.partial(programs.compute, loss, self.layout)
        self._traces: dict[tuple[int, int], jax.stages.Traced] = {}
        self._programs: collections.OrderedDict[
            tuple[int, tuple[int, ...]], jax.stages.Compiled
        ] = collections.OrderedDict()
        self._max_programs = max_programs
        self._groups: tuple[WorkerGroup, ...] = ()
        self.state = self._initial_state(params)
        self._reduce, self.global_program = self._compile_reduce()
        self._apply = self._compile_apply()

    def prepare(self, capacities: Sequence[int]) -> list[Compilation]:
        """Form the worker groups for `capacities` and compile what they lack.

        Only between steps that nobody waits for: the caller drained the pipeline.
        """
        compilations = []
        self._groups = self.workers.groups(capacities)
        for group in self._groups:
            if group.key not in self._programs:
                start = time.perf_counter()
                self._programs[group.key] = self._compile_compute(group)
                seconds = time.perf_counter() - start
                compilations.append(Compilation(group.workers, group.capacity, seconds))
            self._programs.move_to_end(group.key)
        keep = max(self._max_programs, len(self._groups))
        while len(self._programs) > keep:
            self._programs.popitem(last=False)
        return compilations

    def place(
        self, rows: Sequence[WorkerRows], seed: int, epoch: int
    ) -> tuple[GroupInputs, ...]:
        """Bring the rows of the local workers to their devices, by worker group.

        The arrays must not be written to afterwards: a device may use their memory.
        """
        by_worker = dict(zip(self.workers.local, rows, strict=True))
        return tuple(
            self._place_group(group, [by_worker[w] for w in group.workers], seed, epoch)
            for group in self._groups
        )

    def step(self, inputs: Sequence[GroupInputs]) -> StepHandles:
        """Dispatch one step; returns before it is done.

        A worker whose `compute` does not fit into memory contributes its failure bit
        alone: every replica halts, and the caller redoes the step with new caps.
        """
        flat: dict[Device, jax.Array] = {}
        marker: dict[Device, jax.Array] = {}
        for group, group_inputs in zip(self._groups, inputs, strict=True):
            try:
                contribution, done = self._programs[group.key](
                    self._params_of(group), *group_inputs
                )
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                contribution, done = self._failed_contribution(group)
            flat |= pieces_by_device(contribution)
            marker |= pieces_by_device(done)
        local = self.workers.local_devices
        reduced, reduced_marker = self._reduce(
            split_array(self.workers.mesh, [flat[d] for d in local])
        )
        self.state, summary = self._apply(self.state, self._on_local_mesh(reduced))
        reduced_by_device = pieces_by_device(reduced_marker)
        return StepHandles(
            tuple(marker[d] for d in local),
            tuple(reduced_by_device[d] for d in local),
            summary,
        )

    def outcome(self, handles: StepHandles) -> StepOutcome:
        """What came of a step; waits for it."""
        summary = np.asarray(handles.summary.addressable_shards[0].data)[0]
        return StepOutcome(bool(summary[0]), self.layout.statistics(summary[1:]))

    def set_halted(self, halted: bool) -> None:
        """Make the replicas ignore updates (to measure or retry), or obey them again."""
        flags = np.full(len(self.workers.local), halted)
        sharding = NamedSharding(self.workers.local_mesh, SPLIT)
        self.state = self.state._replace(halted=jax.device_put(flags, sharding))

    def replica(self, worker: int) -> PyTree:
        """A host copy (NumPy) of the parameters of one local worker."""
        device = self.workers.devices[worker]
        return jax.tree.map(
            lambda leaf: np.array(pieces_by_device(leaf)[device])[0, ...],
            self.state.params,
        )

    def _batch_shapes(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a whole batch of one worker, as a loss function sees it."""
        return {
            **{
                name: jax.ShapeDtypeStruct((capacity, *x.shape), x.dtype)
                for name, x in self._example.items()
            },
            "index": jax.ShapeDtypeStruct((capacity,), np.int32),
            "key": jax.eval_shape(
                lambda: jax.random.split(
                    jax.random.key(0, impl="threefry2x32"), capacity
                )
            ),
        }

    def _initial_state(self, params: PyTree) -> ReplicaState:
        count = len(self.workers.local)

        def replicate(params: PyTree) -> ReplicaState:
            state = ReplicaState(params, self._optimizer.init(params), jnp.array(False))
            return jax.tree.map(
                lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), state
            )

        sharding = NamedSharding(self.workers.local_mesh, SPLIT)
        host_params = jax.tree.map(np.asarray, params)
        return jax.jit(replicate, out_shardings=sharding)(host_params)

    def _compile_reduce(self) -> tuple[jax.stages.Compiled, str]:
        """The program, and its text, which must be the same on every process."""
        mesh = self.workers.mesh
        reduce = jax.jit(
            jax.shard_map(
                programs.reduce, mesh=mesh, in_specs=SPLIT, out_specs=(WHOLE, WHOLE)
            )
        )
        flat = jax.ShapeDtypeStruct(
            (self.workers.count, self.layout.length),
            self.layout.dtype,
            sharding=NamedSharding(mesh, SPLIT),
        )
        lowered = reduce.lower(flat)
        return lowered.compile(), lowered.as_text()

    def _compile_apply(self) -> jax.stages.Compiled:
        mesh = self.workers.local_mesh
        apply = jax.jit(
            jax.shard_map(
                functools.partial(programs.apply, self._optimizer, self.layout),
                mesh=mesh,
                in_specs=(SPLIT, WHOLE),
                out_specs=(SPLIT, SPLIT),
                # Control flow with constant carries is typed as unvarying.
                check_vma=False,
            ),
            donate_argnums=0,
        )
        reduced = jax.ShapeDtypeStruct(
            (self.layout.length,),
            self.layout.dtype,
            sharding=NamedSharding(mesh, WHOLE),
        )
        return apply.lower(self.state, reduced).compile()

    def _compile_compute(self, group: WorkerGroup) -> jax.stages.Compiled:
        """Traced once a (capacity, group size), thanks to the abstract mesh."""
        size = len(group.workers)
        split = NamedSharding(group.mesh, SPLIT)
        rows = size * group.capacity

        def shape(
            axes: tuple[int, ...], dtype: np.dtype | type
        ) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(axes, dtype, sharding=split)

        arguments = (
            jax.tree.map(
                lambda leaf: shape((size, *leaf.shape[1:]), leaf.dtype),
                self.state.params,
            ),
            {
                name: shape((rows, *x.shape), x.dtype)
                for name, x in self._example.items()
            },
            shape((rows,), bool),
            shape((rows,), np.int32),
            shape((size,), np.int32),
            jax.ShapeDtypeStruct(
                (2,), np.uint32, sharding=NamedSharding(group.mesh, WHOLE)
            ),
        )
        key = group.capacity, size
        if key not in self._traces:
            body = jax.shard_map(
                self._compute_body,
                mesh=group.mesh.abstract_mesh,
                in_specs=(SPLIT, SPLIT, SPLIT, SPLIT, SPLIT, WHOLE),
                out_specs=(SPLIT, SPLIT),
                # As in `apply`; parameters are split, so JAX adds no sum of its own.
                check_vma=False,
            )
            self._traces[key] = jax.jit(body).trace(*arguments)
        trace = self._traces[key].jaxpr

        # A function for this program alone: JAX keeps all that it compiled for a
        # function as long as that lives, and the table would bound nothing.
        def compute(*arguments: PyTree) -> Sequence[jax.Array]:
            return jaxpr_as_fun(trace)(*jax.tree.leaves(arguments))

        return jax.jit(compute).lower(*arguments).compile()

    def _place_group(
        self, group: WorkerGroup, rows: Sequence[WorkerRows], seed: int, epoch: int
    ) -> GroupInputs:
        split = functools.partial(put_split, group.mesh)
        return GroupInputs(
            {name: split([r.fields[name] for r in rows]) for name in self._example},
            split([r.mask for r in rows]),
            split([r.index for r in rows]),
            split([np.array([w], np.int32) for w in group.workers]),
            jax.device_put(
                np.array([seed, epoch], np.uint32), NamedSharding(group.mesh, WHOLE)
            ),
        )

    def _params_of(self, group: WorkerGroup) -> PyTree:
        """The parameters as an array over the group: the same buffers."""
        if len(self._groups) == 1:
            return self.state.params

        def regroup(leaf: jax.Array) -> jax.Array:
            pieces = pieces_by_device(leaf)
            return split_array(group.mesh, [pieces[d] for d in group.devices])

        return jax.tree.map(regroup, self.state.params)

    def _on_local_mesh(self, whole: jax.Array) -> jax.Array:
        """A replicated global array as one over this process's devices: no copy."""
        pieces = pieces_by_device(whole)
        return jax.make_array_from_single_device_arrays(
            whole.shape,
            NamedSharding(self.workers.local_mesh, WHOLE),
            [pieces[d] for d in self.workers.local_devices],
        )

    def _failed_contribution(self, group: WorkerGroup) -> tuple[jax.Array, jax.Array]:
        flat = [self.layout.failure(w)[None] for w in group.workers]
        marker = [np.zeros(1, self.layout.dtype) for _ in group.workers]
        return put_split(group.mesh, flat), put_split(group.mesh, marker)
