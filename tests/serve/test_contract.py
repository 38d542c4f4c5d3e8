"""A server is refused, with the reason, unless its model is one that we can ask rightly."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from ncd_serve.contract import OUTPUTS, read_contract
from ncd_serve.errors import ServerError
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.runners import Answer

# As gRPC sends it: whole numbers of 64 bits are strings in its JSON.
CONFIG: dict[str, Any] = {
    "max_batch_size": 64,
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": ["32", "32", "3"]}],
    "output": [
        {"name": "cluster_id", "data_type": "TYPE_INT64", "dims": ["1"]},
        {"name": "probabilities", "data_type": "TYPE_FP32", "dims": ["5"]},
    ],
    "parameters": {"ncd_preprocess": {"string_value": '{"resolution":32,"resize":36}'}},
}


def test_what_a_client_learns() -> None:
    *facts, outputs = read_contract(CONFIG, "here")
    assert facts == [PreprocessSpec(resolution=32, resize=36), 64, 5]
    assert [output.name for output in outputs] == ["probabilities"]
    for kind, asked in (("TYPE_INT64", True), ("TYPE_FP32", False)):
        fit = {"name": "fit", "data_type": kind, "dims": ["1"]}
        outputs = read_contract({**CONFIG, "output": [*CONFIG["output"], fit]}, "here").outputs
        assert ("fit" in [output.name for output in outputs]) is asked


def test_every_output_that_clients_ask_for_is_a_field_of_their_answer() -> None:
    assert tuple(output.name for output in OUTPUTS if output.in_rows) == Answer._fields
    assert {output.name for output in OUTPUTS if output.in_rows and not output.optional} == {"probabilities"}


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("input", 0, "data_type"), "TYPE_FP32", r"it takes image TYPE_FP32 \[32, 32, 3\], not image TYPE_UINT8"),
        (("input", 0, "dims"), ["3", "32", "32"], r"TYPE_UINT8 \[3, 32, 32\]"),
        (("input", 0, "dims"), ["32", "32"], r"TYPE_UINT8 \[32, 32\]"),
        (("input", 0, "name"), "pixels", "it takes pixels"),
        (("input",), [], "it takes nothing"),
        (("output", 1, "data_type"), "TYPE_FP16", "TYPE_FP16 .*, not with probabilities TYPE_FP32"),
        (("output", 1, "dims"), ["5", "2"], r"probabilities TYPE_FP32 \[5, 2\]"),
        (("output", 1, "dims"), ["-1"], r"probabilities TYPE_FP32 \[-1\]"),
        (("output", 1, "name"), "scores", "it answers with cluster_id .*, scores"),
        (("max_batch_size",), 0, "it takes no batches"),
        (("parameters",), {}, "is not a model that ncd-serve exported"),
        (("parameters", "ncd_preprocess", "string_value"), "{}", "preprocessing is unreadable"),
        (("parameters", "ncd_preprocess"), {}, "preprocessing is unreadable"),
    ],
)
def test_what_breaks_it_is_named(place: tuple[Any, ...], value: object, reason: str) -> None:
    config = deepcopy(CONFIG)
    *way, last = place
    inner: Any = config
    for step in way:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(ServerError, match=reason) as refused:
        read_contract(config, "model 'x' on here")
    assert "model 'x' on here" in str(refused.value) and refused.value.hint
