"""Commands that only read a run start quickly: no torch, and well under a second of CPU time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from heatproof.cli import main
from heatproof.explain.api import read_methods
from heatproof.images import SOURCES
from heatproof.registry import metrics
from heatproof.run.config import read_metrics, study_from
from heatproof.store import Manifest, RunFolder
from heatproof.store.manifest import Facts, MetricFacts
from heatproof.types import Score, Unit
from made_run import make_run

TOOLS = """
import json, sys
import click
from click.testing import CliRunner
from heatproof.cli import main

READING = ("sql", "export", "gate", "verdict", "verify", "report", "compare", "--version")

def call(arguments):
    result = CliRunner().invoke(main, arguments)
    if "torch" in sys.modules and (arguments[0] in READING or "--help" in arguments):
        sys.exit(f"{arguments} imports torch: {result.output}")
    if result.exit_code not in (0, 1, 2):
        sys.exit(f"{arguments} ends with {result.exit_code}: {result.output}")
    return result.exit_code, result.output
"""
STUDY = """
methods = ["gradcam"]
metrics = ["insertion"]
images = {{kind = "folder", path = "{}"}}
[model]
spec = "{}"
{}
"""
# Most commands need a fifth of the time that scipy.stats takes to import. Gate and verdict import it and need
# 1.2 times as much; with torch it would be 3 times.
LARGEST_RATIO = 2.0


def alone(script: str, *arguments: str) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", TOOLS + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("startup") / "run")
    named = {"metrics": ["insertion", "deletion", "cscore", "auc", "accuracy", "method_agreement"]}
    facts = Facts.of_config({**folder.manifest.config, **named})
    replace(folder.manifest, facts=facts).write(folder.path / "run.json")
    return folder.path


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over pictures that may have two findings, with lists that are anchored."""
    config = {
        "methods": ["gradcam"],
        "metrics": ["cscore"],
        "model": {"head": "multilabel", "thresholds": [0.4, 0.6]},
    }
    epochs = ("epoch01", "epoch02")  # alarms over training need two
    manifest = Manifest.collect(config, models=dict.fromkeys(epochs, "abc"), classes=("mass", "node"))
    folder = RunFolder.resume(tmp_path_factory.mktemp("startup") / "findings", manifest)
    for epoch in epochs:
        rows = []
        for i in range(40):
            for c in (0, 1):
                there = c if i % (c + 2) == 0 else None
                chance = (0.2 if there is None else 0.7) + i / 200
                rows.append(Score("net", epoch, f"{i}.png", there, c, "", "probability", chance, ""))
        for metric, value in (("cscore", 0.5), ("cscore_n", 12), ("cscore_degenerate", 0)):
            name = f"{metric}(tau='adaptive', anchor='epoch01')"
            rows += [Score("net", epoch, "", c, c, "gradcam", name, value, "") for c in (None, 0, 1)]
        folder.write_unit(Unit(epoch, (0, 40), ("gradcam",), ("cscore",)), rows)
    folder.plan(folder.ledger.seals(), 40, epochs)
    return folder.path


def test_help_needs_no_torch() -> None:
    script = """
from heatproof.cli import study_group
studies = [["study", name] for name in study_group.list_commands(None) if name not in ("cose", "localise")]
every = [[], *([name] for name in main.list_commands(None) if name != "qr"), *studies]
results = [call([*path, "--help"]) for path in every]
assert all(code == 0 and text.startswith("Usage:") for code, text in results)
print(len(results))
"""
    assert int(alone(script)) > 20


