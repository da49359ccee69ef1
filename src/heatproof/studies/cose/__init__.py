"""COSE: maps should stay if the prediction stays, and change if the prediction changes."""
