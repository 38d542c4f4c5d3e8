"""Wrapper that runs a program which ends when this process's parent dies: `run_with_parent.py PARENT_PID COMMAND...`.

A separate program, because the request must be made in the new process, and Python code run between fork and exec
(`preexec_fn`) may deadlock in a parent that has threads, as every gRPC client has.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the request was made, so no signal will come
        sys.exit("the process that started Triton has ended")
    os.execv(command[0], command)
