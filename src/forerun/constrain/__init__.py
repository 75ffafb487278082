"""Grammars: what a text must be, as masks over the next token."""

from forerun.constrain.lark import Lark
from forerun.constrain.schema import Json, JsonSchema
from forerun.constrain.spec import Choice, Constraint, Regex
from forerun.constrain.tools import ToolCall, ToolCalls, parse_tool_calls

__all__ = ["Choice", "Constraint", "Json", "JsonSchema", "Lark", "Regex", "ToolCall", "ToolCalls", "parse_tool_calls"]
