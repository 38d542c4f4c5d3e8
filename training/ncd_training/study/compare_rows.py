"""Sets of rows to compare, with the paper's figures, from `comparisons/*.toml`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field

from ncd_serve.errors import UsageError, did_you_mean
from ncd_training.config.schema import MethodConfig, Section

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PublishedAcc = float | tuple[float, float]  # in percent; with a deviation where one is published
# The paper's figures are means over three lists of novel classes.
_MEAN_OF_LISTS = {"imagenet-a": "imagenet", "imagenet-b": "imagenet", "imagenet-c": "imagenet"}


class Row(Section):
    """Method or variant in a comparison, with its settings."""

    label: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+-]*$")]  # also the prefix of its run directories
    method: str = MethodConfig().name
    recipes: tuple[str, ...] = ()  # weaker than the user's
    settings: dict[str, Any] = Field(default_factory=dict)  # stronger than the user's recipes, weaker than --set
    weights: bool = True  # False: this row ignores --weights
    for_dataset: dict[str, dict[str, Any]] = Field(default_factory=dict)  # settings on top, by dataset
    # ACC by dataset; in an open world that of `seen` and of `novel` images.
    published: dict[str, PublishedAcc | dict[str, PublishedAcc]] = Field(default_factory=dict)
    elsewhere: dict[str, str] = Field(default_factory=dict)  # figures by dataset that must not be compared with ours

    def figures(self, dataset: str | None) -> dict[str, tuple[float, float | None]]:
        """Return published ACC and deviation by group of images: `novel`, in an open world also `seen`."""
        found = self.published.get(_MEAN_OF_LISTS.get(dataset or "", dataset or ""), {})
        parts = found if isinstance(found, dict) else {"novel": found}
        return {name: figure if isinstance(figure, tuple) else (figure, None) for name, figure in parts.items()}


class RowSet(Section):
    """Set of rows to compare, e.g. a table of the paper."""

    title: str
    note: str = ""  # caveat about the published figures
    elsewhere: str = ""  # protocol and backbone of the figures `elsewhere`
    rows: tuple[Row, ...]

    @property
    def datasets(self) -> list[str]:
        """Datasets with figures in the paper."""
        return list(dict.fromkeys(dataset for row in self.rows for dataset in row.published))

    def pick(self, labels: Sequence[str]) -> tuple[Row, ...]:
        """Return the rows with these labels, in the order of the set; without labels, all rows."""
        known = [row.label for row in self.rows]
        for label in labels:
            if label not in known:
                raise UsageError(f"unknown row '{label}'", hint=did_you_mean(label, known))
        return tuple(row for row in self.rows if not labels or row.label in labels)


def set_names() -> list[str]:
    """Return the names of the sets in this package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _sets().iterdir() if entry.name.endswith(".toml"))


def row_set(name: str) -> RowSet:
    """Load a set by its name."""
    if name not in set_names():
        raise UsageError(f"unknown set of rows '{name}'", hint=did_you_mean(name, set_names()))
    return RowSet.model_validate(tomllib.loads((_sets() / f"{name}.toml").read_text(encoding="utf-8")))


def _sets() -> Any:
    return files("ncd_training.study") / "comparisons"
