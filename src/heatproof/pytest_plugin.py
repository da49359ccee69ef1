"""A pytest plugin: the fixture heatproof_run, to test the verdict and the scores of a run; see docs/ci.md.

Without a named run, the tests are skipped; a folder that cannot be opened, or whose run is not complete, is
an error. heatproof is imported when a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from heatproof.api import Run
    from heatproof.verdict.answers import Claim, Verdict

OPTION, KEY = "--heatproof-run", "heatproof_run"


class CheckedRun:
    """A complete run, with its verdict and a check of rules.

    Args:
        run: an opened run (hp.open_run), for scores and maps.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict of the last checkpoint: `.follows(METHOD)`, `.looks_there(CLASS)`."""
        return self.run.verdict()

    def holds(self, *rules: str) -> Claim:
        """Whether all rules are met; rules are written as in `heatproof gate --help`."""
        from heatproof.verdict.answers import Claim
        from heatproof.verdict.gate import check

        results = check(self.run.folder, rules)[1:]  # the first is whether it is complete
        broken = [result for result in results if not result.holds]
        return Claim(not broken, "; ".join(result.sentence for result in broken or results))

    def __repr__(self) -> str:
        return f"CheckedRun({str(self.run.path)!r})"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("heatproof")
    group.addoption(OPTION, metavar="FOLDER", help="the run folder that tests with heatproof_run are about")
    parser.addini(KEY, f"the folder of {OPTION}, relative to this file")


def pytest_report_header(config: pytest.Config) -> Sequence[str]:
    return [f"heatproof run: {path}"] if (path := named_run(config)) else []


def named_run(config: pytest.Config) -> Path | None:
    """The folder named on the command line, else in pytest's settings."""
    if given := config.getoption(OPTION):
        return Path(config.invocation_params.dir, given)
    if folder := config.getini(KEY):
        return (config.inipath.parent if config.inipath else config.rootpath) / str(folder)
    return None


@pytest.fixture(scope="session")
def heatproof_run(request: pytest.FixtureRequest) -> CheckedRun:
    """The run named by --heatproof-run or in pytest's settings."""
    path = named_run(request.config)
    if path is None:
        pytest.skip(f"no run is named; give pytest {OPTION} FOLDER, or set {KEY} in its settings")
    from heatproof.api import open_run
    from heatproof.errors import HeatproofError
    from heatproof.rows import MIN_USABLE
    from heatproof.verdict.gate import whole

    try:
        run = open_run(path)
        state = whole(run.folder, MIN_USABLE)
    except HeatproofError as error:
        pytest.fail(f"{path} cannot be opened: {error}", pytrace=False)
    if not state.holds:
        pytest.fail(f"{path} cannot be judged: {state.sentence}", pytrace=False)
    return CheckedRun(run)
