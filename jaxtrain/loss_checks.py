"""Whether a loss function of a user takes and returns what it must, in words for the user.

The checks run while a step is traced: they cost nothing when it runs.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxtrain.agreement import WISH
from jaxtrain.errors import ConfigError

OWN_METRICS = (
    *("grad_norm", "param_norm", "learning_rate", "weight", "is_applied", "is_finite"),
    WISH,
)
"""Metrics that the step adds to those of the loss."""


@contextlib.contextmanager
def naming_batch(batch: Mapping[str, Any]) -> Iterator[None]:
    """Adds to a KeyError of a model or loss what the batch has, unless the batch has that key."""
    try:
        yield
    except KeyError as error:
        if error.args[:1] and error.args[0] not in batch:
            error.add_note(f"the batch has: {', '.join(batch)}")
        raise


def check_loss_fn(loss_fn: Any) -> None:
    """Refuses a loss that cannot be called as one, before a model is traced for it."""
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a function (outputs, batch, params) -> name -> (sum, weight); got "
            f"{type(loss_fn).__name__}."
        )
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:
        return  # a builtin does not say
    try:
        signature.bind(None, None, None)
    except TypeError:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ConfigError(
            f"loss_fn is called as loss_fn(outputs, batch, params), but {name}{signature} does not "
            "take that; give it these three arguments."
        ) from None


def check_sums(sums: Any) -> None:
    """Refuses what a loss returned, if it is not name -> (sum, weight)."""
    problem = ""
    if not isinstance(sums, Mapping) or "loss" not in sums:
        names = list(sums) if isinstance(sums, Mapping) else _say(sums)
        problem = f"needs the name 'loss'; got {names}"
    elif reserved := [name for name in sums if name in OWN_METRICS]:
        problem = f"uses names that the step gives its own metrics: {reserved}; rename them"
    else:
        wrong = [name for name, pair in sums.items() if not _is_pair_of_scalars(pair)]
        if wrong:
            got = ", ".join(f"{name!r}: {_say(sums[name])}" for name in wrong)
            problem = (
                f"needs two float32 scalars (sum, weight) for {wrong}; got {got}. The weight is "
                "what the sum is divided by in the end, e.g. jnp.sum(batch['loss_mask'])"
            )
    if problem:
        raise ConfigError(f"loss_fn returns a dict of name -> (sum, weight) and {problem}.")


def _is_pair_of_scalars(pair: Any) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(
        (hasattr(v, "dtype") or isinstance(v, float))
        and jnp.shape(v) == ()
        and jnp.result_type(v) == jnp.float32
        for v in pair
    )


def _say(value: Any) -> str:
    """`a float32[8] array`, `(a float32[] array, the int 64)`: what somebody returned."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_say, value))})"
    if isinstance(value, int | float):
        return f"the {type(value).__name__} {value!r}"
    if not hasattr(value, "dtype"):
        return f"a {type(value).__name__}"
    return f"a {value.dtype}[{','.join(map(str, jnp.shape(value)))}] array"
