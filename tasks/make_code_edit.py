#!/usr/bin/env python3
"""Makes tasks/code_edit.jsonl: edits of short programs whose answers repeat most of what they were given.

    python tasks/make_code_edit.py ../shared/data/human_eval.jsonl > tasks/code_edit.jsonl

The programs are HumanEval's prompts with their canonical solutions. Each gives one task of one kind:

- rename: a function gets another name, or a function's first parameter does;
- type_hints: annotate a function that has no annotations;
- docstring: write one where it was taken out, or replace a long one by a short one;
- typo: one use of a name has two letters swapped; find and mend it.

Which program serves which kind, and every choice within, follows from SHA-256 of a fixed seed and the program's id:
the same input gives the same bytes on every machine and Python version.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import keyword
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SEED = "code_edit 1"
PER_KIND = 12
SHORTEST, LONGEST = 240, 1100
"""Characters of a program: long enough for something to repeat, short enough to run many."""
CHARACTERS_PER_TOKEN = 2.5
"""A low estimate: the catalog's tokenizers have about 3 on these programs, so that `max_tokens` cuts no answer off."""
SPARE_TOKENS = 64
"""For the fences of the code block, new names and hints, a sentence before the code, or a program full of digits."""

PARAMETER_NAMES = ("items", "source", "given", "entries", "first_value", "content")


class Program(NamedTuple):
    """A HumanEval problem as one text. `function` is the one that its tests call."""

    name: str
    text: str
    function: str

    @property
    def tree(self) -> ast.Module:
        """The syntax tree of the text."""
        return ast.parse(self.text)

    @property
    def node(self) -> ast.FunctionDef:
        """The definition of `function`."""
        return next(n for n in self.tree.body if isinstance(n, ast.FunctionDef) and n.name == self.function)


class Edit(NamedTuple):
    """What is asked, the code that it is asked of, and an answer's code (for its length)."""

    request: str
    code: str
    reference: str


def ordered(program: Program, purpose: str) -> str:
    """A key that sorts programs in an arbitrary but fixed order, another one for each purpose."""
    return hashlib.sha256(f"{SEED}/{purpose}/{program.name}".encode()).hexdigest()


def pick(program: Program, purpose: str, n: int) -> int:
    """An arbitrary but fixed number from 0 to n - 1."""
    return int(ordered(program, purpose)[:12], 16) % n


def rename(program: Program) -> Edit | None:
    """Another name for the function, or for its first parameter, wherever it stands (examples included)."""
    parameters = [argument.arg for argument in program.node.args.args]
    if pick(program, "what to rename", 2):
        old, new = program.function, f"{program.function}_impl"
        what = f"the function `{old}` to `{new}`"
    else:
        free = [name for name in PARAMETER_NAMES if not re.search(rf"\b{name}\b", program.text)]
        if not parameters or not free:
            return None
        old, new = parameters[0], free[pick(program, "new name", len(free))]
        what = f"the parameter `{old}` of `{program.function}` to `{new}`"
    if len(re.findall(rf"\b{old}\b", program.text)) < 2:
        return None
    return Edit(f"Rename {what}, everywhere it is used.", program.text, re.sub(rf"\b{old}\b", new, program.text))


def type_hints(program: Program) -> Edit | None:
    """Annotations for the parameters and the result of a function that has none."""
    node = program.node
    if node.returns is not None or not node.args.args or any(argument.annotation for argument in node.args.args):
        return None
    signature = f"def {program.function}("
    hints = "".join(f"{argument.arg}: list[int], " for argument in node.args.args)
    reference = program.text.replace(signature, f"{signature}{hints}) -> list[int]", 1)
    request = f"Add type hints to the parameters and the return value of `{program.function}`."
    return Edit(request, program.text, reference)


def docstring(program: Program) -> Edit | None:
    """A docstring where there is none, or a short one in place of a long one."""
    node = program.node
    first = node.body[0]
    if ast.get_docstring(node) is None or len(node.body) < 2 or first.end_lineno is None:
        return None
    lines = program.text.splitlines(keepends=True)
    bare = "".join(lines[: first.lineno - 1] + lines[first.end_lineno :])
    new = '    """' + "x" * 160 + '"""\n'
    reference = "".join(lines[: first.lineno - 1]) + new + "".join(lines[first.end_lineno :])
    if len(bare) >= SHORTEST:
        return Edit(f"Add a docstring of one or two sentences to `{program.function}`.", bare, reference)
    request = f"Replace the docstring of `{program.function}` by one of a single sentence that keeps the examples."
    return Edit(request, program.text, program.text)


