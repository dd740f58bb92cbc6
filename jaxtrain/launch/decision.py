"""Which process of which run this is: the result of reading the evidence."""

import dataclasses
import re

from jaxtrain.errors import ConfigError

_ADDRESS_FORM = "write it as host:port or [IPv6]:port, e.g. node01:61440"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """Which process of which run this is."""

    launcher: str = ""
    """`flags`, one of `sources.SOURCES`, or empty: a single process."""
    num_processes: int = 1
    process_id: int = 0
    coordinator: str = ""
    """host:port of process 0; empty for a single process, or where the launcher does not say."""
    local_process_id: int | None = None
    """Which of the processes on its node, where the launcher says so."""
    local_num_processes: int | None = None
    node: str = ""
    """The node as the launcher names it; empty: the host name."""
    variables: tuple[str, ...] = ()
    """What was read, as NAME=value."""
    notes: tuple[str, ...] = ()
    """Sources that were not used, and why."""

    def describe(self) -> str:
        """The decision and what is behind it in one line; empty where there is nothing to say."""
        if not self.launcher:
            return ""
        what = f"launcher {self.launcher}: "
        if self.num_processes == 1:
            what += "a single process"
        else:
            what += (
                f"process {self.process_id} of {self.num_processes}, coordinator {self.coordinator}"
            )
        return f"{what} ({' '.join(self.variables)})"


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Splits host:port; the brackets of an IPv6 address are taken off.

    Raises:
        ConfigError: naming the value, `name` and the form that is expected.
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/\s]+):(\d{1,5})", text)
    if found is None or not 0 < int(found[2]) < 2**16:
        why = "has no port"
        if "://" in text:
            why = "has a scheme"
        elif text.count(":") > 1 and not text.startswith("["):
            why = "has an IPv6 address without brackets"
        elif re.search(r"[^\]]:\S", text):
            why = "has no valid host and port"
        raise ConfigError(f"{name}={text} {why}; {_ADDRESS_FORM}")
    return found[1].strip("[]"), int(found[2])


def one_of_several(
    launcher: str,
    variables: tuple[str, ...],
    process_id: int,
    num_processes: int,
    *,
    coordinator: str,
    **local: int | str | None,
) -> Decision:
    """Makes a decision out of what all sources have in common, checked."""
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ConfigError(
            f"process {process_id} of {num_processes} does not exist ({' '.join(variables)}); the"
            f" processes are numbered from 0"
        )
    if num_processes == 1:
        return Decision(launcher=launcher, variables=variables)
    if coordinator:
        parse_address(coordinator, "coordinator")
    return Decision(
        launcher=launcher,
        variables=variables,
        process_id=process_id,
        num_processes=num_processes,
        coordinator=coordinator,
        **local,  # pyright: ignore[reportArgumentType]
    )
