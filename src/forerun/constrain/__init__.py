"""Grammars: what a text must be, as masks over the next token."""

from forerun.constrain.schema import Json, JsonSchema
from forerun.constrain.spec import Choice, Constraint, Lark, Regex

__all__ = ["Choice", "Constraint", "Json", "JsonSchema", "Lark", "Regex"]
