"""The trainer, whole rounds in one process: what is learned does not depend on how."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from jdlb.balance import policies
from jdlb.balance.controller import Controller
from jdlb.balance.ladder import Ladder, Limits
from jdlb.balance.policies.protocol import (
    AnyPolicy,
    Cluster,
    Observation,
    Policy,
    equal_targets,
)
from jdlb.data.partition import epoch_order
from jdlb.engine.mesh import SPLIT, order_workers, pieces_by_device
from jdlb.errors import RunError, UserError
from jdlb.trainer import PROBE_STEPS, Trainer

N, B, W = 23, 8, 4
STEPS = 3
RANDOM = np.random.default_rng(0)
SOURCE = [
    {"x": x, "y": np.float32(x @ [1.0, -2.0, 0.5])}
    for x in RANDOM.normal(size=(N, 3)).astype(np.float32)
]
PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
MOMENTUM = optax.sgd(0.05, momentum=0.9)


def loss(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return error**2, {"absolute": jnp.abs(error)}


def restless(seed: int) -> AnyPolicy:
    """Other shares every round, drawn anew: what no honest policy would do."""

    def draw(cluster: Cluster, round: int) -> np.ndarray:
        random = np.random.default_rng((seed, round))
        return random.dirichlet(np.ones(cluster.workers)) * cluster.global_batch

    def init(cluster: Cluster) -> tuple[np.ndarray, Cluster]:
        return draw(cluster, 0), cluster

    def update(seen: Observation, state: Cluster) -> tuple[np.ndarray, Cluster]:
        return draw(state, seen.round + 1), state

    return Policy(f"restless-{seed}", init, update)


def stubborn(
    shares: Sequence[float],
    first: Sequence[float] | None = None,
    probe: bool = False,
) -> AnyPolicy:
    """Equal at first unless other shares are given, then always these shares."""

    def init(cluster: Cluster) -> tuple[np.ndarray, int]:
        total = cluster.global_batch
        return np.array(first) * total if first else equal_targets(cluster), total

    def update(seen: Observation, total: int) -> tuple[np.ndarray, int]:
        return np.array(shares) * total, total

    return Policy("stubborn", init, update, probe)


def roomy(workers: int = W) -> Cluster:
    """One capacity for all: shares move freely, and one program serves them."""
    return Cluster(workers, B, Ladder(B, top=B), Limits((0,) * workers, (B,) * workers))


def make(workers: int = W, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "loss": loss,
        "params": PARAMS,
        "optimizer": MOMENTUM,
        "source": SOURCE,
        "global_batch": B,
        "policy": "equal",
        "workers": order_workers(jax.devices()[:workers], 0),
        **options,
    }
    return Trainer(**arguments)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def plain_jax(epochs: int, optimizer: Any = MOMENTUM, seed: int = 0) -> np.ndarray:
    """The same training on one device, in a loop of its own."""
    params, state = PARAMS, optimizer.init(PARAMS)
    mean = jax.jit(jax.grad(lambda p, b: loss(p, b)[0].mean()))
    for epoch in range(epochs):
        order = epoch_order(seed, epoch, N)
        for at in range(0, N, B):
            rows = [SOURCE[i] for i in order[at : at + B]]
            batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            updates, state = optimizer.update(mean(params, batch), state, params)
            params = optax.apply_updates(params, updates)
    return flat(params)


TWO_EPOCHS = plain_jax(2)
ROOMY: dict[str, Any] = {"cluster": roomy(), "aligned": False}


def close_to(params: Any, expected: np.ndarray) -> bool:
    """But for the order of the sums."""
    error = np.linalg.norm(flat(params) - expected)
    return bool(error < 1e-6 * np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {}),
        (4, {}),
        (4, {"policy": restless(1)}),
        (4, {"policy": restless(2), "round_steps": 1, **ROOMY}),
        (4, {"policy": restless(3), "round_steps": 2, "run_ahead": 1, **ROOMY}),
        (4, {"policy": policies.get("fixed", shares=(0.625, 0.125, 0.125, 0.125))}),
        (2, {"policy": "static"}),
        (4, {"policy": "dlb", "run_ahead": 9}),
    ],
)
def test_whatever_the_shares_the_parameters_are_those_of_one_device(
    workers: int, options: dict[str, Any]
) -> None:
    with make(workers, **options) as trainer:
        records = [r for _ in range(2) for r in trainer.train_epoch()]
        assert np.linalg.norm(
            flat(trainer.params) - TWO_EPOCHS
        ) < 1e-6 * np.linalg.norm(TWO_EPOCHS)
        for w in range(workers):
            assert np.array_equal(
                flat(trainer._engine.replica(w)), flat(trainer.params)
            )
    for record in records:
        assert sum(record.sizes) == B
    assert sum(record.examples for record in records) == 2 * N
    assert sum(record.steps for record in records) == 2 * STEPS
    if "round_steps" in options and workers == 4:
        assert len({record.sizes for record in records}) > 2


def tell(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    """A loss whose metrics say which examples it saw, and their keys."""
    bits = (jax.vmap(jax.random.bits)(batch["key"]) >> 12).astype(jnp.float32)
    # Sums of one-hots: in the statistics only real rows are left.
    hot = batch["index"][:, None] == jnp.arange(N)[None]
    counts = {f"n{i:02}": hot[:, i] for i in range(N)}
    keys = {f"k{i:02}": jnp.where(hot[:, i], bits, 0) for i in range(N)}
    return loss(params, batch)[0], counts | keys


def test_each_example_once_an_epoch_with_a_key_of_its_own() -> None:
    def epochs(workers: int, policy: Any, seed: int = 0) -> list[dict[str, float]]:
        options: Any = {"loss": tell, "policy": policy, "seed": seed}
        if workers == W:
            options |= ROOMY
        with make(workers, **options) as trainer:
            records = [trainer.train_epoch()[0] for _ in range(2)]
        assert all(record.examples == N for record in records)
        return [{k: round(v * N) for k, v in r.metrics.items()} for r in records]

    one = epochs(1, "equal")
    many = epochs(4, restless(5))
    other = epochs(1, "equal", seed=1)
    for epoch in (*one, *many, *other):
        assert [epoch[f"n{i:02}"] for i in range(N)] == [1] * N
    keys = [[epoch[f"k{i:02}"] for i in range(N)] for epoch in (*one, *other)]
    # On any worker the key is the same; in another epoch or run it is another.
    assert keys[:2] == [[epoch[f"k{i:02}"] for i in range(N)] for epoch in many]
    assert len({key for epoch in keys for key in epoch}) == 4 * N


class RecordingSource:
    """A list that remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return SOURCE[index]


