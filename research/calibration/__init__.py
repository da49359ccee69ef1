"""How often the verdict is wrong, measured on networks whose evidence was planted."""
