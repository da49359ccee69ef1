"""The run folder: rows come back bit for bit, files are whole or absent, and no two writers collide."""

from __future__ import annotations

import csv
import errno
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forked import Forked
from heatproof.disk import clear_failure, digest, write_whole
from heatproof.errors import InputError, MissingExtraError, StoreError
from heatproof.store import Manifest, RunFolder, compare_configs
from heatproof.store import ledger as lease
from heatproof.store.manifest import git_state
from heatproof.store.scores import COLUMNS
from heatproof.types import Score, Unit

ODD = 'it\'s "quoted", 😀,\nnext\tline\\ \x00 end'


def unit(number: int = 0) -> Unit:
    return Unit("epoch1", (number, number + 1), ("gradcam",), ("inside",))


def row(image: str = "a.png", value: float = 0.5, **other: object) -> Score:
    fields: dict[str, object] = {
        "model": "cnn", "checkpoint": "epoch1", "label": 1, "explained": 2,
        "method": "gradcam", "metric": "inside", "reason": "undefined" if math.isnan(value) else "",
    }  # fmt: skip
    return Score(image=image, value=value, **{**fields, **other})  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.resume(tmp_path / "run", Manifest.collect({"methods": ["gradcam"]}))


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


# Rows


def test_rows_come_back_bit_for_bit(run: RunFolder) -> None:
    values = [0.1, -0.0, 5e-324, math.inf, -math.inf, 1 / 3, math.nan, 1.7976931348623157e308]
    rows = [row(f"{i}.png", value) for i, value in enumerate(values)]
    rows += [row(ODD, 1.0, label=None, explained=None, method=ODD, reason=ODD), row("", 2.0, label=2**40)]
    run.write_unit(unit(), rows)
    stored = run.scores().sql("select * from scores")
    assert list(stored[0]) == list(COLUMNS)
    assert [bits(r.pop("value")) for r in stored] == [bits(r.value) for r in rows]
    assert {r.pop("unit") for r in stored} == {unit().hash}
    expected = [{k: v for k, v in vars(r).items() if k != "value"} for r in rows]
    assert stored == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.builds(
            row,
            image=st.text(st.characters(exclude_categories=["Cs"])),
            value=st.floats(),
            label=st.none() | st.integers(-(2**63), 2**63 - 1),
            method=st.text(st.characters(exclude_categories=["Cs"])),
        ),
        max_size=8,
    )
)
def test_any_rows_come_back_in_order(run: RunFolder, rows: list[Score]) -> None:
    run.write_unit(unit(), rows)
    stored = run.scores().sql("select image, label, method, value from scores")
    assert [(r["image"], r["label"], r["method"]) for r in stored] == [
        (r.image, r.label, r.method) for r in rows
    ]
    for stored_row, given_row in zip(stored, rows, strict=True):
        assert bits(stored_row["value"]) == bits(given_row.value) or math.isnan(given_row.value)
        assert math.isnan(stored_row["value"]) == math.isnan(given_row.value)


def test_a_name_that_is_not_unicode_is_stored_with_escapes(run: RunFolder) -> None:
    run.write_unit(unit(), [row("caf\udce9.png")])
    assert run.scores().sql("select image from scores") == [{"image": "caf\\udce9.png"}]


def test_equal_rows_give_equal_bytes(run: RunFolder, tmp_path: Path) -> None:
    rows = [row(f"{i}.png", i / 7) for i in range(5000)]
    other = RunFolder.resume(tmp_path / "other", run.manifest)
    for folder in (run, other):
        folder.write_unit(unit(), rows)
    first, second = (f.path / "scores" / f"{unit().hash}.parquet" for f in (run, other))
    assert first.read_bytes() == second.read_bytes()


def test_a_unit_is_done_when_its_part_exists_even_without_rows(run: RunFolder) -> None:
    assert run.done() == set()
    assert run.scores().sql("select * from scores") == []
    run.write_unit(unit(1))
    run.write_unit(unit(2), [row()])
    assert run.done() == {unit(1).hash, unit(2).hash}
    assert RunFolder.open(run.path).done() == run.done()
    assert run.scores().sql("select count(*) as n from scores") == [{"n": 1}]


