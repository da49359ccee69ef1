"""Protocols end to end, a folder each: what it may be told, its steps, its tables and page."""
