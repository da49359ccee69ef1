"""Budgeted localisation of the thesis (keak2026budget) with four networks that have ImageNet weights."""
