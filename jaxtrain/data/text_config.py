"""Which text a language model trains on and how it is cut: section `data` of its experiment."""

import dataclasses

from jaxtrain.config import DataConfig, field
from jaxtrain.data.counts import parse_on_error
from jaxtrain.data.files import find_files
from jaxtrain.data.mixture_flag import parse_mixture
from jaxtrain.data.shards import shard_roots
from jaxtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig(DataConfig):
    """Which text, and how it is cut."""

    source: str = field(
        "stdlib",
        used_when={"mixture": ("",)},
        help="stdlib (the Python standard library's source), or a UTF-8 file, a folder of them, a"
        " glob, or several with commas between; .jsonl (.gz, .zst), .parquet and .array_record"
        " files hold one document per record; or directories of token shards (jaxtrain prepare)",
    )
    mixture: str = field(
        "",
        help="several sources instead, in proportions: NAME=WEIGHT:SOURCE,NAME=WEIGHT:SOURCE, each"
        " SOURCE as data.source takes it, e.g. web=3:/data/web,code=1:stdlib",
    )
    sequence_length: int = field(128, unit="tokens", minimum=1, help="length of a row")
    packing: str = field(
        "none",
        choices=("none", "split", "best_fit"),
        help="none: rows are cut from one stream, and run over documents; split, best_fit: a "
        "document sees itself only; split cuts it where a row ends, best_fit only if it is longer",
    )
    cross_document_attention: bool = field(
        False,
        used_when={"packing": ("split", "best_fit")},
        help="a token sees all documents before it in its row: lets attention use kernels that "
        "cannot keep packed documents apart",
    )
    validation_fraction: float = field(
        0.05,
        minimum=0,
        maximum=0.5,
        help="share of the text held out for evaluation, by whole files where they are many and"
        " even enough, else the end of each; 0: none",
    )
    shuffle: bool = field(True, help="take the rows in a new random order in each epoch")
    on_bad_bytes: str = field(
        "error",
        choices=("error", "replace"),
        help="bytes that are not UTF-8: error names file, line and offset; replace counts them",
    )
    on_error: str = field(
        "stop",
        on_resume="free",
        help="stop at a document that cannot be used; skip:N: leave out and count up to N",
    )
    json_field: str = field("text", help="field of records that holds the text")
    cache_dir: str = field(
        "",
        on_resume="free",
        help="directory in which text is unpacked once and mapped from then on, as token shards of"
        " bytes; empty: it is read into memory at every start",
    )
    cache_gib: float = field(
        0.0,
        unit="GiB",
        minimum=0,
        on_resume="free",
        help="what all of data.cache_dir may take; 0: what the disk has",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_mixture(self.mixture)
        parse_on_error(self.on_error, "data.on_error")
        if self.cache_gib and not self.cache_dir:
            raise ConfigError(
                f"data.cache_gib={self.cache_gib:g} limits data.cache_dir, which is empty; set both"
            )


def refuse_unread_options(config: TextDataConfig, sources: list[str]) -> None:
    """Refuses options that no source reads.

    Raises:
        ConfigError: naming the option, and who would read it.
    """
    changed = [
        name
        for name in ("json_field", "on_bad_bytes", "on_error", "cache_dir")
        if getattr(config, name) != getattr(TextDataConfig, name)
    ]
    if not changed:
        return
    given = f"data.mixture={config.mixture}" if config.mixture else f"data.source={config.source}"
    texts = [source for source in sources if not shard_roots(source)]
    if not texts:
        name = changed[0]
        way_out = f"give it to jaxtrain prepare (--{name})"
        if name == "cache_dir":
            way_out = "they are mapped as they lie: leave it out"
        raise ConfigError(
            f"data.{name}={getattr(config, name)} is read from text only, and {given} holds token"
            f" shards; {way_out}"
        )
    files = (file for source in texts for file in find_files(source))
    if "json_field" in changed and not any(file.has_records for file in files):
        raise ConfigError(
            f"data.json_field={config.json_field} is read from files of records only (JSON lines,"
            f" Parquet, ArrayRecord), and {given} has none; leave it out"
        )
