"""Writes a JSON Schema as one that llguidance enforces exactly, or says which keyword can't be enforced.

llguidance (docs/json_schema.md there) compiles a large part of JSON Schema, but ignores words that it doesn't
know, rounds numbers, and lets a key through in another spelling ("\\u0061" for "a") where an object takes
further properties. So what it gets is written anew: only keywords that it enforces, references resolved,
patterns and formats in its own syntax. Where an object takes keys beyond the declared ones, no text may write a
character as \\u and four digits, which closes that hole at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from forerun.constrain import formats, keywords, leaves, patterns
from forerun.constrain.document import Document, Place, child, fail, shown
from forerun.constrain.finite import prune

MAX_ENUM: Final = 100_000
MAX_DEPENDENCIES: Final = 6
"""Most properties of one schema that others depend on; each doubles the grammar."""

MAX_NAME: Final = 200
MAX_NAMES: Final = 20_000
"""Longest key, and most characters of keys together, that an object may exclude from its further properties."""

MAX_LEVELS: Final = 400
"""Deepest nesting of schemas, references followed."""

Json = Any


@dataclass(frozen=True)
class Lowered:
    """A schema for llguidance.

    escapes: whether strings may write any character as \\u and its code. False where a key could be smuggled in by
        that; then a string can't hold control characters other than those with a letter (\\b, \\t, \\n, \\f, \\r).
    unknown: the paths of keywords that JSON Schema doesn't know.
    notes: what is enforced a little tighter than it says.
    """

    schema: Json
    escapes: bool
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


class _Site(NamedTuple):
    """Where a schema is met.

    merged: whether its objects are intersected with those of other schemas.
    owner: the definition that the schema belongs to.
    here: whether it is about the same value as its owner.
    """

    merged: bool
    owner: str
    here: bool

    def inside(self) -> _Site:
        """The site of a schema about a part of the value."""
        return self._replace(here=False)


def lower(document: Document, place: Place | None = None) -> Lowered:
    """The schema at `place` (default: the whole document) for llguidance. Raises SchemaError."""
    place = place or document.root
    lowered = _Lowering(document, rewrite=False).run(place) or _Lowering(document, rewrite=True).run(place, last=True)
    assert lowered is not None
    return lowered


class _Lowering:
    """One walk over a schema.

    `rewrite`: whether objects describe their further keys by a pattern, which costs milliseconds for the masks of keys,
    but lets strings keep escapes such as \\u0001. Only constants with control characters need those.
    """

    def __init__(self, document: Document, *, rewrite: bool) -> None:
        self._document = document
        self._rewrite = rewrite
        self._names: dict[tuple[str, bool], str] = {}
        self._todo: list[tuple[Place, _Site]] = []
        self._same: dict[str, list[tuple[str, str]]] = {}
        self._escapes = True
        self._control: tuple[str, str] | None = None
        self._unknown: dict[str, None] = {}
        self._notes: dict[str, None] = {}

    def run(self, place: Place, *, last: bool = False) -> Lowered | None:
        """The schema at a place; None if a constant needs what only rewriting gives (an error if it's the `last`)."""
        root = self._schema(place, _Site(False, "", True))
        definitions: dict[str, Json] = {}
        while self._todo:
            target, site = self._todo.pop()
            definitions[site.owner] = self._schema(target, site)
        _refuse_depth(root, definitions, place.path)
        self._refuse_loops()
        if self._control and not self._escapes:
            if not last:
                return None
            fail(
                *self._control,
                "has a control character, which can't be allowed where objects of the schema take "
                "further properties beside allOf, anyOf, $ref or patternProperties. Set additionalProperties to false.",
            )
        schema = prune(root, definitions, place.path)
        return Lowered(schema, self._escapes, tuple(self._unknown), tuple(self._notes))

    def _schema(self, place: Place, site: _Site) -> Json:
        node, path, base = place
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            fail(None, path, f"must be an object or a boolean, got {shown(node)}.")
        place = Place(node, path, self._document.base(node, base))
        self._look_at_keywords(node, path)
        applied = [key for key in node if key in keywords.ENFORCED]
        composed = {"$ref", "allOf", "anyOf", "oneOf", "const", "enum"} & node.keys()
        depends = {"dependencies", "dependentRequired", "dependentSchemas"} & node.keys()
        alone = len(applied) == 1
        site = site._replace(merged=site.merged or bool(depends) or (bool(composed) and not alone))
        out: dict[str, Json] = {}
        if "type" in node:
            types = leaves.check_types(node["type"], path)
            out["type"] = types[0] if len(types) == 1 else types
        also = self._leaves(node, path, site, out)
        for key in applied:
            if handler := _HANDLERS.get(key):
                handler(self, place, site, out)
        self._array(place, site, out)
        self._object(place, site, out)
        also += self._dependencies(place, site)
        if also:
            out["allOf"] = [*out.get("allOf", []), *also]
        return out

    def _look_at_keywords(self, node: dict[str, Json], path: str) -> None:
        for key, value in node.items():
            if key in keywords.ENFORCED or key in keywords.PLACES or key in keywords.ANNOTATIONS:
                continue
            if key in keywords.REFUSED:
                if not _says_nothing(key, node):
                    fail(key, path, f"isn't supported: {keywords.REFUSED[key]}.")
            elif key in keywords.DEPENDENT:
                continue
            elif keywords.is_private(key):
                if not key.lower().startswith("x-") or key == "x-guidance":
                    self._unknown[child(path, key)] = None
            elif key == "required" or (meant := keywords.meant(key)) is None:
                self._unknown[child(path, key)] = None
            else:
                fail(key, path, f'isn\'t one of JSON Schema; did you mean "{meant}"? It is {shown(value)}.')

    def _leaves(self, node: dict[str, Json], path: str, site: _Site, out: dict[str, Json]) -> list[Json]:
        notes: list[str] = []
        out.update(leaves.numbers(node, path, notes, merged=site.merged))
        text, also = leaves.strings(node, path)
        out.update(text)
        name = node.get("format")
        if name is not None and name in formats.INTEGER_RANGES:
            out.update(leaves.integer_range(name, out, notes))
        self._notes.update(dict.fromkeys(notes))
        if "const" in node:
            leaves.check_constant(node["const"], "const", path)
            self._find_control(node["const"], "const", path)
            out["const"] = node["const"]
        if "enum" in node:
            values = node["enum"]
            if not isinstance(values, list):
                fail("enum", path, f"must be a list of values, got {shown(values)}.")
            if not values:
                fail("enum", path, "has no values, so that nothing would be valid.")
            if len(values) > MAX_ENUM:
                fail("enum", path, f"has {len(values)} values; the limit is {MAX_ENUM}.")
            for value in values:
                leaves.check_constant(value, "enum", path)
                self._find_control(value, "enum", path)
            out["enum"] = values
        return also

    def _find_control(self, value: Json, keyword: str, path: str) -> None:
        if self._control is None and leaves.has_control(value):
            self._control = (keyword, path)

    def _ref(self, place: Place, site: _Site, out: dict[str, Json]) -> None:
        reference = place.node["$ref"]
        if not isinstance(reference, str):
            fail("$ref", place.path, f"must be a text such as #/$defs/name, got {shown(reference)}.")
        target = self._document.resolve(reference, place)
        key = (target.path, site.merged)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._todo.append((target, _Site(site.merged, self._names[key], True)))
        if site.here:
            self._same.setdefault(site.owner, []).append((self._names[key], place.path))
        out["$ref"] = f"#/$defs/{self._names[key]}"

    def _several(self, keyword: str) -> Callable[[Place, _Site, dict[str, Json]], None]:
        def handle(place: Place, site: _Site, out: dict[str, Json]) -> None:
            options = place.node[keyword]
            if not isinstance(options, list) or not options:
                fail(keyword, place.path, f"must be a list of schemas, at least one, got {shown(options)}.")
            if keyword == "allOf" and len(options) > 1:
                site = site._replace(merged=True)
            out[keyword] = [self._child(place, site, keyword, index) for index in range(len(options))]

        return handle

    def _child(self, place: Place, site: _Site, *steps: str | int) -> Json:
        node, path = place.node, place.path
        for step in steps:
            node = node[step]
        return self._schema(Place(node, child(path, *steps), place.base), site)

    def _array(self, place: Place, site: _Site, out: dict[str, Json]) -> None:
        node, path = place.node, place.path
        inside = site.inside()
        for keyword in ("minItems", "maxItems"):
            if keyword in node and (value := leaves.count(node, keyword, path)) is not None:
                out[keyword] = value
        listed = isinstance(node.get("items"), list)
        if listed and "prefixItems" in node:
            fail("items", path, "can't be a list beside prefixItems.")
        tuple_keyword = "items" if listed else "prefixItems"
        if tuple_keyword in node:
            given = node[tuple_keyword]
            if not isinstance(given, list):
                fail(tuple_keyword, path, f"must be a list of schemas, got {shown(given)}.")
            out["prefixItems"] = [self._child(place, inside, tuple_keyword, index) for index in range(len(given))]
        if "items" in node and not listed:
            out["items"] = self._child(place, inside, "items")
        elif listed and "additionalItems" in node:
            out["items"] = self._child(place, inside, "additionalItems")

    def _object(self, place: Place, site: _Site, out: dict[str, Json]) -> None:
        node, path = place.node, place.path
        inside = site.inside()
        for keyword in ("properties", "patternProperties"):
            if keyword in node and not isinstance(node[keyword], dict):
                fail(keyword, path, f"must be an object of schemas, got {shown(node[keyword])}.")
        names: dict[str, None] = {}
        if "properties" in node:
            out["properties"] = {key: self._child(place, inside, "properties", key) for key in node["properties"]}
            names.update(dict.fromkeys(node["properties"]))
        if "required" in node:
            out["required"] = _required(node["required"], path)
            names.update(dict.fromkeys(out["required"]))
        if "patternProperties" in node:
            further = node.get("additionalProperties", True)
            anything = further is True or further == {}
            out["patternProperties"] = {}
            for key in node["patternProperties"]:
                schema = self._child(place, inside, "patternProperties", key)
                expression = leaves.pattern(key, "patternProperties", path, exact=further is not False, wide=anything)
                if _adds(expression, names):
                    out["patternProperties"][leaves.anchored(expression)] = schema
                else:
                    _add_to(out.setdefault("properties", {}), names, expression, schema)
        if "additionalProperties" in node:
            out["additionalProperties"] = self._child(place, inside, "additionalProperties")
        self._counts(node, path, out)
        self._close(site, names, out)

    def _counts(self, node: dict[str, Json], path: str, out: dict[str, Json]) -> None:
        """How many properties: further ones may repeat a key, so more than one of them can't be asked for."""
        if "maxProperties" in node and (value := leaves.count(node, "maxProperties", path)) is not None:
            out["maxProperties"] = value
        if "minProperties" in node:
            value = leaves.count(node, "minProperties", path) or 0
            surely = len(out.get("required", []))
            if value > surely:
                declared = len(out.get("properties", {}).keys() | set(out.get("required", [])))
                closed = out.get("additionalProperties") is False and "patternProperties" not in out
                if value > surely + 1 and not (closed and declared > surely):
                    fail("minProperties", path, f"is {value}, but only {surely} properties are required; at most one "
                         "more can be enforced. Name them in required.")  # fmt: skip
                out["minProperties"] = value

    def _close(self, site: _Site, names: dict[str, None], out: dict[str, Json]) -> None:
        """Keeps declared keys out of an object's further properties in every spelling."""
        patterned = out.get("patternProperties")
        if out.get("additionalProperties") is False or not (names or patterned):
            return
        short = all(len(name) <= MAX_NAME for name in names) and sum(map(len, names)) <= MAX_NAMES
        if (
            not self._rewrite
            or site.merged
            or patterned
            or not short
            or {"minProperties", "maxProperties"} & out.keys()
        ):
            self._escapes = False
            return
        further = out.get("additionalProperties", True)
        properties = out.setdefault("properties", {})
        for name in names:
            properties.setdefault(name, further)
        out["patternProperties"] = {leaves.anchored(patterns.none_of(names)): further}
        out["additionalProperties"] = False

    def _dependencies(self, place: Place, site: _Site) -> list[Json]:
        """What must hold where a property is there: either it isn't there, or it is and the rest holds."""
        node, path = place.node, place.path
        also: list[Json] = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            if keyword not in node:
                continue
            if not isinstance(node[keyword], dict):
                fail(keyword, path, f"must be an object, got {shown(node[keyword])}.")
            for name, needed in node[keyword].items():
                then: Json
                if isinstance(needed, list) and keyword != "dependentSchemas":
                    then = {"type": "object", "required": [name, *_required(needed, child(path, keyword, name), name)]}
                elif keyword != "dependentRequired":
                    inner = self._child(place, site, keyword, name)
                    then = {"type": "object", "required": [name], "allOf": [inner]}
                else:
                    fail(keyword, path, f"must list the properties that {shown(name)} needs, got {shown(needed)}.")
                also.append({"anyOf": [{"properties": {name: False}}, then]})
        if len(also) > MAX_DEPENDENCIES:
            fail("dependencies" if "dependencies" in node else "dependentRequired", path,
                 f"and its like make {len(also)} conditions; the limit is {MAX_DEPENDENCIES}.")  # fmt: skip
        if also:
            self._escapes = False
        return also

    def _refuse_loops(self) -> None:
        """Refuses definitions that say of a value only that it is itself."""
        done: set[str] = set()
        for start in self._same:
            trail = {start: iter(self._same[start])}
            while trail:
                name, targets = next(reversed(trail.items()))
                found = next(targets, None)
                if found is None:
                    del trail[name]
                    done.add(name)
                elif found[0] in trail:
                    fail("$ref", found[1], "leads back to itself without describing a value.")
                elif found[0] not in done:
                    trail[found[0]] = iter(self._same.get(found[0], []))


def _refuse_depth(root: Json, definitions: dict[str, Json], path: str) -> None:
    """Refuses schemas within schemas, by way of references too, that are more than llguidance's stack has room for."""
    seen: set[str] = set()
    todo: list[tuple[Json, int]] = [(root, 0)]
    while todo:
        node, depth = todo.pop()
        if depth > MAX_LEVELS:
            fail(None, path, f"leads to schemas that are nested deeper than {MAX_LEVELS} levels, by way of $ref.")
        if not isinstance(node, dict):
            continue
        inner = [node[keyword] for keyword in ("items", "additionalProperties") if keyword in node]
        for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            inner += node.get(keyword, [])
        for keyword in ("properties", "patternProperties"):
            inner += node.get(keyword, {}).values()
        name = node.get("$ref", "").removeprefix("#/$defs/")
        if name and name not in seen:
            seen.add(name)
            inner.append(definitions[name])
        todo += [(part, depth + 1) for part in reversed(inner)]


def _adds(expression: str, names: dict[str, None]) -> bool:
    """Whether an expression matches any key beyond some names; a pattern that doesn't would leave a dead end."""
    if not names or sum(map(len, names)) > MAX_NAMES or max(map(len, names)) > MAX_NAME:
        return True
    return _meet(expression, patterns.none_of(names))


def _add_to(properties: dict[str, Json], names: dict[str, None], expression: str, schema: Json) -> None:
    """Applies what a pattern says to the named properties that it matches."""
    for name in names:
        if _meet(expression, patterns.literal(name)):
            properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema


def _meet(one: str, other: str) -> bool:
    """Whether any string matches both of two expressions."""
    both = {"type": "string", "allOf": [{"pattern": leaves.anchored(rule)} for rule in (one, other)]}
    failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(both))
    return not (failed and "Regex is empty" in messages[0])


def _required(value: Json, path: str, name: str | None = None) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        if name is None:
            hint = " List the names beside properties, not in each." if isinstance(value, bool) else ""
            fail("required", path, f"must be a list of names, got {shown(value)}.{hint}")
        fail(None, path, f"must be a list of names, got {shown(value)}.")
    return list(dict.fromkeys(value))


def _says_nothing(key: str, node: dict[str, Json]) -> bool:
    """Whether a keyword that can't be enforced has no effect with this value."""
    value = node[key]
    if key == "uniqueItems":
        return value is False or (isinstance(node.get("maxItems"), int) and node["maxItems"] <= 1)
    if key in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return value is True or value == {}
    if key == "if":
        return "then" not in node and "else" not in node
    if key == "not":
        return value is False
    if key == "contains":
        return node.get("minContains") == 0 and "maxContains" not in node
    return False


_HANDLERS: Final[dict[str, Callable[[_Lowering, Place, _Site, dict[str, Json]], None]]] = {
    "$ref": _Lowering._ref,
    "allOf": lambda self, *args: self._several("allOf")(*args),
    "anyOf": lambda self, *args: self._several("anyOf")(*args),
    "oneOf": lambda self, *args: self._several("oneOf")(*args),
}
