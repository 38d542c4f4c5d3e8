"""Inheritance of a run from the generation before: clusters of old images, labels of single images, ids, names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ncd_serve.bundle import Ancestor, Change
from ncd_serve.errors import DataError
from ncd_serve.files import write_json
from ncd_serve.naming import Names
from ncd_serve.text import first_problem

if TYPE_CHECKING:
    from ncd_training.base.run_dir import RunDir

NONE = -1  # of an image that was in no cluster


class Carried(BaseModel):
    """The generation before, as a run that learns from it needs it. Columns are those of the cluster head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bundle: Path
    ancestors: list[Ancestor]  # the generation before is the last of them
    clusters: int  # ids that were given so far
    first: int  # columns that are known classes, which come first
    ids: list[int]  # of the columns after them; those from `clusters` on are new
    names: Names  # of the generation before, and of new clusters
    columns: list[int]  # of the unlabelled images in the generation before
    said: list[bool]  # a person said so: these columns are labels
    wrong: list[int]  # columns that a person took the images out of
    added: list[bool]  # images that are new
    changes: list[Change] = []  # filled in when training has ended; then columns are ids

    @property
    def generation(self) -> int:
        """Number of the generation that the run makes."""
        return self.ancestors[-1].generation + 1

    def write(self, run: RunDir) -> None:
        """Write it into a run directory."""
        write_json(run.carried, self.model_dump(mode="json"))

    @classmethod
    def read(cls, run: RunDir) -> Carried | None:
        """Read it from a run directory; None if the run is a first generation."""
        try:
            return cls.model_validate_json(run.carried.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise DataError(f"{run.carried} is damaged: {first_problem(error)}", hint="train again") from None
