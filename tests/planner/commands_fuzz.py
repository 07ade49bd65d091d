"""Mutated command lines of the planner: options, and the files that they name; and what is wrong with an answer."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import warnings

from hdtensor import AnnotationPlan, cli
from hdtensor.planner.emit import read_planned
from tests.planner.test_mutated_inputs import CONFIGS, mutated_text, mutated_value


#: Option -> values that make sense.
VALUES = {
    "--model": ("llama-7b", "mixtral", "config.json", "opt-350", "llama-3-8B"),
    "--cluster": ("4x H800 + 4x H20", "2x 2x A100 @ a + 4x H20/2 @ b", "cluster.yaml", "cluster.json", "8x CPU", "topo.txt"),
    "--batch": ("1", "8", "16", "64", "60"),
    "--context": ("64", "512", "4096"),
    "--precision": ("bf16", "fp32", "fp16"),
    "--optimizer": ("adamw", "sgd", "sgd_momentum"),
    "--recompute": ("none", "full"),
    "--schedule": ("1F1B", "gpipe", "ZB-H1"),
    "--zero": ("0", "1"),
    "--tp": ("1", "1,2", "1,2,4,8", "2,4"),
    "--cp": ("1", "1,2"),
    "--mbs": ("1", "1,2,4", "3,5"),
    "--max-stages": ("1", "2", "4"),
    "--min-lanes": ("1", "2"),
    "--max-lanes": ("1", "4"),
    "--seconds": ("0.01", "1", "0.3"),
    "--without": ("0", "1-2", "0,3-4"),
    "--back": ("0", "1"),
    "--label": ("two", "one", "C1"),
    "--profile": ("profile.json",),
    "--device": ("H20", "A100"),
    "--nodes": ("1", "2"),
    "--replan": ("plan.json", "plans.json"),
    "--trace": ("out.trace",),
    "--html": ("out.html",),
    "--output": ("out.json", "-"),
    "--microbatches": ("4", "16"),
    "--dtype": ("bf16", "float32"),
    "--ranks-per-node": ("4", "8"),
    "--topology": ("topology.json",),
    "--src": ("S0 / 0-3:S1 4,5:R", "R / 0,1:R"),
    "--dst": ("R / 0-5:S0", "S0 / 0,1:R"),
    "--shape": ("64,64", "8"),
    "--ranks": ("1", "1"),
    "--sizes": ("64", "64,256"),
}  # fmt: skip
FLAGS = ("--json", "--uniform")
#: Command -> (what it begins with, options that it has).
COMMANDS = {
    "plan": (
        ["--model", "llama-7b", "--batch", "16", "--context", "256", "--cluster", "4x H800 + 2x H20"],
        ["--cluster", "--precision", "--optimizer", "--recompute", "--schedule", "--zero", "--tp", "--cp", "--mbs",
         "--max-stages", "--min-lanes", "--max-lanes", "--seconds", "--without", "--profile", "--device", "--nodes",
         "--trace", "--html", "--output", "--model", "--batch", "--context"],
    ),
    "replan": (
        ["--replan", "plan.json", "--without", "1"],
        ["--back", "--label", "--min-lanes", "--tp", "--profile", "--mbs", "--html", "--max-stages", "--output", "--seconds"],
    ),
    "simulate": (
        ["plan.json"],
        ["--label", "--model", "--batch", "--cluster", "--context", "--precision", "--optimizer", "--recompute", "--schedule",
         "--profile", "--trace", "--html", "--device", "--nodes"],
    ),
    "explain": (
        ["plan.json"],
        ["--label", "--model", "--batch", "--cluster", "--context", "--precision", "--optimizer", "--recompute", "--schedule",
         "--profile", "--src", "--dst", "--shape"],
    ),
    "tensor": (
        ["--src", "S0 / 0-3:S1 4,5:R", "--dst", "R / 0-5:S0", "--shape", "64,64"],
        ["--dtype", "--ranks-per-node", "--topology", "--src", "--dst", "--shape"],
    ),
    "dry-run": (
        ["plan.json"],
        ["--label", "--model", "--schedule", "--microbatches", "--context", "--dtype", "--ranks-per-node", "--topology",
         "--trace"],
    ),
    "profile": (
        ["--model", "config.json", "--output", "out.profile", "--tp", "1", "--mbs", "1", "--context", "8", "--precision",
         "fp32", "--ranks", "1", "--seconds", "0.05"],
        ["--tp", "--mbs", "--sizes", "--precision", "--model"],
    ),
    "devices": (["H20"], []),
}  # fmt: skip
NAMES = {"replan": "plan", "tensor": "explain"}
PLANS = ("plan.json", "plans.json", "plan.json", "edited.json")
CLUSTER = """devices:
  fast: {like: H800, speed: 0.9, memory: 80 GB}
nodes:
  - {device: fast, count: 2, zone: a}
  - {device: H20, count: 2, repeat: 2, inside: 400 GB/s}
