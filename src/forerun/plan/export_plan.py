"""What is exported: a drafter on a model, and how far it drafts at which batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.export_schema import Schema
from forerun.plan.memory import check_fits
from forerun.plan.shapes import ModelShape
from forerun.plan.speculate import LONGEST, Bucket, Point, Proposal, Speculation, TargetSteps
from forerun.plan.steptime import Load, forward_time

MOST = 1024
"""Batches that are planned at most: each is looked at by itself."""


@dataclass(frozen=True)
class DraftPlan:
    """A drafter for a model, and its best draft length at every batch from 1 to `most`.

    speculation: prices it. batch: the one whose length is taken by engines that have a single one. buckets: lengths by
    batch, without gaps. assumed: the acceptances were not given but are the planner's.
    """

    target: ModelShape
    deployment: Deployment
    proposal: Proposal
    speculation: Speculation = field(compare=False, repr=False)
    context: float
    most: int
    batch: int
    buckets: tuple[Bucket, ...]
    assumed: bool = False

    @property
    def longest(self) -> int:
        """The largest draft length at any batch."""
        return max(bucket.length for bucket in self.buckets)

    @property
    def last_batch(self) -> int:
        """The largest batch at which drafting pays."""
        return max(bucket.hi for bucket in self.buckets if bucket.length)

    @property
    def length(self) -> int:
        """The draft length at `batch`."""
        return self.bucket_at(self.batch).length

    def bucket_at(self, batch: int) -> Bucket:
        """The bucket of a batch from 1 to `most`."""
        return next(bucket for bucket in self.buckets if bucket.lo <= batch <= bucket.hi)

    def point(self, batch: int, length: int | None = None) -> Point:
        """What a batch gains with its own draft length, or with another one."""
        chosen = self.bucket_at(batch).length if length is None else length
        return self.speculation.price(batch, self.context, chosen)

    @property
    def beyond_measured(self) -> list[str]:
        """What of the verifying steps lies outside of what a measured efficiency was fitted to, one phrase each."""
        found: dict[str, None] = {}
        for bucket in self.buckets:
            for batch in {bucket.lo, bucket.hi}:
                load = Load(batch, bucket.length + 1, self.context)
                found |= dict.fromkeys(forward_time(self.target.network, self.deployment, load).beyond_measured)
        return list(found)

    def why(self, bucket: Bucket) -> str:
        """Why a bucket has its length, with the speedups at its ends."""
        span = f"at batch {bucket.lo}" if bucket.lo == bucket.hi else f"from batch {bucket.lo} to {bucket.hi}"
        if not bucket.length:
            return f"{span} no draft length pays"
        ends = sorted({bucket.lo, bucket.hi})
        gains = ", ".join(f"{self.point(batch).speedup:.2f}x at {batch}" for batch in ends)
        is_best = all(self.speculation.best(batch, self.context).length == bucket.length for batch in ends)
        return f"{'best' if is_best else 'as long as allowed'} {span}: {gains}"

    def capped(self, longest: int) -> DraftPlan:
        """The same with no length beyond `longest`; neighbours that become alike are joined."""
        buckets: list[Bucket] = []
        for bucket in self.buckets:
            length = min(bucket.length, longest)
            if buckets and buckets[-1].length == length:
                buckets[-1] = buckets[-1]._replace(hi=bucket.hi)
            else:
                buckets.append(bucket._replace(length=length))
        return replace(self, buckets=tuple(buckets))


def plan_draft(
    target: ModelShape,
    deployment: Deployment,
    proposal: Proposal,
    *,
    context: float,
    most: int,
    batch: int | None = None,
    longest: int = LONGEST,
    assumed: bool = False,
) -> DraftPlan:
    """The draft lengths of a drafter at every batch up to `most`.

    batch: see `DraftPlan`; None takes `most`, since a length chosen for few sequences loses where many run, and one
    chosen for many gives less where few run. longest: draft tokens that are tried.

    Raises:
        PlanError: `most` or `batch` is out of range, the sequences don't fit the memory, or no draft length pays at any
            batch.
    """
    if not 1 <= most <= MOST:
        raise PlanError("most", f"{most} is not allowed; expected 1 to {MOST}")
    chosen = most if batch is None else batch
    if not 1 <= chosen <= most:
        raise PlanError("batch", f"{chosen} is not allowed; expected 1 to {most}, which is --most")
    if longest < 1:
        raise PlanError("longest", f"{longest} is not allowed; expected at least 1")
    speculation = Speculation(TargetSteps(target.network, deployment), proposal, longest=longest)
    buckets = tuple(speculation.schedule(context, most))
    plan = DraftPlan(target, deployment, proposal, speculation, context, most, chosen, buckets, assumed)
    if not plan.longest:
        raise PlanError(
            "drafter",
            f"no draft length of {proposal.drafter.name} pays at any batch from 1 to {most} with {context:g} cached "
            "tokens: leave speculation off, or try another drafter or a longer context",
        )
    held = context + plan.longest + 1
    check_fits(target.network, deployment, batch=most, context=held, drafter=proposal.drafter)
    return plan


class Note(NamedTuple):
    """Why a key has its value. key: its path in the configuration, with dots; an entry of a list by its index."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Export:
    """A configuration for one engine.

    form: how it is written: "shell" (flags of `command`), "yaml" (a file that `command` reads), "python" (arguments of
    a class). config: flags or keys with their values, in order; "model" of a shell form is the positional argument.
    notes: the reasons, in the order of the keys. warnings: what the engine's documentation says against it.
    placeholders: keys whose value is still to be filled in.
    """

    schema: Schema
    plan: DraftPlan
    form: Literal["shell", "yaml", "python"]
    command: tuple[str, ...]
    config: dict[str, Any]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()


