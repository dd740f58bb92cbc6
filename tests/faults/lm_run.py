"""experiments/train_lm.py with the named moments of toy_run.py, and its last parameters kept."""

import importlib.util
import sys
from pathlib import Path

import toy_run

from jaxtrain.main import main


def train_lm():
    path = Path(__file__).parents[2] / "experiments" / "train_lm.py"
    spec = importlib.util.spec_from_file_location("train_lm", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    script = train_lm()

    def build(config):
        moments = toy_run.begin(config)
        return toy_run.watched(script.build(config), config, moments)

    main(script.LmConfig, build, presets={"model": script.PRESETS})
