"""A plan as a configuration for the engine that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from forerun.errors import PlanError
from forerun.plan import export_forerun, export_llamacpp, export_sglang, export_trtllm, export_vllm
from forerun.plan.export_plan import DraftPlan, Export
from forerun.plan.export_schema import Schema
from forerun.plan.shown import shown

Build = Callable[[DraftPlan, str | None, str | None], Export]

ENGINES: Mapping[str, tuple[Build, Schema]] = MappingProxyType({
    "vllm": (export_vllm.build, export_vllm.SCHEMA),
    "sglang": (export_sglang.build, export_sglang.SCHEMA),
    "tensorrt-llm": (export_trtllm.build, export_trtllm.SCHEMA),
    "llama.cpp": (export_llamacpp.build, export_llamacpp.SCHEMA),
    "forerun": (export_forerun.build, export_forerun.SCHEMA),
})  # fmt: skip


def check_engine(engine: str) -> None:
    """Raises PlanError unless there is a configuration for an engine of that name."""
    if engine not in ENGINES:
        raise PlanError("for", f"{engine!r} is not allowed; expected one of {', '.join(ENGINES)}")


def export(engine: str, plan: DraftPlan, *, target_model: str | None = None, draft_model: str | None = None) -> Export:
    """The configuration of `engine` for a plan, checked against what the engine takes.

    target_model, draft_model: paths or repositories of the checkpoints; None leaves a placeholder.

    Raises:
        PlanError: the engine is unknown, doesn't run the drafter or the deployment, or a path is empty or names a
            checkpoint that the drafter doesn't have.
    """
    check_engine(engine)
    for field, path in (("target_model", target_model), ("draft_model", draft_model)):
        if path is not None and (not path.strip() or not path.isprintable()):
            raise PlanError(field, f"{path!r} is not a path or repository")
        if path is not None and path.startswith("-"):
            raise PlanError(field, f"{path!r} would be read as an option; write ./{path}")
    if draft_model is not None and plan.proposal.drafter.kind == "ngram":
        raise PlanError("draft_model", "n-gram drafting has no checkpoint; leave it out")
    build, schema = ENGINES[engine]
    made = build(plan, target_model, draft_model)
    schema.check(made.config)
    beyond = plan.beyond_measured
    if beyond:
        warning = f"beyond what was measured, so extrapolated: {'; '.join(beyond)}"
        made = replace(made, warnings=(*made.warnings, warning))
    return made


def write_out(path: Path, text: str, *, force: bool = False) -> None:
    """Writes a file in one step: it is there in full or not at all.

    Raises:
        PlanError: it is there already and `force` isn't set, or it can't be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise PlanError("out", f"{path} is no file")
        if path.exists() and not force:
            raise PlanError("out", f"{path} is there already; use --force to overwrite it")
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError("out", f"{shown(str(path))} can't be written: {error.strerror}") from error
