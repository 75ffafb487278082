"""Models and hardware by name: what the package knows, and what users add in TOML files of their own.

`models.toml` has a table for each model with the fields of `ModelShape` (`experts`, `latent` and `formats` are tables),
`hardware.toml` one for each accelerator with units in its keys. A file of the user's has both under [models.NAME] and
[hardware.NAME]; so has the file that `forerun plan calibrate --save` writes, whose only entry is [hardware.local].
Unknown keys are refused, and every number says where it is from.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from forerun.errors import PlanError
from forerun.plan.config_json import read_config
from forerun.plan.formats import WeightFormats
from forerun.plan.hardware import Efficiency, Hardware, Measured
from forerun.plan.shapes import Experts, LatentAttention, ModelShape
from forerun.plan.shown import shown

T = TypeVar("T")

_NESTED: Mapping[str, type] = MappingProxyType(
    {"experts": Experts, "latent": LatentAttention, "formats": WeightFormats}
)
_UNITS: Mapping[str, tuple[str, float]] = MappingProxyType({
    "bandwidth_gb_s": ("bandwidth", 1e9), "memory_gb": ("memory", 1e9), "link_gb_s": ("link", 1e9),
    "link_us": ("link_us", 1.0), "host_gb_s": ("host", 1e9),
})  # fmt: skip
_SOURCED = ("flops", "bandwidth", "memory", "link", "link_us", "host", "efficiency")

LOCAL = "local"
"""The name of this machine."""

_MEASURE = "run `forerun bench step --json > step.json` and `forerun plan calibrate step.json --save`"


@dataclass(frozen=True)
class PlanCatalog:
    """Models and hardware by name.

    local_error: why the hardware `local` can't be had; None if it is there.
    """

    models: Mapping[str, ModelShape]
    hardware: Mapping[str, Hardware]
    local_error: PlanError | None = None

    @staticmethod
    def load(extra: Path | None = None) -> PlanCatalog:
        """What the package knows, what was measured on this machine, and what a file of the user's adds.

        A [hardware.local] in the user's file stands before the measured one. What is wrong with the latter is told when
        it is asked for (`gpu`), not before: a plan for another machine doesn't need it.

        Raises:
            PlanError: the user's file can't be read, isn't TOML, has an unknown key, lacks one, or takes a name again.
        """
        models = {name: shape_of(name, table) for name, table in _packaged("models.toml").items()}
        hardware = {name: hardware_of(name, table) for name, table in _packaged("hardware.toml").items()}
        if extra is not None:
            added = _read(extra, "catalog")
            _add(models, added.models, extra)
            _add(hardware, added.hardware, extra)
        error: PlanError | None = None
        if LOCAL not in hardware:
            try:
                hardware[LOCAL] = _local()
            except PlanError as found:
                error = found
        return PlanCatalog(models, hardware, error)

    def shape(self, model: str) -> ModelShape:
        """A model by name, or from a Hugging Face config.json or the folder that has one.

        Raises:
            PlanError: neither is there, or the file lacks a field. For a name as hubs have it, ORGANISATION/MODEL, it
                names the catalog's model if there is one.
        """
        path = Path(model)
        exists = bool(model) and os.path.exists(path)
        if model in self.models or (not exists and _key(model, self.models) is not None):
            return self.model(model)
        if "/" in model and not os.path.lexists(path):
            near = _near_hub(model, self.models)
            if near:
                raise PlanError("model", f"there is no file {shown(model)}; did you mean {near}, of the catalog?")
        if exists or "/" in model or model.endswith(".json"):
            return read_config(path)
        return self.model(model)

    def model(self, name: str) -> ModelShape:
        """A model of that name, in capitals or not. Raises PlanError naming those that there are."""
        return _found("model", name, self.models)

    def gpu(self, name: str) -> Hardware:
        """Hardware of that name, in capitals or not. Raises PlanError naming those that there are, or saying what is
        wrong with `local`."""
        if name.casefold() == LOCAL and self.local_error is not None:
            raise self.local_error
        return _found("gpu", name, self.hardware)


def local_path() -> Path:
    """Where this machine's own numbers lie: plan/local.toml of the cache, which is FORERUN_CACHE, else
    XDG_CACHE_HOME/forerun, else ~/.cache/forerun.

    Raises:
        PlanError: the home directory is needed and unknown.
    """
    own, xdg = os.environ.get("FORERUN_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    cache = own or (f"{xdg}/forerun" if Path(xdg).is_absolute() else "~/.cache/forerun")
    try:
        return Path(cache).expanduser().absolute() / "plan" / "local.toml"
    except RuntimeError as error:
        raise PlanError(
            "gpu", f"the home directory in {cache!r} is unknown; set FORERUN_CACHE to a directory"
        ) from error


def shape_of(name: str, table: object) -> ModelShape:
    """A model from its table. Raises PlanError naming the key at fault."""
    values = dict(_table(name, table))
    for key, kind in _NESTED.items():
        if key in values:
            values[key] = _built(kind, f"{name}.{key}", values[key])
    if "name" in values:
        raise PlanError(f"{name}: name", "unknown; the table's own name is the model's")
    return _built(ModelShape, name, {"name": name, **values})


def hardware_of(name: str, table: object) -> Hardware:
    """Hardware from its table, whose keys carry units. Raises PlanError naming the key at fault."""
    values: dict[str, Any] = {"name": name}
    for key, value in _table(name, table).items():
        if key in _UNITS:
            field, unit = _UNITS[key]
            values[field] = _number(f"{name}: {key}", value) * unit
        elif key == "tflops":
            rates = _table(f"{name}: tflops", value)
            values["flops"] = {dtype: _number(f"{name}: tflops.{dtype}", rate) * 1e12 for dtype, rate in rates.items()}
        elif key == "efficiency":
            values["efficiency"] = _built(Efficiency, f"{name}.efficiency", value)
        elif key == "measured":
            values["measured"] = _built(Measured, f"{name}.measured", value)
        elif key == "sources":
            values["sources"] = _sources(f"{name}.sources", value)
        else:
            known = [*_UNITS, "tflops", "efficiency", "measured", "sources"]
            raise PlanError(f"{name}: {key}", f"unknown; expected some of {', '.join(known)}")
    for key, field in (("tflops", "flops"), ("bandwidth_gb_s", "bandwidth"), ("memory_gb", "memory")):
        if field not in values:
            raise PlanError(f"{name}: {key}", "missing")
    return _built(Hardware, name, values)


class _Added(NamedTuple):
    """What one file has."""

    models: dict[str, ModelShape]
    hardware: dict[str, Hardware]


def _read(path: Path, field: str) -> _Added:
    """A file of [models.NAME] and [hardware.NAME]. Raises PlanError naming the file and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(field, f"{path} is not TOML: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(field, f"{path} can't be read: {error}") from error
    unknown = tables.keys() - {"models", "hardware"}
    if unknown:
        raise PlanError(f"{path}: {min(unknown)}", "unknown; expected tables named models and hardware")
    try:
        return _Added(
            {name: shape_of(name, table) for name, table in _table("models", tables.get("models", {})).items()},
            {name: hardware_of(name, table) for name, table in _table("hardware", tables.get("hardware", {})).items()},
        )
    except PlanError as error:
        raise PlanError(f"{path}: {error.field}", str(error).removeprefix(f"{error.field}: ")) from error


def _add(known: dict[str, T], new: Mapping[str, T], path: Path) -> None:
    for name, value in new.items():
        if name in known:
            raise PlanError(f"{path}: {name}", "the catalog has that name already; choose another one")
        known[name] = value


def _local() -> Hardware:
    path = local_path()
    if not os.path.lexists(path):
        raise PlanError("gpu", f"this machine was not measured yet; {_MEASURE}")
    try:
        found = _read(path, "gpu")
    except PlanError as error:
        raise PlanError("gpu", f"what was measured can't be used: {error}; {_MEASURE} again") from error
    if found.models or list(found.hardware) != [LOCAL]:
        raise PlanError("gpu", f"{path}: expected one table, [hardware.local]; {_MEASURE} again")
    return found.hardware[LOCAL]


def _table(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(where, f"{shown(value)} is not allowed; expected a table")
    return value


def _sources(where: str, value: object) -> Mapping[str, str]:
    for key, source in _table(where, value).items():
        if key not in _SOURCED:
            raise PlanError(f"{where}: {key}", f"unknown; expected some of {', '.join(_SOURCED)}")
        if not isinstance(source, str):
            raise PlanError(f"{where}: {key}", f"{shown(source)} is not allowed; expected a text")
    return MappingProxyType(dict(_table(where, value)))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return _whole(value) or isinstance(value, float)


def _two(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_real(item) for item in value)


_ALLOWED: Mapping[str, tuple[str, Callable[[object], bool]]] = MappingProxyType({
    "int": ("a whole number", _whole),
    "int | None": ("a whole number", _whole),
    "float": ("a number", _real),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "tuple[float, float]": ("two numbers", _two),
})  # fmt: skip


def _built(kind: type[T], where: str, table: object) -> T:
    """A dataclass from a table that has its fields. Raises PlanError naming the key that is unknown, missing or of
    another type."""
    values = _table(where, table)
    known: dict[str, Field[Any]] = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for key, value in values.items():
        item = known.get(key)
        if item is None:
            raise PlanError(f"{where}: {key}", f"unknown; expected some of {', '.join(known)}")
        expected, allowed = _ALLOWED.get(str(item.type), ("", lambda _value: True))
        if not allowed(value):
            raise PlanError(f"{where}: {key}", f"{shown(value)} is not allowed; expected {expected}")
    for item in known.values():
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise PlanError(f"{where}: {item.name}", "missing")
    try:
        return kind(**values)
    except PlanError as error:
        if error.field.startswith(where):
            raise
        raise PlanError(f"{where}: {error.field}", str(error).removeprefix(f"{error.field}: ")) from error


def _number(field: str, value: object) -> float:
    try:
        number = float(value) if _real(value) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PlanError(field, f"{shown(value)} is not allowed; expected a number")
    return number


def _packaged(file: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("forerun.plan").joinpath(file).read_text(encoding="utf-8"))


def _found(field: str, name: str, known: Mapping[str, T]) -> T:
    key = _key(name, known)
    if key is None:
        raise PlanError(field, f"{shown(name)} is not in the catalog{_near(name, known)}")
    return known[key]


def _key(name: str, known: Iterable[str]) -> str | None:
    """The name as the catalog has it: that very one, or the only one that is the same but for capitals."""
    alike = [other for other in known if other.casefold() == name.casefold()]
    if name in alike:
        return name
    return alike[0] if len(alike) == 1 else None


def _near_hub(name: str, known: Iterable[str]) -> str | None:
    """The catalog's model for ORGANISATION/MODEL: the longest name that MODEL begins with."""
    model = name.rpartition("/")[2].casefold()
    return max((other for other in known if model.startswith(other.casefold())), key=len, default=None)


def _near(name: str, known: Iterable[str]) -> str:
    lower = {other.casefold(): other for other in known}
    near = [lower[found] for found in difflib.get_close_matches(name.casefold(), list(lower), n=1)]
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
