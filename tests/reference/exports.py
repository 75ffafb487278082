"""Plans to be exported, and exported texts read back."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.export_plan import DraftPlan, Export, plan_draft
from forerun.plan.export_text import arguments, written
from forerun.plan.shapes import ModelShape
from forerun.plan.spec import proposal_of
from forerun.plan.speculate import Bucket

CATALOG = PlanCatalog.load()


@functools.cache
def plan_for(kind: str, **options: Any) -> DraftPlan:
    """A plan of a drafter on a model of the catalog that has it."""
    name = {"mtp": "deepseek-v3", "model": "llama-3.3-70b"}.get(kind, "llama-3.1-8b")
    spec = "model=llama-3.1-8b" if kind == "model" else kind
    settings = {"tensor": 16 if kind == "mtp" else 4 if kind == "model" else 1}
    for setting in ("tensor", "pipeline", "expert", "kv", "gpu"):
        if setting in options:
            settings[setting] = options.pop(setting)
    gpu = settings.pop("gpu", "h200")
    return make(name, spec, Deployment(hardware=CATALOG.gpu(gpu), **settings), **options)


def make(model: str | ModelShape, spec: str, where: Deployment, **options: Any) -> DraftPlan:
    target = CATALOG.shape(model) if isinstance(model, str) else model
    proposal = proposal_of(spec, target, CATALOG.shape)
    return plan_draft(target, where, proposal, **{"context": 1000, "most": 64} | options)


@functools.cache
def small_model() -> DraftPlan:
    """A draft model on a target that fits one machine."""
    return make("qwen2.5-7b", "model=qwen2.5-0.5b", one_gpu())


@functools.cache
def crowded(**options: Any) -> DraftPlan:
    """A plan whose drafter stops to pay at batches that fit the memory."""
    return make("llama-3.1-8b", "eagle3:0.7,0.6", one_gpu(), **{"context": 100, "most": 400} | options)


def one_gpu(**settings: Any) -> Deployment:
    return Deployment(hardware=CATALOG.gpu("h100"), **settings)


def with_buckets(plan: DraftPlan, *buckets: tuple[int, int, int]) -> DraftPlan:
    return replace(plan, buckets=tuple(Bucket(*bucket) for bucket in buckets), most=buckets[-1][1], batch=1)


def words_of(text: str) -> list[str]:
    """What a shell makes of a text: the words of its one command, run as a stub that tells them."""
    command = next(line for line in text.splitlines() if not line.startswith("#")).split()[0]
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / command
        stub.write_text('#!/bin/sh\nprintf \'%s\\0\' "${0##*/}" "$@"\n')
        stub.chmod(0o755)
        environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
        told = subprocess.run(["sh", "-eu"], input=text, env=environment, capture_output=True, text=True, check=True)
    assert not told.stderr
    return told.stdout.split("\0")[:-1]


def code(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def parsed(made: Export) -> dict[str, Any]:
    """The configuration read back from its text, by the grammar of its form alone."""
    text = written(made)
    if made.form == "yaml":
        found: dict[str, Any] = yaml.safe_load(text)
        return found
    if made.form == "python":
        [_, assignment] = ast.parse(code(text)).body
        assert isinstance(assignment, ast.Assign)
        call = assignment.value
        assert isinstance(call, ast.Call)
        [model] = call.args
        return {"model": ast.literal_eval(model)} | {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    words = words_of(text)
    assert words == arguments(made)
    assert tuple(words[: len(made.command)]) == made.command
    found = {}
    rest = words[len(made.command) :]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            found["model"] = word
        elif not rest or rest[0].startswith("-"):
            found[word] = True
        else:
            value = rest.pop(0)
            wanted = made.config[word]
            found[word] = value if isinstance(wanted, str) else yaml.safe_load(value)
    return found
