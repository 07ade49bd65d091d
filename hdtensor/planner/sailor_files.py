"""``SailorFolder``: a folder with Sailor's files, read as profiles, nodes, training and measured steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import check_object, shown
from hdtensor.plan.reader import parse_json, read_file
from hdtensor.planner.calibrate import MeasuredStep
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.library import find_device
from hdtensor.planner.model import ModelShape
from hdtensor.planner.profiled import ProfiledCosts, RuntimeConstants
from hdtensor.planner.profiles import Profile
from hdtensor.planner.quantities import planner_errors, whole_number
from hdtensor.planner.roofline import Efficiency, RooflineCosts
from hdtensor.planner.sailor import (
    CONTEXTS,
    read_model,
    read_node,
    read_profile,
    read_training,
)
from hdtensor.planner.sailor_plans import node_links, plan_cluster, plan_strategy, read_plan
from hdtensor.planner.workload import Workload


class SailorFolder:
    """The files of Sailor's artifact that a planner needs, under their names there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Remember where the files are."""
        self.path = Path(path)

    def _read(self, name: str) -> Any:
        with planner_errors(name):
            return parse_json(read_file(self.path / name, name), name)

    @cached_property
    def _profiles(self) -> Any:
        return self._read("profiles_all.json")

    @cached_property
    def _sizes(self) -> Any:
        return self._read("llm_info.json")

    @cached_property
    def network(self) -> Any:
        """The JSON of the fits of bandwidth."""
        return self._read("network_coeffs_all_homo.json")

    @cached_property
    def devices_per_node(self) -> Mapping[str, int]:
        """Sailor's name of a device -> devices of a node."""
        name = "basic_cluster_config.json"
        with planner_errors(name):
            config = check_object(name, self._read(name))
            return {
                device: whole_number(
                    f"{name}.{device}.gpus_per_node", entry.get("gpus_per_node"), 1, 1024
                )
                for device, entry in config.items()
                if isinstance(entry, Mapping)
            }

    def profiles(self, model: str) -> dict[str, Profile]:
        """Return the profile of each device on which a model was measured, by our names of devices.

        Args:
            model: Sailor's name, such as ``OPT-350``.

        Raises:
            PlannerError: If the files have no such model, or are malformed.
        """
        read_model(model)
        with planner_errors("profiles_all.json"):
            table = check_object("profiles_all.json", self._profiles)
            if model not in table:
                raise PlannerError(
                    f"model: profiles_all.json has {', '.join(table)}, not {shown(model)}."
                )
            sizes = check_object("llm_info.json", self._sizes).get(model)
            found = [
                read_profile(model, device, times, sizes)
                for device, times in check_object("profiles_all.json", table[model]).items()
            ]
        return {profile.device: profile for profile in found}

    def training(self, name: str) -> tuple[ModelShape, Workload]:
        """Return the model and the workload of a training configuration, by the file's name."""
        return read_training(self._read(name))

    def cluster(self, counts: Mapping[str, int], zone: str = "") -> Cluster:
        """Return a cluster of whole nodes.

        Args:
            counts: Sailor's name of a device -> devices in all.
            zone: Of every node.

        Raises:
            PlannerError: If a device is unknown, or a number is no whole number of nodes.
        """
        nodes: list[Node] = []
        alone: dict[str, Link] = {}
        for device, count in counts.items():
            size = self.devices_per_node.get(device)
            if size is None or count < 1 or count % size:
                raise PlannerError(
                    f"nodes: {count} {device} are no whole number of nodes of {size or 'any'} devices."
                )
            node, alone[device] = read_node(device, size, self.network, zone=zone)
            nodes += [node] * (count // size)
        return Cluster(nodes=tuple(nodes), **node_links(alone))

    def costs(
        self,
        model: str,
        workload: Workload,
        constants: RuntimeConstants | None = None,
        *,
        smoothing: float = 1.0,
    ) -> ProfiledCosts:
        """Return the costs that the profiles of a model give.

        Links are measured, so they count whole.

        Args:
            model: Sailor's name.
            workload: What is trained, in float32.
            constants: Of the system that trains; default none.
            smoothing: As ``ProfiledCosts`` has it; 0 takes the measurements as they are, as Sailor's own
                simulator does.
        """
        roofline = RooflineCosts(
            model=read_model(model), workload=workload, efficiency=Efficiency(link=1.0)
        )
        return ProfiledCosts(
            roofline=roofline,
            profiles=self.profiles(model),
            constants=constants or RuntimeConstants(),
            smoothing=smoothing,
        )

    def step(self, model: str, plan: Any) -> MeasuredStep:
        """Return a plan on the cluster of just its devices; its seconds are NaN where nobody measured them.

        Args:
            model: Sailor's name.
            plan: The JSON of a plan file.

        Raises:
            PlannerError: If the plan is malformed, or names a device without profile or fit.
        """
        found = read_plan(plan, read_model(model).num_layers)
        cluster = plan_cluster(found, self.devices_per_node, self.network)
        workload = Workload(
            batch=found.batch,
            context=CONTEXTS[model],
            precision="float32",
            optimizer="adam",
            zero=0,
        )
        return MeasuredStep(
            plan_strategy(found, cluster),
            cluster,
            self.costs(model, workload),
            math.nan if found.seconds is None else found.seconds,
            found.memory_bytes,
        )

    def measured(
        self,
        without_memory: Iterable[str] = (),
        folder: str | os.PathLike[str] | None = None,
    ) -> dict[str, MeasuredStep]:
        """Return the plans of a folder by the names of their files, of which one part tells the model.

        Args:
            without_memory: Beginnings of names whose measured memory is left out.
            folder: Where they are; default ``measured``.

        Raises:
            PlannerError: If a file is malformed.
        """
        left_out = tuple(without_memory)
        found = {}
        for path in sorted(Path(folder or self.path / "measured").glob("*.json")):
            with planner_errors(path.name):
                plan = parse_json(read_file(path, path.name), path.name)
            model = "GPT-Neo-2.7" if "GPT-NEO" in path.name.upper() else "OPT-350"
            name, _, rest = path.stem.partition("_plan_config")
            name += rest.removeprefix("_" + name.rpartition("_")[2])
            step = self.step(model, plan)
            is_faulty = bool(left_out) and name.startswith(left_out)
            found[name] = step._replace(memory_bytes=None) if is_faulty else step
        return found


def training_system(reserved: Mapping[str, float]) -> RuntimeConstants:
    """Return first constants of the system that ran Sailor's measured plans, DeepSpeed's pipeline engine.

    Its sends and receives stand in the stream of the passes, so they block both ends.

    Args:
        reserved: Our name of a device -> bytes to begin with; devices with the same number share one.
    """
    names = {find_device(name).name: each for name, each in reserved.items()}
    return RuntimeConstants(is_blocking=True, reserved_bytes=names)
