"""Drafters: what proposes tokens for the target model to check."""

from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree

__all__ = ["NO_DRAFT", "DraftRow", "DraftTree", "Drafter"]
