"""Localisation and faithfulness under a fixed pixel budget."""
