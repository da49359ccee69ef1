"""Protocols end to end, one folder each: settings, steps, tables and page."""
