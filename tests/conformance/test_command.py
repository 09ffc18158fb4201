"""The command as a shell starts it: no engine takes the verdict along when it ends the process."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kdtr.conformance import running
from kdtr.conformance.cli import main
from kdtr.conformance.command import RUN_AN_ENGINE_HERE
from kdtr.conformance.outlive import no_verdict, outlived

KDTR = str(Path(sys.executable).with_name("kdtr"))
ENGINES = Path(__file__).parent / "engines"
FATAL = "fatal_engines:make_engine"
IN_ITS_OWN_PROCESS = "; in a process of its own that is a finding, and the other cases are judged: "

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(word, ...): kdtr in the directory of the engines; what is left of it is killed."""
    started = []

    def start(*words: object) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [KDTR, *map(str, words)], cwd=ENGINES, text=True, start_new_session=True, **pipes
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def of_gate(bundle: Path, end: str, verb: str = "verify") -> list[object]:
    options = ("--engine-option", f"end={end}", "--engine-option", f"verb={verb}")
    return ["gate", bundle, "--engine", FATAL, *options, "--case", "y", "--mode", "stepwise"]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code and both outputs, without the engine's own word."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err.replace("now\n", "")


def begun(process: subprocess.Popen[str]) -> None:
    """Wait until the engine is where it hangs."""
    assert process.stderr is not None
    assert "now\n" == process.stderr.readline()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("_exit", "exited with code 0"),
        ("exit in C", "exited with code 0"),
        ("segfault", "was ended by signal 11 (SIGSEGV)"),
    ],
)
def test_an_engine_that_ends_the_process_leaves_no_verdict(
    start: Start, small: Path, end: str, how: str
) -> None:
    run = ended(start(*of_gate(small, end)))

    said = f"kdtr: no verdict: bundle.kdtr: y / stepwise / round0: verify(): the engine {how} "
    served = f"stdio:kdtr serve-engine --engine {FATAL} "
    served += shlex.join(["--engine-option", f"end={end}", "--engine-option", "verb=verify"])
    advice = f"{IN_ITS_OWN_PROCESS}--engine {shlex.quote(served)}"
    assert (2, "", f"{said}before it returned{advice}\n") == run


@pytest.mark.parametrize(
    ("verb", "where"),
    [
        ("load", "bundle.kdtr: load()"),
        ("open", "bundle.kdtr: y / stepwise: open()"),
        ("prefill", "bundle.kdtr: y / stepwise / chunk0: prefill()"),
        ("committed_len", "bundle.kdtr: y / stepwise / chunk0: committed_len"),
        ("close", "bundle.kdtr: y / stepwise / round1: close()"),
        ("model_close", "bundle.kdtr: close()"),
    ],
)
def test_the_call_that_ended_it_is_named(start: Start, small: Path, verb: str, where: str) -> None:
    code, out, err = ended(start(*of_gate(small, "_exit", verb)))

    assert (2, "") == (code, out)
    assert err.startswith(f"kdtr: no verdict: {where}: the engine exited with code 0 before ")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["xray", "--model", "visible"], "x-ray / visible: verify()"),
        (
            ["gate", "--self", "--model", "{bundle}", "--vocab-size", "37", "--max-len", "60"],
            "self / noise: verify()",
        ),
    ],
)
def test_in_whatever_verb_of_kdtr(start: Start, small: Path, words: list[str], where: str) -> None:
    words = [word.format(bundle=small) for word in words]

    code, out, err = ended(start(*words, "--engine", FATAL, "--engine-option", "end=_exit"))

    assert (2, "") == (code, out)
    assert f"kdtr: no verdict: {where}: the engine exited with code 0 before it returned" in err


