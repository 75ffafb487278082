"""Configurations as text, with their reasons as comments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.plan.export_plan import Export


def written(export: Export) -> str:
    """The configuration as it is written to a file, in lines, the last one ended."""
    write = {"shell": _shell, "yaml": _yaml, "python": _python}[export.form]
    return "\n".join([*_comments(_about(export)), *write(export)]) + "\n"


def arguments(export: Export) -> list[str]:
    """The command of a shell form in words, as `subprocess.run` takes them."""
    return [*export.command, *(word for flag in _flags(export.config) for word in flag)]


def _about(export: Export) -> Iterable[str]:
    plan, schema = export.plan, export.schema
    where, drafter = plan.deployment, plan.proposal.drafter
    yield f"{drafter.name} on {plan.target.name}, for {schema.engine}"
    formats = plan.target.formats
    yield (
        f"planned for {where.gpus} x {where.hardware.name}, weights {formats.linear}, KV {where.kv}, "
        f"{plan.context:g} cached tokens a sequence, batches up to {plan.most}"
    )
    rates = ",".join(f"{rate:g}" for rate in plan.proposal.acceptance.rates)
    yield f"acceptance by depth {rates}: {'assumed, not measured' if plan.assumed else 'given'}"
    if export.placeholders:
        yield f"valid but for what is still to be filled in: {', '.join(export.placeholders)}"
    yield f"checked against {schema.engine} {schema.version} ({schema.source})"
    for warning in export.warnings:
        yield f"warning: {warning}"


def _comments(lines: Iterable[str]) -> list[str]:
    return [f"# {_one_line(line)}" for line in lines]


def _one_line(text: str) -> str:
    """Names come from files of the user's, and none of them may end a comment."""
    return " ".join(text.split())


def _flags(config: Mapping[str, Any]) -> Iterable[list[str]]:
    for name, value in config.items():
        if not name.startswith("-"):
            yield [str(value)]
        elif value is True:
            yield [name]
        else:
            yield [name, json.dumps(value) if isinstance(value, Mapping | list) else str(value)]


def _shell(export: Export) -> list[str]:
    reasons = _comments(f"{note.key} {json.dumps(note.value)}: {note.reason}" for note in export.notes)
    words = [" ".join(shlex.quote(word) for word in flag) for flag in _flags(export.config)]
    if not next(iter(export.config)).startswith("-"):
        words[:1] = [f"{' '.join(export.command)} {words[0]}"]
    else:
        words.insert(0, " ".join(export.command))
    return [*reasons, " \\\n  ".join(words)]


def _yaml(export: Export) -> list[str]:
    reasons = {note.key: note.reason for note in export.notes}
    *command, option = export.command
    lines = _comments([f"run as: {' '.join(shlex.quote(word) for word in command)} {option} FILE"])
    for key, value in export.config.items():
        if isinstance(value, Mapping):
            lines.append(f"{key}:")
            lines += _entries(value, "  ", f"{key}.", reasons)
        else:
            lines += _entries({key: value}, "", "", reasons)
    return lines


def _entries(table: Mapping[str, Any], indent: str, path: str, reasons: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for key, value in table.items():
        reason = reasons.get(f"{path}{key}")
        comment = f"  # {_one_line(reason)}" if reason else ""
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:{comment}")
            lines += _entries(value, f"{indent}  ", f"{path}{key}.", reasons)
        else:
            lines.append(f"{indent}{key}: {_quoted(value)}{comment}")
    return lines


def _quoted(value: object) -> str:
    """A string or number as YAML and Python both read it."""
    return json.dumps(value, ensure_ascii=False)


def _python(export: Export) -> list[str]:
    reasons = {note.key: note.reason for note in export.notes}
    config = dict(export.config)
    model = config.pop("model")
    options = f"--draft {shlex.quote(config['draft'])} --draft-len {config['draft_len']}"
    lines = _comments([f"as a command: {' '.join(export.command)} --model {shlex.quote(model)} {options}"])
    lines += ["from forerun import Engine", "", "engine = Engine(", f"    {_quoted(model)},"]
    for key, value in config.items():
        comment = f"  # {_one_line(reasons[key])}" if key in reasons else ""
        lines.append(f"    {key}={_quoted(value)},{comment}")
    return [*lines, ")"]
