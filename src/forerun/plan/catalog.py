"""Models and hardware by name: what the package knows, and what users add in TOML files of their own.

`models.toml` has a table for each model with the fields of `ModelShape` (`experts`, `latent` and `formats` are tables),
`hardware.toml` one for each accelerator with units in its keys. A file of the user's has both under [models.NAME] and
[hardware.NAME]. Unknown keys are refused, and every number says where it is from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from forerun.errors import PlanError
from forerun.plan.config_json import read_config
from forerun.plan.formats import WeightFormats
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.shapes import Experts, LatentAttention, ModelShape

T = TypeVar("T")

_NESTED: Mapping[str, type] = MappingProxyType(
    {"experts": Experts, "latent": LatentAttention, "formats": WeightFormats}
)
_UNITS: Mapping[str, tuple[str, float]] = MappingProxyType({
    "bandwidth_gb_s": ("bandwidth", 1e9), "memory_gb": ("memory", 1e9), "link_gb_s": ("link", 1e9),
    "host_gb_s": ("host", 1e9), "link_us": ("link_us", 1.0),
})  # fmt: skip


@dataclass(frozen=True)
class PlanCatalog:
    """Models and hardware by name."""

    models: Mapping[str, ModelShape]
    hardware: Mapping[str, Hardware]

    @staticmethod
    def load(extra: Path | None = None) -> PlanCatalog:
        """What the package knows, and what a file of the user's adds.

        Raises:
            PlanError: the file can't be read, isn't TOML, has an unknown key, lacks one, or takes a name again.
        """
        models = _read(_packaged("models.toml"), "models.toml")
        hardware = _read(_packaged("hardware.toml"), "hardware.toml")
        if extra is not None:
            try:
                text = extra.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PlanError("catalog", f"{extra} can't be read: {error}") from error
            added = _read(text, str(extra))
            unknown = added.keys() - {"models", "hardware"}
            if unknown:
                raise PlanError(f"{extra}: {min(unknown)}", "unknown; expected tables named models and hardware")
            for known, new in ((models, added.get("models", {})), (hardware, added.get("hardware", {}))):
                for name, table in new.items():
                    if name in known:
                        raise PlanError(f"{extra}: {name}", "the catalog has that name already; choose another one")
                    known[name] = table
        return PlanCatalog(
            {name: shape_of(name, table) for name, table in models.items()},
            {name: hardware_of(name, table) for name, table in hardware.items()},
        )

    def shape(self, model: str) -> ModelShape:
        """A model by name, or from a Hugging Face config.json or the folder that has one.

        Raises:
            PlanError: neither is there, or the file lacks a field.
        """
        path = Path(model)
        if model not in self.models and (path.exists() or "/" in model or model.endswith(".json")):
            return read_config(path)
        return self.model(model)

    def model(self, name: str) -> ModelShape:
        """A model of that name. Raises PlanError naming those that there are."""
        return _found("model", name, self.models)

    def gpu(self, name: str) -> Hardware:
        """Hardware of that name. Raises PlanError naming those that there are."""
        return _found("gpu", name, self.hardware)


def shape_of(name: str, table: Mapping[str, Any]) -> ModelShape:
    """A model from its table. Raises PlanError naming the key at fault."""
    values = dict(table)
    for key, kind in _NESTED.items():
        if key in values:
            values[key] = _built(kind, f"{name}.{key}", values[key])
    return _built(ModelShape, name, {"name": name, **values})


def hardware_of(name: str, table: Mapping[str, Any]) -> Hardware:
    """Hardware from its table, whose keys carry units. Raises PlanError naming the key at fault."""
    values: dict[str, Any] = {"name": name}
    for key, value in table.items():
        if key in _UNITS:
            field, unit = _UNITS[key]
            values[field] = _number(f"{name}: {key}", value) * unit
        elif key == "tflops":
            if not isinstance(value, Mapping):
                raise PlanError(f"{name}: tflops", "expected a table of rates by data type")
            values["flops"] = {dtype: _number(f"{name}: tflops.{dtype}", rate) * 1e12 for dtype, rate in value.items()}
        elif key == "efficiency":
            values["efficiency"] = _built(Efficiency, f"{name}.efficiency", value)
        elif key == "sources":
            values["sources"] = dict(value)
        else:
            known = [*_UNITS, "tflops", "efficiency", "sources"]
            raise PlanError(f"{name}: {key}", f"unknown; expected some of {', '.join(known)}")
    return _built(Hardware, name, values)


def _built(kind: type[T], where: str, table: object) -> T:
    if not isinstance(table, Mapping):
        raise PlanError(where, f"expected a table, got {table!r}")
    known: dict[str, Field[Any]] = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for key, value in table.items():
        item = known.get(key)
        if item is None:
            raise PlanError(f"{where}: {key}", f"unknown; expected some of {', '.join(known)}")
        expected = str(item.type)
        wrong = (
            (expected == "int" and (not isinstance(value, int) or isinstance(value, bool)))
            or (expected == "bool" and not isinstance(value, bool))
            or (expected == "str" and not isinstance(value, str))
            or (expected == "float" and (not isinstance(value, int | float) or isinstance(value, bool)))
        )
        if wrong:
            raise PlanError(f"{where}: {key}", f"{value!r} is not allowed; expected {expected}")
    for item in known.values():
        if item.default is MISSING and item.default_factory is MISSING and item.name not in table:
            raise PlanError(f"{where}: {item.name}", "missing")
    return kind(**table)


def _number(field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PlanError(field, f"{value!r} is not allowed; expected a number")
    return float(value)


def _packaged(file: str) -> str:
    return resources.files("forerun.plan").joinpath(file).read_text(encoding="utf-8")


def _read(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(where, f"not TOML: {error}") from error


def _found(field: str, name: str, known: Mapping[str, T]) -> T:
    found = known.get(name)
    if found is None:
        raise PlanError(field, f"{name!r} is not in the catalog{_near(name, known)}")
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