def test_examples_are_read_in_the_order_of_the_epoch() -> None:
    source = RecordingSource()
    options: Any = {"policy": restless(7), "round_steps": 1, **ROOMY}
    with make(source=source, **options) as trainer:
        for epoch in range(2):
            source.read.clear()
            trainer.train_epoch()
            assert source.read == epoch_order(0, epoch, N).tolist()


def test_a_round_leaves_out_of_the_meter_what_does_not_count() -> None:
    with make(policy="equal") as trainer:
        first, second = trainer.train_epoch() + trainer.train_epoch()
    # Three steps: the first of a new shape, a full one, a partial one.
    assert first.measured_steps == (1,) * W
    assert second.measured_steps == (2,) * W
    assert all(0 < median < 10 for median in second.busy_median_seconds)
    # One group of four, compiled once, before the first round.
    assert first.compilations == (1, 0, 0, 0)
    assert second.compilations == (0, 0, 0, 0)
    assert second.compile_seconds == (0, 0, 0, 0)


def test_a_probe_changes_nothing_and_decides() -> None:
    shares = (0.625, 0.125, 0.125, 0.125)
    with make(policy=stubborn(shares, probe=True), optimizer=optax.adam(0.1)) as probed:
        (record,) = probed.train_epoch()
        assert record.sizes == (5, 1, 1, 1)
        assert record.round == 0
        with make(optimizer=optax.adam(0.1)) as plain:
            plain.train_epoch()
            expected = flat(plain.params)
        assert np.linalg.norm(flat(probed.params) - expected) < 1e-6
        # More steps than the epoch has full batches: some pass again.
        (times, *_) = probed.measure(PROBE_STEPS)
        assert len(times.busy) == PROBE_STEPS
        assert np.linalg.norm(flat(probed.params) - expected) < 1e-6


def test_static_probes_once() -> None:
    calls: list[tuple[int, int]] = []
    options: Any = {"policy": "static", "on_step": lambda e, s: calls.append((e, s))}
    with make(2, **options) as trainer:
        (first,) = trainer.train_epoch()
        assert len(calls) == PROBE_STEPS + STEPS
        assert calls[-STEPS:] == [(0, 0), (0, 1), (0, 2)]
        (second,) = trainer.train_epoch()
        assert len(calls) == PROBE_STEPS + 2 * STEPS
    assert first.sizes == second.sizes == trainer.allocation.sizes


