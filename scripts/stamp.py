"""Which commit a table was made at: said in the pages that scripts write."""

import pathlib
import subprocess


def commit() -> str:
    """The commit of the working tree, with `+changes` behind it where files differ from it."""
    return subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+changes"],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parent,
        check=False,
    ).stdout.strip()
