"""What lanes that outlive their sweep need of Ray."""

from __future__ import annotations

import subprocess
import sys
import time

import ray

PROGRAM = """
import sys, ray
from ray.util import placement_group

@ray.remote(num_cpus=0)
class Child:
    def ping(self):
        return 1

@ray.remote(num_cpus=0)
class Lane:
    def start(self):
        self.child, self.group = Child.remote(), placement_group([{"CPU": 1}], name="standing")
        ray.get([self.child.ping.remote(), self.group.ready()])
    def ping(self):
        return ray.get(self.child.ping.remote())

ray.init(address=sys.argv[1], log_to_driver=False)
lane = Lane.options(lifetime="detached", name="lane", namespace="contract").remote()
ray.get(lane.start.remote())
"""


def test_detached_actor_and_what_it_reserved_outlive_their_driver_and_end_together(
    ray_cluster: str,
) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, ray_cluster], check=True, timeout=60)

    def is_reserved() -> bool:
        groups = ray.util.placement_group_table().values()
        return any(each["name"] == "standing" and each["state"] == "CREATED" for each in groups)

    listed = ray.util.list_named_actors(all_namespaces=True)
    assert {"namespace": "contract", "name": "lane"} in listed
    lane = ray.get_actor("lane", "contract")
    assert ray.get(lane.ping.remote(), timeout=30) == 1
    assert is_reserved()
    ray.kill(lane)
    until = time.monotonic() + 30
    while is_reserved() and time.monotonic() < until:
        time.sleep(0.2)
    assert not is_reserved()
