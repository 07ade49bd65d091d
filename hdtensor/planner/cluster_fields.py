"""Clusters as JSON values: devices of one's own, nodes, links and zones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import (
    check_keys,
    check_object,
    check_sequence,
    check_text,
    key_text,
    shown,
)
from hdtensor.planner.cluster import Cluster, Link, Node
from hdtensor.planner.cluster_text import (
    INSIDE_LATENCY,
    MAX_RANKS,
    NETWORK_LATENCY,
    NODE_SIZE,
    make_cluster,
    nodes_of,
    parse_groups,
    usual_inside,
    usual_uplink,
)
from hdtensor.planner.devices import Device
from hdtensor.planner.library import DESKTOP_NETWORK, find_device
from hdtensor.planner.quantities import (
    BYTES,
    BYTES_PER_SECOND,
    FLOPS,
    PLAIN_FLOPS,
    PLAIN_LATENCY,
    PLAIN_MEMORY,
    PLAIN_RATE,
    SECONDS,
    planner_errors,
    quantity_field,
    read_quantity,
    whole_number,
)


_KEYS = ("cluster", "node_size", "devices", "nodes", "network", "links")
_NODE_KEYS = ("device", "count", "repeat", "name", "zone", "inside", "uplink")
_DEVICE_KEYS = (
    "like",
    "speed",
    "memory",
    "flops",
    "memory_bandwidth",
    "link_bandwidth",
    "network",
    "source",
)
_PRECISIONS = ("bfloat16", "float16", "float32")


def cluster_of_fields(value: Any) -> Cluster:
    """Return the cluster that an object describes.

    ::

        cluster: 16x H800 + 32x H20        # the short form, or nodes:
        node_size: 8                       # devices of a node in short forms
        nodes:
          - 2x 8x H800 @ east
          - {device: mine, count: 4, repeat: 2, name: b, zone: west, inside: 300 GB/s, uplink: 50 GB/s}
        network: 50 GB/s                   # of one device to other nodes; or {bandwidth: ..., latency: 5 us}
        links:                             # where it is another between zones, or between kinds of devices
          - {between: [east, west], bandwidth: 10 Gb/s, latency: 1 ms}
        devices:                           # of one's own: like a known one, or with all numbers
          mine: {like: H20, speed: 0.9, memory: 80 GiB}

    >>> cluster_of_fields({"cluster": "2x CPU", "network": "1 GB/s"}).between.bandwidth
    1000000000.0

    Args:
        value: A text as ``cluster_of_text`` reads it, or such an object.

    Raises:
        PlannerError: If it describes none; the message begins with the field.
    """
    if isinstance(value, str):
        value = {"cluster": value}
    with planner_errors():
        value = check_object("cluster", value)
        check_keys(value, _KEYS, ())
        own = _devices(value.get("devices", {}))
        node_size = whole_number("node_size", value.get("node_size", NODE_SIZE), 1, MAX_RANKS)
        nodes = _nodes(value, own, node_size)
        cluster = make_cluster(nodes, _link("network", value.get("network"), NETWORK_LATENCY))
        links = _links(value.get("links", []), nodes)
    return dataclasses.replace(cluster, links={**cluster.links, **links})


def cluster_to_fields(cluster: Cluster) -> dict[str, Any]:
    """Return the object of a cluster, ``cluster_of_fields``'s inverse: all numbers, equal nodes once."""
    devices = {node.device.name: node.device for node in cluster.nodes}
    nodes: list[dict[str, Any]] = []
    for node, equal in itertools.groupby(cluster.nodes):
        entry: dict[str, Any] = {"device": node.device.name, "count": node.num_devices}
        repeat = sum(1 for _ in equal)
        entry |= {"repeat": repeat} if repeat > 1 else {}
        entry |= {"name": node.name} if node.name else {}
        entry |= {"zone": node.zone} if node.zone else {}
        entry["inside"] = _link_fields(node.inside)
        entry["uplink"] = None if node.uplink is None else quantity_field(node.uplink, PLAIN_RATE)
        nodes.append(entry)
    return {
        "devices": {name: _device_fields(device) for name, device in devices.items()},
        "nodes": nodes,
        "network": _link_fields(cluster.between),
        "links": [
            {"between": list(pair), **_link_fields(link)} for pair, link in cluster.links.items()
        ],
    }


