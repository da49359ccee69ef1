"""Files made by others: what a study may run, what a run folder may reach, what a name may do.

A seal is no signature: whoever makes a folder can seal it, so these tests seal what they plant.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from heatproof.cli import main
from heatproof.disk import digest
from heatproof.report.tables import Column, Table
from heatproof.run.engine import run_study
from heatproof.store import Manifest, RunFolder
from heatproof.store.ledger import known_record, write_record
from heatproof.types import Score, Unit
from tiny_study import make_study

ESCAPES = ("\x1b", "\x9b", "\x07", "\r", "\u202e")
EVIL = "cat\x1b[2J\x9b31m\x07\r\u202egnp.exe"
SECRET = "the secret of this machine"
MARKER = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def heatproof(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small study with its finished run in `out`."""
    folder = tmp_path_factory.mktemp("finished")
    study = make_study(folder, 8, ["gradcam"], ["accuracy", "insertion(steps=2)"], "epochs/epoch01.pt")
    run_study(study, folder / "out")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "out", tmp_path / "run")
    return tmp_path / "run"


def reseal(run: Path) -> None:
    """As the author of a folder would: every seal tells of the files as they are now."""
    for path in (run / "seals").glob("*.json"):
        seal = known_record(path) or {}
        seal["files"] = {name: digest(run / name) for name in seal["files"]}
        write_record(path, seal)


# --- a study is code ----------------------------------------------------------------------------------------


def test_a_dry_run_runs_no_file_of_the_study(tmp_path: Path) -> None:
    study = make_study(tmp_path, 4, ["gradcam"], [])
    network = tmp_path / "net.py"
    network.write_text(MARKER + network.read_text())
    result = heatproof("run", study, "--dry-run")
    assert result.exit_code == 0 and not (tmp_path / "ran").exists()
    assert "this study runs net.py" in result.output and "--trust" in result.output
    assert "epoch01, epoch02" in result.output and not (tmp_path / "runs").exists()
    trusted = heatproof("run", study, "--dry-run", "--trust")
    assert trusted.exit_code == 0 and (tmp_path / "ran").exists() and "estimated time" in trusted.output


def test_a_dry_run_unpickles_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"
    study = make_study(tmp_path, 4, ["gradcam"], [], "epochs/epoch01.pt")
    study.write_text(study.read_text().replace("[images]", "allow_pickle = true\n[images]"))
    torch.save({"state_dict": CreatesFile(marker)}, tmp_path / "epochs" / "epoch01.pt")
    result = heatproof("run", study, "--dry-run")
    assert result.exit_code == 0 and not marker.exists()
    assert "this study runs net.py and unpickles epochs/epoch01.pt" in result.output
    heatproof("run", study, "--dry-run", "--trust")
    assert marker.exists()


def test_remote_code_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    study = make_study(tmp_path, 4, ["gradcam"], [], [])
    text = study.read_text().replace("net.py:tiny", "hf:nobody/nothing")
    study.write_text(text + "[model.options]\ntrust_remote_code = true\n")
    result = heatproof("run", study, "--dry-run")
    assert result.exit_code == 0 and "runs the code of hf:nobody/nothing" in result.output


