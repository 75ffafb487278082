"""The step batch: arrays that describe one forward, allocated once and updated in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.draft.base import DraftTree
from forerun.engine.request import Request, RowPlan
from forerun.ops import BLOCK, StepInput


class StepBatch:
    """Mirrors the running requests as arrays that the executor reads.

    A request takes a line of the block tables when it first runs (`load`) and gives it back in `leave`; between, only
    the entries of its table that changed are written. All arrays are int32 unless `StepInput` says otherwise.
    """

    def __init__(self, *, max_rows: int, max_tokens: int, max_outputs: int, table_width: int) -> None:
        self._tokens = np.zeros(max_tokens, dtype=np.int32)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._row_start = np.zeros(max_rows + 1, dtype=np.int32)
        self._cached = np.zeros(max_rows, dtype=np.int32)
        self._is_tree = np.zeros(max_rows, dtype=np.uint8)
        self._ancestors = np.zeros(max_tokens, dtype=np.uint64)
        self._tables = np.zeros((max_rows, table_width), dtype=np.int32)
        self._table_row = np.zeros(max_rows, dtype=np.int32)
        self._output = np.zeros(max_outputs, dtype=np.int32)
        self._counting = np.arange(max(max_tokens, table_width * BLOCK) + 1, dtype=np.int32)
        self._lines: dict[Request, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))

    def leave(self, request: Request) -> None:
        """Gives back the request's line, if it has one."""
        line = self._lines.pop(request, None)
        if line is not None:
            self._free.append(line)

    def load(self, rows: Sequence[RowPlan], trees: Sequence[DraftTree], outputs: Sequence[int]) -> StepInput:
        """Fills the arrays for planned rows with their drafts.

        `outputs` are the rows whose next-token distributions are wanted, in order: after the row's last known token,
        then after each node of its tree. The views returned are valid until the next call.
        """
        at = 0
        for i, row in enumerate(rows):
            request = row.request
            line = self._lines.get(request)
            if line is None:
                line = self._lines[request] = self._free.pop()
            table = request.table
            assert table is not None, "a planned request has a block table"
            first = table.take_dirty()
            if first < len(table.blocks):
                self._tables[line, first : len(table.blocks)] = table.blocks[first:]
            self._table_row[i] = line
            self._row_start[i] = at
            self._cached[i] = row.start
            if row.count == 1:
                self._tokens[at] = request.tokens[row.start]
                self._positions[at] = row.start
            else:
                self._tokens[at : at + row.count] = request.tokens[row.start : row.start + row.count]
                self._positions[at : at + row.count] = self._counting[row.start : row.start + row.count]
            at += row.count
            tree = trees[i]
            is_tree = 0
            if tree:
                n, position = len(tree), row.start + row.count
                self._tokens[at : at + n] = tree.tokens
                if tree.is_chain:
                    self._positions[at : at + n] = self._counting[position : position + n]
                else:
                    # The root is the row's only known token: bit 0 of the masks.
                    assert row.count == 1, "a tree follows a single known token"
                    is_tree = 1
                    self._ancestors[at - 1] = 1
                    self._ancestors[at : at + n] = tree.ancestors()
                    self._positions[at : at + n] = [position + depth for depth in tree.depths()]
                at += n
            self._is_tree[i] = is_tree
        n_rows = len(rows)
        self._row_start[n_rows] = at
        n_outputs = 0
        for index in outputs:
            width = 1 + len(trees[index])
            end = self._row_start[index + 1]
            self._output[n_outputs : n_outputs + width] = self._counting[end - width : end]
            n_outputs += width
        return StepInput(
            self._tokens[:at],
            self._positions[:at],
            self._row_start[: n_rows + 1],
            self._cached[:n_rows],
            self._is_tree[:n_rows],
            self._ancestors[:at],
            self._tables,
            self._table_row[:n_rows],
            self._output[:n_outputs],
        )
