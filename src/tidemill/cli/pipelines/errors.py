"""Extracts the one sentence that matters from what Spark says when a pipeline fails.

- Spark repeats an error with its plan, its stack and once more inside another; ``essence`` keeps the
  innermost sentence.
- A traceback of the pipeline's own files names the file and line: ``cause_of``.
- Spark names the flow, not the file that defines it: ``definition_of`` finds the definition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ("Cause", "cause_of", "definition_of", "essence", "short_name")

_TRACEBACK: Final = "Traceback (most recent call last):"
#: The outermost frame of a program that runs as a module. Tracebacks of workers do not have it.
_PROGRAM: Final = re.compile(rf'^{re.escape(_TRACEBACK)}\n  File "<frozen runpy>"', re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+)')
#: What Spark puts around the message of an error.
_WRAPPING: Final = re.compile(
    r"^(?:"
    r"\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception: "
    r"|\[PYTHON_EXCEPTION\] An exception was thrown from the Python worker: "
    r"|\([\w.$]+\) "
    r"|(?:[\w$]+\.)+[\w$]*(?:Exception|Error): "
    r")"
)
_AFTERWARDS: Final = re.compile(r"\s*SQLSTATE: \w+|\n=== Streaming Query ===|\n\s*\n")
_MODULE: Final = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
_DEFAULTS: Final = ("spark_catalog.", "default.")
_CHARACTERS_MAX: Final = 1_500


class Cause(NamedTuple):
    """Why a program ended: the message, and the line of the pipeline's own code that led there."""

    message: str
    path: Path | None = None
    line: int | None = None


def short_name(flow: str) -> str:
    """A flow's name without Spark's default catalog and database.

    >>> short_name("spark_catalog.default.orders")
    'orders'
    """
    for prefix in _DEFAULTS:
        flow = flow.removeprefix(prefix)
    return flow


def essence(text: str) -> str:
    """The essential message of an error of Spark, on one line.

    >>> essence("[STREAM_FAILED] Query [id = 1] terminated with exception: [X] no. SQLSTATE: XXKST")
    '[X] no.'
    """
    text = text.strip()
    before_plan = text.split("\n=== Streaming Query ===")[0]
    if _TRACEBACK in before_plan:
        found = _last_exception(before_plan)
    else:
        while match := _WRAPPING.match(text):
            text = text[match.end() :].lstrip()
        found = _AFTERWARDS.split(text, maxsplit=1)[0]
    words = " ".join(found.split())
    return words if len(words) <= _CHARACTERS_MAX else f"{words[:_CHARACTERS_MAX]}…"


def cause_of(errors: str, project: Path) -> Cause | None:
    """The cause that a program's stderr tells; None if it has no traceback."""
    starts = [each.start() for each in _PROGRAM.finditer(errors)] or [
        each.start() for each in re.finditer(f"^{re.escape(_TRACEBACK)}", errors, re.MULTILINE)
    ]
    if not starts:
        return None
    own = errors[starts[-1] :]
    path, line = None, None
    for text in own.splitlines():
        frame = _FRAME.match(text)
        if frame and _belongs(Path(frame["path"]), project):
            path, line = Path(frame["path"]), int(frame["line"])
    return Cause(_in_words(_exception_of(own)), path, line)


def _belongs(path: Path, project: Path) -> bool:
    return path.is_relative_to(project) and "site-packages" not in path.parts


def _exception_of(traceback: str) -> str:
    """The part of a traceback behind its frames: the exception's class and its message."""
    lines = traceback.splitlines()[1:]
    for number, text in enumerate(lines):
        if text and not text.startswith(" "):
            return "\n".join(lines[number:])
    return lines[-1].strip() if lines else ""


def _in_words(text: str) -> str:
    name, _, message = text.partition(":")
    if name.startswith("pyspark.") and message:
        return essence(message)
    return essence(_MODULE.sub("", text))


def _last_exception(text: str) -> str:
    """The exception of the last traceback in a text, without the module of its class."""
    found = _exception_of(text[text.rfind(_TRACEBACK) :])
    return _MODULE.sub("", _AFTERWARDS.split(found, maxsplit=1)[0])


def definition_of(flow: str, files: Iterable[Path]) -> tuple[Path, int] | None:
    """The file and line that define a flow: a function of its name, or a call with its name."""
    name = short_name(flow).rpartition(".")[2]
    for path in files:
        text = path.read_text("utf-8", errors="replace")
        if path.suffix == ".sql":
            match = re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE)
            if match:
                return path, text.count("\n", 0, match.start()) + 1
        elif line := _defined_in(text, name):
            return path, line
    return None


def _defined_in(source: str, name: str) -> int | None:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (
            node.name == name or any(_names(each, name) for each in node.decorator_list)
        ):
            return node.lineno
    return None


def _names(decorator: ast.expr, name: str) -> bool:
    """Whether a decorator such as ``@dp.append_flow(name="...")`` gives that name."""
    return isinstance(decorator, ast.Call) and any(
        each.arg == "name" and isinstance(each.value, ast.Constant) and each.value.value == name
        for each in decorator.keywords
    )