class CreatesFile:
    """Pickled; whoever unpickles it creates the file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def library_study(folder: Path, spec: str, keys: str) -> Path:
    """A study of a network that a library builds; `keys` are further lines of [model]."""
    study = make_study(folder, 4, ["gradcam"], [], [])
    text = study.read_text().replace("net.py:tiny", spec).replace("checkpoints = []\n", "")
    study.write_text(text.replace("[images]", f"{keys}\n[images]"))
    return study


def hf_folder(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.ViTConfig(image_size=32, patch_size=16, num_labels=2, **sizes).save_pretrained(folder)
    return folder


UNPICKLING = {  # what a study says of its network, with the path of a pickle
    "hf": ("hf:{folder}", "pretrained = true\noptions = {{weights_only = false}}", "hidden_size"),
    "hf alone": ("hf:{folder}", "pretrained = true", "could not be loaded"),
    "timm": ("timm:resnet10t", "random_init = true\noptions = {{checkpoint_path = '{file}'}}", "in_chans"),
    "timm file": (
        "timm:resnet10t", "pretrained = true\noptions = {{pretrained_cfg = {{file = '{file}'}}}}", "in_chans",
    ),
    "timm folder": ("timm:local-dir:{folder}", "pretrained = true", "could not be loaded"),
    "monai": ("monai:resnet10", "options = {{pretrained = '{file}'}}", "model.pretrained"),
    "monai url": ("monai:HoVerNet", "options = {{pretrained_url = 'file://{file}'}}", "spatial_dims"),
    "keras": ("keras:MobileNetV2", "random_init = true\noptions = {{weights = '{file}'}}", "alpha"),
    "torchvision": ("torchvision:resnet18", "pretrained = true", "could not be loaded"),
    "torchvision backbone": (
        "torchvision:fcn_resnet50",
        "random_init = true\noptions = {{weights_backbone = 'DEFAULT'}}",
        "aux_loss",
    ),
    "torch": ("torchvision:resnet18", "checkpoints = '{file}'", "pickled Python objects"),
}  # fmt: skip


@pytest.mark.parametrize("route", UNPICKLING)
def test_no_library_unpickles_without_the_flag(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, keys, words = UNPICKLING[route]
    library = {"hf": "transformers"}.get(part := spec.split(":")[0], part)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (folder := tmp_path / "folder").mkdir()
    file, marker = folder / "pytorch_model.bin", tmp_path / "unpickled"
    torch.save({"state_dict": CreatesFile(marker)}, file)
    if spec.startswith("hf:"):
        hf_folder(folder)
    elif spec.startswith("timm:local-dir"):
        (folder / "config.json").write_text(json.dumps({"architecture": "resnet10t", "num_classes": 2}))
    (weights := tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    for name in ("resnet18-f37072fd.pth", "resnet50-11ad3fa6.pth"):  # as if they had been downloaded
        shutil.copy(file, weights / name)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    text = {"folder": folder, "file": file}
    study = library_study(tmp_path, spec.format(**text), keys.format(**text))
    result = heatproof("run", study, "--dry-run")
    assert not marker.exists()
    assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output


def test_the_flag_is_announced_and_lets_a_library_unpickle(tmp_path: Path) -> None:
    folder, marker = hf_folder(tmp_path / "folder"), tmp_path / "unpickled"
    torch.save({"state_dict": CreatesFile(marker)}, folder / "pytorch_model.bin")
    study = library_study(tmp_path, "hf:folder", "pretrained = true\nallow_pickle = true")
    result = heatproof("run", study, "--dry-run")
    assert result.exit_code == 0 and not marker.exists()
    assert "this study unpickles the weights of hf:folder" in result.output
    heatproof("run", study, "--dry-run", "--trust")
    assert marker.exists()


def test_code_beside_weights_is_not_run(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "folder")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.Own", "AutoModelForImageClassification": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"auto_map": {"AutoImageProcessor": "own.Own"}})
    )
    study = library_study(tmp_path, "hf:folder", "pretrained = true")
    result = CliRunner().invoke(main, ["run", str(study), "--dry-run"], input="y\n")
    assert result.exit_code == 2 and not (tmp_path / "ran").exists()
    assert "trust_remote_code" in result.stderr and "[y/N]" not in result.output


def test_a_keras_file_runs_no_code_without_the_flag(tmp_path: Path) -> None:
    """Three files, made and read in one process: each import of Keras takes seconds."""
    code = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch
from click.testing import CliRunner
from heatproof.cli import main
class CreatesFile:
    def __reduce__(self):
        return exec, ("open('unpickled', 'w').close()",)
results = []
for folder, kind, file in json.loads(sys.argv[1]):
    os.chdir(folder)
    inputs = keras.Input((8, 8, 3))
    own = keras.layers.Lambda(lambda x: open("unpickled", "w").close() or x)
    if kind == "module":
        module = torch.nn.Identity()
        module.creates_file = CreatesFile()
        own = keras.layers.TorchModuleWrapper(module, output_shape=(None, 8, 8, 3))
    x = keras.layers.GlobalAveragePooling2D()(own(inputs))
    keras.Model(inputs, keras.layers.Dense(2)(x)).save(file)
    os.remove("unpickled") if os.path.exists("unpickled") else None
    result = CliRunner().invoke(main, ["run", "study.toml", "--dry-run"])
    results.append([result.exit_code, result.stderr, os.path.exists("unpickled")])
print(json.dumps(results))
"""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    cases = [("lambda", "model.keras"), ("lambda", "model.h5"), ("module", "model.keras")]
    given = []
    for number, (kind, file) in enumerate(cases):
        study = library_study(tmp_path / str(number), file, "")
        given.append([str(study.parent), kind, file])
    command = [sys.executable, "-c", code, json.dumps(given)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    for case, (exit_code, errors, ran) in zip(
        cases, json.loads(process.stdout.splitlines()[-1]), strict=True
    ):
        assert exit_code == 2 and not ran and "allow_pickle" in errors, (case, errors)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("timm:resnet10t", "pretrained = true", "write model.pretrained"),
        ("timm:resnet10t", "device = 'cpu'", "write run.device"),
        ("timm:resnet10t", "allow_pickle = true", "write model.allow_pickle"),
        ("net.py:tiny", "spec_or_module = 'a'", "model.options.spec_or_module"),
        ("timm:resnet10t", "in_chanels = 1", "in_chans"),
        ("lite0", "weights_only = false", "dropout_rate"),
    ],
)
def test_options_of_a_builder_are_a_list_of_names(
    spec: str, options: str, words: str, tmp_path: Path
) -> None:
    study = library_study(tmp_path, spec, f"random_init = true\noptions = {{{options}}}")
    result = heatproof("run", study, "--dry-run", "--trust")
    assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output


