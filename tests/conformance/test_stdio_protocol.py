"""The messages: what they look like, and every refusal of a line with its text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kdtr.conformance.stdio_protocol import (
    REPLIES,
    REQUESTS,
    VERSION,
    class_of,
    decode_request,
    encode,
    info_fields,
    info_of,
    read_envelope,
    read_reply,
)
from kdtr.conformance.stdio_tensors import ANSWERS
from kdtr.contract import (
    VERBS,
    BundleError,
    CacheError,
    EngineError,
    EngineInfo,
    InputError,
    NumericProfile,
    TreeError,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stdio-protocol.md"
INFO = EngineInfo(
    "n",
    "v",
    "cpu",
    NumericProfile(latents="bfloat16", deterministic=True),
    frozenset({"verify", "prefill"}),
    frozenset({"mask"}),
    {"latent_norm_eps": "1e-5"},
)


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(EngineError) as refused:
        call(*args)
    return str(refused.value)


def reply(verb: str, ok: Any, **more: Any) -> Any:
    return read_reply(verb, {"id": 1, "ok": ok, **more})


def test_every_verb_of_the_contract_but_batches_has_a_request_and_a_reply() -> None:
    assert set(REQUESTS) == set(REPLIES)
    assert set(VERBS) - set(REQUESTS) == {"verify_batch", "commit_batch"}
    assert set(ANSWERS) <= set(REQUESTS)


def test_a_request_comes_back_as_it_was_sent() -> None:
    message = {"id": 3, "verb": "commit", "session": 1, "path": [0, 2], "bonus": 2**63 - 1}

    line = encode(message)

    assert line.endswith(b"}\n")
    assert 1 == line.count(b"\n")
    fields = {"session": 1, "path": [0, 2], "bonus": 2**63 - 1}
    assert (3, "commit", fields) == decode_request(line)


def test_info_comes_back_as_it_was_sent() -> None:
    assert INFO == info_of(reply("hello", json.loads(json.dumps(info_fields(INFO)))).fields)


def test_batch_verbs_are_not_served_and_refused() -> None:
    both = EngineInfo("n", "v", "cpu", NumericProfile(), frozenset({"verify", "verify_batch"}))
    assert ["verify"] == info_fields(both)["verbs"]

    fields = {**info_fields(INFO), "verbs": ["commit_batch"]}

    assert "info.verbs names commit_batch; kdtr_stdio 1 carries no batch verbs" == refusal(
        info_of, fields
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"hello", "the request 'hello' is no JSON object: Expecting value"),
        (b"[1]", "the request '[1]' is no JSON object: it is a list"),
        (b'{"id": 1, "id": 2}', "is no JSON object: a key is there twice"),
        (b"\xff{}", "the request '\ufffd{}' is no JSON object: "),
        (b'{"verb": "reset"}', "the request's id = null; expected an integer of 64 bits"),
        (b'{"id": true, "verb": "reset"}', "the request's id = true; expected an integer"),
        (b'{"id": 1, "verb": "speculate"}', 'verb "speculate"; expected one of hello, load, '),
        (b'{"id": 1, "verb": "reset"}', "the reset request lacks session; expected an integer"),
        (
            b'{"id": 1, "verb": "decode", "session": 1, "trace": 0, "out": "x"}',
            "the decode request has trace = 0; expected true or false",
        ),
        (
            b'{"id": 1, "verb": "reset", "session": 1, "hard": true}',
            "the reset request has the unknown field hard; expected session",
        ),
    ],
    ids=range(10),
)
def test_a_request_that_is_none(line: bytes, text: str) -> None:
    assert text in refusal(decode_request, line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            b"Loading...",
            "the engine wrote to stdout what is no reply: 'Loading...' (Expecting value: line 1 "
            "column 1 (char 0)); expected one JSON object a line, and logs on stderr",
        ),
        (b"", "the engine wrote to stdout what is no reply: '' ("),
        (b"7", "is no reply: '7' (it is a int)"),
        (b'{"id": 7, "ok": {"root": Infinity}}', "(Infinity is no JSON)"),
        (b"[" * 100_000, "(it is nested too deep)"),
        (b'{"id": 6, "ok": {}}', "the reply has id 6; expected 7, the request's"),
        (b'{"id": "7", "ok": {}}', 'the reply has id "7"; expected 7, the request\'s'),
        (b'{"ok": {}}', "the reply has id null; expected 7, the request's"),
        (b'{"id": 7.0, "ok": {}}', "the reply has id 7.0; expected 7, the request's"),
    ],
    ids=range(9),
)
def test_a_line_that_is_no_reply_to_request_7(line: bytes, text: str) -> None:
    assert text in refusal(read_envelope, line, 7)


@pytest.mark.parametrize(
    ("verb", "envelope", "text"),
    [
        ("reset", {}, "the reply has the fields id; expected id, one of ok and error, and wrote"),
        ("reset", {"ok": {}, "error": {}}, "the reply has the fields id, ok, error; expected id"),
        ("reset", {"ok": {}, "time": 1}, "the reply has the fields id, ok, time; expected id"),
        ("reset", {"ok": None}, "the reply has ok = null; expected an object"),
        ("reset", {"ok": {}, "wrote": 1}, "the reply has wrote = 1; expected true or false"),
        ("reset", {"ok": {"x": 1}}, "the reply has the unknown field x; expected none"),
        ("prefill", {"ok": {}}, "the reply lacks root; expected an integer of 64 bits"),
        ("prefill", {"ok": {"root": None}}, "the reply has root = null; expected an integer"),
        ("prefill", {"ok": {"root": 2**63}}, "the reply has root = 9223372036854775808; expected"),
        (
            "verify",
            {"ok": {"targets": [1, True]}},
            "the reply has targets = [1, true]; expected a list of integers of 64 bits",
        ),
        ("state", {"ok": {"committed_len": 1, "root": "1"}}, 'has root = "1"; expected an integer'),
        ("reset", {"error": "no"}, 'the reply has error = "no"; expected an object'),
        ("reset", {"error": {"class": "X"}}, "the reply's error lacks text; expected a text"),
        (
            "hello",
            {"ok": {"kdtr_stdio": 2, "new": 1}},
            "the engine speaks kdtr_stdio 2; expected 1",
        ),
        ("hello", {"ok": {"name": "n"}}, "the engine speaks kdtr_stdio null; expected 1"),
    ],
    ids=range(15),
)
def test_a_reply_against_its_schema(verb: str, envelope: dict[str, Any], text: str) -> None:
    assert text in refusal(read_reply, verb, {"id": 1, **envelope})


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ({}, "the reply's profile lacks weights; expected a text"),
        ({"deterministic": 1}, "the reply's profile has deterministic = 1; expected true or false"),
        ({"fp8": "yes"}, "the reply's profile has the unknown field fp8; expected weights, "),
    ],
    ids=range(3),
)
def test_a_profile_against_its_schema(profile: dict[str, Any], text: str) -> None:
    fields = info_fields(INFO)
    whole = {**fields["profile"], **profile} if profile else {}

    assert refusal(info_of, {**fields, "profile": whole}).startswith(text)


def test_refusals_keep_their_class_and_text() -> None:
    error = {"class": "TreeError", "text": "parents[1] = 4"}

    refusal_ = read_reply("verify", {"id": 1, "error": error, "wrote": True}).refusal

    assert (TreeError, "parents[1] = 4") == (type(refusal_), str(refusal_))


def test_what_is_no_class_of_the_contract_is_an_engine_error() -> None:
    error = {"class": "cudaError", "text": "illegal address"}

    refusal_ = read_reply("verify", {"id": 1, "error": error}).refusal

    assert EngineError is type(refusal_)
    assert "the engine raised cudaError: illegal address" == str(refusal_)


def test_a_class_below_the_contract_s_travels_as_the_one_above_it() -> None:
    class Missing(BundleError, KeyError):
        pass

    assert "BundleError" == class_of(Missing("x"))
    assert "CacheError" == class_of(CacheError("x"))
    assert "InputError" == class_of(InputError("x"))


# The page: every example line is a message that this version reads.


def examples() -> list[str]:
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_page_shows_a_request_and_a_reply_of_every_verb() -> None:
    asked: dict[int, str] = {}
    answered: set[str] = set()
    refused = 0
    for line in examples():
        message = json.loads(line)
        if "verb" in message:
            number, verb, fields = decode_request(line.encode())
            assert set(REQUESTS[verb]) == set(fields)
            asked[number] = verb
        else:
            verb = asked[message["id"]]
            found = read_reply(verb, read_envelope(line.encode(), message["id"]))
            refused += found.refusal is not None
            answered |= {verb} if found.refusal is None else set()

    assert set(REQUESTS) == set(asked.values()) == answered
    assert refused


def test_the_page_names_the_version_and_every_tensor() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert f'"kdtr_stdio": {VERSION}' in text
    for names in ANSWERS.values():
        assert all(f"`{name}`" in text for name in names)