def test_a_source_without_a_full_batch_trains_all_the_same() -> None:
    with make(policy="static", source=SOURCE[:3]) as trainer:
        (record,) = trainer.train_epoch()
    assert (record.steps, record.examples) == (1, 3)
    assert record.measured_steps == (0,) * W


def test_a_dry_run_decides_and_keeps_the_first_allocation() -> None:
    policy = stubborn((0.625, 0.125, 0.125, 0.125))
    with make(policy=policy, dry_run=True) as trainer:
        records = trainer.train_epoch() + trainer.train_epoch()
    assert [r.sizes for r in records] == [(2, 2, 2, 2)] * 2
    assert records[0].reason.startswith("dry run, kept: shares moved: worker 0 2 -> 5")
    assert not any(r.rebalanced for r in records)


def test_fixed_shares_stay() -> None:
    shares = (0.5, 0.25, 0.125, 0.125)
    with make(policy=policies.get("fixed", shares=shares)) as trainer:
        records = trainer.train_epoch() + trainer.train_epoch()
    assert {r.sizes for r in records} == {(4, 2, 1, 1)}
    assert not any(r.rebalanced for r in records)


def test_rounds_of_some_steps() -> None:
    with make(policy=restless(1), round_steps=2) as trainer:
        rounds = [r for _ in range(2) for r in trainer.rounds()]
    assert [(r.epoch, r.round, r.first_step, r.steps) for r in rounds] == [
        (0, 0, 0, 2),
        (0, 1, 2, 1),
        (1, 2, 0, 2),
        (1, 3, 2, 1),
    ]
    for one, two in itertools.pairwise(rounds):
        assert one.next_sizes == two.sizes
        assert one.rebalanced == (one.sizes != two.sizes)


def test_the_callers_parameters_stay_and_those_that_come_out_are_plain() -> None:
    params = jax.tree.map(jnp.array, PARAMS)
    with make(params=params) as trainer:
        trainer.train_epoch()
        before = flat(trainer.params).copy()
        taken = trainer.params
        trainer.train_epoch()
    assert flat(params).tolist() == [0, 0, 0, 0]
    assert np.array_equal(flat(taken), before)
    assert jax.tree.structure(taken) == jax.tree.structure(PARAMS)
    # A scalar, too: `np.float32` is not what other libraries take for a leaf.
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(taken))


@pytest.mark.parametrize("count", [1, 7, 11, 23])
def test_evaluation_is_exact_whatever_the_shares(count: int) -> None:
    policy = policies.get("fixed", shares=(0.0, 0.625, 0.25, 0.125))
    with make(policy=policy) as trainer:
        trainer.train_epoch()
        examples, means = trainer.evaluate(SOURCE[:count])
        params = trainer.params
        trainer.evaluate(SOURCE)
        programs: Any = trainer._evaluations[loss]._sums
        assert programs._cache_size() == 1
    rows = SOURCE[:count]
    batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    losses, metrics = loss(params, batch)
    assert examples == count
    assert means["loss"] == pytest.approx(np.asarray(losses, float).mean(), rel=1e-6)
    absolute = np.asarray(metrics["absolute"], float).mean()
    assert means["absolute"] == pytest.approx(absolute, rel=1e-6)


def test_evaluation_of_nothing() -> None:
    with make(1) as trainer, pytest.raises(UserError, match="nothing to evaluate"):
        trainer.evaluate([])


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


def test_the_controller_hears_how_many_steps_are_left(monkeypatch) -> None:
    heard: list[int | None] = []
    decide = Controller.decide

    def listening(self, observation, state, steps_left=None):
        heard.append(steps_left)
        return decide(self, observation, state, steps_left)

    monkeypatch.setattr(Controller, "decide", listening)
    with make(policy="static", epochs=2, round_steps=2) as trainer:
        steps = trainer.steps_in_epoch
        trainer.train_epoch()
        trainer.train_epoch()
    ends = [min(first + 2, steps) for first in range(0, steps, 2)]
    expected = [2 * steps]
    expected += [2 * steps - end for end in ends] + [steps - end for end in ends]
    assert heard == expected
    assert heard[-1] == 0
    with make() as trainer:
        trainer.train_epoch()
    assert heard[-1] is None
