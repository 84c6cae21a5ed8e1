"""Real gloo workers that stay up for a whole session: importing torch once is most of what such tests cost."""

import importlib
import tempfile
import traceback
import warnings
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS, PROGRAM_SECONDS = 100, 60


def serve(rank: int, peers: int, rendezvous: str, connection: Any) -> None:
    """Run what is asked for, by name, until killed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, peers), rank=rank, world_size=peers)
    connection.send((True, None))
    while True:
        module, name, arguments = connection.recv()
        try:
            connection.send((True, getattr(importlib.import_module(module), name)(**arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Pool:
    """W processes with one process group; `run` gives what a program returned on each of them."""

    def __init__(self, peers: int) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self._folder.name) / "store")
        self._connections, self._processes = [], []
        for rank in range(peers):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, peers, rendezvous, there), daemon=True)
            process.start()
            self._connections.append(here)
            self._processes.append(process)
        self._starting = True

    def run(self, module: str, name: str, **arguments: Any) -> list[Any]:
        """Call `module.name(**arguments)` on every worker; results in the order of ranks.

        Raises:
            AssertionError: it raised on some worker; has their tracebacks.
            TimeoutError: some worker did not answer; the pool is of no use then.
        """
        if self._starting:
            self._results(START_SECONDS)
            self._starting = False
        for connection in self._connections:
            connection.send((module, name, arguments))
        return self._results(PROGRAM_SECONDS)

    def _results(self, seconds: float) -> list[Any]:
        results, failures = [], []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(seconds):
                self.close()
                raise TimeoutError(f"worker {rank} did not answer within {seconds} s; " + "\n".join(failures))
            fine, result = connection.recv()
            if not fine:
                failures.append(f"worker {rank}:\n{result}")
            results.append(result)
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        """End the workers; they hold nothing that needs an orderly end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
