"""Bridges from ucm to inference engines."""