def test_reading_a_run_needs_no_torch_and_mistakes_have_their_code(
    run: Path, findings: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text("methods = [")
    (tmp_path / "typo.toml").write_text("modell = 1")
    lost = [tmp_path / f"{name}.toml" for name in ("pictures", "weights", "network")]
    lost[0].write_text(STUDY.format("nothing", "lite0", ""))
    lost[1].write_text(STUDY.format(".", "lite0", 'checkpoints = "nothing.pt"'))
    lost[2].write_text(STUDY.format(".", "nothing.py:net", ""))
    unknown = [tmp_path / f"unknown-{name}.toml" for name in ("method", "metric", "option")]
    whole = STUDY.format(".", "lite0", "")
    unknown[0].write_text(whole.replace('"gradcam"', '"gradcm"'))
    unknown[1].write_text(whole.replace('"insertion"', '"insertoin"'))
    unknown[2].write_text(whole.replace('"gradcam"', '"rise(mask=3)"'))
    missing, bad, typo = (str(tmp_path / name) for name in ("nothing", "bad.toml", "typo.toml"))
    fine = [
        ["--version"],
        ["sql", str(run), "select count(*) from scores"],
        ["sql", str(run), "from scores limit 3", "--format", "csv"],
        ["export", str(run), "--csv", str(tmp_path / "a.csv"), "--parquet", str(tmp_path / "a.parquet")],
        ["export", str(run), "--latex", str(tmp_path / "a.tex"), "--result", str(tmp_path / "a.json")],
        ["board", str(tmp_path / "a.json"), "--out", str(tmp_path / "board.html")],
        ["gate", str(run), "--rule", "insertion.gradcam >= 0.3", "--min-usable", "0"],
        ["gate", str(run), "--rule", "cscore >= 0.3", "--rule", "auc >= 0.9", "--min-usable", "0"],
        *(["gate", str(folder), "--rule", "no-alarms", "--min-usable", "0"] for folder in (run, findings)),
        *(["verdict", str(folder)] for folder in (run, findings)),
        ["verdict", str(run), "--checkpoint", "epoch01", "--tests"],
        ["verify", str(run)],
        [
            "report",
            str(run),
            "--out",
            str(tmp_path / "report.html"),
            "--model-card",
            str(tmp_path / "card.md"),
        ],
        ["compare", f"{run}@epoch01", str(run), "--out", str(tmp_path / "compare.html")],
    ]
    wrong = [
        *([command, missing] for command in ("verdict", "verify", "report")),
        ["report", str(run), "--checkpoint", "nothing"],
        ["compare", missing, str(run)],
        ["compare", str(run)],
        ["sql", missing, "from scores"],
        ["export", missing, "--csv", missing],
        ["board", missing],
        ["gate", missing, "--rule", "auc > 0.9"],
        ["gate", str(run), "--rule", "insertion.gradcm > 0.5"],
        ["verdct"],
        *([command, missing] for command in ("run", "serve")),
        ["run", bad],
        ["run", typo],
        ["study", "cose", bad],
        ["study", "qr", typo],
        ["study", "cscore", f"{missing}.toml"],
        ["explain", "lite0", missing],
        ["explain", "lite0"],
        ["explain", "lite0", "example:cat", "--checkpoint", missing],
        ["explain", f"{missing}.py:net", "example:cat"],
        ["list", "layers", f"{missing}.py:net"],
        *(["run", str(study)] for study in (*lost, *unknown)),
        *([command, "lite0", str(tmp_path), "--methods", "gradcm"] for command in ("audit", "contrast")),
        ["explain", "lite0", "example:cat", "--methods", "gradcam,rise(mask=3)"],
        ["score", "lite0", str(tmp_path), "--maps", "maps", "--metrics", "insertoin"],
        ["audit", "lite0", str(tmp_path), "--size", "large"],
        ["audit", "lite0", missing],
        ["audit", "lite0", str(tmp_path), "--checkpoint", missing],
        ["init", missing],
        ["run", "--nothing"],
    ]
    script = """
for code, lines in zip((0, 2), json.loads(sys.argv[1])):
    for arguments in lines:
        actual, text = call(arguments)
        assert actual == code, (arguments, actual, text)
"""
    alone(script, json.dumps([fine, wrong]))


def test_the_live_page_needs_no_torch(run: Path) -> None:
    script = """
from heatproof.report.serve import Server, answer
live = Server(sys.argv[1]).live
key = json.loads(answer(live, "/images", {}).content)["images"][0]["key"]
for path, query in (("/report", {}), ("/choices", {}), ("/maps", {"method": "gradcam", "keys": key})):
    assert answer(live, path, query).status == 200
assert "torch" not in sys.modules
"""
    alone(script, str(run))


def test_python_reads_the_rows_of_a_run_without_torch(run: Path) -> None:
    script = """
import heatproof as hp
opened = hp.open_run(sys.argv[1])
assert len(opened.scores()) and opened.status() and "torch" not in sys.modules
"""
    alone(script, str(run))


def test_a_run_keeps_the_facts_of_its_metrics_and_methods(tmp_path: Path) -> None:
    config = {"methods": ["random", "sobel", "lime(samples=9)"], "metrics": metrics.names()}
    RunFolder.resume(tmp_path / "run", Manifest.collect(config))
    facts, registered = RunFolder.open(tmp_path / "run").manifest.facts, Facts()
    assert list(facts.metrics) == registered.every_metric
    for method in ("random(seed=3)", "edges", "lime"):
        assert facts.method(method) == registered.method(method)
        assert facts.floor_name(method) == registered.floor_name(method)
    assert facts.method("gradcam") is None and not facts.is_floor("gradcam ~ random")
    for metric in ("cscore_low", "randomisation_ssim", "Insertion", "nothing"):
        assert facts.metric_of(metric) == registered.metric_of(metric)
    assert facts.definition("heatproof.metrics.kit") == "" != facts.definition("heatproof.metrics.sanity")
    assert json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=pytest.fail)


