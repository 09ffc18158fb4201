"""The client: every way in which a process can misbehave, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from left_behind import group_lives, in_folder, watched

from kdtr.conformance import load_engine, stdio_process, stdio_tensors
from kdtr.conformance.stdio_engine import StdioEngine
from kdtr.conformance.stdio_process import MAX_REPLY
from kdtr.contract import (
    Acceptance,
    CacheError,
    CheckpointError,
    DraftTree,
    EngineError,
    InputError,
    SessionError,
    TreeError,
    UnsupportedError,
)

SCRIPT = Path(__file__).parent / "engines" / "stdio_misbehaving.py"
TREE = DraftTree((1, 2), (-1, 0))
SILENCE = "; it wrote nothing to stderr"
Start = Callable[..., StdioEngine]


def command(fault: str, verb: str = "prefill") -> str:
    return shlex.join([sys.executable, "-I", "-S", str(SCRIPT), fault, verb])


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    in_folder(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def start(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(fault, verb, timeout_s=): the engine; afterwards no process and no file is left."""
    monkeypatch.setattr(stdio_process, "_GRACE_S", 0.5)
    pids = watched(monkeypatch)
    engines: list[StdioEngine] = []

    def start(
        fault: str, verb: str = "prefill", timeout_s: float = 20, isolate: bool = False
    ) -> StdioEngine:
        line = command(fault, verb)
        engines.append(StdioEngine(line, timeout_s=timeout_s, isolate=isolate))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    assert pids
    assert [] == [pid for pid in pids if group_lives(pid)]
    assert [] == list(scratch.iterdir())


def session(engine: StdioEngine, source: Any = "some/path") -> Any:
    return engine.load(source).open(max_len=9)


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(EngineError) as failed:
        call()
    return str(failed.value)


def test_an_honest_engine(start: Start) -> None:
    engine = start("honest")
    opened = session(engine)

    assert ("few words", True) == (engine.info.name, engine.info.profile.deterministic)
    assert 1 == opened.prefill([3, 4])
    assert (3, 1) == (opened.committed_len, opened.root)
    assert (1, 2) == opened.verify(TREE).targets
    assert Acceptance((0, 1), 4) == opened.accept(TREE)
    assert (5, 4) == opened.round(TREE).emitted
    assert TREE == opened.build(np.zeros((2, 5)), 1)
    opened.close()


# The process breaks the exchange


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            "crash",
            "the engine was ended by signal 11 (SIGSEGV) before it replied; its stderr ends with: "
            "illegal memory access",
        ),
        ("leave", "the engine exited with code 0 before it replied" + SILENCE),
        (
            "truncated",
            "the engine exited with code 3 within a reply, after 21 bytes without a newline: "
            '\'{"id": 4, "ok": {"roo\'' + SILENCE,
        ),
        ("deaf", "the engine closed its stdin or stdout before it replied" + SILENCE),
        (
            "noise",
            "the engine wrote to stdout what is no reply: 'Loading weights: 100%' (Expecting "
            "value: line 1 column 1 (char 0)); expected one JSON object a line, and logs on stderr"
            + SILENCE,
        ),
        ("wrong_id", "the reply has id 8; expected 4, the request's" + SILENCE),
        ("no_id", "the reply has id null; expected 4, the request's" + SILENCE),
        (
            "utf_16",
            "the engine wrote to stdout what is no reply: '\N{REPLACEMENT CHARACTER}",
        ),
        ("bom", "the engine wrote to stdout what is no reply: '\\ufeff{"),
        ("nan", 'the engine wrote to stdout what is no reply: \'{"id": 4, '),
        (
            "huge",
            f'the reply is longer than {MAX_REPLY} bytes, it begins \'{{"id": 4, "ok": ',
        ),
        (
            "chatty_crash",
            "the engine exited with code 1 before it replied; its stderr ends with: "
            + "x" * 200
            + " | [31mno memory left [0m",
        ),
    ],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_what_ends_a_process(start: Start, fault: str, text: str) -> None:
    opened = session(start(fault))

    said = failure(lambda: opened.prefill([3]))

    assert said.startswith(f"prefill(): {text}")
    assert text in said