def _link_fields(link: Link) -> dict[str, float | str]:
    return {
        "bandwidth": quantity_field(link.bandwidth, PLAIN_RATE),
        "latency": quantity_field(link.latency, PLAIN_LATENCY),
    }


def _device_fields(device: Device) -> dict[str, Any]:
    return {
        "memory": quantity_field(device.memory_bytes, PLAIN_MEMORY),
        "flops": {kind: quantity_field(rate, PLAIN_FLOPS) for kind, rate in device.flops.items()},
        "memory_bandwidth": quantity_field(device.memory_bandwidth, PLAIN_RATE),
        "link_bandwidth": quantity_field(device.link_bandwidth, PLAIN_RATE),
        "network": quantity_field(device.network_bandwidth, PLAIN_RATE),
        "source": device.source,
    }


def _devices(value: Any) -> dict[str, Device]:
    own: dict[str, Device] = {}
    for name, item in check_object("devices", value).items():
        path = f"devices.{key_text(name)}"
        check_text(path, name)
        if any(mark in name for mark in "+/@") or not name.strip():
            raise PlannerError(
                f"{path}: a device's name must be a word without + / @, got {shown(name)}."
            )
        item = check_object(path, item)
        with planner_errors():
            _check_keys(path, item, _DEVICE_KEYS, ())
            own[name] = _device(path, name, item, own)
    return own


def _device(path: str, name: str, item: Mapping[str, Any], own: Mapping[str, Device]) -> Device:
    base = None
    if "like" in item:
        base = find_device(check_text(f"{path}.like", item["like"]), own, f"{path}.like")
    speed = read_quantity(f"{path}.speed", item.get("speed", 1.0), {}, least=1e-6, most=1e6)

    def number(key: str, units: Mapping[str, float], known: float | None) -> float:
        if key in item:
            plain = PLAIN_MEMORY if key == "memory" else PLAIN_RATE
            return read_quantity(f"{path}.{key}", item[key], units, least=1.0, plain=plain)
        if known is None:
            raise PlannerError(
                f"{path}.{key}: missing; give it, or like: the name of a known device."
            )
        return known

    flops = None if base is None else dict(base.flops)
    if "flops" in item:
        flops = _flops(f"{path}.flops", item["flops"])
    if not flops:
        raise PlannerError(
            f"{path}.flops: missing; give a rate such as 100 TFLOPS, or one for each of "
            f"{', '.join(_PRECISIONS)}."
        )
    return Device(
        name=name,
        memory_bytes=int(number("memory", BYTES, None if base is None else base.memory_bytes)),
        flops={kind: rate * speed for kind, rate in flops.items()},
        memory_bandwidth=speed
        * number(
            "memory_bandwidth", BYTES_PER_SECOND, None if base is None else base.memory_bandwidth
        ),
        link_bandwidth=number(
            "link_bandwidth", BYTES_PER_SECOND, None if base is None else base.link_bandwidth
        ),
        network_bandwidth=number(
            "network",
            BYTES_PER_SECOND,
            DESKTOP_NETWORK if base is None else base.network_bandwidth,
        ),
        source=check_text(f"{path}.source", item.get("source", "the description of the cluster")),
    )


