"""Ctrl-C and SIGTERM while a run trains: the first asks it to stop where it can go on from, the second ends it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gdtrain.errors import Interrupted
from gdtrain.session import Say

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals that follow in so many seconds are one request: a terminal and a parent may both send it.
_ONE_REQUEST = 0.3
_CLOSED = 0  # no signal has this number


class StopRequests:
    """What was asked for so far."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._asked: str | None = None
        self._at = 0.0

    def check(self, iteration: int) -> None:
        """Raises Interrupted if a stop was asked for."""
        if self._asked is not None:
            raise Interrupted(f"{self._asked} at iteration {iteration}; --resume goes on from there")

    def watch(self, signals: int) -> None:
        """Read numbers of signals from a pipe until it is told that there are no more.

        In a thread of its own: Python's handlers run between two bytecodes, and an evaluation of MLX is one.
        """
        while (number := os.read(signals, 1)[0]) != _CLOSED:
            if number not in _SIGNALS:
                continue
            if self._asked is not None:
                if time.monotonic() - self._at < _ONE_REQUEST:
                    continue
                if sys.stdout.isatty():
                    os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the progress bar hid the cursor
                os._exit(130)
            self._at = time.monotonic()
            self._asked = "interrupted" if number == signal.SIGINT else "terminated"
            self._say(f"{self._asked}: stopping after this iteration, then saving; once more ends at once")


@contextmanager
def stop_requests(say: Say) -> Iterator[StopRequests]:
    """Within it the two signals are requests. One that the process was started to ignore stays ignored. Only in the
    main thread."""
    requests = StopRequests(say)
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = {s: signal.getsignal(s) for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher = threading.Thread(target=requests.watch, args=(read,), daemon=True)
    watcher.start()
    try:
        yield requests
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(write, bytes([_CLOSED]))
        watcher.join()
        os.close(read)
        os.close(write)
