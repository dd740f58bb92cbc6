"""What was met while reading documents."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.units import several


@dataclasses.dataclass
class Counts:
    """What was met while reading; everything that did not become a document as it stood."""

    files: int = 0
    documents: int = 0
    empty_files: list[str] = dataclasses.field(default_factory=list)
    binary_files: list[str] = dataclasses.field(default_factory=list)
    empty_documents: int = 0
    replaced_bytes: int = 0
    """Runs of bytes that were not UTF-8; each became one U+FFFD."""
    dropped_records: int = 0
    """Records that were no JSON once their bad bytes had been replaced."""
    skipped_documents: int = 0
    """Documents, records and files left out because something was wrong with them."""

    def notes(self) -> list[str]:
        """One phrase for each thing worth a warning."""
        empty, binary = _name_some(self.empty_files), _name_some(self.binary_files)
        return [
            f"{several(number, noun)} {what}"
            for number, noun, what in (
                (len(self.empty_files), "empty file", f"skipped ({empty})"),
                (len(self.binary_files), "binary file", f"skipped ({binary})"),
                (self.empty_documents, "document", "without text"),
                (self.replaced_bytes, "bad byte", "replaced"),
                (self.dropped_records, "broken record", "dropped"),
                (self.skipped_documents, "bad document", "skipped"),
            )
            if number
        ]

    def add(self, counts: Mapping[str, Any]) -> None:
        """Adds counts of another part, as `dataclasses.asdict` gives them."""
        for name, value in counts.items():
            setattr(self, name, getattr(self, name) + value)


def parse_on_error(text: str, flag: str = "on_error") -> int | None:
    """How many bad documents or images may be left out: "stop" is None, "skip:N" is N.

    Raises:
        ConfigError: for anything else.
    """
    if text == "stop":
        return None
    kind, _, number = text.partition(":")
    if kind == "skip" and number.isdecimal() and int(number):
        return int(number)
    raise ConfigError(f"{flag}={text} must be stop, or skip:N with N at least 1")


def _name_some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
