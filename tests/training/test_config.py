from pathlib import Path

import pytest
from ncd_training.config import parse_override, recipe_names, resolve_config

from ncd_serve.errors import UsageError


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[optim]\nepochs = 7\nlearning_rate = 0.5\n")
    config = resolve_config(recipe="glyphs", config_file=file, overrides={"optim.epochs": 3})
    assert (config.optim.epochs, config.optim.learning_rate, config.data.dataset) == (3, 0.5, "glyphs")


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_reads_back_what_it_resolves_to(recipe: str, tmp_path: Path) -> None:
    config = resolve_config(recipe=recipe)
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert resolve_config(recipe=None, config_file=file) == config


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ({"optim.epohcs": 1}, "unknown config key 'optim.epohcs'", "did you mean 'epochs'?"),
        ({"optin.epochs": 1}, "unknown config key 'optin'", "did you mean 'optim'?"),
        ({"optim.epochs": "many"}, "config optim.epochs: Input should be a valid integer", "'many'"),
        ({"model.branches": "both"}, "config model.branches: Input should be", "'both'"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(overrides: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve_config(recipe="glyphs", overrides=overrides)
    assert hint in (caught.value.hint or "")


def test_overrides_are_toml_values_or_words() -> None:
    assert parse_override("optim.epochs=10") == ("optim.epochs", 10)
    assert parse_override("optim.milestones=[1, 2]") == ("optim.milestones", [1, 2])
    assert parse_override("model.branches=global+local") == ("model.branches", "global+local")
    with pytest.raises(UsageError):
        parse_override("epochs=10")


def test_unknown_recipe_names_a_near_one() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_config(recipe="glyph")
    assert caught.value.hint == "did you mean 'glyphs'?"
