"""Which of a node's accelerators belong to a process.

A position counts in the list of devices that the process can see (CUDA_VISIBLE_DEVICES), and is
never a physical device number: schedulers hand out GPUs 2 and 3, and tasks may share a list or see
one GPU each.
"""

import re

from jaxtrain.errors import ConfigError

_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")


def count_visible(visible: str | None, num_installed: int) -> int:
    """How many devices a process can see.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None if it is not set. As in CUDA, the list ends at the first
            entry that names no device (-1, NoDevFiles).
        num_installed: devices that the driver shows where the variable is not set.
    """
    if visible is None:
        return num_installed
    count = 0
    for entry in visible.split(","):
        if not _DEVICE.fullmatch(entry.strip()):
            break
        count += 1
    return count


def local_device_ids(
    num_visible: int, local_process_id: int, local_num_processes: int, process_per: str = "auto"
) -> tuple[int, ...]:
    """The positions, in the list of visible devices, of those that a process uses.

    Args:
        num_visible: devices that this process can see.
        local_process_id: which of the node's processes this is.
        local_num_processes: processes on the node.
        process_per: `device`: each takes one; `node`: each takes all that it sees; `auto`: they
            share them equally. A process that sees a single device takes it.

    Raises:
        ConfigError: when there are fewer devices than processes, or they cannot be shared equally.
    """
    if num_visible == 1 or process_per == "node":
        return tuple(range(num_visible))
    if not 0 <= local_process_id < local_num_processes:
        raise ConfigError(
            f"local process {local_process_id} of {local_num_processes} does not exist; they are"
            f" numbered from 0"
        )
    if num_visible < local_num_processes:
        raise ConfigError(
            f"{local_num_processes} processes on this node see {num_visible} devices; start at most"
            f" {num_visible} processes on a node, or let each see its own"
        )
    if process_per == "device":
        return (local_process_id,)
    share, left = divmod(num_visible, local_num_processes)
    if left:
        raise ConfigError(
            f"{num_visible} devices of this node cannot be shared equally by {local_num_processes}"
            f" processes; start a number of processes that divides {num_visible}, or give"
            f" --process_per=device to use one each"
        )
    return tuple(range(local_process_id * share, (local_process_id + 1) * share))
