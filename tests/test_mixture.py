"""Mixtures by flag: how they are written, what they are made of, and their evaluation."""

import json

import experimenting
import looping
import numpy as np
import preparing
import pytest
from experimenting import TINY, eval_records, evaluation, succeed

from jaxtrain.data.held_out import HeldOut
from jaxtrain.data.mix import PERIOD
from jaxtrain.data.mixture_flag import parse_mixture
from jaxtrain.data.prepare import PrepareConfig, prepare
from jaxtrain.data.sources import ArrayDataset, Dataset
from jaxtrain.data.text import text_datasets, tokenizer_of
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.text_mixture import lm_datasets
from jaxtrain.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories of texts, and of shards of bytes and of another tokenizer."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("web", "web2", "code"):
        (folder / name).mkdir()
        for number in range(6):
            text = preparing.text(f"{name}{number}", 300)
            (folder / name / f"{number}.txt").write_text(text)
    for tokenizer, name in (("bytes", "shards"), ("bpe:300", "other")):
        config = PrepareConfig(workers=1, tokenizer=tokenizer, shard_bytes=3000)
        prepare([str(folder / "web2")], str(folder / name), config)
    lines = "".join(json.dumps({"body": preparing.text(i, 60)}) + "\n" for i in range(40))
    (folder / "lines.jsonl").write_text(lines)
    return folder


def config_of(mixture, **options):
    options = {"sequence_length": 32, "validation_fraction": 0.2, **options}
    return TextDataConfig(mixture=mixture, **options)


# The flag


def test_names_weights_and_lists():
    found = parse_mixture("web=3:/d1/web,/d2/*.txt, code=0.5:stdlib,./old=1:x,b-c_2=1e2:a=b/c")
    assert {name: tuple(part) for name, part in found.items()} == {
        "web": (3.0, "/d1/web,/d2/*.txt"),
        "code": (0.5, "stdlib,./old=1:x"),
        "b-c_2": (100.0, "a=b/c"),
    }
    assert parse_mixture("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("web,code", "mixture=web,code must be NAME=WEIGHT:SOURCE and more of them with commas"),
        ("/data/web=3:x,code=1:y", "must be NAME=WEIGHT:SOURCE"),
        ("web=3:a", "has one source, which is no mixture; use data.source=a"),
        ("web=3:a,web=1:b", "has two sources 'web'; give each its own name"),
        ("web=3:a,code=x:b", "the weight 'x' of 'code' must be a positive number; .* ./code=x:"),
        ("web=0:a,code=1:b", "the weight '0' of 'web' must be a positive number"),
        ("web=inf:a,code=1:b", "the weight 'inf' of 'web' must be a positive number"),
        ("web=nan:a,code=1:b", "the weight 'nan' of 'web' must be a positive number"),
        ("web=1:,code=1:b", "'web' has no source behind its colon"),
    ],
)
def test_other_texts_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        TextDataConfig(mixture=text)


def test_a_mixture_stands_instead_of_a_source():
    with pytest.raises(ConfigError, match=r"source=.*x.* is read only with mixture="):
        TextDataConfig(mixture="a=1:x,b=1:y", source="x")
    with pytest.raises(ConfigError, match="is for lm_datasets"):
        text_datasets(TextDataConfig(mixture="a=1:x,b=1:y"))


# The data


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_sources_of_all_kinds_mix(places, packing):
    mixture = f"web=3:{places}/web,{places}/web2/*,code=2:{places}/code,tok=1:{places}/shards"
    data, held_out, info = lm_datasets(config_of(mixture, packing=packing))
    names = ("code", "tok", "web")  # as the mixture has them, sorted
    alone = {
        name: text_datasets(config_of("", source=source, packing=packing))
        for name, source in (
            ("web", f"{places}/web,{places}/web2/*"),
            ("code", f"{places}/code"),
            ("tok", f"{places}/shards"),
        )
    }
    assert len(data) == sum(len(train) for train, _, _ in alone.values())
    found, start = data.read(np.arange(len(data))), 0
    for name in names:
        train = alone[name][0]
        for key, array in train.read(np.arange(len(train))).items():
            np.testing.assert_array_equal(found[key][start : start + len(train)], array)
        start += len(train)
    ends = np.cumsum([len(alone[name][0]) for name in names])
    source = np.searchsorted(ends, data.sample_indices(0, np.arange(PERIOD)), side="right")
    shares = dict(zip(names, np.bincount(source) / PERIOD, strict=True))
    assert shares == pytest.approx({"web": 1 / 2, "code": 1 / 3, "tok": 1 / 6}, abs=1e-3)
    assert {name: part.fingerprint for name, part in held_out.parts.items()} == {
        name: rows.fingerprint for name, (_, rows, _) in alone.items()
    }
    assert info.train_tokens == sum(part.train_tokens for _, _, part in alone.values())
    facts = info.facts(held_out)
    assert "mixture of code 33.33 %, tok 16.67 %, web 50.00 %; " in facts["data"]
    assert facts["data (code)"] == alone["code"][2].summary()
    entropy = "validation_entropy_order_1"
    assert facts[f"{entropy} (tok)"] == alone["tok"][2].facts(alone["tok"][1])[entropy]


