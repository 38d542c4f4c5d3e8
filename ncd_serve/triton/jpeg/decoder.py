"""Decoders of untrusted images: processes of their own, each image within a budget of memory and of CPU time.

The Triton model beside this file runs it: `decoder.py SOCKET PROCESSES`, with the number of a listening socket. Each
connection carries one image and its answer. A decoder that uses up its budget is replaced; the image gets no answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

from ncd_serve import budget
from ncd_serve.errors import DataError
from ncd_serve.preprocess import PreprocessSpec, load_array

MEMORY_BYTES = 256 << 20  # for one image, beside the decoder itself
CPU_SECONDS = 2.0  # for one image
IMAGES = 1000  # of one process, so that what a library loses does not add up
HEAD = struct.Struct(">II")  # length of the specification in JSON, and of the file
ARRAY, REASON = b"+", b"-"
PR_SET_PDEATHSIG = 1


def ask(address: Any, specification: str, file: bytes, *, seconds: float) -> bytes | str:
    """Return the array of an image as bytes, or the reason why there is none."""
    told = specification.encode()
    try:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(seconds)
            stream.connect(address)
            stream.sendall(HEAD.pack(len(told), len(file)) + told)
            stream.sendall(file)
            answer = b"".join(iter(lambda: stream.recv(1 << 20), b""))
    except OSError:
        answer = b""
    if not answer:
        return f"cannot be decoded within {CPU_SECONDS:g} s and {MEMORY_BYTES >> 20} MiB"
    return answer[1:] if answer[:1] == ARRAY else answer[1:].decode()


def keep(listener: socket.socket, processes: int) -> None:
    """Keep that many decoders running until standard input is closed."""
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: set[int] = set()
    while True:
        while len(running) < processes:
            running.add(_fork(listener))
        ready, _, _ = select.select([sys.stdin, ended], [], [])
        if sys.stdin in ready:
            break
        ended.recv(1 << 10)
        while running:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            running.discard(pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(listener: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _serve(listener)
        finally:
            os._exit(0)
    return pid


def _serve(listener: socket.socket) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for _ in range(IMAGES):
        connection, _ = listener.accept()
        with connection:
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", peer)[1] != os.getuid():
                continue
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # the signal ends the process, wherever it is
            answer = _answer(connection)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(answer)


def _answer(connection: socket.socket) -> bytes:
    """Decode the image of a connection; whatever goes wrong in a decoder is the image's fault."""
    try:
        with connection.makefile("rb") as stream:
            told, length = HEAD.unpack(stream.read(HEAD.size))
            specification, file = json.loads(stream.read(told)), stream.read(length)
        return ARRAY + load_array(file, PreprocessSpec(**specification)).tobytes()
    except DataError as error:
        return REASON + str(error).encode()
    except MemoryError:
        return REASON + f"needs more than the {MEMORY_BYTES >> 20} MiB of memory for an image".encode()
    except Exception as error:
        return REASON + f"cannot be decoded: {error}".encode()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    budget.IMAGE_BYTES = MEMORY_BYTES  # less than elsewhere: refused by its header, before time is spent on it
    keep(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