def _flops(path: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        rate = read_quantity(path, value, FLOPS, least=1.0, plain=PLAIN_FLOPS)
        return dict.fromkeys(_PRECISIONS, rate)
    _check_keys(path, value, _PRECISIONS, ())
    return {
        kind: read_quantity(f"{path}.{kind}", rate, FLOPS, least=1.0, plain=PLAIN_FLOPS)
        for kind, rate in value.items()
    }


def _nodes(value: Mapping[str, Any], own: Mapping[str, Device], node_size: int) -> list[Node]:
    if ("cluster" in value) == ("nodes" in value):
        raise PlannerError(
            "nodes: give either nodes, a list, or cluster, a text such as '16x H800 + 32x H20'."
        )
    if "cluster" in value:
        groups = parse_groups(check_text("cluster", value["cluster"]), own, node_size)
        return [_networked(node, value) for node in nodes_of(groups)]
    nodes: list[Node] = []
    num_ranks = 0
    for index, item in enumerate(check_sequence("nodes", value["nodes"], "nodes")):
        says_uplink = isinstance(item, Mapping) and "uplink" in item
        for node in _some_nodes(f"nodes[{index}]", item, own, node_size):
            nodes.append(node if says_uplink else _networked(node, value))
            num_ranks += node.num_devices
            if num_ranks > MAX_RANKS:
                raise PlannerError(
                    f"nodes[{index}]: more than {MAX_RANKS} devices; allowed: {MAX_RANKS}."
                )
    if not nodes:
        raise PlannerError("nodes: must hold at least one node, got none.")
    return nodes


def _networked(node: Node, value: Mapping[str, Any]) -> Node:
    """Return a node whose devices do not share an uplink if the description says what network each has."""
    return node if value.get("network") is None else dataclasses.replace(node, uplink=None)


def _some_nodes(path: str, item: Any, own: Mapping[str, Device], node_size: int) -> Iterator[Node]:
    if isinstance(item, str):
        yield from nodes_of(parse_groups(item, own, node_size, path))
        return
    item = check_object(path, item)
    _check_keys(path, item, _NODE_KEYS, ("device",))
    device = find_device(check_text(f"{path}.device", item["device"]), own, f"{path}.device")
    inside = _link(f"{path}.inside", item.get("inside"), INSIDE_LATENCY) or usual_inside(device)
    uplink = item.get("uplink")
    if uplink is not None:
        uplink = _rate(f"{path}.uplink", uplink)
    elif "uplink" not in item:
        uplink = usual_uplink(device)
    repeat = whole_number(f"{path}.repeat", item.get("repeat", 1), 1, MAX_RANKS)
    node = Node(
        device=device,
        num_devices=whole_number(f"{path}.count", item.get("count", node_size), 1, MAX_RANKS),
        inside=inside,
        uplink=uplink,
        name=check_text(f"{path}.name", item.get("name", "")),
        zone=check_text(f"{path}.zone", item.get("zone", "")),
    )
    yield from itertools.repeat(node, repeat)


def _link(path: str, value: Any, latency: float) -> Link | None:
    """Return a link by its rate, or by its rate and latency."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return Link(_rate(path, value), latency)
    _check_keys(path, value, ("bandwidth", "latency"), ("bandwidth",))
    return Link(
        _rate(f"{path}.bandwidth", value["bandwidth"]),
        read_quantity(
            f"{path}.latency",
            value.get("latency", latency),
            SECONDS,
            most=3600.0,
            plain=PLAIN_LATENCY,
        ),
    )


def _rate(path: str, value: Any) -> float:
    return read_quantity(path, value, BYTES_PER_SECOND, least=1.0, plain=PLAIN_RATE)


def _links(value: Any, nodes: list[Node]) -> dict[tuple[str, str], Link]:
    known = {node.zone for node in nodes if node.zone} | {node.device.name for node in nodes}
    links: dict[tuple[str, str], Link] = {}
    for index, item in enumerate(check_sequence("links", value, "links")):
        path = f"links[{index}]"
        item = check_object(path, item)
        _check_keys(path, item, ("between", "bandwidth", "latency"), ("between", "bandwidth"))
        ends = [
            check_text(f"{path}.between[{i}]", end)
            for i, end in enumerate(check_sequence(f"{path}.between", item["between"], "two names"))
        ]
        if len(ends) != 2 or not set(ends) <= known:
            raise PlannerError(
                f"{path}.between: must be two of the zones and devices {', '.join(sorted(known))[:300]}, got "
                f"{shown(item['between'])}: {', '.join(ends)[:100]}."
            )
        pair = (ends[0], ends[1])
        if pair in links or pair[::-1] in links:
            raise PlannerError(f"{path}.between: {ends[0]} and {ends[1]} stand twice; keep one.")
        link = _link(path, {key: item[key] for key in item if key != "between"}, NETWORK_LATENCY)
        assert link is not None, item
        links[pair] = link
    return links


def _check_keys(
    path: str, value: Mapping[str, Any], allowed: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    """Raise on an unknown or missing key; the message begins with its path."""
    try:
        check_keys(value, allowed, needed)
    except ValueError as error:
        raise PlannerError(f"{path}.{error}") from None
