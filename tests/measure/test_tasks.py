"""Task files: what is read, what is refused, and the code edits that are made from HumanEval."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forerun.errors import InvalidRequestError
from forerun.measure.tasks import Task, families, groups, read_tasks
from reference.scripts import loaded

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tasks"
CODE_EDIT = TASKS / "code_edit.jsonl"
DATA = ROOT.parent / "shared" / "data"
KINDS = ["type_hints", "typo", "rename", "docstring"]

pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="tasks/ isn't part of this tree")


def data(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} isn't here: it is data that the project doesn't carry")
    return path


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    yield from loaded(TASKS / "make_code_edit.py")


def code_of(prompt: str) -> str:
    found = re.fullmatch(r".*\n\n```python\n(.*)```", prompt, flags=re.DOTALL)
    assert found is not None, prompt
    return found[1]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_code_edits_are_many_and_even() -> None:
    tasks = read_tasks(CODE_EDIT)
    assert len(tasks) == 48
    assert Counter(task.category for task in tasks) == {f"code_edit/{kind}": 12 for kind in KINDS}
    # Any beginning of the file has all kinds.
    assert [task.category.split("/")[1] for task in tasks] == KINDS * 12
    assert len({task.task_id for task in tasks}) == 48
    # One program, one task: no answer can be copied from another task's.
    assert len({task.task_id.rsplit("/", 1)[0] for task in tasks}) == 48


def test_every_code_edit_is_a_program_that_the_answer_repeats() -> None:
    for task in read_tasks(CODE_EDIT):
        code = code_of(task.prompt)
        assert any(isinstance(node, ast.FunctionDef) for node in ast.parse(code).body)
        assert "Change nothing else." in task.prompt
        assert len(code) > 0.4 * len(task.prompt)
        # At 2.5 characters a token the whole code fits, and a bit more.
        assert task.max_tokens is not None
        assert len(code) / 2.5 < task.max_tokens < 640


def test_what_is_asked_can_be_done() -> None:
    for task in read_tasks(CODE_EDIT):
        code, kind = code_of(task.prompt), task.category.split("/")[1]
        if kind == "rename":
            found = re.match(r"Rename the (?:function|parameter) `(\w+)`(?: of `\w+`)? to `(\w+)`", task.prompt)
            assert found is not None
            assert len(re.findall(rf"\b{found[1]}\b", code)) >= 2
            assert not re.search(rf"\b{found[2]}\b", code)
        elif kind == "type_hints":
            name = re.findall(r"`(\w+)`", task.prompt)[0]
            function = next(n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef) and n.name == name)
            assert function.returns is None
            assert function.args.args
            assert not any(argument.annotation for argument in function.args.args)
        elif kind == "docstring":
            name = re.findall(r"`(\w+)`", task.prompt)[0]
            function = next(n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef) and n.name == name)
            assert (ast.get_docstring(function) is None) == task.prompt.startswith("Add a docstring")


def test_the_checked_in_file_is_what_the_script_makes(maker: ModuleType) -> None:
    with data("human_eval.jsonl").open(encoding="utf-8") as lines:
        made = maker.make(maker.programs(lines))
    assert CODE_EDIT.read_text("utf-8") == "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in made)


def test_a_typo_is_two_letters_swapped_in_one_place(maker: ModuleType) -> None:
    with data("human_eval.jsonl").open(encoding="utf-8") as lines:
        problems = {program.name: program for program in maker.programs(lines)}
    checked = 0
    for task in read_tasks(CODE_EDIT):
        name, kind = task.task_id.rsplit("/", 1)
        if kind == "typo":
            code, right = code_of(task.prompt), problems[name].text
            differing = [i for i, (a, b) in enumerate(zip(code, right, strict=True)) if a != b]
            assert len(differing) == 2
            first, second = differing
            assert second == first + 1
            assert code[first] + code[second] == right[second] + right[first]
            wrong = next(m[0] for m in re.finditer(r"\w+", code) if m.start() <= first < m.end())
            assert len(re.findall(rf"\b{wrong}\b", code)) == 1
            checked += 1
    assert checked == 12


PROGRAM = '''\
def total(numbers, start):
    """Adds numbers up.

    >>> total([1, 2], 3)
    6
    """
    result = start
    for number in numbers:
        result = result + number
    return result
'''


def test_edits_of_a_small_program(maker: ModuleType) -> None:
    program = maker.Program("X/0", PROGRAM, "total")
    hints = maker.type_hints(program)
    assert (hints.code, len(hints.reference) > len(PROGRAM)) == (PROGRAM, True)
    assert maker.type_hints(maker.Program("X/0", PROGRAM.replace("numbers,", "numbers: list,"), "total")) is None
    renamed = maker.rename(program)
    old, new = re.findall(r"`(\w+)`", renamed.request)[:: 2 if "parameter" in renamed.request else 1][:2]
    assert renamed.reference == re.sub(rf"\b{old}\b", new, PROGRAM)
    assert renamed.reference.count(new) >= 2
    typo = maker.typo(program)
    assert sorted(typo.code) == sorted(PROGRAM)
    assert typo.code != PROGRAM == typo.reference
    rewritten = maker.docstring(program)
    assert rewritten.code == PROGRAM
    assert rewritten.request.startswith("Replace the docstring of `total`")
    long = PROGRAM + "    # " + "x" * 200 + "\n"
    bare = maker.docstring(maker.Program("X/0", long, "total"))
    assert bare.request.startswith("Add a docstring")
    assert bare.code == long.replace(PROGRAM[PROGRAM.index('    """') : PROGRAM.index("    result")], "")
    assert maker.docstring(maker.Program("X/0", bare.code, "total")) is None


