"""The `ncd-serve` command, also as `python -m ncd_serve`.

Its modules take a moment to import. Until they are there, Ctrl-C ends the process at once, without a traceback.
Earlier still, while Python itself starts (about 10 ms), Ctrl-C is Python's own matter, and it shows one.
"""

import os

INTERRUPTED = 130
try:
    import signal
    import sys

    _interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job may not be
    if _interruptible:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
except KeyboardInterrupt:
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line."""
    from ncd_serve.cli.app import main as run

    try:
        if _interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
