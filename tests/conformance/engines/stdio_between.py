"""An honest engine behind a process that spoils one kind of reply.

    python stdio_between.py FAULT N_NODES COMMAND...

COMMAND speaks the stdio protocol; what it says is passed on, but for a `round` over a tree of
N_NODES: there FAULT happens.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kdtr.kdtr_format import Bundle, write_bundle

FAULT, N_NODES = sys.argv[1], int(sys.argv[2])
HONEST = subprocess.Popen(sys.argv[3:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def asked(line):
    HONEST.stdin.write(line)
    HONEST.stdin.flush()
    return HONEST.stdout.readline()


def say(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def log(text):
    print(text, file=sys.stderr, flush=True)


def hang(line, request):
    log("waiting for the device")
    time.sleep(1000)


def crash(line, request):
    Path(request["out"]).with_name("core").write_text("left here")
    log("illegal memory access in verify_attn")
    os.kill(os.getpid(), signal.SIGSEGV)


def half_a_line(line, request):
    log("out of memory")
    say(asked(line)[:20])
    os._exit(1)


def half_a_file(line, request):
    reply, out = json.loads(asked(line)), Path(request["out"])
    whole = out.read_bytes() if out.exists() else b"\x89KDTR\r\n\x1a" + bytes(300)
    out.write_bytes(whole[: len(whole) // 2])
    say(json.dumps({**reply, "wrote": True}).encode() + b"\n")


def lies(line, request):
    """The mask without its last column, or, where no trace is asked for, a path off the tree."""
    reply, out = json.loads(asked(line)), Path(request["out"])
    if request["trace"]:
        with Bundle.open(out) as bundle:
            found = {name: np.array(bundle[name]) for name in bundle.names()}
        found["trace/mask"] = found["trace/mask"][:, :-1]
        write_bundle(out, found, {})
    else:
        reply["ok"]["path"] = [0, 2, 1]
    say(json.dumps(reply).encode() + b"\n")


def nonsense(line, request):
    asked(line)
    say(b"\xff\xfe\x00 ok ok ok\n")


for line in sys.stdin.buffer:
    request = json.loads(line)
    if request["verb"] == "round" and len(request["tokens"]) == N_NODES:
        globals()[FAULT](line, request)
    else:
        say(asked(line))
