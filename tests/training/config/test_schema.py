import os
from pathlib import Path

import pytest
from ncd_training.config.resolve import config_layers, origins, parse_override, recipe_for, recipe_names, resolve_config
from ncd_training.objective.method import checked

from ncd_serve.errors import UsageError


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[optim]\nepochs = 7\nlearning_rate = 0.5\n")
    config = resolve_config(recipes=["glyphs"], config_file=file, overrides={"optim.epochs": 3})
    assert (config.optim.epochs, config.optim.learning_rate, config.data.dataset) == (3, 0.5, "glyphs")


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_reads_back_what_it_resolves_to(recipe: str, tmp_path: Path) -> None:
    config = resolve_config(recipes=[recipe])
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert resolve_config(config_file=file) == config


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ({"optim.epohcs": 1}, "unknown config key 'optim.epohcs'", "did you mean 'epochs'?"),
        ({"optin.epochs": 1}, "unknown config key 'optin'", "did you mean 'optim'?"),
        ({"optim.epochs": "many"}, "optim.epochs must be a whole number", "'many'"),
        ({"model.branches": "both"}, "model.branches must be 'global', ", "'both'"),
        ({"optim.learning_rate": -1}, "optim.learning_rate must be greater than 0", "-1"),
        ({"optim.weight_decay": float("nan")}, "optim.weight_decay must be a finite number", "nan"),
        ({"optim.seed": -1}, "optim.seed must be at least 0", "-1"),
        ({"data.novel_classes": 1}, "data.novel_classes must be at least 2 or 'auto'", "1"),
        ({"data.novel_classes": "many"}, "data.novel_classes must be a whole number or 'auto'", "'many'"),
        ({"optim.milestones": ["x"]}, "optim.milestones must be a whole number", "'x'"),
        ({"optim": 3}, "optim must be a section", "3"),
        ({"optim.labelled_batch": 0}, "optim.labelled_batch must be at least 1", "config show"),
        (
            dict.fromkeys(("loss.pairwise", "loss.cross_entropy", "loss.consistency"), False),
            "all except distillation",
            "config show",
        ),
        ({"method.variant": "pi"}, "unknown config key 'method.variant'", "known:"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(overrides: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        checked(resolve_config(recipes=["glyphs"], overrides=overrides))
    assert hint in (caught.value.hint or "")


def test_overrides_are_toml_values_or_words() -> None:
    assert parse_override("optim.epochs=10") == ("optim.epochs", 10)
    assert parse_override("optim.milestones=[1, 2]") == ("optim.milestones", [1, 2])
    assert parse_override("model.branches=global+local") == ("model.branches", "global+local")
    with pytest.raises(UsageError):
        parse_override("epochs=10")


def test_unknown_recipe_names_a_near_one() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_config(recipes=["glyph"])
    assert caught.value.hint == "did you mean 'glyphs'?"


def test_variants_lie_on_top_of_the_dataset_s_recipe() -> None:
    paper, quick = (resolve_config(recipes=["cub200", name]) for name in ("paper", "quick"))
    assert paper == resolve_config(recipes=["cub200"])
    assert quick.data.dataset == "cub200"
    assert quick.optim.epochs < paper.optim.epochs


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[optim]\nepochs = 7\n")
    layers = config_layers(recipes=["glyphs"], config_file=file, overrides={"optim.seed": 3})
    found = origins(layers)
    assert found["data.dataset"] == "recipe glyphs"
    assert found["optim.epochs"] == str(file)
    assert found["optim.seed"] == "command line"
    assert "optim.momentum" not in found


def test_a_dataset_has_its_own_recipe_or_its_family_s() -> None:
    assert recipe_for("cub200") == "cub200"
    assert recipe_for("nothing") is None


@pytest.mark.parametrize(
    "overrides", [{"compat.trunk_batch_norm": "train", "data.cache_views": 4}, {"data.cache_views": 1}]
)
def test_views_that_cannot_be_cached(overrides: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="cache_views"):
        resolve_config(overrides=overrides)


@pytest.mark.parametrize("method", ["kcl", "mcl", "kmeans"])
@pytest.mark.parametrize("heads", ["joint", "open-world"])
def test_a_method_that_teaches_no_known_classes_cannot_tell_them_from_novel_ones(method: str, heads: str) -> None:
    with pytest.raises(UsageError, match=f"the method {method} needs .*model.heads=separate"):
        checked(resolve_config(recipes=["glyphs", method, heads]))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe[optim]")
    with pytest.raises(UsageError, match=r"x\.toml is not TOML"):
        resolve_config(config_file=tmp_path / "x.toml")


def test_folders_that_are_not_utf8_leave_a_configuration_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9 \x1b[31m")
    config = resolve_config(recipes=["glyphs"], overrides={"data.unlabelled": folder, "data.dataset": None})
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    again = resolve_config(config_file=tmp_path / "config.toml")
    assert again.optim == config.optim and r"caf\udce9" in str(again.data.unlabelled)
