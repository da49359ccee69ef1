"""Studies that produce data files of the package; not part of the installed package."""
