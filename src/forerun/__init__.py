"""Forerun: a language model's answer sooner, without changing one character of it.

Names are loaded when they are first used, so that a part that needs no engine (`forerun.errors`, the planner, the
command line's help) doesn't load one.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.constrain import Choice, Json, JsonSchema, Lark, Regex, ToolCall, ToolCalls, parse_tool_calls
    from forerun.engine.beam_output import BeamOutput, BeamSequence
    from forerun.engine.engine import Engine, Scores
    from forerun.engine.handle import RequestHandle
    from forerun.engine.output import EngineStats, Piece, RequestOutput, RequestStats, TokenLogprob
    from forerun.errors import ForerunError
    from forerun.sample.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "BeamOutput",
    "BeamSequence",
    "Choice",
    "Engine",
    "EngineStats",
    "ForerunError",
    "Json",
    "JsonSchema",
    "Lark",
    "Piece",
    "Regex",
    "RequestHandle",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "Scores",
    "TokenLogprob",
    "ToolCall",
    "ToolCalls",
    "__version__",
    "parse_tool_calls",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'forerun' has no attribute {name!r}")
        homes = {
            "constrain": (
                "Choice",
                "Json",
                "JsonSchema",
                "Lark",
                "Regex",
                "ToolCall",
                "ToolCalls",
                "parse_tool_calls",
            ),
            "errors": ("ForerunError",),
            "sample.params": ("SamplingParams",),
            "engine.output": ("EngineStats", "Piece", "RequestOutput", "RequestStats", "TokenLogprob"),
            "engine.beam_output": ("BeamOutput", "BeamSequence"),
            "engine.engine": ("Engine", "Scores"),
            "engine.handle": ("RequestHandle",),
        }
        home = next(module for module, names in homes.items() if name in names)
        return getattr(import_module(f"forerun.{home}"), name)
