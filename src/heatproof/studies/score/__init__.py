"""Maps that are there already, scored like our own."""
