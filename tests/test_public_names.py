"""The public names: a golden list, each there on first use, and nothing loaded before it."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
import textwrap

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


# What one takes over from the docstring of another.
LIKE = {"make_eval_step": "make_train_step"}
FUNCTIONS = [name for name in GOLDEN if inspect.isfunction(getattr(jaxtrain, name))]
CLASSES = [name for name in GOLDEN if inspect.isclass(getattr(jaxtrain, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_docstring_of_a_function_speaks_of_every_argument(name):
    function = getattr(jaxtrain, name)
    text = f"{function.__doc__}\n{getattr(jaxtrain, LIKE[name]).__doc__ if name in LIKE else ''}"
    missing = [arg for arg in inspect.signature(function).parameters if not speaks_of(text, arg)]
    assert not missing
    assert len(function.__doc__.splitlines()[0]) > 20


def speaks_of(text, name):
    return re.search(rf"(?<![\w.]){name}\b", text)


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_part_of_a_class_has_a_docstring(name):
    """Fields have theirs below them, or a help text as flags."""
    cls = getattr(jaxtrain, name)
    assert cls.__doc__
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    missing = []
    for statement, following in itertools.pairwise([*node.body, None]):
        if isinstance(statement, ast.FunctionDef):
            names, found = [statement.name], ast.get_docstring(statement)
        elif isinstance(statement, ast.AnnAssign):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            names, found = [statement.target.id], is_text or "help=" in ast.unparse(statement)
        else:
            continue
        missing += [name for name in names if not name.startswith("_") and not found]
    assert not missing


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


def output_of(statements: str) -> list[str]:
    """The words that statements print in a fresh interpreter, warnings being errors."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", statements],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_importing_the_package_loads_nothing():
    assert output_of(
        "import jaxtrain, sys\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots & {'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'absl'}), 'end')\n"
        "print(*[name for name in sys.modules if name.startswith('jaxtrain.')])\n"
    ) == ["end"]


def test_fit_loads_no_package_that_a_run_may_not_need():
    """Checkpoints, progress bars and writers are imported on first use."""
    assert output_of(
        "import jax, optax, flax.nnx, sys\n"
        "before = set(sys.modules)\n"
        "import jaxtrain; jaxtrain.fit\n"
        # flax brings parts of rich along, so only what is new counts.
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        # The last is the name that multiprocessing gives to __main__.
        "print(*sorted(roots - sys.stdlib_module_names - {'__mp_main__'}))\n"
    ) == ["jaxtrain"]


def test_no_public_name_starts_a_backend():
    assert output_of(
        "import jaxtrain\n"
        "for name in jaxtrain.__all__: getattr(jaxtrain, name)\n"
        "import jax\n"
        # Refused once a backend runs.
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(len(jax.devices()))\n"
    ) == ["3"]
