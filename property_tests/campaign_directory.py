"""The directory of a campaign: a manifest, a shard per unit, and what failures leave.

    campaign.json         what is run: engine, laws, cases, seed, versions
    shards/UNIT.parquet   the cases of a unit (`campaign_shard.py`)
    failures/UNIT.txt     a failed unit in words, beside the golden bundles that it names

A directory belongs to one campaign. What is in it and does not fit is refused by name before any
work, and nothing that is finished is run again.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdtr.property_tests.campaign_plan import CampaignError, Unit
from kdtr.property_tests.campaign_shard import (
    Head,
    head_of,
    read_head,
    unit_key,
    write_shard,
    write_whole,
)
from kdtr.property_tests.campaign_unit import FILES, Outcome

MANIFEST = "campaign.json"
_LOCK = ".lock"
_FORMAT = 2


class Directory:
    """DIR of `kdtr campaign --out DIR`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = path / "shards"
        self.failures = path / "failures"

    def manifest(self) -> dict[str, Any]:
        """What the directory's campaign runs. Raises CampaignError where there is none."""
        path = self.path / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CampaignError(
                f"{self.path}: no {MANIFEST}; expected a directory that `kdtr campaign` wrote"
            ) from error
        except (OSError, ValueError) as error:
            raise CampaignError(
                f"{path}: {error}; expected a manifest; remove {self.path}"
            ) from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            told = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise CampaignError(f"{path}: format {told}; expected {_FORMAT}; take another --out")
        return found

    def check(self, campaign: dict[str, Any]) -> None:
        """Refuse another campaign's directory before a worker starts.

        campaign  without `info`, which takes an engine that runs
        """
        path = self.path / MANIFEST
        if path.exists():
            found = self.manifest()
            expected = json.loads(json.dumps({"format": _FORMAT, **campaign}))
            _refuse_another(path, found, {**expected, "info": found.get("info")})
            self.heads(found)
        foreign = [] if path.exists() else sorted(self.shards.glob("*.parquet"))
        if foreign:
            raise CampaignError(
                f"{foreign[0]}: a shard without {path}; expected an empty directory; take another "
                "--out"
            )

    def claim(self, campaign: dict[str, Any]) -> None:
        """Make the directory this campaign's, or see that its engine is still the same."""
        campaign = json.loads(json.dumps({"format": _FORMAT, **campaign}))
        path = self.path / MANIFEST
        if path.exists():
            _refuse_another(path, self.manifest(), campaign)
        else:
            text = json.dumps(campaign, indent=1) + "\n"
            write_whole(path, lambda file: file.write(text.encode()))
        # A write that was killed; nothing else of the directory is ours.
        for leftover in (*self.path.glob(f".{MANIFEST}.*"), *self.shards.glob(".*.parquet.*")):
            if leftover.is_file() and len(leftover.suffix) == 9:
                leftover.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the directory; raises CampaignError where another campaign is at work."""
        try:
            self.shards.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("a")
        except OSError as error:
            raise CampaignError(
                f"--out {self.path}: {error.strerror or error}; expected a directory to write to"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CampaignError(
                    f"--out {self.path}: another campaign writes there; wait for its end or take "
                    "another directory"
                ) from error
            yield

    def heads(self, campaign: dict[str, Any]) -> dict[Unit, Head]:
        """The finished units. Raises CampaignError for a shard that is not this campaign's."""
        campaign = json.loads(json.dumps(campaign))
        found = {}
        for path in sorted(self.shards.glob("*.parquet")):
            head = read_head(path)
            try:
                unit = head.unit
            except (KeyError, TypeError) as error:
                raise CampaignError(f"{path}: its key names no unit; remove it") from error
            _refuse_another(path, head.key, unit_key(unit, campaign))
            fits = unit.seed == campaign["seed"] and unit.examples == campaign["examples"]
            if not fits or unit.law not in campaign["laws"] or path.stem != unit.id:
                raise CampaignError(
                    f"{path}: the unit {unit.id} with seed {unit.seed} and {unit.examples} "
                    f"examples; expected seed {campaign['seed']}, {campaign['examples']} examples "
                    "and a law of this campaign; remove it"
                )
            found[unit] = head
        return found

    def keep(self, outcome: Outcome, campaign: dict[str, Any]) -> Head:
        """Write what the unit gave; its shard last, so that a unit with a shard is finished."""
        head = head_of(outcome, unit_key(outcome.unit, campaign))
        if outcome.failure is not None:
            _directory(self.failures)
            for name, content in outcome.failure.files.items():
                write_whole(self.failures / name, lambda file, content=content: file.write(content))
            text = outcome.failure.text.replace(FILES, f"{self.failures}/") + "\n"
            write_whole(
                self.failures / f"{outcome.unit.id}.txt", lambda file: file.write(text.encode())
            )
        write_shard(self.shards / f"{outcome.unit.id}.parquet", outcome, head)
        return head


def _directory(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise CampaignError(f"{path}: {error.strerror}; expected a directory") from error


def _refuse_another(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    other = first_difference(found, expected)
    if other:
        raise CampaignError(
            f"{path}: {other}, as this campaign runs; take another --out, or run that one"
        )


def first_difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first value that is another one, by its name with dots; "" where all are the same.

    >>> first_difference({"versions": {"blas": "Haswell"}}, {"versions": {"blas": "SkylakeX"}})
    'versions.blas = Haswell; expected SkylakeX'
    """
    theirs, ours = dict(_flat(found)), dict(_flat(expected))
    for name in sorted(theirs.keys() | ours.keys()):
        one, other = theirs.get(name), ours.get(name)
        if one != other:
            return f"{name} = {one}; expected {other}"
    return ""


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with dots.

    >>> dict(_flat({"seed": 0, "info": {"name": "host"}}))
    {'seed': 0, 'info.name': 'host'}
    """
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