@pytest.mark.parametrize(
    ("fault", "got", "stderr"),
    [
        ("hang", "", "; its stderr ends with: waiting for a device"),
        ("stalled", ", only 7 bytes without a newline", SILENCE),
    ],
)
def test_no_reply_in_time(start: Start, fault: str, got: str, stderr: str) -> None:
    opened = session(start(fault, timeout_s=2))
    began = time.monotonic()

    said = failure(lambda: opened.prefill([3]))

    assert (
        f"prefill(): no reply within timeout_s = 2 s{got}; the engine was stopped{stderr}" == said
    )
    assert time.monotonic() - began < 15


def test_a_request_that_the_engine_does_not_read(start: Start) -> None:
    opened = session(start("hang", timeout_s=2))

    assert "no reply within" in failure(lambda: opened.prefill([3] * 1_000_000))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("grandchild", "no reply within timeout_s = 2 s; the engine was stopped"),
        ("daemon", "the engine exited with code 4 before it replied"),
    ],
)
def test_what_the_engine_started_ends_with_it(start: Start, fault: str, text: str) -> None:
    """`start` looks for the whole group."""
    opened = session(start(fault, timeout_s=2))

    said = failure(lambda: opened.prefill([3]))

    assert re.fullmatch(rf"prefill\(\): {text}; its stderr ends with: started \d+", said), said


@pytest.mark.parametrize(
    ("fault", "shown"), [("noise_after", "done in 3 ms"), ("twice", '{"id": 4, "ok"')]
)
def test_output_that_nobody_asked_for(start: Start, fault: str, shown: str) -> None:
    opened = session(start(fault))
    opened.prefill([3])
    time.sleep(0.3)  # what comes later is found at a later request

    said = failure(opened.snapshot)

    assert said.startswith(f"snapshot(): the engine wrote to stdout without being asked: '{shown}")


def test_a_chatty_stderr_blocks_nothing(start: Start) -> None:
    opened = session(start("chatty"))

    assert [1, 1, 1] == [opened.prefill([3]) for _ in range(3)]


# The reply is whole and wrong: the process goes on


@pytest.mark.parametrize(
    ("verb", "fault", "text"),
    [
        (
            "prefill",
            "float_root",
            "prefill(): the reply has root = 1.5; expected an integer of 64 bits",
        ),
        ("prefill", "no_root", "prefill(): the reply lacks root; expected an integer of 64 bits"),
        (
            "prefill",
            "more",
            "prefill(): the reply has the unknown field time_us; expected root",
        ),
        ("prefill", "list", "prefill(): the reply has ok = [1]; expected an object"),
        (
            "prefill",
            "neither",
            "prefill(): the reply has the fields id, root; expected id, one of ok and error, and "
            "wrote where a file was written",
        ),
        ("prefill", "flag", "prefill(): the reply has wrote = 1; expected true or false"),
        ("prefill", "raises", "the engine raised std::bad_alloc: no memory"),
        (
            "verify",
            "three_targets",
            "verify() returned 3 targets, the tree has 2 nodes; expected 2",
        ),
        (
            "accept",
            "path_back",
            "accept(): the reply is no acceptance: path[2] = 1 after path[1] = 2; expected node "
            "ids that strictly increase",
        ),
        (
            "build",
            "no_tree",
            "build(): the reply is no tree: parents[1] = 1, but a parent precedes its child; "
            "expected parents[1] = 0",
        ),
        (
            "snapshot",
            "honest",
            "snapshot(): the reply comes without tokens, positions, c_kv, k_pe; expected them in "
            "the file that the request names in `out`, and `wrote` true",
        ),
        (
            "commit",
            "says_wrote",
            "commit(): the reply says wrote, but the request named no file to write",
        ),
    ],
    ids=range(12),
)
def test_a_reply_that_is_no_answer(start: Start, verb: str, fault: str, text: str) -> None:
    engine = start(fault, verb)
    opened = session(engine)
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: opened.prefill([3]),
        "verify": lambda: opened.verify(TREE),
        "accept": lambda: opened.accept(TREE),
        "build": lambda: opened.build(np.zeros((1, 3), np.float32), 1),
        "snapshot": opened.snapshot,
        "commit": lambda: opened.commit(Acceptance((0,), 1)),
    }

    assert text == failure(calls[verb])
    assert 3 == opened.committed_len


