"""The full audit on made-up pictures, in a few minutes on a laptop and without a network connection.

    pictures    QR codes and hard negatives, with exact masks                       OUT/pictures
    trainings   a small CNN in two phases; the second phase twice, once harmful     OUT/training
    audit       the healthy network: every method, every family of metrics          OUT/audit
    twin        a copy that cheats: it looks at a tag; which methods show that?     OUT/twin
    twins       both trainings, checkpoint by checkpoint: C-Score, alarms           OUT/healthy, OUT/harmful
    cose        maps under 13 transforms, and over the checkpoints                  OUT/cose
    report      one page about all of it                                            OUT/report.html

Every stage is an ordinary use of the rooms: OUT/audit.toml, healthy.toml and harmful.toml can be run again
with `heatproof run`. What is finished is not computed again, so a stopped demo goes on where it was.
"""

from heatproof.demo.audit import Audit, run
from heatproof.demo.settings import FULL, QUICK, Sizes

__all__ = ["FULL", "QUICK", "Audit", "Sizes", "run"]
