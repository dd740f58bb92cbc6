"""A state tree beside a checkpoint: what is saved, and whether it fits what is wanted.

A checkpoint is flat: arrays by path (`params/layers/attention/q/kernel`, `opt_state/0/mu/...`), so
that it does not depend on the classes a tree is made of.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint_files import Array
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.tree import compile_pattern, named_leaves, near_paths

_logger = logging.getLogger("jaxtrain")

_PARAMS = "params/"
_PARTIAL = "checkpoint.partial_restore"
_NAMED = 5


def is_key(leaf: Any) -> bool:
    """Whether a leaf holds typed random keys, which are stored as their data."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(state: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """Flattens a state.

    Returns:
        (arrays as the manifest describes them, the arrays to write), by path. Arrays without
        elements are described only: orbax refuses to write them.
    """
    arrays, leaves, wrong = {}, {}, []
    for name, leaf in named_leaves(state):
        if not isinstance(leaf, jax.Array | np.ndarray) or name in arrays:
            wrong.append(f"{name} ({type(leaf).__name__})")
            continue
        impl, data = "", leaf
        if is_key(leaf):
            impl, data = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        arrays[name] = Array(tuple(leaf.shape), str(leaf.dtype), impl)
        if data.size:
            leaves[name] = data
    if wrong:
        raise CheckpointError(
            "a checkpoint holds arrays, each at a path of its own; these are not: "
            f"{', '.join(wrong)}."
        )
    return arrays, leaves


def require_match(
    where: str, found: Mapping[str, Array], wanted: Mapping[str, Any], *, subset: bool
) -> None:
    """Refuses a checkpoint that does not hold exactly the arrays that are wanted.

    Args:
        where: "checkpoint step 400", for the error.
        found: the checkpoint's arrays.
        wanted: abstract or concrete leaves (`shape`, `dtype`), by path.
        subset: whether the checkpoint may hold more than is wanted.

    Raises:
        CheckpointError: naming the first few parameters concerned, and how many more there are.
    """
    missing = sorted(wanted.keys() - found.keys())
    extra = [] if subset else sorted(found.keys() - wanted.keys())
    other = {}
    for name in sorted(wanted.keys() & found.keys()):
        leaf, array = wanted[name], found[name]
        if tuple(leaf.shape) != array.shape:
            other[name] = f"shape {_shape(array.shape)} vs {_shape(leaf.shape)}"
        elif str(leaf.dtype) != array.dtype:
            other[name] = f"dtype {array.dtype} vs {leaf.dtype}"
    if not (missing or extra or other):
        return
    # The optimizer's moments and the moving average repeat every difference of the parameters.
    names = [*missing, *extra, *other]
    shown = {name for name in names if name.startswith(_PARAMS)} or set(names)
    kind = "parameter" if any(name.startswith(_PARAMS) for name in shown) else "array"
    parts = []
    if texts := _quoted(missing, shown):
        them = "it" if len(texts) == 1 else "them"
        parts.append(f"{where} has no {kind} {_first(texts)}; the model has {them}.")
    if texts := _quoted(extra, shown):
        parts.append(f"{where} has {kind} {_first(texts)}; the model does not.")
    if texts := [f"{_short(name)!r}: {other[name]}" for name in other if name in shown]:
        parts.append(f"{where} and the model differ in {kind} {_first(texts)}.")
    if rest := len(names) - len(shown):
        parts.append(f"{rest} arrays of optimizer state and averages differ along with them.")
    changed = "the model" if kind == "parameter" else "the optimizer or an average"
    parts.append(
        f"Did {changed} change since it was saved? A new run can take over what still fits: "
        f"--workdir=NEW --checkpoint.restore_from=OLD --{_PARTIAL}=PATTERN leaves what PATTERN "
        "matches at its initial values."
    )
    raise CheckpointError(" ".join(parts))


def stay_initial(pattern: str, found: Iterable[str], wanted: Iterable[str]) -> set[str]:
    """The arrays that a partial restore leaves at their initial values.

    Args:
        pattern: regular expression, searched in the path of the parameter (`head/kernel`), which
            stands for its moments and its average too, and in the path of the array in the state
            (`opt_state/0/mu/head/kernel`, `step`).
        found: paths in the checkpoint.
        wanted: paths in the state.

    Returns:
        Paths in the state or in the checkpoint.

    Raises:
        ConfigError: when the pattern matches nothing.
    """
    regex = compile_pattern(pattern, option=_PARTIAL)
    names = {*found, *wanted}
    params = {name.removeprefix(_PARAMS) for name in names if name.startswith(_PARAMS)}
    chosen = {
        name for name in names if regex.search(name) or regex.search(_parameter_of(name, params))
    }
    if not chosen:
        raise ConfigError(
            f"{_PARTIAL}={pattern!r} matches no parameter; near paths: "
            f"{', '.join(near_paths(pattern, params or names))}."
        )
    return chosen


def initial_values(
    initial: Callable[[], Any] | None, names: list[str], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """The arrays of a partial restore that are not read; says which they are.

    Args:
        initial: makes the whole state; not called if nothing is needed of it.
        names: paths of the arrays.
        wanted: all arrays of the state, by path.
    """
    if not names:
        return {}
    if initial is None:
        raise ValueError("a partial restore needs initial values")
    _logger.warning(
        "%d of %d arrays keep their initial values, not those of the checkpoint: %s",
        len(names),
        len(wanted),
        ", ".join(names),
    )
    chosen = set(names)
    return {name: leaf for name, leaf in named_leaves(initial()) if name in chosen}


def _parameter_of(name: str, params: set[str]) -> str:
    """The parameter that an array of the state belongs to: the longest end that is one."""
    end = name
    while end not in params:
        _, separator, end = end.partition("/")
        if not separator:
            return name
    return end


def _quoted(names: list[str], shown: set[str]) -> list[str]:
    return [repr(_short(name)) for name in names if name in shown]


def _first(texts: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = len(texts) - _NAMED
    return ", ".join(texts[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _short(name: str) -> str:
    return name.removeprefix(_PARAMS)


def _shape(shape: Iterable[int]) -> str:
    """`4`, `4x6` or `()`: as people say it."""
    return "x".join(str(size) for size in shape) or "()"
