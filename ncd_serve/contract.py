"""The contract of a served model: its outputs, precisions and configuration, as export writes and clients read them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from ncd_serve.errors import ServerError, UsageError
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.text import first_problem

DEFAULT_MODEL = "ncd_global"  # name of a model in a repository
DEFAULT_URL = "grpc://127.0.0.1:8001"
TOKEN_VARIABLE = "NCD_SERVE_TOKEN"  # environment variable of servers and clients
TOKEN_HEADER = "ncd-serve-token"  # by which Triton's gRPC server knows a token
# Parameters of config.pbtxt with this prefix are facts for clients; no backend acts on them.
FACT_PREFIX = "ncd_"
PREPROCESS_FACT = f"{FACT_PREFIX}preprocess"
DIGEST_FACT = f"{FACT_PREFIX}digest"  # of the bundle
GENERATION_FACT = f"{FACT_PREFIX}generation"
LIMITS = (4096, 16_384, 4096, 1_000_000)  # of a contract: resolution, resize, batch, clusters
THREADS = "intra_op_thread_count"  # which the onnxruntime backend does act on


def checked_token(token: str | None) -> str:
    """Return the token that was given, else that of the environment, else an empty text; raise UsageError if unfit."""
    chosen = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if chosen and not re.fullmatch(r"[A-Za-z0-9._~+/-]{8,200}", chosen):
        raise UsageError(
            "a token has 8 to 200 letters, digits, and . _ ~ + / -",
            hint=f"python -c 'import secrets; print(secrets.token_urlsafe())' makes one; {TOKEN_VARIABLE} may hold it",
        )
    return chosen


class Precision(str, Enum):
    """Precision of weights and activations; `ncd_export.precision` converts models."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"

    def __str__(self) -> str:
        """Return the value that users type."""
        return self.value


class Output(NamedTuple):
    """An output of the served graph."""

    name: str
    dtype: Literal["INT64", "FP32", "BOOL"]  # as Triton calls it
    shape: tuple[Literal["clusters", "features"], ...]  # without the batch
    compared: Literal["exact", "measured", "not"]  # how verification compares it with the trained model
    merged: bool  # whether a merge of clusters changes it
    in_rows: bool = False  # whether clients ask for it: columns of rows are made of it
    optional: bool = False  # whether a model can be without it

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The same type in numpy."""
        return np.dtype({"INT64": "int64", "FP32": "float32", "BOOL": "bool"}[self.dtype])

    @property
    def kind(self) -> str:
        """Type and shape, as messages show them."""
        return f"TYPE_{self.dtype} [{', '.join(self.shape)}]"


# In the order in which the graph answers. A new output is a row here and its computation in `ncd_export.graph`; one
# that clients ask for is also a field of `runners.Answer`.
OUTPUTS = (
    Output("cluster_id", "INT64", (), compared="exact", merged=True),
    Output("confidence", "FP32", (), compared="measured", merged=True),
    Output("probabilities", "FP32", ("clusters",), compared="measured", merged=True, in_rows=True),
    Output("embedding", "FP32", ("features",), compared="measured", merged=False),
    # Known classes first, then clusters; in models that tell known classes from novel ones.
    Output("class_id", "INT64", (), compared="exact", merged=True, optional=True),
    Output("is_novel", "BOOL", (), compared="exact", merged=True, in_rows=True, optional=True),
    # Numbers into `fit.FITS`; not in models of older versions. It follows from embedding and confidence: at its limits
    # the smallest difference would count as a mistake.
    Output("fit", "INT64", (), compared="not", merged=False, in_rows=True, optional=True),
    # Probability that an image is in none of the clusters, and that it is of a known class; see `mixture`. They are
    # computed by nodes that are added after the trained graph, and compared with numpy.
    Output("outside", "FP32", (), compared="not", merged=False, in_rows=True, optional=True),
    Output("known", "FP32", (), compared="not", merged=False, in_rows=True, optional=True),
)


def outputs_in_rows(offered: Iterable[str]) -> tuple[Output, ...]:
    """Return the outputs that rows contain, without the optional ones that a model does not have."""
    names = set(offered)
    return tuple(output for output in OUTPUTS if output.in_rows and (not output.optional or output.name in names))


class Contract(NamedTuple):
    """Facts that a client needs for requests to a model."""

    preprocess: PreprocessSpec
    max_batch: int
    clusters: int
    outputs: tuple[Output, ...]  # to ask for


def read_contract(config: dict[str, Any], where: str) -> Contract:
    """Read the contract from the configuration of a model; raise ServerError with the reason if it is violated."""
    try:
        contract = _read(config, where)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise _broken(where, f"its configuration is unreadable: {type(error).__name__}: {str(error)[:100]}") from None
    sizes = (contract.preprocess.resolution, contract.preprocess.resize, contract.max_batch, contract.clusters)
    for size, limit in zip(sizes, LIMITS, strict=True):
        if not 0 < size <= limit:
            raise _broken(where, f"one of its sizes is {size}, beyond {limit:,}")
    return contract


def _read(config: dict[str, Any], where: str) -> Contract:
    facts = config.get("parameters", {})
    if PREPROCESS_FACT not in facts:
        raise ServerError(f"{where} is not a model that ncd-serve exported", hint="name another with --model-name")
    try:
        preprocess = PreprocessSpec.model_validate_json(facts[PREPROCESS_FACT].get("string_value", ""))
    except ValidationError as error:
        raise _broken(where, f"its preprocessing is unreadable: {first_problem(error)}") from None
    side = preprocess.resolution
    max_batch = int(config.get("max_batch_size", 0))
    if max_batch < 1:
        raise _broken(where, "it takes no batches")
    inputs = {entry["name"]: _kind(entry) for entry in config.get("input", [])}
    if inputs != {"image": f"TYPE_UINT8 [{side}, {side}, 3]"}:
        raise _broken(where, f"it takes {_listed(inputs)}, not image TYPE_UINT8 [{side}, {side}, 3]")
    declared = {entry["name"]: entry for entry in config.get("output", [])}
    outputs = outputs_in_rows(output.name for output in OUTPUTS if _keeps(output, declared.get(output.name)))
    for output in outputs:
        if not _keeps(output, declared.get(output.name)):
            kinds = {name: _kind(entry) for name, entry in declared.items()}
            raise _broken(where, f"it answers with {_listed(kinds)}, not with {output.name} {output.kind}")
    return Contract(preprocess, max_batch, int(declared["probabilities"]["dims"][0]), outputs)


def _keeps(output: Output, entry: dict[str, Any] | None) -> bool:
    """Return whether a configuration declares an output by the table; one value for each image is [1] in Triton."""
    if entry is None or entry.get("data_type") != f"TYPE_{output.dtype}":
        return False
    sizes = [int(size) for size in entry.get("dims", [])]
    return len(sizes) == len(output.shape or (1,)) and min(sizes) > 0


def _kind(entry: dict[str, Any]) -> str:
    return f"{entry['data_type']} {[int(size) for size in entry['dims']]}"


def _listed(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items()) or "nothing"


def _broken(where: str, what: str) -> ServerError:
    return ServerError(f"{where} violates ncd-serve's contract: {what}", hint="export the run again")
