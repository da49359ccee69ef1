"""The Ray engine: the same rows and maps as the local one, also when a worker dies."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from heatproof.run.engine import run_study
from tiny_study import NETWORK, fingerprint, make_study, start

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is an extra")

# The first Ray worker that gets to the network dies in the middle of its unit, as if killed for memory.
DEADLY = """

class Deadly(nn.Module):
    def forward(self, x):
        import os, sys
        from pathlib import Path
        if "default_worker" in sys.argv[0]:
            try:
                Path(__file__).with_name("bullet").unlink()
                os._exit(1)
            except FileNotFoundError:
                pass
        return x

def deadly():
    model = tiny()
    model.module.append(Deadly())
    return model
"""


def ray(study: Path, out: Path) -> str:
    process = start(study, out, "--engine", "ray")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


def test_ray_gives_the_rows_and_maps_of_the_local_engine_though_a_worker_dies(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK + DEADLY)
    study.write_text(study.read_text().replace("net.py:tiny", "net.py:deadly"))
    run_study(study, tmp_path / "local")
    (tmp_path / "bullet").touch()
    output = ray(study, tmp_path / "ray")
    assert not (tmp_path / "bullet").exists(), "no worker died"
    assert "14 of 14 units are done" in output
    assert fingerprint(tmp_path / "ray") == fingerprint(tmp_path / "local")


# A pass in a Ray worker waits until there is a pass in another one: alone, it would wait for ever.
MEETING = """

class Meeting(nn.Module):
    def forward(self, x):
        import os, sys, time
        from pathlib import Path
        if "default_worker" in sys.argv[0]:
            room = Path(__file__).with_name("room")
            (room / str(os.getpid())).touch()
            until = time.monotonic() + 100
            while len(list(room.iterdir())) < 2:
                if time.monotonic() > until:
                    raise RuntimeError("nobody else came")
                time.sleep(0.05)
        return x

def meeting():
    model = tiny()
    model.module.append(Meeting())
    return model
"""
# One cluster of two workers, which takes seconds to start, for two studies; one of them grows.
STAYS = """
import sys
from pathlib import Path
import ray
from heatproof.run.engine import run_study
sys.path.insert(0, {tests!r})
from tiny_study import write_study
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
meeting, growing = map(Path, sys.argv[1:])
for folder in (meeting, growing):
    run_study(folder / "study.toml", folder / "ray", engine="ray")
write_study(growing, checkpoints=["epochs/epoch01.pt", "epochs/epoch02.pt"])
run_study(growing / "study.toml", growing / "ray", engine="ray")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the study whose workers meet and of the one that grows, both finished."""
    meeting, growing = (tmp_path_factory.mktemp(name) for name in ("meeting", "growing"))
    study = make_study(meeting, images=8, checkpoints=["epochs/epoch01.pt"])
    (meeting / "net.py").write_text(NETWORK + MEETING)
    study.write_text(study.read_text().replace("net.py:tiny", "net.py:meeting"))
    (meeting / "room").mkdir()
    make_study(growing, images=6, checkpoints=["epochs/epoch01.pt"])
    code = STAYS.format(tests=str(Path(__file__).parents[1]))
    command = [sys.executable, "-c", code, str(meeting), str(growing)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return meeting, growing


def test_units_of_two_workers_do_not_wait_for_each_other(cluster: tuple[Path, Path]) -> None:
    folder, _ = cluster
    assert len(list((folder / "room").iterdir())) == 2
    run_study(folder / "study.toml", folder / "local")
    assert fingerprint(folder / "ray") == fingerprint(folder / "local")


def test_workers_of_a_cluster_that_stays_take_up_a_grown_study(cluster: tuple[Path, Path]) -> None:
    _, folder = cluster
    run_study(folder / "study.toml", folder / "local")
    assert fingerprint(folder / "ray") == fingerprint(folder / "local")