def test_a_run_says_first_which_code_it_runs(tmp_path: Path) -> None:
    study = make_study(tmp_path, 4, ["gradcam"], [], "epochs/epoch01.pt")
    result = heatproof("run", study, "--out", tmp_path / "out")
    assert result.exit_code == 0 and result.output.startswith("this study runs net.py\n")


def test_the_file_of_a_protocol_says_it_too(tmp_path: Path) -> None:
    file = tmp_path / "cose.toml"
    file.write_text('model = "net.py:tiny"\ncheckpoints = ["a.pt"]\nallow_pickle = true\nimages = "none"\n')
    result = heatproof("study", "cose", file, "--out", tmp_path / "out")
    assert result.output.startswith("this study runs net.py and unpickles a.pt\n")


def test_a_dry_run_of_a_broken_study_still_fails(tmp_path: Path) -> None:
    study = make_study(tmp_path, 4, ["gradcam"], [], "epochs/nothing.pt")
    result = heatproof("run", study, "--dry-run")
    assert result.exit_code == 2 and "there is no file 'epochs/nothing.pt'" in result.output


# --- a run folder reaches nothing else ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["run.json", "plan.json", "scores", "scores/*.parquet", "maps", "maps/gradcam", "maps/gradcam/*",
             "maps/*.json.gz", "pictures", "pictures/*", "seals"],
)  # fmt: skip
def test_links_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    linked, elsewhere = next(run.glob(name)), tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    result = heatproof("report", run, "--out", tmp_path / "report.html")
    assert result.exit_code == 2 and "is a link" in result.output and not (tmp_path / "report.html").exists()
    verified = heatproof("verify", run)
    assert verified.exit_code != 0 and "Traceback" not in verified.output


def test_no_picture_is_a_file_of_this_machine(run: Path, tmp_path: Path) -> None:
    """Neither by a link nor as bytes that are no picture, whatever the seals say."""
    (tmp_path / "secret").write_text(SECRET)
    picture = next((run / "pictures").iterdir())
    picture.write_text(SECRET)
    reseal(run)
    assert heatproof("report", run).exit_code == 2 and not (run / "report.html").exists()
    picture.unlink()
    picture.symlink_to(tmp_path / "secret")
    assert heatproof("report", run).exit_code == 2 and not (run / "report.html").exists()


def test_repair_touches_nothing_behind_a_link(run: Path, tmp_path: Path) -> None:
    for name in ("scores", "maps/gradcam", "locks"):
        (elsewhere := tmp_path / name.replace("/", "-")).mkdir()
        (elsewhere / "000000000000.lease").write_text("000000000000 {}\n")
        for path in (run / name).iterdir():
            shutil.copy(path, elsewhere / path.name)
        shutil.rmtree(run / name)
        (run / name).symlink_to(elsewhere)
    before = sorted(tmp_path.glob("*/*.*"))
    untouched = [path for path in before if path.parent != run]
    assert heatproof("verify", run, "--repair").exit_code == 1
    assert all(path.exists() for path in untouched) and not list(run.glob("scores/*"))
    assert not any(path.is_symlink() for path in run.rglob("*"))


