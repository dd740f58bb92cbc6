"""How `--data.mixture` is written: NAME=WEIGHT:SOURCE, several with commas between.

    web=3:/disk1/web,/disk2/web,code=1:stdlib

A SOURCE is what --data.source takes. Behind a comma comes the next source where NAME=WEIGHT: stands
there, and more of the same source where not. A path that looks so itself is written ./PATH.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.errors import ConfigError

_HEAD = re.compile(r"(?:^|,)\s*(?P<name>[A-Za-z][A-Za-z0-9_-]*)=(?P<weight>[^:,=/]*):")


class WeightedSource(NamedTuple):
    """One source of a mixture."""

    weight: float
    source: str
    """As `--data.source` takes it."""


def parse_mixture(text: str) -> Mapping[str, WeightedSource]:
    """Returns name -> source of a mixture; nothing for an empty text.

    Raises:
        ConfigError: for anything else.
    """
    if not text:
        return {}
    heads = list(_HEAD.finditer(text))
    if not heads or heads[0].start() != 0:
        raise ConfigError(
            f"mixture={text} must be NAME=WEIGHT:SOURCE and more of them with commas between, as in"
            f" web=3:/data/web,code=1:stdlib"
        )
    found: dict[str, WeightedSource] = {}
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=True):
        name, source = head["name"], text[head.end() : end].strip()
        if name in found:
            raise ConfigError(f"mixture={text} has two sources {name!r}; give each its own name")
        try:
            weight = float(head["weight"])
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"mixture={text}: the weight {head['weight']!r} of {name!r} must be a positive"
                f" number; for a path of this form write ./{name}={head['weight']}:..."
            )
        if not source:
            raise ConfigError(f"mixture={text}: {name!r} has no source behind its colon; give one")
        found[name] = WeightedSource(weight, source)
    if len(found) == 1:
        (only,) = found.values()
        raise ConfigError(
            f"mixture={text} has one source, which is no mixture; use data.source={only.source}"
        )
    return found