def test_too_few_programs_are_an_error(maker: ModuleType) -> None:
    with pytest.raises(SystemExit, match="only 1 of 12 programs suit type_hints"):
        maker.make([maker.Program("X/0", PROGRAM, "total")])


def test_an_input_that_is_no_human_eval_is_told_in_one_line(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "other.jsonl", {"task_id": "X/0"})
    for name, complaint in (
        (str(tmp_path / "absent"), "absent can't be read: No such file"),
        (str(other), "other.jsonl is not HumanEval's JSON lines: KeyError"),
        (str(write(tmp_path / "text", "words")), "text is not HumanEval's JSON lines: JSONDecodeError"),
    ):
        monkeypatch.setattr(sys, "argv", ["make_code_edit.py", name])
        with pytest.raises(SystemExit) as ended:
            maker.main()
        # A text is printed as it is, with exit code 1.
        assert complaint in str(ended.value)
        assert "\n" not in str(ended.value)


def test_spec_bench_is_read_by_its_own_fields() -> None:
    tasks = read_tasks(data("spec_bench.jsonl"))
    assert Counter(task.category for task in tasks) == {
        "chat": 40, "translation": 40, "summarization": 40, "qa": 40, "math_reasoning": 40, "rag": 40,
    }  # fmt: skip
    assert all(task.max_tokens is None for task in tasks)
    assert next(task for task in tasks if task.category == "summarization").prompt.startswith("Summarize: ")


def test_both_forms_in_one_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tasks.jsonl",
        {"question_id": 7, "category": "roleplay", "turns": ["first", "second"], "reference": []},
        "",
        {"task_id": "a", "category": "code_edit/typo", "prompt": "one\u2028line", "max_tokens": 9},
        {"task_id": "b", "category": "other", "prompt": "p"},
    )
    assert read_tasks(path) == [
        Task("7", "chat", "first", None),
        Task("a", "code_edit/typo", "one\u2028line", 9),
        Task("b", "other", "p", None),
    ]


