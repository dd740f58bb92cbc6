"""The worker processes of `jaxtrain prepare`: started, fed, listened to, and ended.

Own processes with pipes rather than `multiprocessing`: that one would import the script of whoever
calls it anew, and leaves its workers behind when their parent is killed.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.child_process import how_it_ended
from jaxtrain.errors import PeerError

_READ_BYTES = 2**16
_MODULE = "jaxtrain.data.prepare_worker"
# The cores are shared out among processes, not among the threads of each.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class Pool:
    """Workers, each with one unit at a time."""

    def __init__(self, out: str, how: str, workers: int, units: Sequence[int]) -> None:
        """Starts the workers.

        Args:
            out: directory of the preparation.
            how: "stop" or "skip", what they do with bad documents.
            workers: how many.
            units: what they are to make.
        """
        self._waiting = list(reversed(units))
        self._selector = selectors.DefaultSelector()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._unit: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}
        self.under_way: dict[int, int] = {}
        """Bytes done of each unit that is being made."""
        try:
            self._start(workers, [sys.executable, "-m", _MODULE, out, how, str(os.getpid())])
        except BaseException:
            # Ctrl-C before the `with` has been entered.
            self.close()
            raise

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yields what the workers say until every unit is made.

        Raises:
            PeerError: when a worker has died.
        """
        while self._unit:
            for key, _ in self._selector.select():
                worker: subprocess.Popen[bytes] = key.data
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    raise PeerError(self._obituary(worker))
                *lines, self._rest[worker.pid] = (self._rest[worker.pid] + data).split(b"\n")
                for line in lines:
                    yield self._take(worker, json.loads(line))

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
        self._selector.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, workers: int, command: Sequence[str]) -> None:
        for _ in range(workers):
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ENVIRONMENT},
                # A terminal's Ctrl-C is for the parent, which ends them.
                start_new_session=True,
            )
            self._workers.append(worker)
            self._rest[worker.pid] = b""
            assert worker.stdout is not None
            self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
            self._feed(worker)

    def _take(self, worker: subprocess.Popen[bytes], answer: dict[str, Any]) -> dict[str, Any]:
        unit = self._unit[worker.pid]
        if "done" in answer:
            self.under_way[unit] = answer["done"]
        else:
            self.under_way.pop(unit, None)
            self._feed(worker)
        return answer

    def _feed(self, worker: subprocess.Popen[bytes]) -> None:
        self._unit.pop(worker.pid, None)
        if not self._waiting:
            return
        self._unit[worker.pid] = unit = self._waiting.pop()
        assert worker.stdin is not None
        # One that has just died is found when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(f"{unit}\n".encode())
            worker.stdin.flush()

    def _obituary(self, worker: subprocess.Popen[bytes]) -> str:
        how, unit = how_it_ended(worker.wait()), self._unit.get(worker.pid)
        return (
            f"worker {worker.pid} {how} at shard {unit}; the same command goes on where it stopped"
        )
