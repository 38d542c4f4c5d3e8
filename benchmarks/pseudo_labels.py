"""Quality of pairwise scores (same novel class or not) on the features of a run.

    .venv/bin/python benchmarks/pseudo_labels.py RUN            # after training
    .venv/bin/python benchmarks/pseudo_labels.py RUN --initial  # before discovery

AUC, and precision of the best pairs, as many as there are true ones, need no threshold. The mean scores show how much
of the total score is on pairs of different classes. Reads true classes, so it is for analysis only.
"""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from ncd_training.base.checkpoint import load_checkpoint
from ncd_training.base.randomness import generator_for
from ncd_training.base.run_dir import RunDir
from ncd_training.config.schema import DataConfig
from ncd_training.data.prepare import reopen
from ncd_training.model.branches import BranchOutput
from ncd_training.model.predict import run_model
from ncd_training.run.step import TrainState, load_state
from ncd_training.score.pair_quality import pair_quality, sample_rows, score_variants
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from ncd_serve.errors import NcdError
from ncd_serve.progress import Progress, Track


def features(state: TrainState, data: DataConfig, paths: list[Path], track: Track) -> tuple[Tensor, Tensor]:
    """Return embeddings [M, d] of the global branch and descriptions [M, e] of the local one."""
    kinds = state.method.kinds
    whole, parts = (kinds.index(kind) if kind in kinds else 0 for kind in ("global", "local"))
    judge = deepcopy(state.method.pseudo_labels[parts]).eval()
    descriptions: list[Tensor] = []

    def fill(outputs: list[BranchOutput]) -> None:
        none = torch.zeros(0, dtype=torch.long)
        judge.remember(outputs[parts], none, branch=state.model.branches[parts], generator=generator_for(0))

    def describe(outputs: list[BranchOutput]) -> None:
        embeddings.append(outputs[whole].embedding.cpu())
        descriptions.append(judge.compared("local", outputs[parts], 0).cpu())

    embeddings: list[Tensor] = []
    # Before training the dictionary is empty: parts of the same images fill it.
    passes = [describe] if len(judge.dictionary.filled) else [fill, describe]
    for number, see in enumerate(passes, start=1):
        what = f"pass {number} of {len(passes)}"
        run_model(state.model, paths, data.preprocess, workers=data.workers, track=track, what=what, see=see)
    return torch.cat(embeddings), torch.cat(descriptions)


def quality_table(run: RunDir, progress: Progress, *, initial: bool, images: int) -> Table:
    setup = reopen(run, progress=progress)
    if setup.manifest.truth is None:
        sys.exit("no true classes are known for these images, so there is nothing to compare with")
    state = load_state(setup, run.checkpoint)
    if initial:
        load_checkpoint(state, run.initial)
    rows = sample_rows(len(setup.manifest.unlabelled), seed=0, at_most=images)
    truth = np.array(setup.manifest.truth)[rows]
    which = "initial" if initial else f"epoch {state.epoch}"
    title = f"{len(rows)} unlabelled images, {which} features"
    table = Table(Column("scores", no_wrap=True), Column("features", no_wrap=True), title=title, title_justify="left")
    for name in ("AUC", "precision of best", "mean, same", "mean, others"):
        table.add_column(name, justify="right")
    paths = [setup.manifest.unlabelled[row] for row in rows]
    for what, form, scores in score_variants(*features(state, setup.config.data, paths, progress.track)):
        found = pair_quality(scores, truth)
        columns = ("auc", "precision_at_positives", "mean_same", "mean_different")
        table.add_row(what, form, *(f"{found[name]:.3f}" for name in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--initial", action="store_true", help="the features before training")
    parser.add_argument("--images", type=int, default=1000, help="at most so many unlabelled images")
    arguments = parser.parse_args()
    console = Console()
    try:
        run = RunDir.open(arguments.run)
        console.print(quality_table(run, Progress(console), initial=arguments.initial, images=arguments.images))
    except NcdError as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")


if __name__ == "__main__":
    main()
