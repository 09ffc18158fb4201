"""A campaign over Ray gives what one over processes gives, also when an actor is killed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kdtr.property_tests.campaign_plan import CampaignError

if find_spec("ray") is None:
    pytest.skip("Ray is not installed; install the extra kdtr[ray]", allow_module_level=True)

# In a process of its own: Ray changes the signals and the warnings of the one that starts it.
RUN = """
import sys
from pathlib import Path
from kdtr.property_tests.campaign_processes import Processes
from kdtr.property_tests.campaign_ray import RayActors
from kdtr.property_tests.campaign_run import Request, run_campaign

LAWS = ("the_walk_follows_the_targets", "a_commit_then_a_verify_is_a_longer_prompt")
request = Request("kdtr.reference:make_engine", laws=LAWS, cases=60, most=10)
crews = []

def over_ray(setup):
    crews.append(RayActors(setup, 2))
    return crews[0]

def kill_one(state):
    if 30 <= state.cases < 40:
        import ray
        ray.kill(crews[0].actors[0], no_restart=False)

def main():
    out = Path(sys.argv[1])
    run_campaign(request, out / "processes", lambda setup: Processes(setup, 1), lambda state: None)
    run_campaign(request, out / "ray", over_ray, kill_one)

if __name__ == "__main__":
    main()
"""


def test_an_actor_that_is_killed_halfway_costs_no_case(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)

    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)

    expected, actual = (
        {
            path.name: pq.read_table(path).to_pylist()
            for path in (tmp_path / crew / "shards").iterdir()
        }
        for crew in ("processes", "ray")
    )
    assert 6 == len(expected)
    assert expected == actual


@pytest.mark.parametrize(
    ("resources", "workers", "gpus", "expected"),
    [
        ({"CPU": 16.0}, None, 0.0, 16),
        ({"CPU": 16.0}, 3, 0.0, 3),
        ({"CPU": 16.0, "GPU": 4.0}, None, 1.0, 4),
        ({"CPU": 16.0, "GPU": 4.0}, None, 0.25, 16),
        ({"CPU": 16.0, "GPU": 4.0}, None, 2.0, 2),
        ({"CPU": 3.0, "GPU": 4.0}, None, 1.0, 3),
    ],
)
def test_there_are_as_many_actors_as_the_cluster_holds(
    resources: dict[str, float], workers: int | None, gpus: float, expected: int
) -> None:
    from kdtr.property_tests.campaign_ray import _actors

    assert expected == _actors(resources, workers, gpus)


def test_more_actors_than_the_cluster_holds_are_refused() -> None:
    """Ray would let them wait for ever."""
    from kdtr.property_tests.campaign_ray import _actors

    with pytest.raises(CampaignError, match="the cluster has 0 GPUs and 2 cores; expected --work"):
        _actors({"CPU": 2.0}, 1, 1.0)
