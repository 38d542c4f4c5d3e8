"""What a served model has to be like for our clients, read from its configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError

from ncd_serve.errors import ServerError
from ncd_serve.preprocess import PreprocessSpec

DEFAULT_MODEL = "ncd_global"  # name of a model in a repository
DEFAULT_URL = "grpc://127.0.0.1:8001"
# Parameters of config.pbtxt with this prefix are facts for clients; no backend acts on them.
FACT_PREFIX = "ncd_"
PREPROCESS_FACT = f"{FACT_PREFIX}preprocess"
THREADS = "intra_op_thread_count"  # which the onnxruntime backend does act on


class Contract(NamedTuple):
    """What a client has to know to ask a model."""

    preprocess: PreprocessSpec
    max_batch: int
    clusters: int
    tells_fit: bool  # models of older versions do not


def read_contract(config: dict[str, Any], where: str) -> Contract:
    """The contract of a model that keeps it; ServerError names what is wrong with any other."""
    facts = config.get("parameters", {})
    if PREPROCESS_FACT not in facts:
        raise ServerError(f"{where} is not a model that ncd-serve exported", hint="name another with --model-name")
    try:
        preprocess = PreprocessSpec.model_validate_json(facts[PREPROCESS_FACT].get("string_value", ""))
    except ValidationError as error:
        raise _broken(where, f"its preprocessing is unreadable: {error.errors()[0]['msg']}") from None
    side = preprocess.resolution
    max_batch = int(config.get("max_batch_size", 0))
    if max_batch < 1:
        raise _broken(where, "it takes no batches")
    inputs = {entry["name"]: _kind(entry) for entry in config.get("input", [])}
    if inputs != {"image": f"TYPE_UINT8 [{side}, {side}, 3]"}:
        raise _broken(where, f"it takes {_listed(inputs)}, not image TYPE_UINT8 [{side}, {side}, 3]")
    outputs = {entry["name"]: entry for entry in config.get("output", [])}
    probabilities = outputs.get("probabilities", {})
    clusters = [int(size) for size in probabilities.get("dims", [])]
    if probabilities.get("data_type") != "TYPE_FP32" or len(clusters) != 1 or clusters[0] < 1:
        kinds = {name: _kind(entry) for name, entry in outputs.items()}
        raise _broken(where, f"it answers with {_listed(kinds)}, not with probabilities TYPE_FP32 [clusters]")
    tells_fit = outputs.get("fit", {}).get("data_type") == "TYPE_INT64"
    return Contract(preprocess, max_batch, clusters[0], tells_fit)


def _kind(entry: dict[str, Any]) -> str:
    return f"{entry['data_type']} {[int(size) for size in entry['dims']]}"


def _listed(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items()) or "nothing"


def _broken(where: str, what: str) -> ServerError:
    return ServerError(f"{where} does not keep ncd-serve's contract: {what}", hint="export the run again")
