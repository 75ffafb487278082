"""Choosing tokens: parameters, logit transforms in a documented order, counter-based noise."""

from forerun.sample.edits import LogitEdits, Saved
from forerun.sample.params import SamplingParams
from forerun.sample.transforms import NOT_FINITE, NOTHING_ALLOWED

__all__ = ["NOTHING_ALLOWED", "NOT_FINITE", "LogitEdits", "SamplingParams", "Saved"]
