"""The trainer when something goes wrong: what it says, and that nothing is lost."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from small_training import (
    PARAMS,
    SOURCE,
    TWO_EPOCHS,
    B,
    N,
    W,
    flat,
    loss,
    make,
    stubborn,
)

from jdlb.balance import policies
from jdlb.balance.ladder import Ladder, Limits
from jdlb.balance.policies.protocol import (
    AnyPolicy,
    Cluster,
)
from jdlb.data.partition import epoch_order
from jdlb.engine.mesh import SPLIT, pieces_by_device
from jdlb.errors import RunError, UserError
from jdlb.trainer import Trainer


def test_a_disturbed_replica_is_named() -> None:
    with make() as trainer:
        trainer.train_epoch()
        state = trainer._engine.state
        pieces = pieces_by_device(state.params["w"])
        rows = [np.array(pieces[d]) for d in trainer.workers.devices]
        rows[2].view(np.uint32)[0, 1] ^= 1 << 15
        sharding = NamedSharding(trainer.workers.mesh, SPLIT)
        disturbed = jax.device_put(np.concatenate(rows), sharding)
        params = {**state.params, "w": disturbed}
        trainer._engine.state = state._replace(params=params)
        with pytest.raises(RunError, match=r"of worker 2 differ .* after round 1"):
            trainer.train_epoch()


def poisoned(*steps: int) -> list[dict[str, Any]]:
    """The source with a NaN for the first worker in these steps of epoch 0."""
    source = [dict(example) for example in SOURCE * 6]
    order = epoch_order(0, 0, len(source))
    for step in steps:
        source[order[step * B]]["y"] = np.float32(np.nan)
    return source


def test_a_skipped_step_is_counted_and_its_worker_named() -> None:
    with make(source=poisoned(1, 4)) as trainer:
        (record,) = trainer.train_epoch()
        assert np.isfinite(flat(trainer.params)).all()
    assert record.skipped_steps == 2
    assert record.skipped_by_worker == (2, 0, 0, 0)
    assert record.examples == 6 * N - 2 * B
    assert np.isfinite(record.metrics["loss"])


def test_nine_in_a_row_do_not_end_a_run_and_ten_do() -> None:
    with make(source=poisoned(*range(9), *range(10, 17))) as trainer:
        (record,) = trainer.train_epoch()
    assert record.skipped_steps == 16
    ten: Any = {"source": poisoned(*range(3, 13)), "round_steps": 5}
    message = r"10 updates in a row .* of worker 0 are"
    with make(**ten) as trainer, pytest.raises(RunError, match=message):
        trainer.train_epoch()
    # Neither the reader nor the meter is left running.
    assert not [t for t in threading.enumerate() if t.name.startswith("jdlb")]


class Memory:
    """Devices that hold no more than so many rows each: [W]."""

    def __init__(self, trainer: Trainer, rows: Sequence[int]):
        self._rows = rows
        engine = trainer._engine
        prepare: Callable = engine.prepare

        def limited(capacities: Sequence[int]) -> Any:
            made = prepare(capacities)
            for group in engine._groups:
                if any(group.capacity > self._rows[w] for w in group.workers):
                    engine._programs[group.key] = self._exhausted  # pyright: ignore[reportArgumentType]
            return made

        engine.prepare = limited
        limited(trainer.allocation.capacities)

    @staticmethod
    def _exhausted(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


@contextlib.contextmanager
def with_memory(rows: Sequence[int], **options: Any) -> Iterator[Trainer]:
    with make(len(rows), **options) as trainer:
        Memory(trainer, rows)
        yield trainer


@pytest.mark.parametrize(
    ("rows", "policy", "sizes"),
    [
        ((5, 8), policies.get("fixed", shares=(0.75, 0.25)), (5, 3)),
        # In the second round: the first was fine.
        ((5, 8), stubborn((0.75, 0.25)), (5, 3)),
        # One after the other: what one cannot hold is too much for the next.
        ((3, 5, 8), policies.get("fixed", shares=(0.125, 0.75, 0.125)), None),
    ],
)
def test_out_of_memory_backs_off_and_nothing_is_lost(
    rows: tuple[int, ...], policy: AnyPolicy, sizes: tuple[int, ...] | None
) -> None:
    with with_memory(rows, policy=policy) as trainer:
        records = [trainer.train_epoch()[0] for _ in range(2)]
        assert np.linalg.norm(
            flat(trainer.params) - TWO_EPOCHS
        ) < 1e-6 * np.linalg.norm(TWO_EPOCHS)
    for record in records:
        assert record.examples == N
        assert sum(record.sizes) == B
        assert record.skipped_steps == 0
    assert all(c <= m for c, m in zip(records[1].capacities, rows, strict=True))
    if sizes:
        assert records[1].sizes == sizes


def test_out_of_memory_while_probing_backs_off_too() -> None:
    policy = dataclasses.replace(policies.get("fixed", shares=(0.75, 0.25)), probe=True)
    with with_memory((5, 8), policy=policy) as trainer:
        trainer.probe()
        assert trainer.allocation.sizes == (5, 3)
        (record,) = trainer.train_epoch()
        trainer.train_epoch()
        assert np.linalg.norm(
            flat(trainer.params) - TWO_EPOCHS
        ) < 1e-6 * np.linalg.norm(TWO_EPOCHS)
    assert record.sizes == (5, 3)


def test_below_the_lowest_edge_a_cap_halves() -> None:
    cluster = Cluster(2, B, Ladder(4, top=B), Limits((0, 0), (B, B)))
    options: Any = {"cluster": cluster, "aligned": False}
    policy = stubborn((0.375, 0.625), first=(0.375, 0.625))
    with with_memory((2, 8), policy=policy, **options) as trainer:
        (record,) = trainer.train_epoch()
    assert (record.sizes, record.capacities) == ((2, 6), (2, 8))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((8, 0), "worker 1 ran out of memory with one example"),
        ((4, 3), "ran out of memory, and there is no room for the examples"),
    ],
)
def test_no_room_left_ends_the_run(rows: tuple[int, ...], message: str) -> None:
    policy = policies.get("fixed", shares=(0.75, 0.25) if rows[1] else (0.875, 0.125))
    with (
        with_memory(rows, policy=policy) as trainer,
        pytest.raises(RunError, match=message) as caught,
    ):
        trainer.train_epoch()
    assert "\n" not in str(caught.value)


def test_an_error_of_the_source_ends_the_epoch_and_no_thread_is_left() -> None:
    source = [*SOURCE[:-1], {"x": np.zeros(4, np.float32), "y": np.float32(0)}]
    message = f"example {N - 1}, key 'x'"
    with make(1, source=source) as trainer, pytest.raises(UserError, match=message):
        trainer.train_epoch()
    assert not [t for t in threading.enumerate() if t.name.startswith("jdlb")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda p, b: loss(p, b)[0].mean()}, "the loss function must return"),
        ({"loss": lambda p, b: (loss(p, b)[0].mean(), {})}, "one value an example"),
        ({"params": {}}, "the parameters are empty"),
        ({"params": {**PARAMS, "n": np.zeros(2, int)}}, r"\['n'\] has dtype int64"),
        ({"source": []}, "the data source is empty"),
        ({"source": [{"x": "text"}]}, "example 0, key 'x'"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**32}, "seed 4294967296"),
        ({"global_batch": W - 1}, "a global batch of 3 is less than one example"),
        (
            {"cluster": Cluster.create(W, B + 1)},
            "for 4 workers and a global batch of 9",
        ),
        (
            {"cluster": Cluster.create(W - 1, B)},
            "for 3 workers .*, the run has 4 and 8",
        ),
        ({"policy": "dbl"}, "did you mean 'dlb'"),
        ({"round_steps": 0}, "round_steps is 0"),
        ({"run_ahead": 0}, "run_ahead is 0"),
        ({"prefetch": 0}, "prefetch is 0"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(**options)
    assert "\n" not in str(caught.value)
    assert not [t for t in threading.enumerate() if t.name.startswith("jdlb")]
