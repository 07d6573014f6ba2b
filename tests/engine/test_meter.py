"""The meter: a delay shows where it was, and in nobody else's time.

The arrays are stand-ins that become ready when the test says so; times are of a few
hundredths of a second, and bounds leave room for a busy machine.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jdlb.engine.meter import Meter, WorkerTimes, _WorkerClock, spread_seconds

DELAY = 0.08
# What a thread may be late on a machine whose cores are taken.
LATE = 0.04


class Promise:
    """Looks to a meter like an array that some device will have ready."""

    def __init__(self) -> None:
        self._ready = threading.Event()

    def block_until_ready(self) -> "Promise":
        assert self._ready.wait(10)
        return self

    def keep(self) -> None:
        self._ready.set()


class Broken:
    def block_until_ready(self) -> None:
        raise RuntimeError("Array has been deleted")


def run_steps(
    delays: Sequence[Sequence[float]],
    measured: Callable[[int, int], bool] = lambda s, w: True,
    ahead: float = 0.0,
    input_seconds: float = 0.0,
) -> tuple[WorkerTimes, ...]:
    """A round in which worker w takes `delays[s][w]` seconds for step s.

    Workers are threads: each starts a step when the last one's sum was there, as a
    device does; all steps are dispatched at once. `ahead` is how long nothing runs.
    """
    steps, workers = len(delays), len(delays[0])
    contributed = [[Promise() for _ in range(workers)] for _ in range(steps)]
    reduced = [[Promise() for _ in range(workers)] for _ in range(steps)]
    barrier = threading.Barrier(workers)

    def work(w: int) -> None:
        for s in range(steps):
            time.sleep(delays[s][w])
            contributed[s][w].keep()
            barrier.wait(10)
            reduced[s][w].keep()

    with Meter(range(workers)) as meter:
        meter.begin_round()
        threads = [threading.Thread(target=work, args=(w,)) for w in range(workers)]
        for thread in threads:
            thread.start()
        for s in range(steps):
            use = [measured(s, w) for w in range(workers)]
            meter.watch(contributed[s], reduced[s], input_seconds, use)
        time.sleep(ahead)
        times = meter.end_round()
        for thread in threads:
            thread.join()
    return times


def test_a_delay_is_busy_time_of_its_worker_and_wait_time_of_the_others() -> None:
    times = run_steps([[0.0, DELAY, 0.0]] * 4)
    for w, seen in enumerate(times):
        assert len(seen.busy) == len(seen.wait) == 4
        late, early = (seen.busy, seen.wait) if w == 1 else (seen.wait, seen.busy)
        assert min(late) > 0.8 * DELAY
        assert sorted(early)[1] < LATE


def test_whole_step_timing_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: waiting for the sum before looking at the clock."""
    honest = _WorkerClock._watch

    def whole_step(self: Any, watch: Any) -> None:
        watch.reduced.block_until_ready()
        honest(self, watch)

    monkeypatch.setattr(_WorkerClock, "_watch", whole_step)
    times = run_steps([[0.0, DELAY, 0.0]] * 4)
    # All look alike: what the tests above must not let pass.
    assert min(sum(seen.busy) for seen in times) > 0.8 * 4 * DELAY


def test_dispatching_ahead_is_not_work() -> None:
    """Ten steps dispatched at once, then nothing asked for a while."""
    start = time.perf_counter()
    times = run_steps([[0.01, 0.03]] * 10, ahead=0.5)
    assert time.perf_counter() - start > 0.5
    for seen, delay in zip(times, (0.01, 0.03), strict=True):
        assert 0.9 * 10 * delay < sum(seen.busy) < 0.4
        assert sum(seen.busy) + sum(seen.wait) < 0.5


def test_what_is_not_measured_is_left_out() -> None:
    # The first step of a new shape, on worker 0; a last partial batch, on both.
    times = run_steps(
        [[DELAY, 0.0], [0.0, 0.0], [0.0, DELAY]],
        measured=lambda s, w: s == 1 or (s == 0 and w == 1),
        input_seconds=0.25,
    )
    assert len(times[0].busy) == len(times[0].wait) == 1
    assert times[0].busy[0] < LATE
    assert len(times[1].busy) == 2
    assert times[1].busy[0] < LATE
    assert times[0].input == (0.25,)
    assert times[1].input == (0.25, 0.25)


def test_a_step_begins_with_the_last_sum_even_where_that_was_not_measured() -> None:
    times = run_steps([[DELAY, DELAY], [0.02, 0.02]], measured=lambda s, w: s == 1)
    for seen in times:
        assert 0.015 < seen.busy[0] < DELAY


def test_a_round_forgets_the_one_before() -> None:
    kept = Promise()
    kept.keep()
    with Meter([0]) as meter:
        for count in (3, 2):
            meter.begin_round()
            for _ in range(count):
                meter.watch([kept], [kept], 0.0, [True])
            (seen,) = meter.end_round()
            assert len(seen.busy) == count
        time.sleep(DELAY)
        # Time between two rounds is nobody's.
        meter.begin_round()
        meter.watch([kept], [kept], 0.0, [True])
        (seen,) = meter.end_round()
        assert seen.busy[0] < LATE


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.timeout(20)
def test_an_error_surfaces_at_the_end_and_steps_behind_it_are_not_waited_for() -> None:
    never, broken, done = Promise(), Broken(), Promise()
    done.keep()
    with Meter([0, 1]) as meter:
        meter.begin_round()
        meter.watch([done, broken], [done, done], 0.0, [True, True])
        meter.watch([done, never], [done, never], 0.0, [True, True])
        with pytest.raises(RuntimeError, match="has been deleted"):
            meter.end_round()


@pytest.mark.usefixtures("no_threads_left")
def test_threads_end_on_close() -> None:
    meter = Meter([0, 1, 2])
    names = {thread.name for thread in threading.enumerate()}
    assert {f"jdlb-meter-{w}" for w in range(3)} <= names
    meter.close()


def test_spread_is_between_the_quartiles() -> None:
    assert spread_seconds([]) == 0.0
    assert spread_seconds([1.0]) == 0.0
    assert spread_seconds([5.0, 1.0, 2.0, 3.0, 4.0]) == 2.0
