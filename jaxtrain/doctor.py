"""`jaxtrain doctor`: is this machine, and are all machines of a run, ready to train?

Alone it looks at the machine at hand. Under `srun` and the like, or with the flags of a run, the
processes meet as those of a run do, and process 0 prints what they found, host by host.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import doctor_checks as checks
from jaxtrain import flags
from jaxtrain.config import Config, RunConfig, field, override
from jaxtrain.doctor_checks import NOTE, OK, WRONG, Finding
from jaxtrain.doctor_facts import TOKEN, gather, nearest_directory
from jaxtrain.errors import ConfigError, ExitCode, PeerError
from jaxtrain.launch import meeting
from jaxtrain.launch.decision import Decision, parse_address
from jaxtrain.launch.evidence import decide_for
from jaxtrain.launch.local_devices import local_device_ids
from jaxtrain.progress import setup_logging

__all__ = ["run"]

_MARK = "*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """The flags of a run that say where it would run, and some of the doctor's own."""

    workdir: str = override(RunConfig, "workdir", "runs")
    compilation_cache_dir: str = override(RunConfig, "compilation_cache_dir", "")
    launcher: str = override(RunConfig, "launcher", "auto")
    coordinator: str = override(RunConfig, "coordinator", "")
    num_processes: int = override(RunConfig, "num_processes", 0)
    process_id: int = override(RunConfig, "process_id", -1)
    process_per: str = override(RunConfig, "process_per", "auto")
    init_timeout_seconds: float = override(RunConfig, "init_timeout_seconds", 120.0)
    device_timeout_seconds: float = field(
        120.0, unit="seconds", positive=True, help="how long driver and devices may take to answer"
    )
    json: bool = field(False, help="print one JSON object")


def run(words: Sequence[str]) -> None:
    """Prints what is as it should be and what is not.

    Raises:
        SystemExit: with code 2 if anything is wrong, on all processes.
        ConfigError: for bad flags.
    """
    config = flags.parse(["jaxtrain doctor", *words], DoctorConfig, description=__doc__ or "")
    setup_logging()
    decision, launcher = _decide(config)
    several = decision.num_processes > 1
    host, port = parse_address(decision.coordinator, "coordinator") if several else ("", 0)
    me = {
        "process_id": decision.process_id,
        "num_processes": decision.num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "node": decision.node or socket.gethostname(),
        "port": port,
        **gather(
            workdir=config.workdir,
            cache=config.compilation_cache_dir,
            coordinator_host=host,
            device_timeout_seconds=config.device_timeout_seconds,
        ),
    }
    me["has_loopback_name"] = me["names"]["is_loopback"]
    gpus = me["gpus"]
    uses_gpus = gpus["plugins"] and gpus["visible"] and not gpus["platforms"].startswith("cpu")
    me["num_gpus"] = gpus["visible"] if uses_gpus else None
    me["findings"] = [dataclasses.asdict(f) for f in (launcher, *checks.check_process(me))]
    everybody, together = [me], []
    if several:
        everybody, together = _compare(host, port, me, config)
    is_wrong = any(
        finding["verdict"] == WRONG
        for finding in (*together, *(finding for who in everybody for finding in who["findings"]))
    )
    # The others have told process 0 what they found; if they could not, each speaks for itself.
    if decision.process_id == 0 or len(everybody) == 1:
        _print(everybody, together, is_wrong, config.json)
    sys.exit(ExitCode.CONFIG if is_wrong else ExitCode.OK)


def _decide(config: DoctorConfig) -> tuple[Decision, Finding]:
    """Who started this process; a single process where the evidence is no good."""
    try:
        decision = decide_for(config)
    except ConfigError as error:
        advice = "set what is missing, or give --launcher=none for a single process"
        return Decision(), _refused("launcher", error, advice)
    text = decision.describe() or "a single process; no launcher has set its variables"
    if decision.notes:
        return decision, Finding(
            "launcher",
            NOTE,
            f"{text} ({'; '.join(decision.notes)})" if decision.launcher else decision.notes[0],
            "nothing if this process is on its own; else let that launcher start it",
        )
    return decision, Finding("launcher", OK, text)