def test_repair_deletes_nothing_that_a_seal_names_elsewhere(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text(SECRET)
    path = next((run / "seals").glob("*.json"))
    seal = known_record(path) or {}
    seal["files"] |= {"scores/../../victim.txt": "0" * 64, "../victim.txt": "0" * 64}
    write_record(path, seal)
    assert heatproof("verify", run, "--repair").exit_code == 1 and victim.exists()


def test_a_pipe_in_the_folder_is_not_waited_for(run: Path) -> None:
    (picture := next((run / "pictures").iterdir())).unlink()
    os.mkfifo(picture)
    command = [sys.executable, "-m", "heatproof", "verify", str(run)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1 and "foreign" in process.stdout


# --- nor more memory than it should -------------------------------------------------------------------------


def test_an_index_is_not_unpacked_without_a_limit(run: Path) -> None:
    index = next((run / "maps").glob("*.json.gz"))
    text = gzip.decompress(index.read_bytes())
    index.write_bytes(gzip.compress(text + b" " * (1 << 27), 1))
    reseal(run)
    result = heatproof("report", run)
    assert result.exit_code == 2 and "unpacks to more than 64 MB" in " ".join(result.output.split())


def test_an_index_names_no_absurd_size(run: Path) -> None:
    index = next((run / "maps").glob("*.json.gz"))
    content = json.loads(gzip.decompress(index.read_bytes()))
    content["maps"][0]["image_size"] = [10**6, 10**6]
    index.write_bytes(gzip.compress(json.dumps(content).encode()))
    reseal(run)
    result = heatproof("report", run)
    assert result.exit_code == 2 and "are too large" in " ".join(result.output.split())


def test_a_picture_of_absurd_size_is_not_shown(run: Path) -> None:
    for picture in (run / "pictures").iterdir():
        picture.write_bytes(png(60_000, 60_000))
    reseal(run)
    result = heatproof("report", run)
    assert result.exit_code == 2 and "size is implausible" in " ".join(result.output.split())


def png(width: int, height: int) -> bytes:
    """Small, and huge once it is unpacked."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def test_deeply_nested_records_raise_a_clear_error(run: Path) -> None:
    plan = known_record(run / "plan.json")
    write_record(run / "plan.json", plan | {"deep": "HERE"}, indent=None)
    text = (run / "plan.json").read_text()
    for path, content in ((run / "plan.json", text), (run / "run.json", '{"deep": "HERE"}')):
        path.write_text(content.replace('"HERE"', "[" * 200_000))
        result = heatproof("report", run)
        assert result.exit_code == 2 and "Traceback" not in result.output


# --- what a name may do -------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A run in which everything has an evil name."""
    classes = [EVIL, "=cmd|x"]
    folder = RunFolder.resume(tmp_path / "named", Manifest.collect({"methods": ["gradcam"]}, classes=classes))
    rows = [
        Score("net" + EVIL, "last" + EVIL, f"{sign}{i}{EVIL}", i % 2, 0, "gradcam", "insertion", -0.5)
        for i, sign in enumerate("=+-@\t\rx")
    ]
    rows.append(Score("net" + EVIL, "last" + EVIL, EVIL, 0, None, "", "image", float("nan"), f"no{EVIL}"))
    folder.write_unit(Unit("last" + EVIL, (0, 8), ("gradcam",), ("insertion",)), rows)
    return folder.path


def sent(text: str) -> list[str]:
    return [letter for letter in ESCAPES if letter in text]


@pytest.mark.parametrize(
    "command",
    [
        lambda run: ("sql", run, "from scores"),
        lambda run: ("sql", run, "select reason from scores", "--format", "json"),
        lambda run: ("sql", run, f'select 1 as "{EVIL}"'),
        lambda run: ("sql", run, f'select "{EVIL}" from scores'),
        lambda run: ("report", run),
        lambda run: ("report", run, "--checkpoint", EVIL),
        lambda run: ("report", run, "--out", run / EVIL),
        lambda run: ("gate", run, "--rule", "insertion >= 0.5", "--min-usable", "0"),
        lambda run: ("export", run, "--csv", run / EVIL),
        lambda run: ("verify", run.with_name(EVIL)),
    ],
)
def test_escapes_are_shown_not_sent(named: Path, command: Callable[[Path], tuple[str, ...]]) -> None:
    (named / "scores" / f"{EVIL}.parquet").touch()
    arguments = command(named)
    if arguments[0] == "verify":
        named = named.rename(arguments[1])
    result = heatproof(*arguments)
    assert "Traceback" not in result.output and not sent(result.output)


def test_a_name_is_shown_whole(named: Path) -> None:
    output = heatproof("sql", named, "select distinct reason from scores where reason <> ''").output
    assert r"no" + EVIL.encode("unicode_escape").decode() in output
    assert ":cat: [red]x[/]" in heatproof("sql", named, "select ':cat: [red]x[/]' as a").output


def test_broken_pictures_and_reasons_are_shown(tmp_path: Path) -> None:
    study = make_study(tmp_path, 4, ["gradcam"], [], "epochs/epoch01.pt")
    (tmp_path / "pictures" / "cat" / "a\x1b[2J\u202e.png").write_text("no image")
    result = heatproof("run", study, "--out", tmp_path / "out")
    assert result.exit_code == 1 and r"a\x1b[2J\u202e.png" in result.output and not sent(result.output)


def cells(text: str) -> list[str]:
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


def test_no_csv_holds_a_formula(named: Path, tmp_path: Path) -> None:
    assert heatproof("export", named, "--csv", tmp_path / "a.csv").exit_code == 0
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        exported = file.read()
    queried = heatproof("sql", named, "from scores", "--format", "csv").stdout_bytes.decode()
    columns = (Column("=1+1"), Column("b"))
    table = Table("t", "t", columns, (("@x", -0.5), ("+y", 1))).csv()
    for text in (exported, queried, table):
        table_cells = cells(text)
        formulas = [cell for cell in table_cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
        assert set(formulas) == {"-0.5"} and any(cell.startswith("'=") for cell in table_cells)
    assert len([cell for cell in cells(exported) if cell.startswith("'")]) == 6


# --- queries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "from read_text('{secret}')", "from '{secret}.csv'", "copy scores to '{new}'", "attach '{new}' as x",
        "copy (select 1) to '{part}' (use_tmp_file false)", "explain analyze copy scores to '{new}'",
        "from read_parquet('{part}')", "from glob('{folder}/*')", "export database '{new}'",
        "set enable_external_access = true", "install httpfs",
    ],
)  # fmt: skip
def test_a_query_reaches_no_file(run: Path, tmp_path: Path, query: str) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret.csv").write_text(SECRET)
    part, new = next((run / "scores").iterdir()), tmp_path / "new"
    before = part.read_bytes()
    text = query.format(secret=tmp_path / "secret", new=new, part=part, folder=tmp_path)
    result = heatproof("sql", run, text)
    assert result.exit_code == 2 and SECRET not in result.output and "Traceback" not in result.output
    assert part.read_bytes() == before and not new.exists()


@pytest.mark.parametrize("query", ["", " ", ";;", "-- nothing"])
def test_an_empty_query_raises_a_clear_error(run: Path, query: str) -> None:
    result = heatproof("sql", run, "--", query)
    assert result.exit_code == 2 and "the query is empty" in result.output


def test_a_query_reads_files_only_with_the_option(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    result = heatproof("sql", run, f"select content from read_text('{tmp_path / 'secret'}')", "--files")
    assert result.exit_code == 0 and SECRET in result.output


def test_queries_see_the_same_rows_either_way(run: Path) -> None:
    for query in ("from scores order by all", "from status", "create temp table a as from scores; from a"):
        closed, opened = (heatproof("sql", run, query, "--format", "json", *o) for o in ((), ("--files",)))
        assert closed.exit_code == 0 and closed.output == opened.output, closed.output


def test_ctrl_c_ends_a_query(run: Path) -> None:
    query = "select count(*) from range(100_000_000) a, range(100_000) b where a.range + b.range = 7"
    code = "from heatproof.cli import main; print('ready', flush=True); main()"
    command = [sys.executable, "-c", code, "sql", str(run), query]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(2)
            process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130 and output.strip() == "stopped"