def typo(program: Program) -> Edit | None:
    """One use of a name, misspelt: two neighbouring letters swapped."""
    body = program.node.body
    start = body[1].lineno if len(body) > 1 else body[0].lineno
    uses = [
        token
        for token in tokenize.generate_tokens(io.StringIO(program.text).readline)
        if token.type == tokenize.NAME
        and token.start[0] >= start
        and len(token.string) >= 4
        and not keyword.iskeyword(token.string)
        and len(re.findall(rf"\b{token.string}\b", program.text)) >= 3
    ]
    if not uses:
        return None
    use = uses[pick(program, "which use", len(uses))]
    swaps = [
        word
        for i in range(1, len(use.string) - 1)
        if (word := use.string[:i] + use.string[i + 1] + use.string[i] + use.string[i + 2 :]) != use.string
        and not re.search(rf"\b{word}\b", program.text)
    ]
    if not swaps:
        return None
    wrong = swaps[pick(program, "which letters", len(swaps))]
    lines = program.text.splitlines(keepends=True)
    line, (row, column) = lines[use.start[0] - 1], use.start
    lines[row - 1] = line[:column] + wrong + line[column + len(wrong) :]
    return Edit("A name in this code is misspelt in one place. Correct it.", "".join(lines), program.text)


KINDS: tuple[tuple[str, Callable[[Program], Edit | None]], ...] = (
    ("type_hints", type_hints),
    ("typo", typo),
    ("rename", rename),
    ("docstring", docstring),
)
"""The pickiest first, since each takes from what is left."""


def programs(lines: Iterator[str]) -> list[Program]:
    """HumanEval's problems of a suitable length, in the order of the file."""
    found = []
    for line in lines:
        if not line.strip():
            continue
        problem = json.loads(line)
        text = (problem["prompt"] + problem["canonical_solution"]).strip("\n") + "\n"
        if SHORTEST <= len(text) <= LONGEST:
            found.append(Program(problem["task_id"], text, problem["entry_point"]))
    return found


def task(program: Program, kind: str, edit: Edit) -> dict[str, object]:
    """One line of the task file."""
    return {
        "task_id": f"{program.name}/{kind}",
        "category": f"code_edit/{kind}",
        "prompt": (
            f"{edit.request} Change nothing else. Answer with the complete code in one Python code block and nothing "
            f"more.\n\n```python\n{edit.code}```"
        ),
        "max_tokens": int(max(len(edit.code), len(edit.reference)) / CHARACTERS_PER_TOKEN) + SPARE_TOKENS,
    }


def make(problems: Sequence[Program]) -> list[dict[str, object]]:
    """The tasks, kinds in turn, so that the first n have them in equal parts."""
    left = list(problems)
    by_kind: dict[str, list[dict[str, object]]] = {}
    for kind, make_edit in KINDS:
        chosen = by_kind[kind] = []
        for program in sorted(left, key=lambda program: ordered(program, kind)):
            edit = make_edit(program)
            if edit is not None:
                chosen.append(task(program, kind, edit))
                left.remove(program)
            if len(chosen) == PER_KIND:
                break
        else:
            raise SystemExit(f"only {len(chosen)} of {PER_KIND} programs suit {kind}; is the input whole?")
    return [one for turn in zip(*by_kind.values(), strict=True) for one in turn]


def main() -> None:
    """Reads HumanEval, writes the tasks to standard output."""
    parser = argparse.ArgumentParser(description="Makes the code-edit tasks from HumanEval.")
    parser.add_argument("human_eval", type=Path, help="human_eval.jsonl")
    path = parser.parse_args().human_eval
    try:
        with path.open(encoding="utf-8") as lines:
            problems = programs(lines)
    except OSError as error:
        raise SystemExit(f"make_code_edit: {path} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"make_code_edit: {path} is not HumanEval's JSON lines: {error!r}") from None
    for one in make(problems):
        sys.stdout.write(json.dumps(one, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
