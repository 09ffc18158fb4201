"""A campaign over Ray: on the cores and GPUs of many machines.

Every worker is an actor. Ray restarts one that dies and runs its unit again; what is left to do
here is to hand out units, so that none waits behind another, and to end those that take too long.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from kdtr.contract import EngineError, EngineInfo, UnsupportedError
from kdtr.property_tests.campaign_crew import TRIES, Lost
from kdtr.property_tests.campaign_plan import CampaignError, Setup, Unit
from kdtr.property_tests.campaign_unit import Outcome
from kdtr.property_tests.campaign_worker import THREADS, Worker

# How often an actor may go away while it loads its engine.
_STARTS = 5
_LONGEST = 300  # characters of Ray's accounts


def _ray() -> Any:
    # Ray would warn of a change in what it hides from actors without a GPU; this is the new way.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(
            f"--ray needs Ray ({error}); install the extra: pip install 'kdtr[ray]'"
        ) from error
    return ray


class RayActors:
    """A crew of actors (`campaign_crew.Crew`).

    address          of a cluster that runs; "": the one Ray finds, or a new one on this machine
    workers          actors; None: as many as the cluster has GPUs for, or cores
    gpus_per_worker  0.25 puts four engines on a GPU; 0: engines that use none
    limit_s          seconds that a unit may take; after a restart that includes loading the engine
    """

    def __init__(
        self,
        setup: Setup,
        workers: int | None = None,
        *,
        address: str = "",
        gpus_per_worker: float = 0.0,
        limit_s: float | None = None,
    ) -> None:
        self._setup = setup
        self._limit_s = limit_s
        self._ray = _ray()
        self._started_ray = not self._ray.is_initialized()
        if self._started_ray:
            self._connect(address)
        try:
            n = _actors(self._ray.cluster_resources(), workers, gpus_per_worker)
        except CampaignError:
            self.close()
            raise
        actor_class = self._ray.remote(Worker).options(
            num_cpus=1,
            num_gpus=gpus_per_worker,
            max_restarts=-1,
            max_task_retries=TRIES - 1,
            runtime_env={"env_vars": {k: os.environ.get(k, v) for k, v in THREADS.items()}},
        )
        self.actors = [actor_class.remote(setup) for _ in range(n)]

    def describe(self) -> EngineInfo:
        try:
            info: EngineInfo = self._ray.get(self._start(self.actors[0]))
        except self._ray.exceptions.RayError as error:
            raise self._start_failed(error) from error
        return info

    def outcomes(self, units: Iterable[Unit]) -> Iterator[Outcome]:
        waiting = deque(units)
        idle: list[Any] = []
        starting = {self._start(actor): actor for actor in self.actors}
        running: dict[Any, tuple[Unit, Any, float]] = {}  # with the time to give up
        killed: set[Unit] = set()
        while waiting or running:
            while waiting and idle:
                unit, actor = waiting.popleft(), idle.pop()
                running[actor.run.remote(unit)] = (unit, actor, self._give_up())
            refs = [*running, *starting]
            soonest = min((entry[2] for entry in running.values()), default=math.inf)
            timeout = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
            done, _ = self._ray.wait(refs, timeout=timeout)
            for ref in done:
                if ref in starting:
                    idle.append(self._started(ref, starting.pop(ref)))
                    continue
                unit, actor, _ = running.pop(ref)
                yield self._outcome(ref, unit, unit in killed)
                if waiting:
                    starting[self._start(actor)] = actor
            for ref, (unit, actor, give_up) in running.items():
                if give_up <= time.monotonic():
                    killed.add(unit)
                    self._ray.kill(actor, no_restart=False)
                    running[ref] = (unit, actor, self._give_up())

    def close(self) -> None:
        """Ends the actors; what Ray runs on besides stays, unless this crew has started it."""
        for actor in getattr(self, "actors", []):
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()

    def _connect(self, address: str) -> None:
        try:
            self._ray.init(address=address or None, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise CampaignError(
                f"--ray {address}: {str(error).partition(chr(10))[0]}; expected the address of a "
                "cluster that runs, or none for a new one on this machine"
            ) from error

    def _give_up(self) -> float:
        return math.inf if self._limit_s is None else time.monotonic() + self._limit_s

    def _start(self, actor: Any) -> Any:
        """Have the actor load its engine: at once where it lives, else when Ray has restarted it.

        Only then does it get a unit, which would be blamed for an actor that is not there yet.
        """
        return actor.describe.options(max_task_retries=_STARTS).remote()

    def _started(self, ref: Any, actor: Any) -> Any:
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise self._start_failed(error) from error
        return actor

    def _start_failed(self, error: Any) -> Exception:
        """The engine's own refusal where Ray carries one, or how the process ended."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):
            return cause
        return EngineError(
            f"engine {self._setup.engine}: the actor that loads it ended by {_how(str(error))}; "
            "expected an engine that the machines of the cluster can load"
        )

    def _outcome(self, ref: Any, unit: Unit, killed: bool) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            return Lost(_how(str(error)), killed).outcome(unit, self._setup, self._limit_s)
        return outcome


def _how(text: str) -> str:
    """Ray's account of an actor's end, in one line without the actor's number."""
    told = " ".join(text.split())
    return f"a crash; Ray says: {re.sub('The actor [0-9a-f]+', 'the actor', told)[:_LONGEST]}"


def _actors(resources: dict[str, float], workers: int | None, gpus_per_worker: float) -> int:
    """How many actors the cluster holds, or the number asked for. Raises CampaignError.

    >>> _actors({"CPU": 16.0, "GPU": 4.0}, None, 0.5), _actors({"CPU": 16.0}, None, 0)
    (8, 16)
    """
    room = int(resources.get("CPU", 0))
    if gpus_per_worker:
        gpus = int(resources.get("GPU", 0))
        whole = gpus_per_worker >= 1
        room = min(room, int(gpus / gpus_per_worker) if whole else gpus * int(1 / gpus_per_worker))
    if room < (workers or 1):
        raise CampaignError(
            f"--workers {workers or 1} with --gpus-per-worker {gpus_per_worker:g} and a core each: "
            f"the cluster has {resources.get('GPU', 0):g} GPUs and {resources.get('CPU', 0):g} "
            f"cores; expected --workers <= {room}"
        )
    return workers or room
