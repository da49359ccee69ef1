"""python -m heatproof is the command line."""

from heatproof.cli import main

main()
