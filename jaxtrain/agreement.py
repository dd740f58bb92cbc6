"""What the processes of a run decide together, so that all stop, fall back or fail as one.

Where all processes are at the same place of the program they can talk through the devices:
`together`, `from_primary` and `require_same` do. Between steps that would cost time, so there a
wish travels with the data: every batch carries one integer for each device, and the compiled step
returns the largest (`Agreement`). Without other processes all of this is free.
"""

import collections
import contextlib
import enum
import functools
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.data.prefetch import Interrupted
from jaxtrain.errors import ConfigError, JaxtrainError
from jaxtrain.preemption import Preemption

_logger = logging.getLogger("jaxtrain")

WISH = "process_wish"
"""Name of the integers in a batch, and of the largest among the metrics of a step."""


class Wish(enum.IntEnum):
    """What a process wants of the others; the largest counts."""

    GO_ON = 0
    STOP = 1
    """It was told to end: save and leave."""
    FAIL = 2
    """It cannot go on; its part of this batch is that of the last one."""


# At the same place of the program


def first_failure(error: Exception | None) -> Exception | None:
    """What failed on any process, for all to raise: one's own error, else that of the first one.

    All processes call it, with None where nothing failed.
    """
    if jax.process_count() == 1:
        return error
    failures = _gather(b"" if error is None else _pack(error))
    if error is not None:
        return error
    for process_id, packed in enumerate(failures):
        if packed:
            kind, text = pickle.loads(packed)
            return kind(f"process {process_id}: {text}")
    return None


def largest(value: int) -> int:
    """The largest of the values that the processes give."""
    from jax.experimental import multihost_utils  # here and below: only where there are others

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """The block either succeeds on all processes, or raises on all; no process waits inside."""
    failure = None
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        failure = error
    failure = first_failure(failure)
    if failure is not None:
        raise failure


def from_primary[T](make: Callable[[], T]) -> T:
    """What `make` returns, or raises, on process 0, on all processes; the others do not call it."""
    if jax.process_count() == 1:
        return make()
    from jax.experimental import multihost_utils

    packed, failure = b"", None
    if jax.process_index() == 0:
        try:
            packed = pickle.dumps((make(), None))
        except Exception as error:
            failure = error
            packed = pickle.dumps((None, _pack(error)))
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(packed))))
    padded = np.zeros(_rounded(size), np.uint8)
    padded[: len(packed)] = np.frombuffer(packed, np.uint8)
    received = multihost_utils.broadcast_one_to_all(padded)
    value, error = pickle.loads(np.asarray(received, np.uint8)[:size].tobytes())
    if error is not None:
        kind, text = pickle.loads(error)
        raise failure or kind(text)
    return value


def require_same(facts: Mapping[str, Any]) -> None:
    """Checks that all processes have the same facts (JSON).

    Raises:
        ConfigError: on all processes, naming the first one that differs, and in what.
    """
    if jax.process_count() == 1:
        return
    everybody = [json.loads(text) for text in _gather(json.dumps(dict(facts)).encode())]
    for process_id, found in enumerate(everybody):
        differing = [
            f"{name}: {found.get(name)} instead of {value}"
            for name, value in everybody[0].items()
            if found.get(name) != value
        ]
        if differing:
            raise ConfigError(
                f"process {process_id} differs from process 0 in {'; '.join(differing)}; give all"
                f" processes the same flags and the same data"
            )


