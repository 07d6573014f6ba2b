"""Transforms of whole batches of images: normalisation and augmentation.

Random choices are a hash of (seed, epoch, example index): an example is changed in the
same way whichever worker, batch or restart brings it. NumPy only; must not know
workers or allocations.
"""

from collections.abc import Sequence

import numpy as np

from jdlb.data.loader import Fields, Transform
from jdlb.errors import UserError

_WORD = 2**64 - 1
# An odd constant with well spread bits (2^64 over the golden ratio).
_INCREMENT = 0x9E3779B97F4A7C15


def random_bits(seed: int, epoch: int, index: np.ndarray, stream: int) -> np.ndarray:
    """Independent uniform uint64 [b], one an example index (int [b]).

    `stream` tells apart the choices made for one example. The mixing function is the
    finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), applied to one word
    after the other.
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for word in (seed, epoch, stream):
            state = _mix(state ^ np.uint64(word & _WORD))
        return _mix(state ^ index.astype(np.uint64))


def _mix(words: np.ndarray) -> np.ndarray:
    words = words + np.uint64(_INCREMENT)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def compose(*transforms: Transform) -> Transform:
    """One transform that applies the given ones in order."""

    def composed(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        for transform in transforms:
            fields = transform(fields, index, seed, epoch)
        return fields

    return composed


def normalise(
    mean: Sequence[float], std: Sequence[float], key: str = "image"
) -> Transform:
    """Images [b, ..., C] to float32 `(x - mean) / std`, a channel at a time.

    `mean` and `std` [C] are in units of the full range: uint8 images are taken as
    x / 255, floats as they are.

    Raises:
      UserError: `mean` and `std` differ in length, or a `std` is not positive.
    """
    if len(mean) != len(std) or not all(s > 0 for s in std):
        raise UserError(
            f"mean {list(mean)} and std {list(std)}: give one of each a channel, and "
            "every std above 0"
        )
    centre = np.asarray(mean, np.float32)
    scale = np.asarray([1 / s for s in std], np.float32)

    def normalised(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        del index, seed, epoch
        image = fields[key]
        unit = np.float32(1 / 255 if image.dtype == np.uint8 else 1)
        # In place on one new array: a pass over memory costs as much as the sums.
        out = image.astype(np.float32)
        out *= unit * scale
        out -= centre * scale
        return {**fields, key: out}

    return normalised


def random_flip(key: str = "image", stream: int = 1) -> Transform:
    """Mirror each image [b, H, W, C] left to right with probability 1/2."""

    def flipped(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        image = fields[key]
        chosen = random_bits(seed, epoch, index, stream) >> np.uint64(63) == 1
        out = image.copy()
        out[chosen] = image[chosen, :, ::-1]
        return {**fields, key: out}

    return flipped


def random_crop(padding: int, key: str = "image", stream: int = 2) -> Transform:
    """Move each image [b, H, W, C] by up to `padding` pixels each way, zeros outside.

    The same as padding by `padding` pixels on all sides and cutting a window of the
    old size at a random place. Before `normalise` zero is black.

    Raises:
      UserError: the padding is negative.
    """
    if padding < 0:
        raise UserError(f"the crop's padding is {padding} pixels: it must be 0 or more")

    def cropped(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        image = fields[key]
        count, height, width = image.shape[:3]
        bits = random_bits(seed, epoch, index, stream)
        places = np.uint64(2 * padding + 1)
        # The high half of (32 bits x places) is uniform in [0, places).
        top = ((bits >> np.uint64(32)) * places >> np.uint64(32)).astype(np.int64)
        left = ((bits & np.uint64(2**32 - 1)) * places >> np.uint64(32)).astype(
            np.int64
        )
        around = (padding, padding)
        wide = np.pad(image, ((0, 0), around, around, (0, 0)))
        rows = top[:, None] + np.arange(height)
        columns = left[:, None] + np.arange(width)
        which = np.arange(count)[:, None, None]
        return {**fields, key: wide[which, rows[:, :, None], columns[:, None, :]]}

    return cropped
