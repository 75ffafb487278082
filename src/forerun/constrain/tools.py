"""Calls of tools in the format that a model was trained on."""