def _gather(text: bytes) -> list[bytes]:
    """What each process gives, on all processes."""
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.int32(len(text))).reshape(-1)
    if not sizes.any():
        return [b""] * len(sizes)
    padded = np.zeros(_rounded(int(sizes.max())), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _rounded(size: int) -> int:
    """Every size is a program of its own, so there are few."""
    return max(256, 1 << (size - 1).bit_length())


def _pack(error: Exception) -> bytes:
    """An error as the other processes raise it: of the same class if it is for the user."""
    if isinstance(error, JaxtrainError):
        return pickle.dumps((type(error), str(error)))
    text = f"{type(error).__name__}: {error} (its log has the stack)"
    return pickle.dumps((JaxtrainError, text))


# Between the steps


class ToldToStop(Exception):
    """Ends an evaluation from inside its batches."""


class Agreement:
    """Whether to go on, agreed among the processes of a run at every step.

    A wish that comes in a step goes out with the next batch, and all learn of it when the metrics
    of that one are read: after two more steps all are at the same step and know. A single process
    asks its `Preemption` directly.
    """

    def __init__(self, mesh: Mesh, preemption: Preemption) -> None:
        self._preemption = preemption
        self._failure: Exception | None = None
        self._is_stopping = False
        self._pending: collections.deque[jax.Array] = collections.deque()
        self.is_alone = jax.process_count() == 1
        if not self.is_alone:
            # One array for each wish of this process, made once: a step only chooses.
            sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._wishes_D = {
                wish: jax.make_array_from_callback(
                    (mesh.size,), sharding, lambda _, wish=wish: np.full(1, wish, np.int32)
                )
                for wish in Wish
            }

    @property
    def is_stopping(self) -> bool:
        """Whether all stop now; the same on all processes at the same step."""
        return self._preemption.requested if self.is_alone else self._is_stopping

    def mark(self, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """The batch with this process's wish."""
        if self.is_alone:
            return batch
        wish = Wish.GO_ON
        if self._failure is not None:
            wish = Wish.FAIL
        elif self._preemption.requested:
            wish = Wish.STOP
        return {**batch, WISH: self._wishes_D[wish]}

    def learn(self, wish: int) -> None:
        """Takes what a step returned.

        Raises:
            Exception: when a process failed; on all of them.
        """
        if wish == Wish.FAIL:
            failure = first_failure(self._failure)
            assert failure is not None
            raise failure
        if wish == Wish.STOP and not self._is_stopping:
            self._is_stopping = True
            if not self._preemption.requested and jax.process_index() == 0:
                _logger.info("another process was told to stop: all save and leave")

    def attempt[T](self, act: Callable[[], T], otherwise: T) -> T:
        """Calls `act`, or, once something has failed here, returns `otherwise` until all know.

        A single process raises at once.
        """
        if self.is_alone:
            return act()
        if self._failure is None:
            try:
                return act()
            except Exception as error:
                self._failure = error
        return otherwise

    def each[T](
        self, items: Iterable[T], count: int, stand_in: Callable[[T, int], T]
    ) -> Iterator[T]:
        """Yields `count` items of an evaluation, whose steps are `noted` one by one.

        Args:
            items: that many.
            count: how many.
            stand_in: (the first item, number) -> what stands for an item that could not be read.

        Raises:
            ToldToStop: on all processes at the same item.
        """
        iterator = iter(items)
        if self.is_alone:
            yield from self._each_alone(iterator)
            return
        with together():
            item = first = next(iterator)
        for number in range(count):
            if number:
                item = self.attempt(functools.partial(next, iterator), stand_in(first, number))
            # The step before the last one is done by now: nobody waits for it.
            if len(self._pending) > 1:
                self.learn(int(self._pending.popleft()))
            if self._is_stopping:
                self._pending.clear()
                raise ToldToStop
            yield item
        while self._pending:
            self.learn(int(self._pending.popleft()))

    def _each_alone[T](self, iterator: Iterator[T]) -> Iterator[T]:
        try:
            for item in iterator:
                if self._preemption.requested:
                    raise ToldToStop
                yield item
        except Interrupted:
            if self._preemption.requested:
                raise ToldToStop from None
            raise

    def note(self, result: Any) -> Any:
        """Takes the wish out of what an evaluation step returned."""
        if self.is_alone:
            return result
        sums, wish = result
        self._pending.append(wish)
        return sums


def carrying_train_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The train step for batches that carry wishes: the largest is one of its metrics."""

    @functools.wraps(step)
    def carrying(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        rest, wish = _take_wish(batch)
        state, metrics = step(state, rest)
        return state, {**metrics, WISH: wish}

    return carrying


def carrying_eval_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The evaluation step for batches that carry wishes: it returns (sums, the largest)."""

    @functools.wraps(step)
    def carrying(params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Any]:
        rest, wish = _take_wish(batch)
        return step(params, model_state, rest), wish

    return carrying


def _take_wish(batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    rest = dict(batch)
    with jax.named_scope("agreement"):
        return rest, jnp.max(rest.pop(WISH))
