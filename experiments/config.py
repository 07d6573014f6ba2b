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
    dry_run: bool = False
    """Decide and record, but keep the first shares."""
    run_ahead: int = 2
    """Steps dispatched before the oldest is waited for."""
    prefetch: int = 2
    """Batches read ahead."""

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch", "run_ahead", "prefetch"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: use 1 or more"
                )
        for name in ("learning_rate", "momentum", "warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: use a finite "
                    "number of at least 0"
                )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"--clip-norm {self.clip_norm}: use a number above 0")

    @property
    def data_folder(self) -> Path:
        """`data_dir` with the home folder filled in."""
        return Path(self.data_dir).expanduser()


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
    made = module.config() if hasattr(module, "config") else None
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
