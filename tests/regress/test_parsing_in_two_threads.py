"""CPython before 3.13 counts the depth of `ast.parse` once for all threads: a switch in it raised SystemError."""

import ast
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attngen.jit import load
from attngen.source import SYNTAX_LOCK, parse_python

TEXT = "\n".join(f"x{i} = [f(a, {i}), (b, {i}), {{'c': {i}}}]" for i in range(400))


@pytest.fixture
def switching() -> Iterator[None]:
    """Another thread takes over in every collection, and parsing allocates enough to be collected in."""
    before = gc.get_threshold()

    def switch(phase: str, info: dict[str, int]) -> None:
        time.sleep(1e-4)

    gc.callbacks.append(switch)
    gc.set_threshold(300, 1, 1)
    yield
    gc.callbacks.remove(switch)
    gc.set_threshold(*before)


def in_threads(count: int, work: Callable[[], object]) -> list[BaseException]:
    faults: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


@pytest.mark.usefixtures("switching")
def test_ours_beside_ours() -> None:
    assert in_threads(6, lambda: [parse_python(TEXT) for _ in range(4)]) == []


def test_ours_beside_a_parser_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ast.parse, []

    def disturbed(text: str) -> ast.Module:
        calls.append(text)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=24, after=27)")
        return real(text)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert len(parse_python("a = 1").body) == 1 and len(calls) == 3


def test_the_compiler_in_this_process_keeps_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL parses a kernel without the lock: ours is held around it."""
    taken: list[bool] = []

    def compile_plan(*arguments: object) -> dict[str, str]:
        other = threading.Thread(target=lambda: taken.append(SYNTAX_LOCK.acquire(blocking=False)))
        other.start()
        other.join()
        return {}

    monkeypatch.setattr(load.worker, "compile_plan", compile_plan)
    assert load._compile_here(Path("kernel.py"), 0, Path("plan0"), "") == {}
    assert taken == [False]
