"""Random numbers keyed by what they are for, so that every policy meets the same.

Raw output of a counter-based generator, which NumPy keeps stable between versions.
"""

import numpy as np
from scipy.special import ndtri


def uniform(seed: int, stream: int, round: int, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform numbers in (0, 1), a function of the first three arguments alone.

    A `stream` is one purpose: noise, or one of the disturbances. `round` may be
    negative (a probe comes before round 0).
    """
    key = np.array([seed % 2**64, (stream % 2**24) << 40 | round % 2**40], np.uint64)
    raw = np.random.Philox(key=key).random_raw(int(np.prod(shape)))
    # The upper 53 bits, in the middle of their intervals: never 0, never 1.
    return ((raw >> np.uint64(11)).reshape(shape) + 0.5) * 2.0**-53


def normal(uniforms: np.ndarray) -> np.ndarray:
    """Standard normal numbers from uniform ones."""
    return ndtri(uniforms)