@dataclass
class Entries:
    """A configuration while it is put together: keys with their reasons."""

    config: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    placeholders: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, reason: str = "", *, table: str | None = None) -> None:
        """Adds a key, to a table of the configuration if one is named."""
        home = self.config if table is None else self.config.setdefault(table, {})
        home[key] = value
        path = key if table is None else f"{table}.{key}"
        if reason:
            self.note(path, value, reason)
        if is_placeholder(value):
            self.placeholders.append(path)

    def note(self, path: str, value: Any, reason: str) -> None:
        """Adds a reason alone, for a part of a value."""
        self.notes.append(Note(path, value, reason))


_CHECKPOINTS = {"medusa": "Medusa heads", "eagle": "EAGLE checkpoint", "eagle3": "EAGLE-3 checkpoint"}


def target_path(plan: DraftPlan, given: str | None) -> str:
    """The target's checkpoint, or a placeholder for it."""
    return given or f"<path of {plan.target.name}>"


def drafter_path(plan: DraftPlan, given: str | None) -> str:
    """The drafter's checkpoint, or a placeholder for it."""
    drafter = plan.proposal.drafter
    what = _CHECKPOINTS.get(drafter.kind)
    return given or (f"<path of the {what} for {plan.target.name}>" if what else f"<path of {drafter.name}>")


def is_placeholder(value: object) -> bool:
    """Whether `target_path` or `drafter_path` made it up."""
    return isinstance(value, str) and value.startswith("<path of ")


def check_split(plan: DraftPlan, engine: str) -> None:
    """Raises PlanError where an engine can't split the model's attention over the tensor-parallel accelerators."""
    heads, tensor = plan.target.heads, plan.deployment.tensor
    if heads % tensor:
        raise PlanError(
            "tensor",
            f"{tensor} is not allowed; {engine} splits the {heads} attention heads of {plan.target.name} evenly; "
            "expected a divisor of them",
        )


def refuse(plan: DraftPlan, engine: str, reason: str) -> PlanError:
    """The error for a drafter that an engine doesn't run."""
    return PlanError("drafter", f"{engine} doesn't run {plan.proposal.drafter.kind}: {reason}")


def one_length(plan: DraftPlan, engine: str) -> int:
    """The draft length for an engine that has one for all batches.

    Raises:
        PlanError: at `plan.batch` none pays.
    """
    if not plan.length:
        raise PlanError(
            "batch",
            f"{engine} has one draft length for all batches, and at batch {plan.batch} none pays; drafting pays up to "
            f"batch {plan.last_batch}: export with --most {plan.last_batch}, or leave speculation off",
        )
    return plan.length


def why_one(plan: DraftPlan) -> str:
    """Why a single length was taken, and what it gives up elsewhere."""
    point = plan.point(plan.batch)
    text = f"best at batch {plan.batch}: {point.speedup:.2f}x"
    if plan.batch > 1 and plan.bucket_at(1).length != plan.length:
        best, here = plan.point(1), plan.point(1, plan.length)
        text += f"; at batch 1 it gives {here.speedup:.2f}x, {best.length} would give {best.speedup:.2f}x"
    if plan.batch < plan.most and plan.bucket_at(plan.most).length != plan.length:
        peak = plan.point(plan.most, plan.length)
        text += f"; at batch {plan.most} it gives {peak.speedup:.2f}x"
    return text


def losses(plan: DraftPlan, length: int) -> list[str]:
    """A warning if one length for all batches loses at some: where, and how much."""
    ends = sorted({batch for bucket in plan.buckets for batch in (bucket.lo, bucket.hi)})
    worst = min((plan.point(batch, length) for batch in ends), key=lambda point: point.speedup)
    if worst.speedup >= 1:
        return []
    return [
        f"{length} draft tokens are slower than none at batch {worst.batch} ({worst.speedup:.2f}x); --batch "
        f"{worst.batch} chooses for that load"
    ]
