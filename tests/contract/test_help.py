"""Help that a newcomer can read: panels, examples that work, no types of flags; completion without torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ncd_training.config.resolve import listed_recipes, recipe_names

from ncd_serve.cli import completion
from ncd_serve.cli.app import app
from ncd_serve.cli.help import LOOK, OPERATE, RESEARCH, START, split_help

GROUP: Any = typer.main.get_command(app)


def commands(group: Any = GROUP, path: str = "ncd-serve") -> Iterator[tuple[str, Any]]:
    for name, inner in group.commands.items():
        yield from commands(inner, f"{path} {name}") if hasattr(inner, "commands") else [(f"{path} {name}", inner)]


ALL = dict(commands())


def parse(line: str) -> dict[str, Any]:
    """The parameters of a typed command, checked but not run."""
    words = shlex.split(line)
    length = 3 if " ".join(words[:3]) in ALL else 2
    return ALL[" ".join(words[:length])].make_context(line, words[length:]).params


@pytest.mark.parametrize("path", ALL)
def test_every_command_has_examples_that_can_be_typed(path: str) -> None:
    text, examples = split_help(ALL[path].callback)
    assert text and examples
    for line in examples:
        assert f"{line} ".startswith(f"{path} ")
        parse(line)


def test_commands_stand_in_panels_and_flags_have_no_type(ncd: Any) -> None:
    assert {command.rich_help_panel for command in GROUP.commands.values()} == {START, LOOK, OPERATE, RESEARCH}
    for line in ("--help", "query --help", "name --help", "name list --help"):
        shown = ncd(*line.split()).stdout
        assert not [word for word in ("<bool>", "list[", "<str>", "<path>", "int range") if word in shown], line
    shown = ncd("train", "--help").stdout
    places = [
        shown.index(word)
        for word in ("─ Images ─", "--labelled", "--dataset", "─ Network ─", "─ Settings ─", "Examples:")
    ]
    assert places == sorted(places) and all(word in shown for word in ("--epochs", "--device", "--backbone"))
    assert "compose|helm|kserve" in ncd("deploy", "render", "--help").stdout


def test_paragraphs_of_help_are_wrapped_by_the_terminal() -> None:
    for command in ALL.values():
        assert not [part for part in str(command.help).split("\n\n") if "\n" in part], command.name


def test_american_spelling_is_accepted() -> None:
    assert parse("ncd-serve train --labeled a --unlabeled b")["labelled"] == Path("a")


def test_each_recipe_is_listed_once_with_one_sentence() -> None:
    groups = listed_recipes()
    names = [name for group in groups.values() for name in group]
    assert sorted(names) == sorted([*recipe_names(), "paper"]) and names[0] == "own-images"
    for group in groups.values():
        for name, line in group.items():
            assert line.endswith(".") and "On top of" not in line and len(line) < 110, name


def completed(line: str, folder: Path) -> list[str]:
    """What bash is offered at the end of a line."""
    program = "import sys; from ncd_serve.cli.app import app; app(prog_name='ncd-serve')"
    words = {"_NCD_SERVE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    watched = f"import atexit, sys; atexit.register(lambda: sys.stderr.write(str('torch' in sys.modules))); {program}"
    command, environment = [sys.executable, "-c", watched], {**os.environ, **words}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "False", done.stderr
    return done.stdout.split()


def test_names_are_completed_without_torch(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "birds"
    run.mkdir(parents=True)
    (run / "environment.json").write_text('{"created": "2026-01-01"}')
    assert completed("ncd-serve train --dataset cub", tmp_path) == ["cub200"]
    assert completed("ncd-serve train --recipe own", tmp_path) == ["own-images"]
    assert completed("ncd-serve train --method d", tmp_path) == ["dtc", "dual"]
    assert "efficientnet_lite0" in completed("ncd-serve train --backbone efficientnet_l", tmp_path)
    assert completed("ncd-serve train --resume runs", tmp_path) == ["runs/birds"]
    (run / "reference.npz").touch()
    assert completed("ncd-serve evaluate ", tmp_path) == ["runs/birds"]


def test_completed_backbones_exist() -> None:
    from ncd_training.base.vision import timm
    from ncd_training.model.backbone import ALIASES, OWN

    assert set(completion.OWN_BACKBONES) == {*OWN, *ALIASES}
    assert {*completion.backbone_names()} == {*timm.list_models(), *completion.OWN_BACKBONES}


def test_training_can_be_kept_on_the_cpu() -> None:
    program = (
        "from ncd_serve.cli.options import Accelerator, use_device; use_device(Accelerator.CPU); import torch;"
        "assert not torch.cuda.is_available() and torch.cuda.device_count() == 0"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
