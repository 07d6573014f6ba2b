"""The main job: 5,000 real MNIST images on three unlike workers."""

from experiments.config import Config


def config() -> Config:
    """Six epochs, B = 240, SGD with momentum."""
    return Config(
        dataset="mnist5k",
        epochs=6,
        global_batch=240,
        learning_rate=0.05,
        momentum=0.9,
        schedule="cosine",
    )
