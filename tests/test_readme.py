"""The README's script runs as it stands there."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_your_own_model_in_40_lines_trains(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "my_experiment.py"
    script.write_text(blocks[0])
    code = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(code) <= 45, "the README promises 40 lines"
    flags = ["--num_steps=60", "--eval_every_steps=0", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, script, *flags], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"evaluation.*accuracy ([0-9.]+)", done.stderr)[1])
    assert accuracy > 0.5, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
