"""python -m data.audit DATASET: reads every record once, and says what is wrong with which.

Exit code 0: nothing found; 78: something is wrong with the data; 2: something is wrong with the command line.

It takes 1.4 (records of 100 KB) to 1.7 times (1 KB) the processor time of only reading the records with TensorFlow, and
all cores: 0.8 and 0.3 GB/s a core (scripts/bench_audit.py). A damaged shard is slower from its first damaged byte on.
"""

import collections
import dataclasses
import importlib.util
import json
import os
import sys
from typing import Any

from absl import flags  # noqa: TID251 - a program of its own
from absl import logging as absl_logging

from data import catalog, errors, findings

EXIT_CLEAN = 0
EXIT_USAGE = 2
EXIT_RETRY = 75
EXIT_DATA = 78

_USAGE = "usage: python -m data.audit DATASET [--splits=NAME,…]\nDATASET is a directory, or a name under --data_dir."
_SHOWN = 20  # findings printed; --json has all
_MB = 1e6


def main(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    options = _options()
    try:
        arguments = options(argv)[1:]
    except flags.Error as error:
        return _usage(error)
    if options.help:
        kinds = "\n".join(f"  {kind}: {what}" for kind, what in findings.KINDS.items())
        print(f"{_USAGE}\n{options.get_help()}\n\nWhat is looked for:\n{kinds}")
        return EXIT_CLEAN
    if len(arguments) != 1:
        return _usage(f"Name one dataset. Received: {' '.join(arguments) or 'none'}.")
    unknown = set(options.ignore) - set(findings.KINDS)
    if unknown:
        kind = min(unknown)
        return _usage(f"--ignore: no kind {kind!r}{catalog.nearest(kind, list(findings.KINDS))}.")
    if importlib.util.find_spec("tensorflow") is None:
        print("TensorFlow is not installed. Install it: pip install '.[cpu]', gpu or tpu.", file=sys.stderr)
        return EXIT_DATA
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its log lines tell a user nothing he can act on
    absl_logging.set_verbosity(absl_logging.ERROR)
    from data import faults

    try:
        with faults.explained():
            return _audit(os.path.expanduser(arguments[0]), options)
    except (errors.DataError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_RETRY if isinstance(error, errors.StorageError) else EXIT_DATA


def _audit(dataset: str, options: flags.FlagValues) -> int:
    from data import manifest, pipeline, quarantine, review

    info = pipeline.open_dataset(dataset, os.path.expanduser(options.data_dir)).info
    report = review.audit(
        info,
        options.splits,
        threads=options.threads,
        decode=options.decode,
        key_feature=options.key_feature,
        ignore=frozenset(options.ignore),
        show_progress=sys.stderr.isatty(),
    )
    written, handled = [], set[findings.Finding]()
    if options.write_quarantine:
        path, handled = quarantine.write(report.directory, report.reports)
        written.append(path)
    if options.write_manifest:
        written.append(manifest.write(report.directory, manifest.build(info, report.reports, handled)))
    print(json.dumps(_as_json(report, written), indent=1) if options.json else _as_text(report, written))
    return EXIT_DATA if report.findings else EXIT_CLEAN


def _as_json(report: Any, written: list[str]) -> dict:
    return {
        "dataset": report.name,
        "directory": report.directory,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "splits": _splits(report),
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "notes": report.notes,
        "written": written,
    }


def _as_text(report: Any, written: list[str]) -> str:
    lines = [f"{report.name} in {report.directory}"]
    for name, split in _splits(report).items():
        lines.append(f"  {name}: {split['records']:,} records in {split['shards']} shards, {split['bytes']:,} bytes")
    speed = report.bytes / _MB / report.seconds
    lines.append(f"  read {report.bytes / _MB:,.1f} MB in {report.seconds:.1f} s, {speed:,.0f} MB/s")
    lines += [f"note: {note}" for note in report.notes]
    found = report.findings
    lines += [str(finding) for finding in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"… and {len(found) - _SHOWN:,} more; --json lists them")
    if found:
        kinds = collections.Counter(finding.kind for finding in found)
        lines.append(f"{len(found):,} findings: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()))
        if kinds.keys() <= findings.HARMLESS:
            lines.append("Records that repeat others may be meant so; if not, rebuild these files")
        elif not written:
            lines.append("Rebuild these files, or leave bad records out of training: --write_quarantine")
    else:
        lines.append("Clean: nothing was found.")
    lines += [f"wrote {path}" for path in written]
    return "\n".join(lines)


def _splits(report: Any) -> dict[str, dict[str, int]]:
    splits: dict[str, dict[str, int]] = {}
    for shard in report.reports:
        split = splits.setdefault(shard.shard.split, {"shards": 0, "records": 0, "bytes": 0})
        split["shards"] += 1
        split["records"] += shard.records
        split["bytes"] += shard.bytes
    return splits


def _usage(error: object) -> int:
    print(f"{error}\n{_USAGE}", file=sys.stderr)
    return EXIT_USAGE


def _options() -> flags.FlagValues:
    """Flags of this command alone: absl's global ones belong to the trainer."""
    values = flags.FlagValues()
    default = catalog.default_data_dir()
    flags.DEFINE_string("data_dir", default, "Directory in which NAME/VERSION lies.", flag_values=values)
    flags.DEFINE_list("splits", [], "Splits to read; all by default.", flag_values=values)
    flags.DEFINE_boolean("decode", False, "Decode every image; otherwise its header is read.", flag_values=values)
    flags.DEFINE_string("key_feature", None, "Feature that no two records may share.", flag_values=values)
    flags.DEFINE_list("ignore", [], "Kinds of findings not to report.", flag_values=values)
    flags.DEFINE_boolean("json", False, "Print the report as JSON.", flag_values=values)
    flags.DEFINE_boolean("write_manifest", False, "Write manifest.json beside dataset_info.json.", flag_values=values)
    flags.DEFINE_boolean(
        "write_quarantine",
        False,
        "Write quarantine.json: the bad records, which --corrupt_records=skip leaves out of training.",
        flag_values=values,
    )
    flags.DEFINE_integer("threads", os.cpu_count(), "Shards read at a time.", lower_bound=1, flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this help.", flag_values=values)
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv))