def test_a_metric_of_another_package_is_described_where_that_is_missing(tmp_path: Path) -> None:
    warmth = MetricFacts(
        "warmth", title="warm places", higher_is_better=True, judges="map", module="elsewhere"
    )
    manifest = Manifest.collect({"methods": ["gradcam"]}, models={"epoch01": "abc"})
    facts = replace(manifest.facts, metrics=(*Facts.of_config({"metrics": ["auc"]}).metrics, warmth))
    folder = RunFolder.resume(tmp_path / "run", replace(manifest, facts=facts))
    rows = [Score("net", "epoch01", f"{i}.png", 0, 0, "gradcam", "warmth(at=2)", i, "") for i in range(9)]
    folder.write_unit(Unit("epoch01", (0, 9), ("gradcam",), ("warmth(at=2)",)), rows)
    assert "warm places ↑" in alone("print(call(['verdict', sys.argv[1], '--tests'])[1])", str(folder.path))


def test_a_plug_in_is_listed_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from heatproof.registry import explainer\n"
        "@explainer('mine', cite='sobel1968edges')\n"
        "def mine(trace):\n    'The pixels themselves.'\n    return trace.images.mean(1)\n"
    )
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[heatproof.explainers]\nmine = mine\n")
    command = [sys.executable, "-m", "heatproof", "list", "methods"]
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    listed = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | paths, check=True
    ).stdout
    assert "The pixels themselves." in listed and "gradcam" in listed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["study", "qr", "--help"],
        ["sql", "RUN", "from scores limit 1"],
        ["gate", "RUN", "--rule", "no-alarms", "--min-usable", "0"],
        ["verdict", "RUN"],
        ["run", "nothing.toml"],
    ],
    ids=" ".join,
)
def test_it_begins_at_once(run: Path, scipy: list[float], arguments: list[str]) -> None:
    command = ["-m", "heatproof", *(str(run) if a == "RUN" else a for a in arguments)]
    # Absolute times depend on the machine and on what else it does; both are measured again up to twice.
    for measured in range(3):
        if measured:
            scipy.append(cpu_seconds("-c", "import scipy.stats"))
        if cpu_seconds(*command) < LARGEST_RATIO * scipy[-1]:
            return
    pytest.fail(f"{arguments} takes more than {LARGEST_RATIO} times as long as scipy.stats to import")


@pytest.fixture(scope="module")
def scipy() -> list[float]:
    """CPU seconds that Python takes to import scipy.stats, the last measurement at the end."""
    return [cpu_seconds("-c", "import scipy.stats")]


def cpu_seconds(*arguments: str) -> float:
    """CPU time of Python with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_shell_completes_commands() -> None:
    variables = {"_HEATPROOF_COMPLETE": "bash_complete", "COMP_WORDS": "heatproof ve", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from heatproof.cli import main; main(prog_name='heatproof')"]
    output = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables).stdout
    assert output.split() == ["plain,verdict", "plain,verify"]
    assert "_HEATPROOF_COMPLETE=bash_source heatproof" in CliRunner().invoke(main, ["--help"]).output


def test_help_shows_every_command_in_its_section_and_cuts_no_line() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=100).output
    order = [line.split()[0] for line in text.partition("Start:")[2].splitlines() if line[:2] == "  "]
    assert (
        order[:6] == ["demo", "explain", "list", "audit", "evidence", "init"]
        and "..." not in text.partition("Options:")[2]
    )


def test_the_study_in_the_help_of_run_can_be_read() -> None:
    text = CliRunner().invoke(main, ["run", "--help"]).output.partition("A study:\n")[2]
    study = study_from(tomllib.loads(text.partition("\n\n")[0]))
    assert [call.entry.name for call in read_methods(study.methods)] == ["gradcam", "rise"]
    assert [request.text for request in read_metrics(study.metrics)] == study.metrics
    assert study.images.kind in SOURCES and study.model.checkpoints == "best.pt"
