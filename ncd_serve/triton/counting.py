"""Requests of clients: what models have answered, without their warm-up and without probes, over all versions."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from ncd_serve.triton.probe import Activity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def warm_up_requests(config: Any) -> int:
    """Return the number of requests that Triton sends to each version of a model before anybody else does."""
    each = sum(max(1, sample.count) * max(1, sample.batch_size) for sample in config.model_warmup)
    return each * sum(max(1, group.count) for group in config.instance_group)


class Ledger:
    """Count of the requests that clients have sent to each model. A version that is unloaded keeps its count."""

    def __init__(self) -> None:
        self.warm_up: dict[str, int] = {}  # requests to each version of a model
        self._seen: dict[tuple[str, str, int], Activity] = {}
        self._lives: Counter[tuple[str, str]] = Counter()  # times that a version was loaded again

    def update(self, found: Mapping[tuple[str, str], Activity], probes: Mapping[str, int]) -> dict[str, Activity]:
        """Return the activity of each model by what Triton counts for each version of it at the moment."""
        for (model, version), now in found.items():
            before = self._seen.get((model, version, self._lives[model, version]))
            if before and now.answered < before.answered:
                self._lives[model, version] += 1
            self._seen[model, version, self._lives[model, version]] = now
        return {model: self._of(model, found, probes.get(model, 0)) for model in sorted({key[0] for key in self._seen})}

    def _of(self, model: str, found: Mapping[tuple[str, str], Activity], probes: int) -> Activity:
        warm_up = self.warm_up.get(model, 0)
        all_ = [activity for (name, *_), activity in self._seen.items() if name == model]
        answered = sum(max(0, each.answered - warm_up) for each in all_) - probes
        images = sum(max(0, each.images - warm_up) for each in all_) - probes
        loaded = [each for (name, _), each in found.items() if name == model and answered > 0]
        p50, p99 = (_most(each.p50 for each in loaded), _most(each.p99 for each in loaded))
        return Activity(max(0, answered), sum(each.failed for each in all_), max(0, images), p50, p99)


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)
