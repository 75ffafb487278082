"""The step batch: arrays that describe one forward, allocated once and updated in place."""

from __future__ import annotations

import numpy as np

from forerun.engine.request import Request, StepPlan
from forerun.ops import StepInput


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
        self._counting = np.arange(max(max_tokens, table_width * 16) + 1, dtype=np.int32)
        self._lines: dict[Request, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))

    def leave(self, request: Request) -> None:
        """Gives back the request's line, if it has one."""
        line = self._lines.pop(request, None)
        if line is not None:
            self._free.append(line)

    def load(self, plan: StepPlan, outputs: list[int]) -> StepInput:
        """Fills the arrays for a plan; `outputs` are the plan's rows whose last token wants a next-token distribution,
        in the order in which they are wanted. The views returned are valid until the next call.
        """
        at = 0
        for i, row in enumerate(plan.rows):
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
        n = len(plan.rows)
        self._row_start[n] = at
        for i, index in enumerate(outputs):
            self._output[i] = self._row_start[index + 1] - 1
        return StepInput(
            self._tokens[:at],
            self._positions[:at],
            self._row_start[: n + 1],
            self._cached[:n],
            self._is_tree[:n],
            self._ancestors[:at],
            self._tables,
            self._table_row[:n],
            self._output[: len(outputs)],
        )
