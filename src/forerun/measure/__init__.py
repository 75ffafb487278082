"""Measuring: what a number says, over what, and how it was taken. Imports nothing of the engine."""
