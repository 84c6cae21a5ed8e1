"""The ordered lane: exchanges run one after the other, in the order in which they were submitted.

On CPU a worker thread, so that they overlap the rest of backward; on CUDA a side stream, on which the same
lines are issued without waiting for the device.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

Job = Callable[[], None]


class ThreadLane:
    """Runs jobs in order on one daemon thread. Jobs must not raise."""

    def __init__(self) -> None:
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._jobs = jobs
        self._thread = threading.Thread(target=_run, args=(jobs,), name="gradwire-lane", daemon=True)
        self._thread.start()
        # The thread holds the queue only, so a lane that nobody holds any more ends its thread.
        self._close = weakref.finalize(self, jobs.put, None)

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Let the submitted jobs finish, then end the thread; does not wait."""
        self._close()


def _run(jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or the last step's tensors live until the next


class StreamLane:
    """Runs jobs at once in the calling thread, their kernels on a side stream ordered after the current one.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            job()

    def close(self) -> None:
        pass


def make_lane(device: torch.device) -> ThreadLane | StreamLane:
    """The lane for tensors on `device`."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


def device_guard(device: torch.device) -> Any:
    """Make `device` the current one where that means something."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
