from .folder import RunFolder
from .manifest import Change, Manifest, compare_configs
from .maps import MapStore
from .scores import Scores
from .status import Status

__all__ = ["Change", "Manifest", "MapStore", "RunFolder", "Scores", "Status", "compare_configs"]