def test_a_byte_order_mark_and_all_letters_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    line = json.dumps({"task_id": "é", "category": "編集", "prompt": "a\tb\x1b\u2028🙂"})
    path.write_text(f"\ufeff{line}\n", encoding="utf-8")
    assert read_tasks(path) == [Task("é", "編集", "a\tb\x1b\u2028🙂", None)]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"task_id": "a", "category": "c", "prompt": "x\u2028y"}, ensure_ascii=False) + "\n")
    assert read_tasks(path)[0].prompt == "x\u2028y"


def test_a_limit_is_for_each_category(tmp_path: Path) -> None:
    lines = [{"task_id": f"{c}{n}", "category": c, "prompt": "p"} for n in range(4) for c in ("x", "y")]
    path = write(tmp_path / "tasks.jsonl", *lines)
    assert [task.task_id for task in read_tasks(path, 2)] == ["x0", "y0", "x1", "y1"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"line 2 of [^:]* is no JSON: [^:()]+ \(column 2\)$"),
        (
            {"task_id": "a\x1b[31m", "category": "c", "prompt": "p"},
            r"line 2 of .*: task_id '.*' has a control character",
        ),
        ({"task_id": "a", "category": "c\n", "prompt": "p"}, r"line 2 of .*: category 'c\\n' has a control character"),
        ({"task_id": "a", "category": "c\u2028", "prompt": "p"}, "has a control character"),
        ({"task_id": "a", "category": "c", "prompt": "p\ud83d"}, "line 2 of .*: prompt has half of a surrogate pair"),
        ({"question_id": "a\x9b", "category": "qa", "turns": ["p"]}, "question_id '.*' has a control character"),
        ({"question_id": 1, "category": "qa", "turns": ["\udc00"]}, "turns has half of a surrogate pair"),
        ("[" * 100_000, "line 2 of "),
        ([1], "expected a JSON object"),
        ({"category": "c", "prompt": "p"}, "task_id must be a text"),
        ({"task_id": "a", "category": "c", "prompt": " "}, "prompt must be a text that isn't empty"),
        ({"task_id": "a", "category": 3, "prompt": "p"}, "category must be a text"),
        ({"task_id": "a", "category": "c", "prompt": "p", "max_tokens": 0}, "max_tokens=0 is not allowed"),
        ({"task_id": "a", "category": "c", "prompt": "p", "max_tokens": True}, "max_tokens=True is not allowed"),
        ({"task_id": "first", "category": "c", "prompt": "p"}, "'first' is there twice"),
        ({"question_id": 1, "category": "cooking", "turns": ["p"]}, "category 'cooking' is not one of writing, "),
        ({"question_id": 1, "category": "qa", "turns": []}, "turns must be a list of texts"),
        ({"question_id": 1, "category": "qa", "turns": [""]}, "turns must be a text that isn't empty"),
        ({"question_id": None, "category": "qa", "turns": ["p"]}, "question_id must be a number or a text"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path: Path, line: Any, complaint: str) -> None:
    path = write(tmp_path / "tasks.jsonl", {"task_id": "first", "category": "c", "prompt": "p"}, line)
    with pytest.raises(InvalidRequestError, match=complaint):
        read_tasks(path)


def test_a_file_must_be_there_and_have_tasks(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="can't be read: No such file"):
        read_tasks(tmp_path / "absent")
    with pytest.raises(InvalidRequestError, match="has no tasks"):
        read_tasks(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"task_id": "\xe9"}')
    with pytest.raises(InvalidRequestError, match=r"isn't UTF-8 \(byte 13\)"):
        read_tasks(tmp_path / "latin.jsonl")


def test_groups_have_one_category() -> None:
    tasks = [Task(f"{c}{n}", c, "p", 1) for n in range(5) for c in "xy"]
    found = [[task.task_id for task in group] for group in groups(tasks, 2)]
    assert found == [["x0", "x1"], ["x2", "x3"], ["x4"], ["y0", "y1"], ["y2", "y3"], ["y4"]]


def test_a_category_belongs_to_its_family() -> None:
    assert families("code_edit/typo") == ["code_edit", "code_edit/typo"]
    assert families("chat") == ["chat"]