def test_a_refusal_in_the_engine_s_own_class_and_words(start: Start) -> None:
    opened = session(start("refuses"))

    with pytest.raises(CacheError, match=r"^needs 9 slots, has 8$"):
        opened.prefill([3])
    assert 3 == opened.committed_len


def test_a_file_that_is_not_there(start: Start) -> None:
    opened = session(start("says_wrote"))

    said = failure(lambda: opened.prefill([3]))

    assert re.fullmatch(r"prefill\(\): the file of the reply: .*\.kdtr: no such file.*", said)


# Files: written here in place of an engine


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"logits": np.zeros((3, 5))}, "verify() returned logits [3, 5]; expected [2, vocab_size]"),
        ({"logits": np.zeros(5)}, "verify() returned logits [5]; expected [2, vocab_size]"),
        (
            {"targets": np.zeros(2)},
            "verify(): the file of the reply holds 'targets'; expected logits",
        ),
        (
            {"logits": np.zeros((2, 5)), "trace/mask": np.ones((2, 5), bool)},
            "verify(): the file of the reply holds 'trace/mask'; expected logits",
        ),
    ],
    ids=range(4),
)
def test_files_that_lie(
    start: Start, monkeypatch: pytest.MonkeyPatch, arrays: dict[str, np.ndarray], text: str
) -> None:
    opened = session(start("says_wrote", "verify"))
    writing(monkeypatch, arrays)

    assert text == failure(lambda: opened.verify(TREE))