def test_sources_of_other_tokenizers_are_refused(places):
    with pytest.raises(
        DataError,
        match=r"sources 'a' and 'b' of data.mixture are not of one tokenizer: they have bytes "
        r"\(256 tokens, .* and bpe:300 \(300 tokens, hash .*, documents end with 0\); give both",
    ):
        lm_datasets(config_of(f"a=1:{places}/shards,b=1:{places}/other"))
    same = f"a=1:{places}/other,b=2:{places}/other"
    assert lm_datasets(config_of(same))[2].vocab_size == 300
    assert tokenizer_of(config_of(same)).vocab_size == 300
    assert tokenizer_of(config_of(f"a=1:{places}/web,b=2:stdlib")).name == "bytes"
    with pytest.raises(ConfigError, match=r"than the 300 tokens of data.mixture=a=1:.*"):
        lm_datasets(config_of(same))[2].check_vocabulary(256)


def test_a_source_that_cannot_be_used_is_named(places):
    with pytest.raises(DataError, match=r"nowhere does not exist; .* \(source 'b' of data.mixtu"):
        lm_datasets(config_of(f"a=1:{places}/web,b=1:{places}/nowhere"))
    with pytest.raises(DataError, match=r"weight a=1e-05 is less than one of 4096 samples"):
        lm_datasets(config_of(f"a=0.00001:{places}/web,b=1:{places}/code"))


def test_options_of_text_are_for_the_sources_that_read_them(places):
    web, shards = f"{places}/web", f"{places}/shards"
    lines = f"{places}/lines.jsonl"
    mixed = lm_datasets(config_of(f"a=1:{lines},b=1:{shards},c=1:{web}", json_field="body"))[0]
    assert len(mixed.sources) == 3
    with pytest.raises(ConfigError, match=r"field=body is read from files of .* data.mixture=a"):
        lm_datasets(config_of(f"a=1:{web},b=1:{shards}", json_field="body"))
    with pytest.raises(ConfigError, match=r"on_bad_bytes=replace is read from text only, and data"):
        lm_datasets(config_of(f"a=1:{shards},b=1:{shards}", on_bad_bytes="replace"))


# The evaluation


def test_held_out_parts_stand_one_behind_the_other():
    parts = {
        name: ArrayDataset({"id": np.arange(first, first + size)})
        for name, first, size in (("b", 0, 5), ("a", 100, 3))
    }
    data = HeldOut(parts, {"a": 1, "b": 3, "unused": 9})
    assert isinstance(data, Dataset)
    assert data.shares == {"b": 0.75, "a": 0.25}
    indices = np.array([7, 0, 5, 4, 0])
    assert data.read(indices)["id"].tolist() == [102, 0, 100, 4, 0]
    assert data.read(indices[:0]) == {} or not len(data.read(indices[:0])["id"])
    other = HeldOut(parts, {"a": 1, "b": 1})
    assert data.fingerprint != other.fingerprint


def test_means_of_parts_are_those_of_each_alone():
    """The last batch of each is not full."""
    rows = looping.rows(29, seed=5)
    cut = {"x": slice(0, 9), "y": slice(9, 29)}
    parts = {
        name: ArrayDataset({key: array[where] for key, array in rows.items()})
        for name, where in cut.items()
    }
    both = looping.fit(
        looping.config(num_steps=3, eval_every_steps=2), eval_data=HeldOut(parts, {"x": 1, "y": 3})
    ).eval_metrics
    alone = {
        name: looping.fit(looping.config(num_steps=3), eval_data=part).eval_metrics
        for name, part in parts.items()
    }
    for name, means in alone.items():
        assert both[f"loss/{name}"] == pytest.approx(means["loss"], rel=1e-6)
    expected = 0.25 * alone["x"]["loss"] + 0.75 * alone["y"]["loss"]
    assert both["loss"] == pytest.approx(expected, rel=1e-6)
    assert both["rows"] == 29
    assert both["weight"] == alone["x"]["weight"] + alone["y"]["weight"]


def test_a_mixture_trains_resumes_and_is_evaluated(places, tmp_path):
    mixture = f"web=3:{places}/web,tok=1:{places}/shards"

    def words(num_steps, mixture=mixture):
        return (
            *(*TINY, "--data.packing=best_fit", "--data.validation_fraction=0.2"),
            *(f"--data.mixture={mixture}", f"--num_steps={num_steps}", f"--workdir={tmp_path}"),
            *("--eval_every_steps=2", "--optimizer.warmup_steps=0"),
        )

    ended = succeed("train_lm", *words(4), num_devices=2)
    assert "mixture of tok 25.00 %, web 75.00 %" in ended.err
    assert "data (tok): token shards of" in ended.err
    (last,) = [record for record in eval_records(tmp_path) if record["step"] == 4]
    assert last["loss"] == pytest.approx(0.75 * last["loss/web"] + 0.25 * last["loss/tok"])
    assert "data (web)" in (tmp_path / "report.html").read_text()
    assert (
        json.loads((tmp_path / "config.json").read_text())["config"]["data"]["mixture"] == mixture
    )
    ended = succeed("train_lm", *words(6), num_devices=2)
    assert "resumed from step 4" in ended.err
    found = evaluation(succeed("train_lm", *words(6), "--evaluate", num_devices=2))
    assert found["step"] == 6
    assert found.keys() >= {"loss", "loss/web", "loss/tok"}
    changed = experimenting.run("train_lm", *words(6, mixture.replace("=3", "=4")), num_devices=2)
    assert changed.code == 2
    assert "data.mixture" in changed.error
