"""Run blocks on the machines of a Ray cluster: block numbers go out, counts come back, rows go straight to files."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data

from ncd_serve.bulk.blocks import images_of
from ncd_serve.bulk.parts import finished, part_name, read_block
from ncd_serve.bulk.storage import Folder
from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError, MissingExtraError, NcdError, ServerError
from ncd_serve.rows.assignment import assign_images
from ncd_serve.rows.tables import write_parquet
from ncd_serve.runners import Device, OnnxRunner

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from ncd_serve.bulk.parts import Order, Plan
    from ncd_serve.prediction import Prediction

_MAX_TRIES = 3  # of a block whose workers die: afterwards the block is taken to be the cause


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Connect to the cluster at an address or at RAY_ADDRESS; without either, start a temporary one on this machine."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing phones home
    terminate = signal.getsignal(signal.SIGTERM)
    with _silence():
        try:
            _knock(address)
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.FATAL)
            signal.signal(signal.SIGTERM, terminate)  # Ray has its own, with another exit code
        except Exception as error:  # Ray raises the bare class where a machine is too busy to start in time
            raise ServerError(
                f"no Ray cluster can be used at {address}: {error}",
                hint="`ray status --address HOST:PORT` checks a cluster; without --ray-address one is started here",
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise an error at once if the address does not respond: Ray itself retries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def room(device: Device) -> tuple[int, Device]:
    """Return the number of workers that the cluster has room for, and the device of each."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    if gpus and device is not Device.CPU:
        return gpus, Device.CUDA if device is Device.AUTO else device
    if device in (Device.AUTO, Device.CPU):
        return max(1, int(resources.get("CPU", 1))), Device.CPU
    raise MissingExtraError(f"the Ray cluster has no GPU for --device {device.value}", hint="--device cpu")


def run(
    plan: Plan, folder: Folder, bundle: Bundle, *, workers: int, device: Device
) -> Generator[Counter[str], None, None]:
    """Do the blocks that are not done, and count the rows of each by status when its part is written.

    A worker that dies is restarted, and so is its block. A block whose workers die repeatedly is skipped.
    """
    done = finished(folder)
    to_do = [number for number in range(plan.blocks) if number not in done]
    files = {file.name: file.read_bytes() for file in bundle.folder.iterdir() if file.is_file()}
    _configure()
    tries: Any = ray.remote(Tries).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    # Numbers alone: workers look up in the plan what they mean. They are told apart on the way, without a share of the
    # CPUs that workers may hold all; a dataset that begins with a block for each costs the driver much more.
    numbers = ray.data.from_arrow(pa.table({"number": to_do}))
    blocks = numbers.map_batches(_as_it_is, batch_size=1, batch_format="pyarrow", num_cpus=0)
    counts: Any = blocks.map_batches(
        Worker,
        batch_size=1,
        batch_format="pyarrow",
        fn_constructor_args=(files, plan.order, plan.home, folder.absolute, device, tries),
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(to_do)), max_tasks_in_flight_per_actor=2),
        num_cpus=1,
        num_gpus=0 if device is Device.CPU else 1,
    )
    for table in counts.iter_batches(batch_size=None, batch_format="pyarrow"):
        for row in table.to_pylist():
            if failure := row.pop("failure"):
                raise pickle.loads(failure)
            yield Counter(row)


class Tries:
    """Counter of attempts at each block. Ray itself would retry for ever."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, number: int) -> int:
        """Count an attempt, and return the number of attempts so far."""
        self._counts[number] += 1
        return self._counts[number]


class Worker:
    """Actor with one model, which processes one block after the other."""

    def __init__(self, files: dict[str, bytes], order: Order, home: str, out: str, device: Device, tries: Any) -> None:
        with suppress(OSError):  # a machine without it can do with URLs and absolute paths
            os.chdir(home)
        self._order, self._folder, self._tries = order, Folder(out), tries
        self._failure: NcdError | None = None
        with TemporaryDirectory() as scratch:
            for name, content in files.items():
                (Path(scratch) / name).write_bytes(content)
            try:
                # There are as many workers as cores: none of them may take all.
                self._runner = OnnxRunner(Bundle.read(Path(scratch)), device=device, threads=1)
            except NcdError as error:  # as an answer to the first block: Ray would try again, then print a traceback
                self._failure = type(error)(f"a worker on {socket.gethostname()}: {error}", hint=error.hint)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Write the part of a block, and return the number of its rows by status."""
        number = table["number"][0].as_py()
        counts, failure = Counter(ok=0, unsure=0, error=0), self._failure
        try:
            if not failure and ray.get(self._tries.count.remote(number)) <= _MAX_TRIES:
                with self._folder.writing(part_name(number)) as target:
                    write_parquet(_counted(self._rows(number), counts), target)
        except NcdError as error:
            reason = f"{part_name(number)} cannot be written: {error}"
            failure = DataError(reason, hint="finished parts are kept: continue with --resume")
        return pa.Table.from_pylist([{**counts, "failure": pickle.dumps(failure) if failure else b""}])

    def _rows(self, number: int) -> Iterator[Prediction]:
        images = images_of(read_block(self._folder, number))
        order = self._order
        return assign_images(images, self._runner, top_k=order.top_k, min_confidence=order.min_confidence)


def _as_it_is(table: pa.Table) -> pa.Table:
    return table


def _counted(rows: Iterator[Prediction], counts: Counter[str]) -> Iterator[Prediction]:
    for row in rows:
        counts[row.status] += 1
        yield row


def _configure() -> None:
    context: Any = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # bytes, so that every row stays a separate block
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep Ray's own reports out of the command's: its logs have them.

    At any log level, its C++ part writes to the process's standard error, and its Python part to standard output.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere, os.fdopen(kept, "w") as errors:
        os.dup2(nowhere.fileno(), 2)
        try:
            with redirect_stderr(errors), redirect_stdout(nowhere):
                yield
        finally:
            os.dup2(kept, 2)
