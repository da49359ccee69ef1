"""C-Score over training: consistency of the maps of a class at every checkpoint."""
