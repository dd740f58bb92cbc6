"""A disk that fills up, in earnest, at every stage of a run (case C5).

Each start ends with one sentence and the documented code, and the same command with room again
goes on as if nothing had happened.
"""

import os
import subprocess

import looping
import pytest
from processes import finished

FULL = "No space left on device"
ERROR = "error: "

# (TOY_AT, exit code, checkpoints afterwards, what is said). In one directory, one after the other,
# with room made in between.
STARTS = [
    ("build 1 fill", 4, [], ("config.json could not be written", FULL)),
    ("step 3 fill", 4, [], (FULL,)),
    ("evaluate 1 fill", 4, [], (FULL,)),
    ("commit_finished 1 fill", 4, [5], (FULL,)),
    ("compiled 1 fill", 4, [5], ("metrics.jsonl could not be written", FULL)),
    ("config 1 fill", 4, [5], (FULL,)),
    ("evaluate 1 fill", 4, [5], ("could not be written", FULL)),
    # The last step is safe: what fails then is said, and is not worth the run.
    ("commit_finished 1 fill", 0, [5, 10], ("the times of this start are lost", FULL)),
    ("build 1 fill", 0, [5, 10], ("the run is complete", "the report could not be written", FULL)),
    ("", 0, [5, 10], ("the run is complete", "report:")),
]


@pytest.fixture
def disk(tmp_path):
    """A file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only: sudo unshare -m pytest THIS_FILE")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.timeout(900)
def test_a_full_disk_at_any_stage_costs_the_steps_since_the_last_checkpoint(tmp_path, disk):
    code, output = finished(tmp_path / "whole")
    assert code == 0, output
    workdir = disk / "run"
    for at, expected, steps, parts in STARTS:
        code, output = finished(workdir, at=at, variables={"TOY_DISK": str(disk)})
        print(f"--- {at}: {code}\n{output}")
        assert code == expected, output
        assert looping.saved_steps(workdir) == steps, output
        for part in parts:
            assert part in output
        errors = [line for line in output.splitlines() if line.startswith(ERROR)]
        assert len(errors) == (code != 0), output
        for dump in ("Traceback", "ERROR:", "Exception ignored"):
            assert dump not in output, output
        assert not [name for name in names_in(workdir) if name.endswith(".new")]
        (disk / "filler").unlink(missing_ok=True)
    assert looping.records(workdir) == looping.records(tmp_path / "whole")
    assert names_in(workdir) == names_in(tmp_path / "whole")
    assert names_in(workdir / "checkpoints") == names_in(tmp_path / "whole" / "checkpoints")


def names_in(directory):
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
