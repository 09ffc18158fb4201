"""An engine of few words that speaks the stdio protocol by hand, and breaks it in one way.

    python stdio_misbehaving.py FAULT [VERB]

It does what FAULT says when it is asked for VERB (prefill), and is honest otherwise.
"""

import json
import os
import signal
import subprocess
import sys
import time

FAULT = sys.argv[1]
VERB = sys.argv[2] if len(sys.argv) > 2 else "prefill"

DTYPES = ("weights", "activations", "latents", "scores", "logits", "accumulation")
INFO = {
    "kdtr_stdio": 1,
    "name": "few words",
    "version": "1",
    "device": "cpu",
    "profile": {
        **dict.fromkeys(DTYPES, "float32"),
        "deterministic": True,
        "batch_invariant": False,
    },
    "verbs": ["prefill", "verify", "accept", "build", "commit", "snapshot", "round"],
    "stages": ["mask"],
    "conventions": {},
}
ANSWERS = {
    "hello": INFO,
    "state": {"committed_len": 3, "root": 1},
    "prefill": {"root": 1},
    "verify": {"targets": [1, 2]},
    "accept": {"path": [0, 1], "bonus": 4},
    "round": {"path": [0, 1], "bonus": 4, "emitted": [5, 4]},
    "build": {"tokens": [1, 2], "parents": [-1, 0]},
}


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def log(text):
    print(text, file=sys.stderr, flush=True)


def reply(number, verb, **more):
    say(json.dumps({"id": number, "ok": ANSWERS.get(verb, {}), **more}))


def hang(number, verb):
    log("waiting for a device")
    time.sleep(1000)


def grandchild(number, verb):
    child = subprocess.Popen(["sleep", "1000"])
    log(f"started {child.pid}")
    time.sleep(1000)


def daemon(number, verb):
    """Leaves a child behind that holds stdout and stderr, and exits."""
    child = subprocess.Popen(["sleep", "1000"])
    log(f"started {child.pid}")
    os._exit(4)


def crash(number, verb):
    log("illegal memory access")
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(number, verb):
    sys.exit(0)


def truncated(number, verb):
    sys.stdout.write(f'{{"id": {number}, "ok": {{"roo')
    sys.stdout.flush()
    os._exit(3)


def stalled(number, verb):
    sys.stdout.write('{"id": ')
    sys.stdout.flush()
    time.sleep(1000)


def deaf(number, verb):
    """Closes its stdout and goes on."""
    os.close(1)
    time.sleep(1000)


def noise(number, verb):
    say("Loading weights: 100%")
    reply(number, verb)


def utf_16(number, verb):
    """Valid JSON, in an encoding that is not the protocol's; its reply ends with a newline."""
    line = json.dumps({"id": number, "ok": ANSWERS.get(verb, {})})
    sys.stdout.buffer.write(line.encode("utf-16") + b"\n")
    sys.stdout.flush()


def bom(number, verb):
    line = json.dumps({"id": number, "ok": ANSWERS.get(verb, {})})
    sys.stdout.buffer.write(line.encode("utf-8-sig") + b"\n")
    sys.stdout.flush()


def noise_after(number, verb):
    reply(number, verb)
    say("done in 3 ms")


def wrong_id(number, verb):
    reply(number + 4, verb)


def no_id(number, verb):
    say(json.dumps({"ok": ANSWERS.get(verb, {})}))


def twice(number, verb):
    reply(number, verb)
    reply(number, verb)


def huge(number, verb):
    say(json.dumps({"id": number, "ok": {"root": 1, "comment": "x" * 20_000_000}}))


def nan(number, verb):
    say(f'{{"id": {number}, "ok": {{"root": NaN}}}}')


def chatty(number, verb):
    for i in range(20_000):
        sys.stderr.write(f"kernel {i} launched with a long list of arguments\n")
    sys.stderr.flush()
    reply(number, verb)


def chatty_crash(number, verb):
    sys.stderr.write("x" * 1_000_000 + "\n\n\x1b[31mno memory left\x1b[0m\n")
    sys.stderr.flush()
    os._exit(1)


def raises(number, verb):
    body = {"class": "std::bad_alloc", "text": "no memory"}
    say(json.dumps({"id": number, "error": body}))


def refuses(number, verb):
    body = {"class": "CacheError", "text": "needs 9 slots, has 8"}
    say(json.dumps({"id": number, "error": body}))


def says_wrote(number, verb):
    reply(number, verb, wrote=True)


def answering(ok, **more):
    return lambda number, verb: say(json.dumps({"id": number, "ok": ok, **more}))


def newer(number, verb):
    answering({**INFO, "kdtr_stdio": 2, "features": []})(number, verb)


FAULTS = {
    "honest": reply,
    "float_root": answering({"root": 1.5}),
    "no_root": answering({}),
    "more": answering({"root": 1, "time_us": 12}),
    "list": answering([1]),
    "neither": lambda number, verb: say(json.dumps({"id": number, "root": 1})),
    "three_targets": answering({"targets": [1, 2, 3]}),
    "path_back": answering({"path": [0, 2, 1], "bonus": 4}),
    "no_tree": answering({"tokens": [1, 2], "parents": [-1, 1]}),
    "flag": answering({"root": 1}, wrote=1),
    "batch": answering({**INFO, "verbs": ["verify_batch"]}),
    "no_dtype": answering({**INFO, "profile": {}}),
    "odd_dtype": answering({**INFO, "profile": {**INFO["profile"], "latents": "fp8"}}),
}
FAULT_OF = FAULTS.get(FAULT) or globals()[FAULT]

for line in sys.stdin:
    request = json.loads(line)
    answer = FAULT_OF if request["verb"] == VERB else reply
    answer(request["id"], request["verb"])
