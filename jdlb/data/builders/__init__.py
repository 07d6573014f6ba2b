"""Data sets by name: prepare one in a folder once, then open its splits.

Everything is written and read with TFDS as ArrayRecord files, without TensorFlow and
without a network. Knows the registry of data sets and folders; must not know training.

A prepared data set is the folder `data_dir/name/version`, which appears in one rename
when it is whole: what a killed preparation leaves is never opened as if it were.
"""

import contextlib
import dataclasses
import fcntl
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from jdlb.data.builders import fashion_mnist, mnist5k
from jdlb.data.builders.images import DataSet, make_builder
from jdlb.data.loader import Source
from jdlb.errors import UserError, unknown_name

_DATA_SETS = {
    module.DATA_SET.name: module.DATA_SET for module in (fashion_mnist, mnist5k)
}


@dataclasses.dataclass(frozen=True)
class Splits:
    """Random access to the examples of a data set: dicts with "image" and "label"."""

    train: Source
    test: Source


def names() -> tuple[str, ...]:
    """The known data sets, sorted."""
    return tuple(sorted(_DATA_SETS))


def get(name: str) -> DataSet:
    """The data set of this name.

    Raises:
      UserError: it is unknown; lists the known ones.
    """
    if name not in _DATA_SETS:
        raise unknown_name("data set", name, _DATA_SETS)
    return _DATA_SETS[name]


def prepare(name: str, data_dir: Path, source_dir: Path | None = None) -> bool:
    """Write a data set to `data_dir`, unless it is there; say whether it was written.

    `source_dir` holds the original files, where the data set has any. Several
    processes may call this at once: one writes, the others wait for it.

    Raises:
      UserError: the name is unknown, the original files are missing or damaged, or the
        folder cannot be written.
    """
    data_set = get(name)
    final = _folder(data_set, data_dir)
    if final.is_dir():
        return False
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with _locked(data_dir / f".{name}.lock"):
            if final.is_dir():
                return False
            _write(data_set, data_dir, source_dir)
    except OSError as error:
        raise UserError(
            f"cannot write data set {name!r} to {data_dir} ({error}): name a folder "
            "with --data-dir that can be written"
        ) from error
    return True


def open_splits(name: str, data_dir: Path) -> Splits:
    """The prepared splits of a data set; reads one example of each.

    Raises:
      UserError: the name is unknown, or the data set is missing or damaged.
    """
    data_set = get(name)
    folder = _folder(data_set, data_dir)
    remedy = f"python -m experiments prepare {name} --data-dir {data_dir}"
    if not folder.is_dir():
        raise UserError(f"no data set {name!r} in {data_dir}: run `{remedy}`")
    try:
        # Typed as any tree there; without arguments it is a dict of all splits.
        sources: Any = tfds.builder_from_directory(folder).as_data_source()
        splits = Splits(train=sources["train"], test=sources["test"])
        # The files are opened by the first read, and damage shows there.
        for split in (splits.train, splits.test):
            split[0]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"data set {name!r} in {folder} is damaged ({first_line}): remove that "
            f"folder and run `{remedy}`"
        ) from error
    return splits


def _folder(data_set: DataSet, data_dir: Path) -> Path:
    return data_dir / data_set.name / data_set.version


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes that the kernel drops when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(data_set: DataSet, data_dir: Path, source_dir: Path | None) -> None:
    """Read the originals, write beside the final folder, rename; under the lock."""
    prefix = f".{data_set.name}-incomplete-"
    # Whoever holds the lock is alone: older ones belong to the dead.
    for left_over in data_dir.glob(f"{prefix}*"):
        shutil.rmtree(left_over)
    splits = data_set.read(source_dir)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=data_dir) as scratch:
        builder = make_builder(data_set, splits, Path(scratch))
        # TFDS reports to both streams; standard output belongs to the command.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            builder.download_and_prepare(
                download_dir=Path(scratch) / "downloads",
                # Or it asks a server on the internet whether it has the data.
                download_config=tfds.download.DownloadConfig(try_download_gcs=False),
            )
        _publish(Path(builder.data_path), _folder(data_set, data_dir))


def _publish(written: Path, final: Path) -> None:
    final.parent.mkdir(exist_ok=True)
    written.rename(final)
