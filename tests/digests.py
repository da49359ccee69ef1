"""Digests of everything a test session computed: rows of run folders, tables, verdicts.

    pytest --basetemp FOLDER ...; python tests/digests.py FOLDER before.json
    (change the code, run the same tests again)    python tests/digests.py FOLDER after.json before.json

The second call lists what differs. Digests hold for one machine and one number of threads, since sums run in
another order elsewhere. Numbers of folders and workers are dropped from paths; the digests of a path form a
multiset.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from heatproof.errors import HeatproofError
from heatproof.store import RunFolder

COLUMNS = "model, checkpoint, image, label, explained, method, metric, value, reason"
VOLATILE = re.compile(r"seconds|latency|ms$|_ms|started|time|version|path|hash|command", re.IGNORECASE)
Digests = dict[str, list[str]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows_of(folder: Path) -> str:
    query = f"select {COLUMNS} from scores order by all"
    return "\n".join(repr(tuple(row.values())) for row in RunFolder.open(folder).scores().sql(query))


def without_volatile(value: object) -> object:
    """The record without times, versions and paths."""
    if isinstance(value, dict):
        return {k: without_volatile(v) for k, v in value.items() if not VOLATILE.search(k)}
    return [without_volatile(item) for item in value] if isinstance(value, list) else value


def collect(base: Path) -> Digests:
    """Digests by normalised path of every run folder, table and verdict below a folder."""
    digests: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(base.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            if path.name == "run.json":
                text = rows_of(path.parent)
            elif path.name == "verdict.json":
                text = json.dumps(without_volatile(json.loads(path.read_text())), sort_keys=True)
            elif path.suffix == ".csv":
                text = path.read_text()
            else:
                continue
        except (HeatproofError, ValueError, OSError):
            continue  # tests damage run folders on purpose
        name = re.sub(r"popen-gw\d+/", "", path.relative_to(base).as_posix())
        text = re.sub(r"popen-gw\d+/", "", text.replace(str(base), ""))  # networks are named by their files
        digests[re.sub(r"\d+/", "/", name)].append(digest(text))
    return {name: sorted(values) for name, values in sorted(digests.items())}


def main(base: str, out: str, before: str = "") -> None:
    now = collect(Path(base))
    Path(out).write_text(json.dumps(now, indent=0))
    print(f"{sum(map(len, now.values()))} digests of {len(now)} paths")
    earlier: Digests = json.loads(Path(before).read_text()) if before else now
    for name in sorted({*now, *earlier}):
        if now.get(name) != earlier.get(name):
            print(f"differs: {name}: {len(earlier.get(name, []))} before, {len(now.get(name, []))} now")


if __name__ == "__main__":
    main(*sys.argv[1:])
