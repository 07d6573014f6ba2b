"""Configurations: found, written down and read back, each field with a flag and help."""

import ast
import dataclasses
import inspect
import json
import sys

import pytest

from experiments import config as configs
from experiments.__main__ import main
from experiments.config import Config, from_json, to_json
from jdlb.balance import policies
from jdlb.data import builders

OTHER = Config(
    dataset="fashion_mnist",
    epochs=3,
    global_batch=64,
    learning_rate=0.1,
    clip_norm=1.5,
    policy="fixed",
    shares=(0.75, 0.25),
    caps=(50, 40),
    round_steps=7,
    aligned=False,
)


@pytest.mark.parametrize("name", configs.names())
def test_each_config_loads_and_is_a_lab_note(name):
    made = configs.load(name)
    path = configs.CONFIG_FOLDER / f"{name}.py"
    assert made == configs.load(str(path))
    assert made.dataset in builders.names()
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("config", [OTHER, *map(configs.load, configs.names())])
def test_json_and_back(config):
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_a_config_file_anywhere(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses\n"
        "from experiments import config as configs\n"
        "def config():\n"
        "    return dataclasses.replace(configs.load('mnist5k'), epochs=17)\n"
    )
    assert configs.load(str(path)).epochs == 17


@pytest.fixture
def said(monkeypatch, capsys):
    """What a command line prints on standard output, with its exit status."""

    def said(*arguments: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
        monkeypatch.setenv("COLUMNS", "300")
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        return status, " ".join(capsys.readouterr().out.split())

    return said


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_mentions_all_there_is(said, arguments):
    status, out = said(*arguments)
    assert status == 0
    known = [*configs.names(), *policies.POLICIES, *builders.names()]
    assert all(name in out for name in known)
    for command in ("compare", "train", "prepare", "bench"):
        assert f" {command} " in out


def documented(kind: type) -> dict[str, str]:
    """The fields of a dataclass, each with the string below it in the source."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


@pytest.mark.parametrize("command", ["compare", "train"])
def test_help_shows_each_field_with_its_default(said, command):
    status, out = said(command, "mnist5k", "--help")
    assert status == 0
    config = configs.load("mnist5k")
    docs = documented(Config)
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in out
        value = getattr(config, field.name)
        default = " ".join(map(str, value)) if isinstance(value, tuple) else value
        shown = f"{docs[field.name]} (default: {default}"
        assert shown.replace("'", "") in out.replace("'", "")


@pytest.mark.parametrize("flags", [["--epochs", "x"], ["--nonsense", "1"]])
def test_flags_that_do_not_parse(said, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said("compare", "mnist5k", *flags) == (2, "")
    assert list(tmp_path.iterdir()) == []