network: {bandwidth: 25 GB/s, latency: 5 us}
"""
TOPO = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV18\t0-7\nGPU1\tNV18\tX\t0-7\n"
TOPOLOGY = {"links": {"near": {"bandwidth": 1e11, "latency": 1e-6}}}
MOST_LETTERS = 4000


class Fuzz:
    """Makes command lines and their files in a folder, and looks at the answers."""

    def __init__(self, folder):
        self.folder = folder
        self.code = None
        config = {**CONFIGS[0], "num_hidden_layers": 4}
        self.files = {"config.json": json.dumps(config), "cluster.yaml": CLUSTER, "topo.txt": TOPO,
                      "topology.json": json.dumps(TOPOLOGY)}  # fmt: skip
        self._restore()
        for name, model in (("plan.json", "llama-7b"), ("other.json", "config.json")):
            self._run(["plan", "--model", model, "--batch", "12", "--context", "256", "--cluster", "4x H800 + 2x H20",
                       "--output", name])  # fmt: skip
        plan, other = (json.loads(self._read(name)) for name in ("plan.json", "other.json"))
        edited = json.loads(self._read("plan.json"))
        edited["pipelines"][0]["microbatches"] += 1
        plans = {"plans": [{**plan, "label": "one"}, {**other, "label": "two"}]}
        self._run(["profile", "--model", "config.json", "--output", "profile.json", "--tp", "1", "--mbs", "1,2", "--context",
                   "8,16", "--precision", "fp32", "--ranks", "1"])  # fmt: skip
        self.files |= {
            "plan.json": json.dumps(plan),
            "plans.json": json.dumps(plans),
            "edited.json": json.dumps(edited),
            "cluster.json": json.dumps(plan["planned_for"]["cluster"]),
            "profile.json": self._read("profile.json"),
        }

    def command(self, random):
        """Return a mutated command line; its files are written."""
        self._restore()
        kind = random.choice(tuple(COMMANDS))
        words, allowed = COMMANDS[kind]
        words = [random.choice(PLANS) if word == "plan.json" else word for word in words]
        for option in random.sample(allowed, k=min(len(allowed), random.choice((0, 1, 1, 2, 3)))):
            words += [option, random.choice(VALUES[option])]
        words += [
            flag for flag in FLAGS if random.random() < 0.4 and (flag == "--json" or kind == "plan")
        ]
        for _ in range(random.choice((0, 0, 1, 1, 1, 2))):
            self._mutate(random, words)
        return [NAMES.get(kind, kind), *words]

    def _mutate(self, random, words):
        """Change a word of a command line, or a file that it names."""
        named = [word for word in words if word in self.files]
        if named and random.random() < 0.6:
            self._mutate_file(random, random.choice(named))
            return
        at = random.randrange(len(words)) if words else 0
        match random.randrange(6):
            case 0:
                words[at : at + 1] = []
            case 1:
                option = random.choice(tuple(VALUES))
                words += [option, random.choice(VALUES[option])]
            case 2:
                words.insert(
                    at,
                    random.choice(
                        ("", "-1", "0", "1e9", "nan", "none", "9" * 30, "--json", "x" * 3000, "é\n")
                    ),
                )
            case 3 if words:
                words[at] = random.choice(
                    ("0", "-1", "2", "1000000", "65536", "1,1", "3", "inf", "1e-9")
                )
            case _ if words:
                words[at] = mutated_text(random, words[at]).replace("\x00", "")

    def _mutate_file(self, random, name):
        text = self.files[name]
        if name.endswith("json") and random.random() < 0.75:
            value = json.loads(text)
            for _ in range(random.choice((1, 1, 2))):
                value = mutated_value(random, value)
            text = json.dumps(value)
        else:
            text = mutated_text(random, text)
        self._write(name, text)

    def fault(self, words):
        """Run a command and return what is wrong with its answer, in words; None if nothing is."""
        out, err = self._run(words)
        lines = err.splitlines()
        if self.code == 2:
            if len(lines) != 1 or not lines[0].startswith("hdtensor") or "error: " not in lines[0]:
                return f"not one line: {err[:1500]!r}"
            return f"output before an error: {out[:200]!r}" if out else None
        if self.code != 0:
            return f"exit code {self.code}: {err[:1000]}"
        if any("warning: " not in line for line in lines):
            return f"stderr: {err[:500]!r}"
        if "--json" in words and "--help" not in words:
            return _fault_of_json(out)
        if not out or "nan" in out.lower().split() or "inf" in out.lower().split():
            return f"text: {out[:500]!r}"
        return self._fault_of_plan(words)

    def _fault_of_plan(self, words):
        if "out.json" not in words or words[0] != "plan":
            return None
        planned = read_planned(AnnotationPlan.load(os.path.join(self.folder, "out.json")))
        return None if planned.strategy.lanes else "no lanes"

    def _run(self, words):
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            try:
                self.code = cli.main(words)
            except SystemExit as error:
                self.code = error.code or 0
        return out.getvalue(), err.getvalue()

    def _restore(self):
        for name in ("out.json", "out.trace", "out.html", "out.profile"):
            if os.path.exists(os.path.join(self.folder, name)):
                os.remove(os.path.join(self.folder, name))
        for name, text in self.files.items():
            self._write(name, text)

    def _read(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return file.read()

    def _write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def _fault_of_json(out):
    value = json.loads(out)
    for path, number in _numbers(value, ""):
        if not math.isfinite(number):
            return f"{path} is {number}"
        if number < 0 and not path.startswith((".lanes", ".why", ".plan")):
            return f"{path} is {number}"
    if "step_seconds" in value and not value["step_seconds"] > 0:
        return f"a step of {value['step_seconds']} s"
    return None


def _numbers(value, path):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