def _compare(
    host: str, port: int, me: dict[str, Any], config: DoctorConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(what all processes say, what is seen only when they are put side by side)"""
    from jaxtrain.distributed import check_together  # imports jax, which --help has no use for

    directory = nearest_directory(config.workdir)

    def look(everybody: Sequence[dict[str, Any]]) -> None:
        # Process 0 does this while all tokens are still there.
        for who in everybody:
            who["is_shared"] = not who["token"] or os.path.exists(directory / who["token"])

    with _token(directory) as token:
        me = {**me, "token": token}
        try:
            everybody = meeting.meet(
                host, port, me, timeout_seconds=config.init_timeout_seconds, check=look
            )
        except (ConfigError, PeerError) as error:
            advice = "start all of them at a time, and let them reach that port"
            return [me], [dataclasses.asdict(_refused("meeting", error, advice))]
    found = checks.check_together(
        everybody,
        check_together,
        lambda visible, place, local: local_device_ids(visible, place, local, config.process_per),
    )
    return everybody, [dataclasses.asdict(finding) for finding in found]


@contextlib.contextmanager
def _token(directory: Path) -> Iterator[str]:
    """A file in the directory for the time of the block: its name, empty if there can be none."""
    with contextlib.ExitStack() as stack:
        name = ""
        with contextlib.suppress(OSError):
            name = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=TOKEN, dir=directory)
            ).name
        yield os.path.basename(name)


def _refused(check: str, error: Exception, advice: str) -> Finding:
    """An error as a finding, with `advice` where it does not say itself what to do."""
    text, separator, last = str(error).rpartition("; ")
    if separator and isinstance(error, ConfigError):
        return Finding(check, WRONG, text, last)
    return Finding(check, WRONG, str(error), advice)


# What is printed


def _print(
    everybody: Sequence[dict[str, Any]],
    together: Sequence[dict[str, Any]],
    is_wrong: bool,
    as_json: bool,
) -> None:
    rows = checks.hosts(everybody) if len(everybody) > 1 else []
    if as_json:
        found = {
            "verdict": WRONG if is_wrong else OK,
            "hosts": rows,
            "together": together,
            "processes": everybody,
        }
        print(json.dumps(found, indent=2))
        return
    lines = _table(rows) + [""] if rows else []
    for finding in _gathered(everybody):
        lines += _lines(finding)
    for finding in together:
        lines += _lines(finding)
    lines.append("something is wrong" if is_wrong else "nothing is wrong")
    print("\n".join(lines))


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The hosts; what is not as on most others has a mark."""
    columns = [name for name in rows[0] if name != "odd"]
    cells = [columns] + [
        [f"{row[name]}{_MARK if name in row['odd'] else ''}" for name in columns] for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    if any(row["odd"] for row in rows):
        lines.append(f"{_MARK} unlike most hosts")
    return lines


def _gathered(everybody: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings of all processes, each once; what is not ok says on which hosts."""
    gathered: list[dict[str, Any]] = []
    for same_check in zip(*(who["findings"] for who in everybody), strict=True):
        troubles: dict[tuple[str, str, str], list[str]] = {}
        for who, finding in zip(everybody, same_check, strict=True):
            key = (finding["verdict"], finding["text"], finding["advice"])
            if finding["verdict"] != OK:
                troubles.setdefault(key, []).append(f"{who['node']}:{who['process_id']}")
        if not troubles:
            gathered.append(same_check[0])
        for (verdict, text, advice), where in troubles.items():
            if len(everybody) > 1:
                text = f"[{', '.join(where) if len(where) < len(everybody) else 'all'}] {text}"
            gathered.append({**same_check[0], "verdict": verdict, "text": text, "advice": advice})
    return gathered


def _lines(finding: dict[str, Any]) -> list[str]:
    lines = [f"{finding['check']:<9}  {finding['verdict']:<5}  {finding['text']}"]
    if finding["advice"]:
        lines.append(f"{'':<18}-> {finding['advice']}")
    return lines
