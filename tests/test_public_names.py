"""The public names: a golden list, each there on first use, and nothing loaded before it."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import jaxtrain

# A name that is added or taken away here is a change of the interface: say so in CHANGELOG.md.
GOLDEN = [
    "ArrayDataset",
    "CheckpointConfig",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DEFAULT_RULES",
    "DataError",
    "Dataset",
    "ExitCode",
    "FitResult",
    "JaxtrainError",
    "Model",
    "NonFiniteError",
    "OptimizerConfig",
    "RunConfig",
    "ShardingRules",
    "TrainState",
    "Writer",
    "audit",
    "classification_loss",
    "field",
    "fit",
    "functional",
    "init_state",
    "lm_loss",
    "make_eval_step",
    "make_mesh",
    "make_optimizer",
    "make_train_step",
    "num_params",
    "row_keys",
    "shard_batch",
]


def test_the_public_names_are_the_golden_list():
    assert sorted(jaxtrain.__all__) == GOLDEN
    assert dir(jaxtrain) == GOLDEN


@pytest.mark.parametrize("name", GOLDEN)
def test_every_public_name_is_there(name):
    value = getattr(jaxtrain, name)
    # Where a class or function says where it is from, that is our own package.
    assert getattr(value, "__module__", "jaxtrain").startswith("jaxtrain")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'jaxtrain' has no attribute 'Trainer'"):
        jaxtrain.Trainer  # noqa: B018


def test_no_public_name_is_a_module_too():
    """Importing a submodule would put the module where the function was."""
    modules = {module.name for module in pkgutil.iter_modules(jaxtrain.__path__)}
    assert not modules & set(GOLDEN)


def test_audit_is_the_function_whatever_was_imported_first():
    for module in ("layout_audit", "loop", "main"):
        importlib.import_module(f"jaxtrain.{module}")
        assert callable(jaxtrain.audit)


def loaded_after(statements: str, *modules: str) -> list[str]:
    """Which of the modules a fresh interpreter has loaded after some statements."""
    code = f"{statements}\nimport sys\nprint(*[m for m in {modules} if m in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_importing_the_package_loads_nothing():
    heavy = ("jax", "jaxlib", "numpy", "flax", "optax", "absl", "jaxtrain.errors")
    assert loaded_after("import jaxtrain", *heavy) == []


def test_fit_does_not_load_what_a_run_may_not_need():
    """Checkpoints, progress bars and writers are imported on first use."""
    later = ("orbax", "orbax.checkpoint", "grain", "rich", "tensorboardX", "sklearn", "IPython")
    assert loaded_after("import jaxtrain; jaxtrain.fit", "jaxtrain.loop", *later) == [
        "jaxtrain.loop"
    ]


def test_the_public_names_start_no_backend():
    statements = (
        "import jaxtrain\n"
        "for name in jaxtrain.__all__: getattr(jaxtrain, name)\n"
        "import jax\n"
        # Refused once a backend runs.
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert len(jax.devices()) == 3\n"
    )
    assert loaded_after(statements, "jax") == ["jax"]
