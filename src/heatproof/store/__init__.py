"""Where results live: a run folder with scores, maps and a manifest, safe to stop at any moment."""

from heatproof.store.folder import RunFolder
from heatproof.store.manifest import Change, Manifest, compare_configs
from heatproof.store.maps import MapStore
from heatproof.store.scores import Scores
from heatproof.store.status import Status

__all__ = ["Change", "Manifest", "MapStore", "RunFolder", "Scores", "Status", "compare_configs"]
