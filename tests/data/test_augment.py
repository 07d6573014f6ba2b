"""An example's random change depends on seed, epoch and its index, nothing else."""

from collections.abc import Callable

import numpy as np
import pytest

from jdlb.data.augment import (
    compose,
    normalise,
    random_bits,
    random_crop,
    random_flip,
)
from jdlb.data.loader import Transform
from jdlb.errors import UserError

INDEX = np.arange(200)
IMAGES = np.random.default_rng(0).integers(1, 256, (200, 6, 5, 3), dtype=np.uint8)


def run(
    transform: Transform, index: np.ndarray = INDEX, seed: int = 1, epoch: int = 2
) -> np.ndarray:
    return transform({"image": IMAGES[index]}, index, seed, epoch)["image"]


RANDOM: dict[str, Callable[[], Transform]] = {
    "flip": random_flip,
    "crop": lambda: random_crop(2),
    "both": lambda: compose(
        random_crop(2), random_flip(), normalise([0.5] * 3, [0.25] * 3)
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_keyed_by_example_and_not_by_batch(name: str) -> None:
    transform = RANDOM[name]()
    whole = run(transform)
    shuffled = np.random.default_rng(1).permutation(INDEX)
    for part in np.split(shuffled, [1, 50, 50, 120]):
        np.testing.assert_array_equal(run(transform, part), whole[part])
    assert (run(transform, seed=2) != whole).any()
    assert (run(transform, epoch=3) != whole).any()


@pytest.mark.parametrize("name", RANDOM)
def test_input_is_left_alone(name: str) -> None:
    before = IMAGES.copy()
    RANDOM[name]()({"image": IMAGES}, INDEX, 1, 2)
    np.testing.assert_array_equal(IMAGES, before)


def test_flip_mirrors_about_half() -> None:
    out = run(random_flip())
    mirrored = (out == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    same = (out == IMAGES).all(axis=(1, 2, 3))
    assert (mirrored ^ same).all()
    assert 70 < mirrored.sum() < 130


def test_crop_is_a_window_of_the_padded_image() -> None:
    out = run(random_crop(2))
    wide = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = np.zeros((5, 5), int)
    for image, padded in zip(out, wide, strict=True):
        fits = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if (padded[top : top + 6, left : left + 5] == image).all()
        ]
        assert len(fits) == 1
        places[fits[0]] += 1
    # 200 windows over 25 places; top and left are independent and cover all values.
    assert (places.sum(axis=0) > 15).all()
    assert (places.sum(axis=1) > 15).all()
    assert (places > 0).sum() > 20


def test_crop_without_padding_changes_nothing() -> None:
    np.testing.assert_array_equal(run(random_crop(0)), IMAGES)


def test_normalise() -> None:
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    out = run(normalise(mean, std))
    assert out.dtype == np.float32
    want = (IMAGES / 255.0 - mean) / std
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    floats = normalise(mean, std)({"image": IMAGES / 255.0}, INDEX, 0, 0)["image"]
    np.testing.assert_allclose(floats, want, rtol=1e-5, atol=1e-6)


def test_other_fields_pass() -> None:
    label = np.arange(3)
    transform = compose(random_flip(), random_crop(1), normalise([0], [1]))
    fields = {"image": np.zeros((3, 4, 4, 1), np.uint8), "label": label}
    assert transform(fields, np.arange(3), 0, 0)["label"] is label


def test_empty_batch() -> None:
    out = run(RANDOM["both"](), np.arange(0))
    assert out.shape == (0, 6, 5, 3)
    assert out.dtype == np.float32


def test_bits_are_uniform_and_independent() -> None:
    index = np.arange(20_000)
    streams = [
        random_bits(seed, epoch, index, stream)
        for seed, epoch, stream in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    bits = np.stack([np.unpackbits(s.view(np.uint8)) for s in streams]).reshape(
        4, len(index), 64
    )
    # Standard error of a mean of 20,000 coins: 0.0035.
    assert np.abs(bits.mean(axis=1) - 0.5).max() < 0.018
    for i in range(4):
        assert len(np.unique(streams[i])) == len(index)
        assert np.abs((bits[i, 1:] ^ bits[i, :-1]).mean(axis=0) - 0.5).max() < 0.018
        for j in range(i):
            assert np.abs((bits[i] ^ bits[j]).mean(axis=0) - 0.5).max() < 0.018


def test_bits_are_the_same_on_every_machine() -> None:
    # Worked out once; a change would alter what a resumed run trains on.
    assert random_bits(1, 2, np.array([3, 2**31]), 4).tolist() == [
        15633652749581319305,
        6983970440850828516,
    ]


def test_bad_input() -> None:
    with pytest.raises(UserError, match="std"):
        normalise([0.5], [0.0])
    with pytest.raises(UserError, match="mean"):
        normalise([0.5, 0.5], [1.0])
    with pytest.raises(UserError, match="-1 pixels"):
        random_crop(-1)
