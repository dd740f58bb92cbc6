"""What `fit` refuses before the first step, although only evaluating or writing needs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from looping import EVAL, TRAIN, config, fit, rows

from jaxtrain import ConfigError, DataError, program


@pytest.fixture(autouse=True)
def _nothing_compiles(monkeypatch):
    def compile_step(*args, **options):
        pytest.fail("it was refused after the train step was compiled")

    monkeypatch.setattr(program, "compile_step", compile_step)


def careless_loss(outputs_BC, batch, params):
    error = jnp.square(outputs_BC - batch["y"])
    return {"loss": (jnp.sum(error), jnp.float32(len(error)))}


@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_loss_without_the_mask_costs_no_training(num_devices):
    with pytest.raises(ConfigError, match="does not enter the sum of 'loss' and the weight of"):
        fit(config(), loss_fn=careless_loss, num_devices=num_devices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "eval_data has no 'y', only x; give it every array"),
        ({"x": np.zeros((20, 8), np.uint8)}, "'x' is uint8, not float32; prepare both"),
    ],
)
def test_evaluation_data_unlike_the_training_data(change, message):
    arrays = {name: array for name, array in (EVAL | change).items() if array is not None}
    with pytest.raises(DataError, match=message):
        fit(config(), eval_data=arrays)


class HalfWriter:
    def write(self, record):
        del record


class WholeWriter(HalfWriter):
    def flush(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    ("writers", "message"),
    [
        (WholeWriter(), r"a list of writers; got WholeWriter: writers=\[\.\.\.\]"),
        ([object()], "object lacks write, flush, close"),
        ([WholeWriter(), HalfWriter()], "HalfWriter lacks flush, close"),
        ([WholeWriter], "got the class WholeWriter: call it"),
    ],
)
def test_what_is_no_writer(writers, message):
    with pytest.raises(ConfigError, match=message):
        fit(config(), writers=writers)


@pytest.mark.parametrize(
    "data",
    [(TRAIN["x"], TRAIN["y"]), [jnp.zeros((4, 8))], TRAIN["x"], jax.numpy.zeros((4, 8))],
    ids=["tuple", "list", "NumPy", "JAX"],
)
def test_arrays_without_names(data):
    with pytest.raises(DataError, match=r'arrays have no names.*\{"x": array, "y": array\}'):
        fit(config(), data)


def test_rows_that_fill_every_batch_need_no_mask(monkeypatch):
    monkeypatch.undo()
    assert fit(config(num_steps=1), loss_fn=careless_loss, eval_data=rows(16)).step == 1
