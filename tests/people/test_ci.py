"""The action, the hook and their page: the page's own settings are run by the files' own commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from judged_run import make_judged

from heatproof.store import Manifest, RunFolder
from heatproof.types import Score, Unit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
WORKFLOW, CONFIG = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run that the page speaks of."""
    folder = tmp_path_factory.mktemp("project")
    make_judged(folder / "runs" / "first")
    return folder


def printed(about: str) -> str:
    """The output that the page shows behind a remark."""
    match = re.search(rf"^<!-- {about} -->\n```text\n(.*?)^```$", PAGE, re.M | re.S)
    assert match is not None
    return match[1]


def bare(text: str) -> list[str]:
    """Lines without the blanks that fill a table up."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def called(command: list[str], folder: Path, **variables: str) -> tuple[int, str]:
    """In an environment whose heatproof is the one that is tested."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COLUMNS", "GITHUB"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=clean | {"PATH": path} | variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def act(folder: Path, **given: str) -> tuple[int, str]:
    """The action's gate, with inputs filled in as GitHub does."""
    inputs = {name: str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()} | given
    _, gate = ACTION["runs"]["steps"]
    pattern = r"\$\{\{ inputs\.([\w-]+) \}\}"
    variables = {name: re.sub(pattern, lambda m: inputs[m[1]], text) for name, text in gate["env"].items()}
    summary = {"GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    return called(
        [shutil.which("bash") or "bash", "-e", "-o", "pipefail", "-c", gate["run"]],
        folder,
        **summary,
        **variables,
    )


def action_inputs() -> dict[str, str]:
    """What the page's workflow gives the action."""
    (maps,) = WORKFLOW["jobs"].values()
    return dict(maps["steps"][-1]["with"])


def test_the_action_is_one_that_github_takes() -> None:
    assert {"name", "description", "inputs", "runs"} == set(ACTION) and ACTION["runs"]["using"] == "composite"
    install, gate = ACTION["runs"]["steps"]
    assert all(step["shell"] == "bash" for step in (install, gate))
    used = re.findall(r"inputs\.([\w-]+)", str(ACTION["runs"]))
    assert set(used) == set(ACTION["inputs"]) and set(action_inputs()) <= set(ACTION["inputs"])
    assert "${{" not in install["run"] + gate["run"]  # inputs would be run as code
    assert '"${PACKAGE:-$GITHUB_ACTION_PATH}"' in install["run"] and (ROOT / "pyproject.toml").exists()
    listed = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M)
    assert listed == list(ACTION["inputs"])


def test_the_action_prints_what_the_page_shows_and_fails_as_the_gate_does(project: Path) -> None:
    code, output = act(project, **action_inputs())
    assert code == 1
    assert bare(output) == bare(printed("the action"))
    assert bare(output) == bare((project / "summary.md").read_text().replace("```", ""))
    cases = ElementTree.parse(project / "gate.xml").getroot().iter("testcase")
    assert [case.find("failure") is None for case in cases] == [True, True, False, True]


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"rules": "\n  \ninsertion.gradcam >= 0.4\n"}, 0, "2 of 2 rules hold"),
        ({"rules": "insertion.gradcam >= 0.4", "min-n": "101"}, 1, "fewer than 101"),
        ({"rules": "insertion >=", "junit": ""}, 2, "cannot read the rule"),
        ({"rules": "follows gradcam", "run": "nothing"}, 2, "error"),
        ({"rules": '"; touch owned; echo "'}, 2, "cannot read the rule"),
    ],
)
def test_the_action_takes_its_inputs_as_they_are(project: Path, given: Any, code: int, words: str) -> None:
    actual, output = act(project, run="runs/first", **given) if "run" not in given else act(project, **given)
    assert (actual, words in output) == (code, True), output
    assert not (project / "owned").exists()


def test_names_in_a_run_are_no_commands_of_the_workflow(tmp_path: Path) -> None:
    """Neither at the start of a line nor in the older form, nor the end of the summary's block of text."""
    name = "cat\n::error::one\n```\n<b>##[error]two"
    folder = RunFolder.resume(tmp_path / "--run", Manifest.collect({"methods": ["gradcam"]}, classes=[name]))
    rows = [Score("net", name, f"{i}{name}", 0, 0, "gradcam", "insertion", 0.1) for i in range(40)]
    rows += [Score("net", name, "", 0, 0, "gradcam", "cscore", 0.1)]
    folder.write_unit(Unit(name, (0, 40), ("gradcam",), ("insertion",)), rows)
    code, output = act(tmp_path, run="--run", rules="insertion >= 0.5\ncscore >= 0.5", **{"min-usable": "0"})
    assert code == 1 and "error" in output and "two" in output, output
    assert not re.search(r"^\s*::", output, re.M) and "##[" not in output
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("```") == 2 and "0 of" in summary


def test_the_hook_prints_what_the_page_shows(project: Path) -> None:
    (hook,) = HOOKS
    (repository,) = CONFIG["repos"]
    (used,) = repository["hooks"]
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert {key: used[key] for key in hook if key != "description"} == {
        key: value for key, value in hook.items() if key != "description"
    }  # the page's own hook, and the one that the repository offers, are one
    assert hook["language"] == "system" and not hook["pass_filenames"]
    code, output = called([*hook["entry"].split(), *used["args"]], project, COLUMNS="120")
    assert code == 1 and "FAIL  follows layercam" in output
    head, _, table = printed("the hook").partition("exit code: 1\n")
    assert head.startswith(hook["name"])
    assert hook["id"] in head and [line.strip() for line in bare(table)] == [
        line.strip() for line in bare(output)
    ]


def test_the_assertion_on_the_page_is_what_pytest_shows(project: Path) -> None:
    (project / "test_maps.py").write_text(
        'def test_maps(heatproof_run):\n    assert heatproof_run.verdict.follows("layercam")\n'
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--heatproof-run", "runs/first"]
    code, output = called([*command, "test_maps.py"], project)
    assert code == 1 and printed("the assertion").strip() in output, output