def test_the_other_verbs_run_no_engine_in_their_own_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A new verb is to be put into one of both lists."""
    run_none = {"golden", "golden-check", "adopt", "inspect", "diff", "index", "export"}
    run_none |= {"questions", "judge", "campaign-report"}
    apart = {"mutants", "campaign", "serve-engine"}

    with pytest.raises(SystemExit):
        main(["--help"])

    listed = re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert {*RUN_AN_ENGINE_HERE, *run_none, *apart} == {*listed}
    assert len(listed) == len({*listed})


def test_a_module_that_ends_the_process(tmp_path: Path, small: Path) -> None:
    (tmp_path / "gone.py").write_text("import os\nos._exit(0)\n")
    command = [KDTR, "gate", small, "--engine", "gone:make"]

    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert 2 == run.returncode
    said = "kdtr: no verdict: import gone: the engine exited with code 0 before it returned; "
    assert run.stderr.startswith(said)


def test_what_the_sentence_advises_gives_a_finding(start: Start, small: Path) -> None:
    _, _, err = ended(start(*of_gate(small, "_exit")))
    words = shlex.split(err.partition(IN_ITS_OWN_PROCESS)[2].replace("kdtr serve", f"{KDTR} serve"))

    code, out, _ = ended(start("gate", small, *words, "--case", "y"))

    assert (1, "--engine") == (code, words[0])
    assert "verify(): the engine exited with code 0 before it replied" in out


def test_a_verdict_stands_whatever_the_engine_does_at_exit(start: Start, small: Path) -> None:
    code, out, err = ended(start(*of_gate(small, "exits with 0 at exit")))
    assert (0, "") == (code, err)
    assert "part of the gate passed: 1 pass" in out

    code, out, err = ended(start(*of_gate(small, "segfault at exit")))
    assert "part of the gate passed: 1 pass" in out
    assert (
        2,
        "kdtr: what it had to tell is told, but then the process was ended by signal 11 "
        "(SIGSEGV)\n",
    ) == (code, err)


def test_a_failure_stays_one_whatever_the_engine_does_at_exit(start: Start, tmp_path: Path) -> None:
    (tmp_path / "none.kdtr").write_text("no bundle")
    words = of_gate(tmp_path / "none.kdtr", "exits with 0 at exit", "info")

    code, _, err = ended(start(*words))

    assert 2 == code
    assert "BundleError" in err


def test_an_engine_may_ask_the_terminal(start: Start, small: Path) -> None:
    """As a debugger in it does."""
    process = start(*of_gate(small, "reads"))

    out, err = process.communicate("one\ntwo\n", timeout=60)

    assert 0 == process.returncode, err
    assert "now\nread one\nnow\nread two\n" == err
    assert "passed" in out


def test_the_exit_codes_of_a_shell_are_as_ever(start: Start, small: Path) -> None:
    assert 0 == ended(start("--version"))[0]
    assert 0 == ended(start("gate", "--help"))[0]
    assert 2 == ended(start("gate"))[0]
    assert 0 == ended(start("gate", small, "--engine", "host"))[0]


# Streams


@pytest.mark.parametrize(
    ("end", "closed"),
    [("no stdout", "sys.stdout"), ("no streams", "sys.stdout and sys.stderr")],
)
def test_a_stream_that_an_engine_closes_is_a_finding(
    start: Start, small: Path, end: str, closed: str
) -> None:
    code, out, err = ended(start(*of_gate(small, end)))

    assert (1, "") == (code, err)
    said = f"verify() closed {closed}; expected that an engine leaves it open: the verdict is "
    assert f"ERROR  y / stepwise / round0: answer: {said}written there\n" in out
    assert "part of the gate FAILED: 1 error" in out


@pytest.mark.parametrize("verb", ["load", "verify", "model_close"])
def test_a_stream_that_an_engine_puts_in_its_place_hides_no_verdict(
    start: Start, small: Path, verb: str
) -> None:
    code, out, _ = ended(start(*of_gate(small, "another stdout", verb)))

    assert 0 == code
    assert "part of the gate passed: 1 pass" in out


@pytest.mark.parametrize(
    ("end", "verb"),
    [
        ("wrapped stdout", "load"),
        ("silenced", "load"),
        ("silenced", "verify"),
        ("borrowed", "load"),
        ("detached stdout", "load"),
        ("detached stderr", "verify"),
    ],
)
def test_what_engines_do_to_their_own_output_hides_no_verdict(
    start: Start, small: Path, end: str, verb: str
) -> None:
    """For UTF-8, or to quiet a C library; the engine is right."""
    code, out, err = ended(start(*of_gate(small, end, verb)))

    assert "Traceback" not in err
    if end.startswith("detached"):  # what is left there cannot be written to
        assert 1 == code
        assert "expected that an engine leaves it open" in out
        return
    assert 0 == code, out + err
    assert "part of the gate passed: 1 pass" in out


def test_standard_output_that_is_gone_altogether(start: Start, small: Path) -> None:
    code, out, err = ended(start(*of_gate(small, "descriptor 1 gone")))

    assert (1, "") == (code, err)  # it cannot close it twice
    assert "OSError: [Errno 9] Bad file descriptor" in out


def test_a_reader_that_has_left_is_no_failed_gate(start: Start, small: Path) -> None:
    """rich would exit with 1."""
    process = start("gate", small, "--engine", "host", "--case", "ar")
    assert process.stdout is not None
    process.stdout.close()

    assert 2 == process.wait(60)
    assert process.stderr is not None
    assert "kdtr: cannot write the output: Broken pipe\n" == process.stderr.read()


def test_without_standard_output_there_is_nowhere_to_tell(small: Path) -> None:
    command = f"exec '{KDTR}' gate '{small}' --engine host --case ar >&-"

    run = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)

    assert (2, "kdtr: cannot write the output: Bad file descriptor\n") == (
        run.returncode,
        run.stderr,
    )


# Signals


def test_sigterm_ends_both_and_says_where(start: Start, small: Path) -> None:
    process = start(*of_gate(small, "hangs"))
    begun(process)

    process.terminate()

    code, out, err = ended(process)
    assert (-signal.SIGTERM, "") == (code, out)
    assert re.fullmatch(
        r"kdtr: ended by SIGTERM at bundle.kdtr: y / stepwise / round0: verify\(\), "
        r"\d+ s after it was called; no verdict\n",
        err,
    ), err


def test_one_that_hangs_after_the_verdict_has_told_it(start: Start, small: Path) -> None:
    process = start(*of_gate(small, "hangs at exit"))
    assert process.stdout is not None
    while "part of the gate passed" not in process.stdout.readline():
        pass

    process.terminate()

    code, _, err = ended(process)
    said = "what it had to tell is told, but then it went on until SIGTERM"
    assert (-signal.SIGTERM, f"kdtr: {said}\n") == (code, err)


def test_one_that_was_started_with_ends_of_children_ignored(small: Path) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    words = [KDTR, "gate", str(small), "--engine", "host", "--case", "ar"]

    run = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )

    assert (0, "") == (run.returncode, run.stderr)


def test_reports_lie_where_they_were_asked_for(start: Start, small: Path) -> None:
    """An engine that changes the directory takes no relative path along."""
    here = ENGINES / "relative.html"
    try:
        code, _, err = ended(start(*of_gate(small, "goes elsewhere"), "--html", here.name))
        assert (0, "") == (code, err)
        assert here.exists()
    finally:
        here.unlink(missing_ok=True)


def test_a_parent_that_is_killed_takes_the_engine_along(start: Start, small: Path) -> None:
    process = start(*of_gate(small, "hangs in C"))
    begun(process)

    process.kill()

    out, err = process.communicate(timeout=10)  # the engine held both pipes open
    assert ("", "") == (out, err)


def test_an_interrupt_that_is_not_heard_is_told(start: Start, small: Path) -> None:
    process = start(*of_gate(small, "hangs in C"))
    begun(process)

    process.send_signal(signal.SIGINT)

    assert process.stderr is not None
    said = re.fullmatch(
        r"kdtr: bundle.kdtr: y / stepwise / round0: verify\(\) has not returned for \d+ s and does "
        r"not hear of the interrupt; to end it: kill -9 (\d+)\n",
        process.stderr.readline(),
    )
    assert said
    os.kill(int(said[1]), signal.SIGKILL)
    code, _, err = ended(process)
    assert 2 == code
    assert (
        "verify(): the engine was ended by signal 9 (SIGKILL) before it returned, as the kernel"
        in err
    )


# On a terminal


@pytest.fixture
def typed(small: Path) -> Iterator[Callable[..., str]]:
    """typed(end, (seen, keys), ...): types each as its text is seen; what the screen was sent."""
    started: list[tuple[int, int]] = []

    def typed(end: str, *keys: tuple[str, str]) -> str:
        pid, screen = pty.fork()
        if pid == 0:
            os.chdir(ENGINES)
            os.execv(KDTR, [KDTR, *map(str, of_gate(small, end))])
        started.append((pid, screen))
        shown, rest = "", [*keys]
        until = time.monotonic() + 60
        while time.monotonic() < until and select.select([screen], [], [], 30)[0]:
            try:
                shown += os.read(screen, 65536).decode(errors="replace")
            except OSError:  # of Linux, where all have left
                break
            if rest and rest[0][0] in shown.rpartition(TYPED)[2]:
                shown += TYPED
                os.write(screen, rest.pop(0)[1].encode())
        return shown

    yield typed
    for pid, screen in started:
        os.close(screen)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


TYPED = "<typed>"


def test_a_call_that_hangs_is_named_and_ctrl_c_ends_it(typed: Callable[..., str]) -> None:
    shown = typed("hangs", ("verify() for 3 s", "\x03"))

    assert "bundle.kdtr: y / stepwise / round0: verify() for 3 s" in shown
    where = r"bundle\.kdtr: y / stepwise / round0: verify\(\), \d+ s after it was called"
    assert re.search(rf"kdtr: interrupted at {where}\s*$", shown), shown[-500:]


def test_a_breakpoint_has_the_terminal(typed: Callable[..., str]) -> None:
    """The prompt stays, in the engine's own line; Ctrl-C is the debugger's."""
    shown = typed("breaks", ("(Pdb) ", "p 6 * 7\n"), ("42", "c\n"), ("(Pdb) ", "c\n"))

    prompt = shown.partition("(Pdb) ")[2].partition("(Pdb) ")[0]
    assert "fatal_engines.py" in shown.partition("(Pdb) ")[0]
    assert f"{TYPED}p 6 * 7" in prompt.replace("\r", "").replace("\n", "")
    assert "\x1b[2K" not in prompt
    assert "part of the gate passed" in shown


# The note that both share


def shared(*, code: int | None = None, **of: object) -> running.Doing:
    memory = memoryview(bytearray(running.SIZE))
    try:
        running.share(memory)
        running.load("my_engine:make")
        running.at("base.kdtr: y / round")
        if of.get("call"):
            running.enter("round()")
        if code is not None:
            running.settle(code)
        return running.read_shared(memory)
    finally:
        running.share(memoryview(bytearray(running.SIZE)))


def test_what_is_noted_is_read_by_another_process() -> None:
    doing = shared(call=True, code=1)

    assert ("my_engine:make", "base.kdtr: y / round") == (doing.engine, doing.place)
    assert ("round()", True, 1) == (doing.call, doing.inside, doing.code)
    assert "base.kdtr: y / round: round()" == doing.where()


def test_a_very_long_place_is_cut() -> None:
    memory = memoryview(bytearray(running.SIZE))
    running.share(memory)

    running.at("é" * 2000)
    place = running.read_shared(memory).place
    running.share(memoryview(bytearray(running.SIZE)))

    assert 400 < len(place) < running.SIZE
    assert {"é"} == set(place)


def test_a_place_of_bytes_that_are_no_text_is_noted() -> None:
    memory = memoryview(bytearray(running.SIZE))
    running.share(memory)

    running.at(os.fsdecode(b"\xff.kdtr"))
    place = running.read_shared(memory).place
    running.share(memoryview(bytearray(running.SIZE)))

    assert "\\udcff.kdtr" == place


def test_an_engine_within_an_engine_returns_to_the_outer_call() -> None:
    memory = memoryview(bytearray(running.SIZE))
    running.share(memory)

    outer = running.enter("the factory")
    inner = running.enter("load()")
    running.load("host")
    running.leave(inner)
    within = running.read_shared(memory)
    running.leave(outer)
    after = running.read_shared(memory)
    running.share(memoryview(bytearray(running.SIZE)))

    assert ("the factory", True, "") == (within.call, within.inside, within.engine)
    assert "after the factory" == after.where()


def test_a_process_that_ended_outside_of_an_engine() -> None:
    assert "no verdict: the process exited with code 1 before it was done" == no_verdict(
        running.Doing(), 1
    )
    after = running.Doing("e:make", "base.kdtr: y / round", "round()")
    assert (
        "no verdict: base.kdtr: y / round: after round(): the process was ended by signal 6 "
        "(SIGABRT) before it was done"
    ) == no_verdict(after, -6)


def test_one_behind_stdio_is_in_a_process_of_its_own_already() -> None:
    doing = running.Doing("stdio:./mine", "base.kdtr", "load()", inside=True)

    assert (
        "no verdict: base.kdtr: load(): the engine was ended by signal 15 (SIGTERM) before it "
        "returned" == no_verdict(doing, -15)
    )


def test_an_engine_that_nobody_named_has_no_advice() -> None:
    doing = running.Doing(call="load()", inside=True)

    assert "no verdict: load(): the engine exited with code 0 before it returned" == no_verdict(
        doing, 0
    )


def test_a_debugger_has_one_process() -> None:
    before, pid = sys.gettrace(), os.getpid()
    sys.settrace(lambda *_: None)
    try:
        assert outlived() is None
    finally:
        sys.settrace(before)
    assert os.getpid() == pid
