"""A data set that fits into memory, read once and kept as whole arrays.

Decoding a small example can cost more than a tenth of computing on it where a worker
has a fraction of a core; picking rows of an array costs next to nothing. Knows
sources; must not know workers or allocations.
"""

import dataclasses

import numpy as np

from jdlb.data.loader import Fields, Source, fetch, read_standard
from jdlb.errors import UserError

_CHUNK = 1024


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Examples as arrays, `fields` [N, ...] a key: reads many rows in one operation.

    >>> source = ArraySource({"x": np.array([[1, 2], [3, 4]]), "y": np.array([0, 1])})
    >>> len(source), source[1]["x"].tolist(), source.gather(np.array([1]))["y"].tolist()
    (2, [3, 4], [1])
    """

    fields: Fields

    def __post_init__(self) -> None:
        lengths = {key: len(field) for key, field in self.fields.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"fields of {lengths} examples: all must have as many")

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> Fields:
        """One example: a copy, so that nobody can change the data set."""
        return {key: field[index].copy() for key, field in self.fields.items()}

    def gather(self, index: np.ndarray) -> Fields:
        """Fresh arrays [b, ...] of the rows int64 [b]."""
        return {key: field.take(index, axis=0) for key, field in self.fields.items()}


def in_memory(source: Source) -> ArraySource:
    """Read all examples of a source, whoever computes them later.

    Raises:
      UserError: there are none, or they are not all alike.
    """
    if len(source) == 0:
        raise UserError(
            "the data source has 0 examples: name a split that has some, or prepare "
            "the data set again"
        )
    standard = read_standard(source, 0)
    fields = {
        key: np.empty((len(source), *shape), dtype)
        for key, (shape, dtype) in standard.fields.items()
    }
    for start in range(0, len(source), _CHUNK):
        index = np.arange(start, min(start + _CHUNK, len(source)))
        for key, rows in fetch(source, index, standard).items():
            fields[key][index] = rows
    return ArraySource(fields)
