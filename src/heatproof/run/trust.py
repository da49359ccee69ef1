"""What a study runs that is neither heatproof nor an installed package: a study file is code.

model.spec = "net.py:make"               the file, and whatever it imports
model.allow_pickle = true                what is pickled in the checkpoints, or the layers of a .keras file
model.options.trust_remote_code = true   the Python files beside the weights of a Hugging Face model
"""

from __future__ import annotations

from collections.abc import Iterator

from heatproof.models.keras_graph import FILES
from heatproof.run.config import ModelTable
from heatproof.run.plan import make_plan
from heatproof.run.study import Opened
from heatproof.store import Manifest


def foreign_code(table: ModelTable) -> str:
    """Half a sentence: what loading this model runs; '' where that is nothing of the study's own.

    >>> foreign_code(ModelTable("net.py:make", checkpoints="best.pt", allow_pickle=True))
    'runs net.py and unpickles best.pt'
    """
    return " and ".join(_phrases(table))


def _phrases(table: ModelTable) -> Iterator[str]:
    path = table.spec.rpartition(":")[0]
    if path.endswith(".py"):
        yield f"runs {path}"
    if table.allow_pickle and table.spec.endswith(FILES):
        yield f"runs the code inside {table.spec}"
    given = [table.checkpoints] if isinstance(table.checkpoints, str) else table.checkpoints
    if table.allow_pickle and given:
        yield f"unpickles {', '.join(map(str, given))}"
    if table.options.get("trust_remote_code"):
        yield f"runs the code that {table.spec} brings"


def outline(opened: Opened) -> Iterator[tuple[str, str]]:
    """What can be said of a study without loading its model: what there is, and how much."""
    checkpoints = [checkpoint.name for checkpoint in opened.checkpoints]
    plan = make_plan(Manifest(opened.config, models=dict.fromkeys(checkpoints, "")), len(opened.source))
    yield "images", f"{len(opened.source):,}"
    yield "checkpoints", f"{len(checkpoints)}: {', '.join(checkpoints)}"
    yield "methods", ", ".join(opened.study.methods)
    yield "metrics", ", ".join(opened.study.metrics)
    yield "units", f"{len(plan.units):,} of up to {opened.study.run.batch_size} images"