@pytest.mark.parametrize("name", ["trace/scores/x", "trace/scores/01", "trace//1", "mask"])
def test_tensors_that_are_no_stage(
    start: Start, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened = session(start("says_wrote", "verify"))
    writing(monkeypatch, {name: np.zeros(2)})

    assert (
        f"verify(): the file of the reply holds {name!r}; expected logits, trace/<stage>, "
        "trace/<stage>/<layer>"
    ) == failure(lambda: opened.verify(TREE, trace=lambda stage, layer, array: None))


def test_a_file_that_is_no_kdtr(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(start("says_wrote", "verify"))
    monkeypatch.setattr(
        stdio_tensors.Scratch, "new_path", lambda self: written(self.path / "x", b"logits")
    )

    said = failure(lambda: opened.verify(TREE))

    assert said.startswith("verify(): the file of the reply: ")
    assert "magic" in said or "KDTR" in said


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def writing(monkeypatch: pytest.MonkeyPatch, arrays: dict[str, np.ndarray]) -> None:
    """The next files are already there when the engine is asked to write them."""

    def new_path(scratch: Any) -> Path:
        path = scratch.path / "written.kdtr"
        stdio_tensors.write_tensors(path, arrays)
        return path

    monkeypatch.setattr(stdio_tensors.Scratch, "new_path", new_path)


# Starting and ending


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("newer", "hello(): the engine speaks kdtr_stdio 2; expected 1"),
        ("leave", "hello(): the engine exited with code 0 before it replied" + SILENCE),
        ("batch", "info.verbs names verify_batch; kdtr_stdio 1 carries no batch verbs"),
        ("no_dtype", "the reply's profile lacks weights; expected a text"),
    ],
)
def test_a_hello_that_fails(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    pids = watched(monkeypatch)
    line = command(fault, "hello")

    assert f"engine stdio:{line}: {text}" == failure(lambda: load_engine(f"stdio:{line}"))
    assert [False] == [group_lives(pid) for pid in pids]
    assert [] == list(scratch.iterdir())


def test_an_info_that_the_loader_refuses(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = watched(monkeypatch)
    name = f"stdio:{command('odd_dtype', 'hello')}"

    assert failure(lambda: load_engine(name)).startswith(
        f"engine {name}: profile.latents = 'fp8'; expected one of float64"
    )
    assert [False] == [group_lives(pid) for pid in pids]
    assert [] == list(scratch.iterdir())


@pytest.mark.parametrize("verb", ["load", "open", "prefill"])
def test_after_a_crash_the_next_open_starts_anew(start: Start, verb: str) -> None:
    """Each start has the same fault here: what is not reached goes well again and again."""
    engine = start("leave", verb)
    if verb == "load":
        assert "load(): the engine exited" in failure(lambda: engine.load("x"))
        assert "load(): the engine exited" in failure(lambda: engine.load("x"))  # again
        return
    model = engine.load("x")
    for _ in range(2):
        if verb == "open":
            assert "open(): the engine exited" in failure(lambda: model.open(max_len=9))
            continue
        opened = model.open(max_len=9)
        assert "prefill(): the engine exited" in failure(lambda opened=opened: opened.prefill([3]))
        gone = "state(): the engine's process is gone, since prefill() failed"
        assert gone == failure(lambda opened=opened: opened.committed_len)
        opened.close()  # nothing to do
    model.close()


def test_a_model_that_does_not_load_again_is_given_up(start: Start, tmp_path: Path) -> None:
    once = tmp_path.parent / f"{tmp_path.name}-loaded"
    source = SCRIPT.read_text().replace(
        'def leave(number, verb):\n    sys.exit(0)',
        "def leave(number, verb):\n"
        f"    if verb == 'load' and not os.path.exists({str(once)!r}):\n"
        f"        open({str(once)!r}, 'w').close()\n"
        "        return reply(number, verb)\n"
        "    sys.exit(5)",
    ).replace('request["verb"] == VERB', 'request["verb"] in ("load", "prefill")')  # fmt: skip
    script = once.with_suffix(".py")
    script.write_text(source)
    words = [sys.executable, "-I", "-S", str(script), "leave"]
    start("honest")  # for what the fixture looks at
    with StdioEngine(shlex.join(words), timeout_s=20) as engine:
        model = engine.load("x")
        opened = model.open(max_len=9)
        failure(lambda: opened.prefill([3]))

        said = failure(lambda: model.open(max_len=9))

        assert (
            "the engine was started again, but load(): the engine exited with code 5 before it "
            f"replied{SILENCE}; the model is given up"
        ) == said
        assert said == failure(lambda: model.open(max_len=9))
        model.close()


def test_each_session_in_a_process_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = watched(monkeypatch)
    model = start("honest", isolate=True).load("some/path")

    first, second = model.open(max_len=9), model.open(max_len=9)
    assert 1 == first.prefill([3]) == second.prefill([3])
    first.close()

    assert [False, True] == [group_lives(pid) for pid in pids]
    with pytest.raises(SessionError, match=r"^the session is closed; open another$"):
        first.prefill([3])
    assert 1 == second.prefill([3])


def test_a_crash_in_a_process_of_its_own_leaves_the_others(start: Start) -> None:
    model = start("crash", isolate=True).load("some/path")
    first, second = model.open(max_len=9), model.open(max_len=9)

    assert "SIGSEGV" in failure(lambda: first.prefill([3]))
    assert (3, 1) == (second.committed_len, second.root)
    assert 3 == model.open(max_len=9).committed_len


def test_a_closed_engine(start: Start) -> None:
    engine = start("honest")
    opened = session(engine)
    engine.close()
    engine.close()

    assert "the engine is closed; make another one" == failure(lambda: engine.load("x"))
    assert ("prefill(): the engine's process is gone, since it was closed") == failure(
        lambda: opened.prefill([1])
    )
    opened.close()


def test_a_forgotten_engine_ends(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = watched(monkeypatch)
    engine: StdioEngine | None = StdioEngine(command("honest"), timeout_s=20)
    assert engine is not None
    opened = session(engine)
    engine = None
    gc.collect()
    assert 1 == opened.prefill([1])  # a session keeps it alive

    del opened
    gc.collect()

    assert [False] == [group_lives(pid) for pid in pids]
    assert [] == list(scratch.iterdir())


@pytest.mark.parametrize("end", ["", "raise ValueError('by the way')", "sys.exit(3)"])
def test_at_exit_nothing_is_left(tmp_path: Path, end: str) -> None:
    code = (
        "import sys, tempfile\n"
        "from kdtr.conformance import load_engine, stdio_tensors\n"
        "from pathlib import Path\n"
        "stdio_tensors._MEMORY, name = Path(sys.argv[1]), sys.argv[2]\n"
        "engine = load_engine(name)\n"
        "session = engine.load('x').open(max_len=3)\n"
        "print(engine._connection._process._child.pid)\n" + end
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), f"stdio:{command('honest')}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    assert not group_lives(int(run.stdout)), run.stderr
    assert [] == list(tmp_path.iterdir())


def test_an_interrupted_request_ends_the_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: the late reply must not answer the next request."""
    opened = session(start("hang"))

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stdio_process.EngineProcess, "_receive", interrupted)

    with pytest.raises(KeyboardInterrupt):
        opened.prefill([3])
    assert ("state(): the engine's process is gone, since prefill() was interrupted") == failure(
        lambda: opened.root
    )


# What callers hand in


def test_a_pair_is_written_and_removed(
    start: Start, scratch: Path, small_model: SimpleNamespace
) -> None:
    model = start("honest").load((small_model.config, small_model.weights))
    (written_,) = scratch.glob("*/model.kdtr")

    assert small_model.config is model.config
    assert written_.stat().st_size > 0
    model.close()
    assert not written_.exists()


def test_the_configuration_of_a_path_is_read_when_asked_for(start: Start, small: Path) -> None:
    engine = start("honest")

    assert 37 == engine.load(str(small)).config.vocab_size
    with pytest.raises(CheckpointError):
        _ = engine.load("no/such").config


def test_a_source_that_is_no_model_is_refused_here(start: Start) -> None:
    with pytest.raises(CheckpointError, match=r"^source is \(int, dict\); expected"):
        start("honest").load((1, {}))  # type: ignore[arg-type]


def test_inputs_that_no_request_can_say(start: Start) -> None:
    opened: Any = session(start("honest"))
    cases: tuple[tuple[type[Exception], str, Callable[[], object]], ...] = (
        (InputError, "tokens = 'abc'; expected a sequence", lambda: opened.prefill("abc")),
        (InputError, "tokens[1] = True; expected an integer", lambda: opened.prefill([1, True])),
        (InputError, "tokens[0] = 1.0; expected an integer", lambda: opened.prefill([1.0])),
        (InputError, "of 64 bits", lambda: opened.prefill([2**63])),
        (InputError, "tokens[0] = an integer of 16610 bits", lambda: opened.prefill([10**5000])),
        (InputError, "trace is int; expected", lambda: opened.prefill([1], trace=3)),
        (TreeError, "tree is str; expected a DraftTree", lambda: opened.verify("tree")),
        (TreeError, "tokens[0] = 9223372036854775808", lambda: opened.verify(_deep())),
        (InputError, "limit is NoneType; expected", lambda: opened.round(TREE, limit=None)),
        (InputError, "acceptance is tuple; expected", lambda: opened.commit((0,))),
        (InputError, "targets[0] = 'x'; expected", lambda: opened.accept(TREE, ["x"])),
        (InputError, "budget = 1.5; expected an integer", lambda: opened.build([[1.0]], 1.5)),
        (InputError, "draft_logits has dtype", lambda: opened.build([["x"]], 1)),
        (InputError, "draft_logits is list, which", lambda: opened.build([[1], [2, 3]], 1)),
        (UnsupportedError, "few words does not offer reset()", lambda: opened.reset()),
        (UnsupportedError, "does not offer decode()", lambda: opened.decode()),
    )
    for kind, text, call in cases:
        with pytest.raises(kind, match=re.escape(text)):
            call()
    assert 1 == opened.prefill(np.array([1, 2], np.int32))


def _deep() -> DraftTree:
    return DraftTree((2**63, 1), (-1, 0))
