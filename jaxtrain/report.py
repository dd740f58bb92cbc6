"""report.html: what a run did, on one page, from the files of its workdir alone.

The page is self-contained: inline SVG and CSS, no JavaScript, nothing fetched. `jaxtrain report
WORKDIR` writes it again from the same files, on any machine; no backend is started.

Read, each only if it is there:

    metrics.jsonl   the records (`jaxtrain.metrics`)
    config.json     {"config": {...}, "versions": {...}, "changed": {dotted path: default}}
    run.json        {"describe": {name: value}, "compile_seconds": s, "wall_seconds": s,
                    "checkpoint_seconds": s, "memory": {part: bytes},
                    "environment": {"devices": text, "command": text, ...}}
    audit.json      `Audit.to_json()`

A number in `describe` whose name speaks of an entropy, a loss or a baseline is drawn into the loss
curve as a line to compare with.
"""

from html import escape
from pathlib import Path

from jaxtrain import report_sections, report_tables
from jaxtrain.output_files import replace_file
from jaxtrain.report_run import Run, read_run

_SECTIONS = (
    report_sections.header,
    report_sections.tiles,
    report_sections.loss,
    report_sections.curves,
    report_sections.time,
    report_tables.tasks,
    report_tables.layout,
    report_tables.setup,
)


def write_report(workdir: str | Path) -> Path:
    """Writes `workdir/report.html` and returns its path."""
    path = Path(workdir) / "report.html"
    replace_file(path, page(read_run(workdir)).encode())
    return path


def page(run: Run) -> str:
    """The whole page."""
    style = Path(__file__).with_name("report.css").read_text(encoding="ascii")
    body = "\n".join(filter(None, (section(run) for section in _SECTIONS)))
    missing = f" Without: {escape(', '.join(run.missing))}." if run.missing else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} - jaxtrain</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>Made by jaxtrain from the files of the run; "
        f"<code>jaxtrain report WORKDIR</code> makes it again.{missing}</footer>\n"
        "</main>\n</body>\n</html>\n"
    )
