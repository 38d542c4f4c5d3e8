"""Requests of clients, counted by hand."""

from __future__ import annotations

import math

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from ncd_serve.triton.counting import Ledger, warm_up_requests
from ncd_serve.triton.probe import Activity

CONFIG = """
instance_group [ { kind: KIND_CPU count: 2 } ]
model_warmup [ { name: "one" batch_size: 1 }, { name: "eight" batch_size: 8 count: 3 } ]
"""


def raw(answered: int, p50: float = 1.0, failed: int = 0) -> Activity:
    return Activity(answered, failed, answered, p50, 2 * p50)


def test_warm_up_is_what_the_configuration_says() -> None:
    assert warm_up_requests(text_format.Parse(CONFIG, ModelConfig())) == 2 * (1 + 3 * 8)
    assert warm_up_requests(ModelConfig()) == 0


def test_neither_warm_up_nor_probes_count_in_any_version() -> None:
    ledger = Ledger()
    ledger.warm_up["birds"] = 73

    def count(probes: int, **versions: Activity) -> tuple[int, float]:
        found = ledger.update({("birds", name): each for name, each in versions.items()}, {"birds": probes})["birds"]
        assert found.images == found.answered
        return found.answered, found.p50

    assert math.isnan(count(2, v1=raw(75))[1])
    assert count(3, v1=raw(80)) == (4, 1.0)
    assert count(3, v1=raw(80), v2=raw(30)) == (4, 1.0)  # in the middle of its warm-up
    assert count(3, v2=raw(75, p50=4.0)) == (6, 4.0)  # the first one is unloaded
    assert count(3, v2=raw(76), v1=raw(0)) == (7, 1.0)
    assert count(4, v2=raw(74)) == (7, 1.0)  # loaded again
    assert ledger.update({("gulls", "1"): raw(1, failed=2)}, {})["gulls"][:3] == (1, 2, 1)