def test_a_unit_written_twice_counts_once(run: RunFolder) -> None:
    for _ in range(2):
        run.write_unit(unit(), [row()])
    assert run.scores().sql("select count(*) as n from scores") == [{"n": 1}]


def test_two_runs_do_not_see_each_other(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.resume(tmp_path / "other", run.manifest)
    run.write_unit(unit(), [row()])
    reader, empty = run.scores(), other.scores()
    assert empty.sql("from scores") == []
    assert len(reader.sql("from scores")) == 1


@pytest.mark.parametrize("name", ["run[1]", "it's", "a*b?", "läuft 😀"])
def test_any_folder_name_will_do(tmp_path: Path, name: str) -> None:
    RunFolder.resume(tmp_path / "run1", Manifest({})).write_unit(unit(), [row("other.png")])
    run = RunFolder.resume(tmp_path / name, Manifest({}))
    run.write_unit(unit(), [row("mine.png")])
    assert run.scores().sql("select image from scores") == [{"image": "mine.png"}]


def test_threads_may_write_units_at_the_same_time(run: RunFolder) -> None:
    def write(number: int) -> None:
        run.write_unit(unit(number), [row(f"{number}-{i}.png", i) for i in range(200)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    rows = run.scores().sql("select unit, count(*) as n, min(image) as first from scores group by all")
    assert {(r["unit"], r["n"], r["first"]) for r in rows} == {
        (unit(n).hash, 200, f"{n}-0.png") for n in range(8)
    }


# Queries


def test_columns_are_arrays_and_parameters_are_bound(run: RunFolder) -> None:
    run.write_unit(unit(), [row("a", 1.0), row("b", math.nan, label=None)])
    columns = run.scores().columns("select label, value from scores where image >= ?", ["a"])
    assert columns["label"].tolist() == [1, None]
    assert columns["value"][0] == 1.0
    assert math.isnan(columns["value"][1])
    assert run.scores().sql("select value from scores where image = ?", ["' or true --"]) == []


@pytest.mark.parametrize(
    "query", ["select wrong from scores", "selekt 1", "select cast(method as int) from scores"]
)
def test_a_wrong_query_raises_a_clear_error(run: RunFolder, query: str) -> None:
    run.write_unit(unit(), [row()])
    with pytest.raises(InputError, match=r"the query failed: .*scores has the columns model, ") as error:
        run.scores().sql(query)
    assert "\n" not in str(error.value)


def test_a_broken_part_is_named(run: RunFolder) -> None:
    run.write_unit(unit(), [row()])
    part = run.path / "scores" / f"{unit().hash}.parquet"
    part.write_bytes(b"not parquet")
    with pytest.raises(StoreError, match=rf"cannot read .*{part.name}.*heatproof verify"):
        run.scores().sql("from scores")
    with pytest.raises(StoreError, match=rf"cannot read .*{part.name}"):
        run.scores().export(run.path / "rows.csv", "csv")


def test_digest_ignores_order_and_parts_and_sees_every_bit(tmp_path: Path) -> None:
    rows = [row(f"{i}.png", i / 3) for i in range(50)] + [row("nan.png", math.nan), row("null", label=None)]

    def digest(name: str, *parts: list[Score]) -> str:
        run = RunFolder.resume(tmp_path / name, Manifest({}))
        for number, part in enumerate(parts):
            run.write_unit(unit(number), part)
        return run.scores().digest()

    whole = digest("whole", rows)
    shuffled = random.Random(0).sample(rows, len(rows))
    assert digest("parts", shuffled[:20], [], shuffled[20:]) == whole
    changed = row("0.png", math.nextafter(0.0, 1.0))
    assert digest("one bit", [changed, *rows[1:]]) != whole
    assert digest("minus zero", [row("0.png", -0.0), *rows[1:]]) != whole
    assert digest("twice", [rows[0], *rows]) != whole
    assert digest("reason", [row("0.png", 0.0, reason="why"), *rows[1:]]) != whole
    assert digest("empty") == digest("also empty", [])


def million_rows(run: RunFolder, parts: int) -> None:
    """As write_unit would leave them: 6 methods, 4 metrics, 100 classes, one row in 50 undefined."""
    (run.path / "scores").mkdir()
    each = 1_000_000 // parts
    with duckdb.connect() as database:
        for part in range(parts):
            database.execute(
                f"""copy (
                    select 'cnn' as model, 'epoch1' as checkpoint,
                           'class/image' || (i // 24) || '.png' as image,
                           (i // 24) % 100 as label, (i // 24) % 97 as explained,
                           'method' || (i % 6) as method, 'metric' || (i // 6 % 4) as metric,
                           if(hash(i) % 50 = 0, 'nan'::double, hash(i) / 2.0 ** 64) as value,
                           if(hash(i) % 50 = 0, 'empty map', '') as reason, 'part{part}' as unit
                    from range({part * each}, {(part + 1) * each}) as t(i)
                ) to '{run.path}/scores/{unit(part).hash}.parquet' (format parquet, compression zstd)"""
            )
            name = f"scores/{unit(part).hash}.parquet"
            run.ledger.write(unit(part), {name: digest(run.path / name)}, {}, lease="")


def test_a_million_rows_group_as_fast_as_their_files(run: RunFolder) -> None:
    million_rows(run, parts=8)
    query = """select method, label, metric, avg(value) filter (not isnan(value)) as mean, count(*) as n
               from scores group by all"""
    seconds, alone = [], []
    files = f"from read_parquet('{run.path}/scores/*.parquet')"
    for _ in range(3):
        start = time.perf_counter()
        rows = run.scores().sql(query)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        with duckdb.connect() as database:
            database.execute(query.replace("from scores", files)).fetchall()
        alone.append(time.perf_counter() - start)
    assert len(rows) == 6 * 4 * 100
    assert sum(r["n"] for r in rows) == 1_000_000
    assert all(0.4 < r["mean"] < 0.6 for r in rows)
    assert min(seconds) < 10 * min(alone), (seconds, alone)


# Export


def test_csv_and_parquet_hold_every_row(run: RunFolder, tmp_path: Path) -> None:
    run.write_unit(unit(1), [row("b", 1 / 3), row(ODD.replace("\x00", ""), math.nan)])
    run.write_unit(unit(0), [row("a", -0.0, label=None)])
    run.scores().export(tmp_path / "rows.csv", "csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["image"] for r in rows] == ["a", "b", ODD.replace("\x00", "")]
    assert [float(r["value"]) for r in rows[:2]] == [0, 1 / 3]  # DuckDB 1 sorts -0.0 as 0.0
    assert (rows[0]["label"], rows[2]["value"], rows[2]["reason"]) == ("", "nan", "undefined")
    run.scores().export(tmp_path / "rows.parquet", "parquet")
    with duckdb.connect() as database:
        images = database.execute(
            "select image from read_parquet(?)", [f"{tmp_path}/rows.parquet"]
        ).fetchall()
    assert [image for (image,) in images] == [r["image"] for r in rows]


def test_latex_shows_means_with_their_n(run: RunFolder, tmp_path: Path) -> None:
    rows = [row("a", 0.25), row("b", 0.75), row("c", math.nan), row("a", 0.5, method="lime_50%")]
    rows += [row("", 0.125, metric="cscore", label=k) for k in (0, 1)]
    rows += [row("", 0.5, metric="cscore", label=None), row("a", math.nan, metric="gone")]
    run.write_unit(unit(), rows)
    run.scores().export(tmp_path / "table.tex", "latex")
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert r"metric & gradcam & lime\_50\% \\" in lines
    assert r"inside & 0.5 (2/3) & 0.5 (1) \\" in lines
    assert r"cscore (class) & 0.125 (2) &  \\" in lines
    assert r"cscore (checkpoint) & 0.5 (1) &  \\" in lines
    assert r"gone & -- (0/1) &  \\" in lines


def test_export_refuses_what_it_cannot_do(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot export as 'xlsx'; known: csv, parquet, latex"):
        run.scores().export(tmp_path / "x", "xlsx")
    for kind in ("csv", "latex"):
        with pytest.raises(StoreError, match="no does not exist; create it first"):
            run.scores().export(tmp_path / "no" / "x", kind)


# Manifest and resume


def test_the_manifest_says_what_made_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"methods": ("gradcam",), "folder": Path("images"), "tau": 0.5}
    made = Manifest.collect(
        config, seed=3, models={"epoch1": "ab12"}, data="cd34", command=["heatproof", "run"]
    )
    RunFolder.resume(tmp_path / "run", made)
    read = RunFolder.open(tmp_path / "run").manifest
    assert read == made
    assert read.config == {"methods": ["gradcam"], "folder": "images", "tau": 0.5}
    assert (read.seed, read.models, read.data, read.git) == (3, {"epoch1": "ab12"}, "cd34", None)
    assert {"python", "heatproof", "torch", "numpy", "duckdb"} <= set(read.versions)
    assert {"cpu", "cores", "device"} <= set(read.machine)
    assert read.started.endswith("+00:00")


def test_git_state_sees_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    assert git_state(tmp_path) is None  # no commit yet
    git("commit", "--allow-empty", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and not state["dirty"]
    (tmp_path / "new").write_text("x")
    state = git_state(tmp_path)
    assert state is not None and state["dirty"]


def test_config_hash_ignores_the_order_of_keys() -> None:
    assert (
        Manifest({"a": 1, "b": {"c": 2, "d": 3}}).config_hash
        == Manifest({"b": {"d": 3, "c": 2}, "a": 1}).config_hash
    )
    assert Manifest({"a": 1}).config_hash != Manifest({"a": 1.5}).config_hash


@pytest.mark.parametrize(
    ("old", "new", "sentence", "addition"),
    [
        ({"methods": ["a"]}, {"methods": ["a", "b", "c"]}, "methods gained 'b', 'c'", True),
        ({"run": {"metrics": []}}, {"run": {"metrics": ["x"]}}, "run.metrics gained 'x'", True),
        ({"checkpoints": {"e1": "p"}}, {"checkpoints": {"e1": "p", "e2": "q"}},
         "checkpoints gained 'e2'", True),
        ({"models": [{"checkpoints": ["a"]}]}, {"models": [{"checkpoints": ["a", "b"]}]},
         "models[0].checkpoints gained 'b'", True),
        ({"images": 100}, {"images": 200}, "images rose from 100 to 200", True),
        ({"images": 200}, {"images": 100}, "images was 200 and is now 100", False),
        ({"methods": ["a", "b"]}, {"methods": ["a"]}, "methods lost 'b'", False),
        ({"methods": ["a", "b"]}, {"methods": ["b", "a"]}, "methods has its entries in another order", False),
        ({"methods": ["a"]}, {"methods": ["b", "a"]}, "methods has its entries in another order", False),
        ({"mean": [1]}, {"mean": [1, 2]}, "mean was [1] and is now [1, 2]", False),
        ({"images": {"folder": "a"}}, {"images": {"folder": "b"}},
         "images.folder was 'a' and is now 'b'", False),
        ({"images": {}}, {"images": {"single_object": True}},
         "images.single_object was absent and is now True", False),
        ({"layer": "x"}, {}, "layer was 'x' and is now absent", False),
        ({"checkpoints": {"e1": "p"}}, {"checkpoints": {"e1": "q"}},
         "checkpoints.e1 was 'p' and is now 'q'", False),
        ({"tau": 0.5}, {"tau": "0.5"}, "tau was 0.5 and is now '0.5'", False),
    ],
)  # fmt: skip
def test_what_changed_is_reported_and_additions_are_distinguished(
    old: dict[str, object], new: dict[str, object], sentence: str, addition: bool
) -> None:
    (change,) = compare_configs(old, new)
    assert (change.sentence, change.addition) == (sentence, addition)
    assert compare_configs(old, old) == []


def test_free_keys_may_change() -> None:
    assert compare_configs({"run": {"workers": 1}}, {"run": {"workers": 8}}, free=["run.workers"]) == []
    assert compare_configs({"run": {}}, {"run": {"workers": 8}}, free=["run.workers"]) == []


def test_resume_goes_on_grows_or_refuses(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = Manifest.collect({"methods": ["a"], "tau": 0.5}, models={"e1": "1"}, data="d")
    RunFolder.resume(path, first).write_unit(unit(), [row()])
    again = Manifest.collect({"tau": 0.5, "methods": ["a"]}, models={"e1": "1"}, data="d")
    before = (path / "run.json").read_bytes()
    assert RunFolder.resume(path, again).done() == {unit().hash}
    assert (path / "run.json").read_bytes() == before

    grown = Manifest.collect({"methods": ["a", "b"], "tau": 0.5}, models={"e1": "1", "e2": "2"}, data="d")
    assert RunFolder.resume(path, grown).done() == {unit().hash}
    manifest = RunFolder.open(path).manifest
    assert manifest.config["methods"] == ["a", "b"]
    assert [past["config"]["methods"] for past in manifest.earlier] == [["a"]]

    wrong = Manifest.collect({"methods": ["b"], "tau": 0.7}, seed=1, models={"e1": "9", "e2": "2"}, data="x")
    before = (path / "run.json").read_bytes()
    with pytest.raises(StoreError) as error:
        RunFolder.resume(path, wrong)
    for part in ("methods lost 'a'", "tau was 0.5 and is now 0.7", "the seed was 0 and is now 1",
                 "the weights of 'e1' are not", "the images are not those"):  # fmt: skip
        assert part in str(error.value)
    assert (path / "run.json").read_bytes() == before


def test_shards_may_start_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Manifest] = []
    write = Manifest.write

    def slow_write(manifest: Manifest, path: Path) -> None:
        writes.append(manifest)
        time.sleep(0.1)
        write(manifest, path)

    monkeypatch.setattr(Manifest, "write", slow_write)
    for methods in (["a"], ["a", "b"]):
        manifest = Manifest.collect({"methods": methods})
        with ThreadPoolExecutor(8) as pool:
            opened = list(pool.map(RunFolder.resume, [tmp_path / "run"] * 8, [manifest] * 8))
        assert [run.manifest.config for run in opened] == [manifest.config] * 8
    assert [manifest.config["methods"] for manifest in writes] == [["a"], ["a", "b"]]  # once each


def test_more_images_may_change_the_data_hash(tmp_path: Path) -> None:
    RunFolder.resume(tmp_path, Manifest.collect({"images": {"images": ["a"]}}, data="1"))
    grown = Manifest.collect({"images": {"images": ["a", "b"]}}, data="2")
    assert RunFolder.resume(tmp_path, grown).manifest.data == "2"
    with pytest.raises(StoreError, match="the images are not those of the run"):
        RunFolder.resume(tmp_path, Manifest.collect({"images": {"images": ["a", "b"]}}, data="3"))


def test_folders_that_are_no_run(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run folder: it has no run\.json"):
        RunFolder.open(tmp_path / "elsewhere")
    for content in ("{", "[]", '{"seed": 1}'):
        (run.path / "run.json").write_text(content)
        with pytest.raises(StoreError, match=r"cannot read .*run\.json"):
            RunFolder.open(run.path)


# Two processes


def python(code: str, *arguments: object) -> Forked:
    return Forked(textwrap.dedent(code), *arguments, stderr=subprocess.PIPE)


HOLD = """
    import os, sys, time
    from heatproof.store import RunFolder
    with RunFolder.open(sys.argv[1]).lock():
        child = os.fork()  # such as a worker that loads images and outlives its parent
        if child == 0:
            os.close(1), os.close(2)  # the test waits for the parent's output only
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(run: RunFolder) -> None:
    holder = python(HOLD, run.path)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with (
            pytest.raises(StoreError, match=rf"is being written by process {holder.pid} on .*shard 0/1"),
            run.lock(),
        ):
            pass
        with pytest.raises(StoreError, match="all have the same count, so not 1/2"), run.lock("1/2"):
            pass
        run.write_unit(unit(), [row()])  # but units may be written beside it, as Ray's workers do
        holder.kill()
        holder.communicate()
        with run.lock():  # although the child still lives
            os.kill(child, 0)
    finally:
        holder.kill()
        holder.communicate()
        os.kill(child, signal.SIGKILL)


def test_a_lock_is_free_again_after_an_error_and_refused_inside_itself(run: RunFolder) -> None:
    with pytest.raises(ZeroDivisionError), run.lock("0/2"):
        raise ZeroDivisionError
    with run.lock("0/2"), pytest.raises(StoreError, match=f"process {os.getpid()} "), run.lock("0/2"):
        pass


# Crashes and full disks


CRASH = """
    # Forks writers that are killed at random moments; importing once keeps this fast.
    import os, random, signal, sys, time
    import duckdb, numpy as np, torch
    from heatproof.store import RunFolder
    from heatproof.types import Maps, Score, Unit
    run = RunFolder.open(sys.argv[1])
    moments = random.Random(int(sys.argv[2]))

    def write_for_ever():
        number = 0
        while True:
            unit = Unit("epoch1", (number, number + 1), ("gradcam",), ("inside",))
            if unit.hash not in run.done():
                rows = [
                    Score("cnn", "epoch1", str(i), 0, 0, "gradcam", "inside", number + i / 7)
                    for i in range(3000)
                ]
                ids = tuple(f"{number}-{i}" for i in range(40))
                values = np.random.default_rng(number).random((40, 56, 56), dtype=np.float32)
                explained = torch.from_numpy(np.zeros(40, np.int64))
                maps = Maps("gradcam", torch.from_numpy(values), (224, 224), explained, ids)
                run.write_unit(unit, rows, {"gradcam": maps})
            number += 1

    for number in range(10):
        child, before, start = os.fork(), len(run.done()), time.monotonic()
        if child == 0:
            with run.lock():
                write_for_ever()
        while number % 2 and len(run.done()) == before and time.monotonic() < start + 20:
            time.sleep(0.005)  # every second writer gets at least one unit done, however slow the machine
        time.sleep(moments.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


def test_killed_at_random_moments_every_part_is_whole(run: RunFolder) -> None:
    seed = random.randrange(10**6)
    killed = python(CRASH, run.path, seed)
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == 0, errors
    done = run.done()
    assert len(done) >= 3, f"too few units to say anything (seed {seed})"
    counts = run.scores().sql(
        "select unit, count(*) as n, sum(value) as s, min(value) as low from scores group by 1"
    )
    assert {r["unit"] for r in counts} == done
    for r in counts:
        assert r["n"] == 3000
        assert r["s"] == pytest.approx(sum(r["low"] + i / 7 for i in range(3000)))
    maps = run.maps().read("epoch1", "gradcam")
    assert len(maps) == 40 * len(done), f"a finished unit lacks maps (seed {seed})"
    with run.lock():
        assert list(run.path.rglob("*.tmp")) == []


def test_killed_while_it_says_how_it_stands_leaves_nothing_behind(run: RunFolder) -> None:
    killed = python(
        """
        import os, signal, sys
        from heatproof.store import RunFolder
        replace = os.replace
        def killed(source, target):  # written, not yet renamed
            if str(target).endswith("status.json"):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
        os.replace = killed
        with RunFolder.open(sys.argv[1]).lock():
            pass
        """,
        run.path,
    )
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name.split(".")[0] for path in run.path.glob("*.tmp")] == ["status"]
    with run.lock():
        assert list(run.path.rglob("*.tmp")) == []


def test_leftovers_go_at_the_next_start_but_not_those_of_the_living(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, locks = run.path / "scores", run.path / "locks"
    scores.mkdir()
    monkeypatch.setattr(lease, "PATIENCE", 0.5)
    with lease.writing(run.path) as own:
        names = {
            f"a.parquet.{'0' * 12}.0a1b2c3d.tmp": False,  # its lease is gone
            f"b.parquet.{own.id}.0a1b2c3d.tmp": True,
            f"c.parquet.{'c' * 12}.0a1b2c3d.tmp": False,  # killed on this machine
            f"d.parquet.{'d' * 12}.0a1b2c3d.tmp": True,  # on another machine, alive
            f"e.parquet.{'e' * 12}.0a1b2c3d.tmp": False,  # on another machine, silent
            "notes.tmp": True,  # not ours
        }
        for name in names:
            (scores / name).write_bytes(b"half")
            os.utime(scores / name, (0, 0) if name < "d" else (2**32, 2**32))  # clocks decide nothing
        for letter, kernel in (("c", lease.kernel()), ("d", "elsewhere"), ("e", "elsewhere")):
            (locks / f"{letter * 12}.lease").write_text(f'000000000001 {{"kernel": "{kernel}"}}')
        assert run.done() == set() and run.scores().sql("from scores") == []
        with run.lock():
            left = {p.name[0] for p in scores.iterdir()}
            assert left == {"b", "d", "e", "n"}  # of the silent one nobody knows yet
            (locks / f"{'d' * 12}.lease").write_text('000000000002 {"kernel": "elsewhere"}')
            time.sleep(0.6)
        assert {p.name for p in scores.iterdir()} == {name for name, stays in names.items() if stays}


def test_a_failed_write_leaves_nothing_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole({tmp_path / "b": lambda path: path.write_text("whole"), tmp_path / "a": fail})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_text_bytes_and_what_writes_itself_are_files_alike(tmp_path: Path) -> None:
    seen: list[str] = []
    text, raw, own = (tmp_path / "new" / name for name in ("text", "raw", "own"))

    def write(path: Path) -> None:
        seen.append(path.name)
        path.touch()

    marks = write_whole({text: "é", raw: b"\x00\xff", own: write}, "0" * 12)
    assert (text.read_bytes(), raw.read_bytes()) == ("é".encode(), b"\x00\xff")
    assert marks == {path: digest(path) for path in (text, raw, own)}
    assert lease.lease_of(seen[0]) == "0" * 12 and lease.lease_of("own") is None


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mount.returncode:
        pytest.skip("a full or read-only disk can only be made by root, who may mount one")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def random_rows(number: int) -> list[Score]:
    rng = random.Random(number)
    return [row(f"{rng.random()}.png", rng.random()) for _ in range(2000)]


def test_a_full_disk_raises_a_clear_error_and_keeps_what_was_written(tiny_disk: Path) -> None:
    run = RunFolder.resume(tiny_disk / "run", Manifest.collect({}))
    written = 0
    with pytest.raises(StoreError, match="the disk is full; free some space and start again") as error:
        while True:
            run.write_unit(unit(written), random_rows(written))
            written += 1
    assert "\n" not in str(error.value)
    assert written > 3
    assert run.done() == {unit(n).hash for n in range(written)}
    assert run.scores().sql("select count(*) as n from scores") == [{"n": 2000 * written}]
    assert list(run.path.rglob("*.tmp")) == []
    with pytest.raises(StoreError, match="the disk is full"):
        run.scores().export(tiny_disk / "all.csv", "csv")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_short_write_of_an_array_is_a_full_disk(tmp_path: Path) -> None:
    """Which NumPy reports without the system's reason."""
    words = r"cannot write .*a\.npy: the disk is full; .* MB are free in /"
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with full, pytest.raises(StoreError, match=words), clear_failure(tmp_path / "a.npy"):
        np.zeros(100_000).tofile(full)


def test_a_read_only_folder_raises_a_clear_error_and_can_be_read(tiny_disk: Path) -> None:
    run = RunFolder.resume(tiny_disk / "run", Manifest({}))
    run.write_unit(unit(), [row()])
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    for attempt in (
        lambda: run.write_unit(unit(1), [row()]),
        lambda: RunFolder.resume(run.path, run.manifest),
        lambda: RunFolder.resume(tiny_disk / "new", run.manifest),
        lambda: run.lock("9/9").__enter__(),
    ):
        with pytest.raises(StoreError, match="is not writable; change its permissions or choose another"):
            attempt()
    assert len(RunFolder.open(run.path).scores().sql("from scores")) == 1


def test_a_file_size_limit_raises_a_clear_error(run: RunFolder) -> None:
    run.write_unit(unit(0), [row()])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StoreError, match=os.strerror(errno.EFBIG)):
            run.write_unit(unit(1), random_rows(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.done() == {unit(0).hash}
    run.write_unit(unit(1), random_rows(1))
    assert len(run.scores().sql("from scores")) == 2001


def test_without_duckdb_the_install_line_is_given(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.setattr("heatproof.store.scores._databases", {})
    with pytest.raises(MissingExtraError, match="pip install duckdb"):
        run.write_unit(unit(), [row()])
