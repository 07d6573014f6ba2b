"""`fashion_mnist`: 60,000 + 10,000 images of clothes, from the four original files.

The files are in the IDX format: a magic number that holds the element type and the
number of axes, the length of each axis as big-endian 32-bit integers, the elements.
"""

import gzip
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jdlb.data.builders.images import DataSet, Images
from jdlb.errors import UserError

# Where the Debian package dataset-fashion-mnist puts them.
DEFAULT_SOURCE = Path("/usr/share/datasets/fashion-mnist")
_PREFIXES = {"train": "train", "test": "t10k"}
# Element type "unsigned byte" in the third byte, the number of axes in the fourth.
_UNSIGNED_BYTE = 0x08
_SIDE = 28
_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def read(source_dir: Path | None) -> Mapping[str, Images]:
    """The splits "train" and "test" from the IDX files in a folder.

    Raises:
      UserError: a file is missing, truncated, of another kind, or does not fit the
        file beside it.
    """
    folder = DEFAULT_SOURCE if source_dir is None else source_dir
    return {split: _read_split(folder, prefix) for split, prefix in _PREFIXES.items()}


def _read_split(folder: Path, prefix: str) -> Images:
    image_path = folder / f"{prefix}-images-idx3-ubyte.gz"
    label_path = folder / f"{prefix}-labels-idx1-ubyte.gz"
    image = read_idx(image_path, axes=3)
    label = read_idx(label_path, axes=1)
    if image.shape[1:] != (_SIDE, _SIDE):
        raise UserError(
            f"{image_path} holds images of {image.shape[1:]} pixels, not "
            f"({_SIDE}, {_SIDE}): name the folder of the original files"
        )
    if len(image) != len(label):
        raise UserError(
            f"{image_path} holds {len(image)} images, {label_path.name} {len(label)} "
            "labels: take both from one copy of the data set"
        )
    if len(label) == 0 or label.max() >= len(_CLASSES):
        raise UserError(
            f"{label_path} holds {len(label)} labels, of which "
            f"{np.count_nonzero(label >= len(_CLASSES))} are above "
            f"{len(_CLASSES) - 1}: name the folder of the original files"
        )
    return Images(image[..., np.newaxis], label)


def read_idx(path: Path, axes: int) -> np.ndarray:
    """One gzipped IDX file of unsigned bytes with so many axes: uint8, read-only.

    Raises:
      UserError: the file is missing, damaged, or is something else.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise UserError(
            f"no file {path}: install the Debian package dataset-fashion-mnist, or "
            "name the folder that holds the four .gz files"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be unpacked ({error}): copy or download it again"
        ) from error
    header = 4 + 4 * axes
    magic = int.from_bytes(content[:4], "big")
    wanted = _UNSIGNED_BYTE << 8 | axes
    if len(content) < header or magic != wanted:
        raise UserError(
            f"{path} begins with the magic number {magic:#010x}, not {wanted:#010x}: "
            "it is not the file that its name says; copy or download it again"
        )
    shape = tuple(np.frombuffer(content, ">u4", axes, offset=4).tolist())
    if len(content) - header != math.prod(shape):
        raise UserError(
            f"{path} holds {len(content) - header} bytes of data, its header says "
            f"{math.prod(shape)}: copy or download it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


DATA_SET = DataSet(
    name="fashion_mnist",
    version="1.0.0",
    description=(
        "60,000 training and 10,000 test images of articles of clothing in ten "
        "classes (Xiao, Rasul and Vollgraf, arXiv 1708.07747)."
    ),
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    shape=(_SIDE, _SIDE, 1),
    classes=_CLASSES,
    read=read,
)
