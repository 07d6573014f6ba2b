"""What a step takes as a function of the batch: believed, and fitted online.

One frozen model for all workers; a round's measures make the next model of it. Must not
know who asks, nor what is done with the answers. `W` is the number of workers, `K` of
batches that are remembered of each.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from jdlb.balance.curves import Curves
from jdlb.errors import UserError

# Batches remembered of each worker: those that it used last.
_REMEMBERED = 8
# Deviation of a measure before any was seen twice, relative; and what it counts.
_NOISE_AT_FIRST, _COUNT_AT_FIRST = 0.02, 0.1
_NOISE_KEPT = 0.95
# The least deviation believed in, relative: that of clocks.
_LEAST_NOISE = 1e-6
# Deviation of a slope about the proportional one, as a fraction of it: the fixed part
# of a step is anything from nothing to all of it.
_SLOPE_DEVIATION = 0.5
# Slopes believed in, in proportional ones.
_SLOPE_RANGE = (0.02, 4.0)
# At a larger batch than the nearest known, times this far above proportional may be its
# cost: what leaves a cache or an allocator's pool.
_CLIFF = 2.0
# A measure further off than this many standard errors and this fraction is suspect.
_GATE_ERRORS, _GATE_FRACTION = 4.0, 0.1
# Information that is left of the slope after a change.
_KEPT_AT_CHANGE = 0.1
# Seconds of a step outside of this come from a broken clock.
_SHORTEST, _LONGEST = 1e-12, 1e12
# In place of 0 where something is divided by it.
_LEAST = 1e-200


@dataclass(frozen=True, eq=False)
class TimeModel:
    """Seconds of a step against its batch, one curve for each worker.

    Affine, `t = alpha + beta b`, by weighted least squares on relative errors, old
    measures counting `forgetting` times less each round; of the slope they do so only
    as far as new ones tell of it. The slope is drawn to that of
    proportional time as far as measures are noisy or their batches alike: a worker
    seen at one batch alone is proportional, which is the assumption of `dlb`. With
    `bend` above 0 piecewise linear: the line is bent towards the mean measure at each
    remembered batch, the more the more often that batch was seen lately and the less
    noise there is; `bend` is how far from the line, relative to it, the truth may well
    be. Infinite: through the means themselves.

    A measure outside `gate` is not taken in; a second one in a row on the same side, or
    one that a `witness` bears out, is a change: the curve is scaled to it, and what was
    known of its form counts little from there on. A new batch tells of the curve's form
    first: nothing is a surprise there that is between the time at the nearest batch
    known and one proportional to it, or, at a larger batch, twice that.

    Attributes:
      forgetting: what is kept of the weight of the past each round, 0 to below 1.
      bend: 0 for affine.
      weight, batch, level: weight of the measures and their weighted means, [W]; NaN
        means of a worker that was never measured.
      variance, covariance: weighted sums of squares about the means, [W].
      noise, noise_count: sum of squares of relative noise, and of how many, [W].
      suspect: side of a last measure that was not taken in: -1, 0 or 1, [W].
      last: batch and seconds measured last, [2, W].
      knots: remembered batches, rising, infinite where none, [W, K].
      means, counts: mean seconds and weight of each, [W, K].
    """

    forgetting: float
    bend: float
    weight: np.ndarray
    batch: np.ndarray
    level: np.ndarray
    variance: np.ndarray
    covariance: np.ndarray
    noise: np.ndarray
    noise_count: np.ndarray
    suspect: np.ndarray
    last: np.ndarray
    knots: np.ndarray
    means: np.ndarray
    counts: np.ndarray

    @classmethod
    def create(
        cls, workers: int, forgetting: float = 0.8, bend: float = 0.1
    ) -> "TimeModel":
        """Nothing known of so many workers.

        >>> model = TimeModel.create(workers=1, bend=0.0)
        >>> for batch in (100.0, 200.0, 100.0, 200.0):
        ...     model = model.update(np.array([batch]), np.array([1 + batch / 100]))
        >>> model.curves.seconds(np.array([150.0])).round(2)
        array([2.5])

        Raises:
          UserError: forgetting outside [0, 1), or a negative bend.
        """
        if not 0 <= forgetting < 1:
            raise UserError(
                f"forgetting {forgetting}: use what is kept of the past each round, "
                "from 0 to below 1"
            )
        if not bend >= 0:
            raise UserError(f"bend {bend}: use a relative deviation of at least 0")
        zeros, unknown = np.zeros(workers), np.full(workers, np.nan)
        knots = np.full((workers, _REMEMBERED), np.inf)
        return cls(
            forgetting=forgetting,
            bend=bend,
            weight=zeros,
            batch=unknown,
            level=unknown,
            variance=zeros,
            covariance=zeros,
            noise=zeros,
            noise_count=zeros,
            suspect=np.zeros(workers, np.int64),
            last=np.full((2, workers), np.nan),
            knots=knots,
            means=np.full_like(knots, np.inf),
            counts=np.zeros_like(knots),
        )

    @property
    def seen(self) -> np.ndarray:
        """Which workers were measured at all, [W]."""
        return self.weight > 0

    @property
    def two_batches_seen(self) -> np.ndarray:
        """Of which workers two batches were seen, so that they have a slope, [W]."""
        return self.variance > 0

    def remembers(self, batches: np.ndarray) -> np.ndarray:
        """Whose batch of these [W] is one that it was measured at lately, [W]."""
        return (self.knots == np.asarray(batches)[:, None]).any(axis=1)

    @functools.cached_property
    def deviation(self) -> np.ndarray:
        """Relative standard deviation of one measure, [W].

        From measures that follow each other at the same batch, drawn to the mean of all
        workers as far as one worker has few.
        """
        # Sorted, or the order of the workers would show in the last bit.
        squares, counts = np.sort(self.noise).sum(), np.sort(self.noise_count).sum()
        # Weighed like the rest, the first guess fades once others know better.
        guess = _COUNT_AT_FIRST / (1 + counts)
        common = (squares + guess * _NOISE_AT_FIRST**2) / (counts + guess)
        own = (self.noise + common) / (self.noise_count + 1)
        return np.sqrt(np.maximum(own, _LEAST_NOISE**2))

    @functools.cached_property
    def curves(self) -> Curves:
        """What is believed; a worker never measured is like the mean of the others."""
        batch, level = self._known_means()
        slope, _ = self._slope()
        there = np.isfinite(self.knots)
        knots = np.where(there, self.knots, batch[:, None])
        line = level[:, None] + slope[:, None] * (knots - batch[:, None])
        line = np.maximum(line, 0.01 * level[:, None])
        if self.bend > 0:
            bent = self.counts + (self.deviation[:, None] / self.bend) ** 2
            trust = self.counts / np.maximum(bent, _LEAST)
            seconds = line + trust * (np.where(there, self.means, line) - line)
            knots = self.knots.copy()
        else:
            seconds, knots = level[:, None].copy(), batch[:, None].copy()
        # Who was never measured has no knots.
        knots[:, 0] = np.where(self.seen, knots[:, 0], batch)
        seconds[:, 0] = np.where(self.seen, seconds[:, 0], level)
        return Curves.through(knots, seconds, before=slope, beyond=slope)

    def standard_error(self, batches: np.ndarray) -> np.ndarray:
        """Standard error of the seconds believed at `batches` [W], in seconds, [W]."""
        batch, _ = self._known_means()
        _, slope_error = self._slope()
        line = np.hypot(self._level_error(), slope_error * (batches - batch))
        if self.bend == 0:
            return line
        nearest = np.abs(self.knots - batches[:, None]).argmin(axis=1)
        count = self.counts[np.arange(len(batches)), nearest]
        # As far as the line is bent to the nearest mean, its error is that of the mean.
        precision = count / self.deviation**2 + 1 / self.bend**2
        of_line = 1 - count / self.deviation**2 / np.maximum(precision, _LEAST)
        mean = self.curves.seconds(batches) / np.sqrt(np.maximum(precision, _LEAST))
        return np.where(self.seen, np.hypot(of_line * line, mean), line)

    def gate(self, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least and the most seconds at `batches` [W] that are no surprise, [W]."""
        expected = self.curves.seconds(batches)
        rows = np.arange(len(batches))
        known = self.knots[rows, np.abs(self.knots - batches[:, None]).argmin(axis=1)]
        known = np.where(np.isfinite(known), known, batches)
        at_known = self.curves.seconds(known)
        proportional = at_known * (batches / np.maximum(known, 1.0))
        low = np.minimum(np.minimum(expected, proportional), at_known)
        cliff = np.where(batches > known, _CLIFF, 1.0) * proportional
        high = np.maximum(np.maximum(expected, cliff), at_known)
        error = np.hypot(self._level_error(), self.deviation * expected)
        margin = np.maximum(_GATE_ERRORS * error, _GATE_FRACTION * expected)
        return low - margin, high + margin

    def side(self, batches: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """On which side outside the gate measures are: -1, 1, or 0 for inside.

        `seconds` are [W] or several measures of each worker, [..., W]; so is what is
        returned. NaN is inside, and so is all of a worker never measured.
        """
        low, high = self.gate(batches)
        above, below = seconds > high, seconds < low
        return np.where(self.seen, above.astype(np.int64) - below, 0)

    def update(
        self,
        batches: np.ndarray,
        seconds: np.ndarray,
        witness: np.ndarray | None = None,
    ) -> "TimeModel":
        """The model after one measure of each worker.

        Args:
          batches: [W], what a step was paid for.
          seconds: [W], what it took; not between 1e-12 and 1e12: not measured.
          witness: [W], what another measure of the same steps says, a median for one;
            NaN for none. A measure that it bears out, being outside the gate on the
            same side, is a change at once.
        """
        batches = np.asarray(batches, np.float64)
        seconds = np.asarray(seconds, np.float64)
        usable = (seconds > _SHORTEST) & (seconds < _LONGEST) & (batches > 0)
        if witness is None:
            witness = np.full_like(seconds, np.nan)
        measures = np.stack([np.where(usable, seconds, np.nan), witness])
        side, side_of_witness = self.side(batches, measures)
        change = (side != 0) & ((side == self.suspect) | (side == side_of_witness))
        taken = usable & ((side == 0) | change)
        scale = np.where(change, seconds / self.curves.seconds(batches), 1.0)
        model = self._noted_noise(batches, seconds, usable & ~change)
        model = model._scaled(change, scale)._with_line(batches, seconds, taken)
        model = model._with_knots(batches, seconds, taken)
        suspect = np.where(usable, np.where(change, 0, side), self.suspect)
        return dataclasses.replace(model, suspect=suspect)

    def _level_error(self) -> np.ndarray:
        """Standard error of the level, in seconds, [W]; all of it if never measured."""
        # A measure's weight is one over its square.
        error = self.deviation / np.sqrt(np.maximum(self.weight, _LEAST))
        _, level = self._known_means()
        return np.where(self.seen, error, level)

    def _known_means(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean batch and seconds, [W]; of who is not known, one like the others."""
        if not self.seen.any():
            ones = np.ones(len(self.weight))
            return ones, ones
        speeds = np.sort((self.batch / self.level)[self.seen])
        batch = np.where(self.seen, self.batch, 1.0)
        level = np.where(self.seen, self.level, 1.0 / speeds.mean())
        return batch, level

    def _slope(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds an example of the line, and their standard error, both [W]."""
        batch, level = self._known_means()
        proportional = level / batch
        prior = 1 / (_SLOPE_DEVIATION * proportional) ** 2
        noise = 1 / self.deviation**2
        precision = self.variance * noise + prior
        slope = (self.covariance * noise + proportional * prior) / precision
        low, high = _SLOPE_RANGE
        slope = np.clip(slope, low * proportional, high * proportional)
        return slope, 1 / np.sqrt(precision)

    def _noted_noise(
        self, batches: np.ndarray, seconds: np.ndarray, usable: np.ndarray
    ) -> "TimeModel":
        """With what two measures in a row at the same batch say of the noise."""
        before = self.last
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.log(seconds / before[1])
        same = usable & (batches == before[0]) & np.isfinite(apart)
        # Of an outlier only as much as noise may grow in a round.
        largest = 3 * np.maximum(self.deviation, 0.01)
        apart = np.clip(np.where(same, apart, 0.0), -largest, largest)
        kept = np.where(same, _NOISE_KEPT, 1.0)
        return dataclasses.replace(
            self,
            noise=kept * self.noise + apart**2 / 2,
            noise_count=kept * self.noise_count + same,
            last=np.where(usable, np.stack([batches, seconds]), before),
        )

    def _scaled(self, change: np.ndarray, scale: np.ndarray) -> "TimeModel":
        """With the curve `scale` times as high where it changed, and little trust."""
        kept = np.where(change, _KEPT_AT_CHANGE, 1.0)
        # In units of one over seconds squared, what a level counts scales as well.
        return dataclasses.replace(
            self,
            level=self.level * scale,
            weight=self.weight * kept / scale**2,
            variance=self.variance * kept / scale**2,
            covariance=self.covariance * kept / scale,
            knots=np.where(change[:, None], np.inf, self.knots),
            means=np.where(change[:, None], np.inf, self.means),
            counts=np.where(change[:, None], 0.0, self.counts),
        )

    def _with_line(
        self, batches: np.ndarray, seconds: np.ndarray, taken: np.ndarray
    ) -> "TimeModel":
        """With one more measure in the weighted sums (Welford's way)."""
        new = np.where(taken, 1 / np.where(taken, seconds, 1.0) ** 2, 0.0)
        keep = np.where(taken, self.forgetting, 1.0)
        old = self.weight * keep
        weight = old + new
        share = new / np.where(weight > 0, weight, 1.0)
        batch = np.where(self.seen, self.batch, batches)
        seconds = np.where(taken, seconds, 0.0)
        level = np.where(self.seen, self.level, seconds)
        off_batch, off_level = batches - batch, seconds - level
        told = old * share * off_batch**2
        # A form is forgotten as far as there is news of it, however long nothing moves.
        news = told / np.maximum(self.variance + told, _LEAST)
        keep_form = 1 - (1 - self.forgetting) * news
        return dataclasses.replace(
            self,
            weight=weight,
            batch=np.where(self.seen | taken, batch + share * off_batch, np.nan),
            level=np.where(self.seen | taken, level + share * off_level, np.nan),
            variance=keep_form * self.variance + told,
            covariance=keep_form * self.covariance
            + old * share * off_batch * off_level,
        )

    def _with_knots(
        self, batches: np.ndarray, seconds: np.ndarray, taken: np.ndarray
    ) -> "TimeModel":
        """With the measure in the mean of its batch, or in place of the oldest one."""
        counts = self.counts * np.where(taken, self.forgetting, 1.0)[:, None]
        rows = np.arange(len(batches))
        same = (self.knots == batches[:, None]) & taken[:, None]
        known = same.any(axis=1)
        k = np.where(known, same.argmax(axis=1), counts.argmin(axis=1))
        knots, means = self.knots.copy(), self.means.copy()
        gain = np.where(known, 1 / (counts[rows, k] + 1), 1.0)
        with np.errstate(invalid="ignore"):
            ratio = seconds / means[rows, k]
        # Seen again at another speed: the machine is, at all batches.
        drift = np.where(known, 1 + gain * (np.where(known, ratio, 1.0) - 1), 1.0)
        means *= drift[:, None]
        new = taken & ~known
        knots[rows[new], k[new]] = batches[new]
        means[rows[new], k[new]] = seconds[new]
        counts[rows[taken], k[taken]] = np.where(known, counts[rows, k] + 1, 1.0)[taken]
        if not new.any():
            return dataclasses.replace(self, means=means, counts=counts)
        order = np.argsort(knots, axis=1, kind="stable")
        knots, means, counts = (
            np.take_along_axis(array, order, axis=1) for array in (knots, means, counts)
        )
        return dataclasses.replace(self, knots=knots, means=means, counts=counts)
