"""What a run is: one typed record, and where files of them are found.

Configurations are read here and nowhere else; the library takes typed arguments.
A file under `configs/` is a Python module with a function `config() -> Config` and a
docstring that is its lab note.
"""

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jdlb.errors import UserError, unknown_name

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Config:
    """One run. Only plain values, so that it can be written down and sent."""

    dataset: str
    """Data set to train on: a name that `prepare` knows."""
    epochs: int
    """Passes over the training set."""
    global_batch: int
    """Examples an optimizer step, over all workers."""
    learning_rate: float
    """Peak learning rate of SGD."""
    data_dir: str = "~/.cache/jdlb"
    """Folder of the prepared data sets."""
    in_memory: bool = True
    """Read the data set into memory once; for sets that fit, several times over."""
    model: Literal["cnn"] = "cnn"
    """Network to train."""
    momentum: float = 0.9
    """Momentum of SGD (Nesterov: no)."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up; cosine falls to 0 at the last step."""
    weight_decay: float = 0.0
    """Decay added to the gradient, per unit of parameter."""
    clip_norm: float | None = None
    """Largest global norm of the gradient; None for no clipping."""
    seed: int = 0
    """Seed of parameters, order of examples, augmentation and dropout."""
    policy: str = "dlb"
    """Rule that sets the shares (`train`); `compare` takes --policies."""
    shares: tuple[float, ...] = ()
    """Shares of the policy `fixed`, one a worker, summing to 1."""
    round_steps: int | None = None
    """Optimizer steps between two decisions; None for an epoch."""
    granule: int | None = None
    """Step of the bucket ladder in examples; None for 1 % of the batch or finer."""
    growth: float = 1 / 16
    """Growth of the ladder from one capacity to the next, as a fraction."""
    caps: tuple[int, ...] = ()
    """Most examples a step for each worker, for its memory; empty for no caps."""
    aligned: bool = True
    """Keep sizes on the ladder, so that little is padded."""
    dead_band: float = 0.0
    """No move below this fraction of a worker's size."""
    weigh_compilation: bool = True
    """Move only where the rest of the run gains more than new programs take."""
    dry_run: bool = False
    """Decide and record, but keep the first shares."""
    run_ahead: int = 2
    """Steps dispatched before the oldest is waited for."""
    prefetch: int = 2
    """Batches read ahead."""

    @property
    def data_folder(self) -> Path:
        """`data_dir` with the home folder filled in."""
        return Path(self.data_dir).expanduser()


# Field -> smallest and largest value; not a number is outside of all.
_RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1, 1e9),
    "global_batch": (1, 2**24),
    "learning_rate": (0, 1e9),
    "momentum": (0, 1),
    "warmup_steps": (0, 1e9),
    "weight_decay": (0, 1e9),
    "clip_norm": (1e-30, 1e30),
    "seed": (0, 2**32 - 1),
    "round_steps": (1, 1e9),
    "granule": (1, 2**24),
    "growth": (0, 1),
    "dead_band": (0, 0.999),
    "run_ahead": (1, 1000),
    "prefetch": (1, 1000),
}


def check(config: Config) -> None:
    """Every field by itself; not in the record's constructor, so that flags can err.

    Raises:
      UserError: a value is out of its range.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise UserError(
                f"--{name.replace('_', '-')} {value}: use a number from {low:.10g} to "
                f"{high:.10g}"
            )


def names() -> list[str]:
    """The configurations under `configs/`."""
    return sorted(
        path.stem
        for path in CONFIG_FOLDER.glob("*.py")
        if not path.stem.startswith("_")
    )


def load(name: str) -> Config:
    """The configuration of a name under `configs/`, or of a path to a Python file.

    Raises:
      UserError: there is none, or the file does not define one.
    """
    path = Path(name)
    if path.suffix != ".py":
        if name not in names():
            raise unknown_name("config", name, names())
        path = CONFIG_FOLDER / f"{name}.py"
    if not path.is_file():
        raise UserError(f"no config file {path}: name one of {', '.join(names())}")
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, "config", None)
    made = function() if callable(function) else None
    if not isinstance(made, Config):
        raise UserError(
            f"{path} does not define config() -> Config: see {CONFIG_FOLDER.name}/"
        )
    return made


def to_json(config: Config) -> dict[str, Any]:
    """As plain JSON values."""
    return asdict(config)


def from_json(fields: dict[str, Any]) -> Config:
    """From what `to_json` gave."""
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    return Config(**plain)
