"""What others run livedraft with: Prometheus, Grafana, systemd, Docker. Each file is read by its own tool's grammar, and every
metric and label it names is one that a server that learns really gives."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.markdown import ROOT
from tests.docs.test_documents import parse
from tests.e2e.in_process import livedraft
from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess
from tests.e2e.test_state_cli import ask, shown, wait_for

DEPLOY = ROOT / "deploy"
FROM_PROMETHEUS = {"up": {"job", "instance"}}
"""What Prometheus itself adds about whom it scrapes."""
SCRAPE_LABELS = {"job", "instance"}
pytestmark = pytest.mark.timeout(240)


_DURATION = re.compile(r"(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
_GROUP_FIELDS = {"name": str, "interval": str, "query_offset": str, "limit": int, "labels": dict, "rules": list}
_RULE_FIELDS = {"alert": str, "expr": str, "for": str, "keep_firing_for": str, "labels": dict, "annotations": dict}
_DURATIONS = ("interval", "query_offset", "for", "keep_firing_for")
_TEMPLATE_FUNCTIONS = {
    "humanize", "humanize1024", "humanizeDuration", "humanizePercentage", "humanizeTimestamp", "title", "toUpper", "toLower",
}  # fmt: skip
_TEMPLATE = re.compile(r"\$(?:labels\.[a-zA-Z_]\w*|value)(?:\s*\|\s*(\w+))?")


@pytest.fixture(scope="module")
def samples(model_folder, tmp_path_factory):
    """Name -> labels of every sample on /metrics of a server that has served, drafted and trained."""
    state = tmp_path_factory.mktemp("deploy") / "state"
    options = ("--served-model-name", "m", "--dtype", "float32", "--state", state)
    with ServerProcess(
        model_folder, *options, LIVEDRAFT_SPECULATION__NUM_SPECULATIVE_TOKENS="2", **TINY_ENVIRONMENT
    ) as server:
        ask(server, 12)
        wait_for(lambda: shown("learn", "status", "--state", state, "--json")["trainer"].get("num_steps", 0) > 0, 150)
        text = httpx.get(f"{server.url}/metrics", timeout=10).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def alert_rules():
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels():
    return json.loads((DEPLOY / "grafana.json").read_text())["panels"]


def expressions():
    """(where, PromQL) of everything; Grafana's own variables get values first."""
    for rule in alert_rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


def selectors(node):
    """(metric, labels it is asked for) in an expression's tree."""
    for name in ("expr", "lhs", "rhs"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr) or hasattr(child, "prettify"):
            yield from selectors(child)
    for argument in getattr(node, "args", None) or []:
        yield from selectors(argument)
    selector = node if isinstance(node, promql_parser.VectorSelector) else getattr(node, "vector_selector", None)
    if selector is not None:
        yield selector.name, {matcher.name for matcher in selector.matchers.matchers}


@pytest.mark.long
def test_every_metric_and_label_that_is_asked_for_is_given(samples):
    num_metrics = 0
    for where, expression in expressions():
        asked = list(selectors(promql_parser.parse(expression)))
        assert asked, where
        known = set(SCRAPE_LABELS)
        for metric, labels in asked:
            given = FROM_PROMETHEUS.get(metric) or samples.get(metric)
            assert given is not None, f"{where}: {metric} is not on /metrics"
            assert labels <= given | SCRAPE_LABELS, f"{where}: {metric} has no {labels - given}"
            known |= given
            num_metrics += 1
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= known, f"{where}: {group}"
    assert num_metrics > 40


@pytest.mark.long
def test_labels_in_legends_and_texts_are_given(samples):
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]), panel["title"]


def faults_of_rules(rules):
    """What Prometheus would refuse in a file of alert rules, or show wrongly: its schema, durations, label names, templates."""
    if set(rules) != {"groups"}:
        return [f"top: {set(rules)}"]
    found = []
    for group in rules["groups"]:
        found += faults_of_fields(group, _GROUP_FIELDS, required={"name", "rules"})
        for rule in group.get("rules", []):
            found += faults_of_fields(rule, _RULE_FIELDS, required={"alert", "expr"})
            for name, text in {**rule.get("labels", {}), **rule.get("annotations", {})}.items():
                if not re.fullmatch(r"[a-zA-Z_]\w*", name) or not isinstance(text, str):
                    found.append(f"{rule.get('alert')}: {name}: {text!r}")
                    continue
                found += [f"{rule.get('alert')}: {name}: {fault}" for fault in faults_of_template(text)]
    return found


def faults_of_fields(row, fields, required):
    name = row.get("alert") or row.get("name")
    found = [f"{name}: no {field}" for field in required - set(row)]
    for field, value in row.items():
        if not isinstance(value, fields.get(field, ())):
            found.append(f"{name}: {field}: {value!r}")
        elif field in _DURATIONS and (not value or _DURATION.fullmatch(value) is None):
            found.append(f"{name}: {field}: {value!r} is no duration")
    return found


def faults_of_template(text):
    actions = re.findall(r"{{(.*?)}}", text)
    rest = re.sub(r"{{.*?}}", "", text)
    if "{{" in rest or "}}" in rest:
        return [f"braces that do not close: {text!r}"]
    matches = [(action, _TEMPLATE.fullmatch(action.strip())) for action in actions]
    return [
        f"{{{{{action}}}}}" for action, match in matches
        if match is None or (match[1] is not None and match[1] not in _TEMPLATE_FUNCTIONS)
    ]  # fmt: skip


def test_the_rules_have_prometheus_schema():
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    assert faults_of_rules(rules) == []
    for rule in alert_rules():
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = [set(re.split(r",\s*", inside)) for inside in re.findall(r"\bby \(([^)]*)\)", rule["expr"])]
        for inside in kept:  # what a sum leaves out cannot be named
            assert labels <= inside, rule["alert"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"for": "2 minutes"}, "no duration"),
        ({"for": 120}, "for: 120"),
        ({"four": "2m"}, "four"),
        ({"expr": 1}, "expr: 1"),
        ({"labels": {"sever-ity": "warning"}}, "sever-ity"),
        ({"labels": {"severity": 1}}, "severity: 1"),
        ({"annotations": {"summary": "{{ $labels.instance"}}, "do not close"),
        ({"annotations": {"summary": "{{ $value | humaniseDuration }}"}}, "humaniseDuration"),
        ({"annotations": {"summary": "{{ $label.instance }}"}}, "$label.instance"),
    ],
)
def test_a_fault_in_a_rule_is_found(change, fault):
    group = {"name": "g", "rules": [alert_rules()[0] | change]}
    found = faults_of_rules({"groups": [group]})
    assert len(found) == 1
    assert fault in found[0]


def metrics_in_the_documents():
    """Of the table in docs/operations.md; a name that begins with _ goes on with the one before it."""
    section = (ROOT / "docs" / "operations.md").read_text().split("| metric | what |")[1].split("\n\n")[0]
    names = set()
    for row in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)(?:{\w+})?`", row):
            names.add(f"livedraft:spec_decode{name}" if name.startswith("_") else f"livedraft:{name}")
    return names


@pytest.mark.long
def test_the_documents_table_of_metrics_is_what_is_served(samples):
    served = {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples if not name.endswith("_created")}
    assert metrics_in_the_documents() == served
    assert len(served) > 25


def test_alerts_say_what_to_do():
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert len(rule["annotations"]["description"]) > 40
    assert len({rule["alert"] for rule in alert_rules()}) == len(alert_rules()) >= 8


def test_panels_lie_beside_each_other():
    places = set()
    for panel in panels():
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells


def test_the_scrape_configuration_names_the_rules_that_are_there():
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert [(DEPLOY / name).exists() for name in config["rule_files"]] == [True]
    assert config["scrape_configs"][0]["job_name"] in next(
        rule["expr"] for rule in alert_rules() if "up{" in rule["expr"]
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees():
    subprocess.run(["promtool", "check", "config", str(DEPLOY / "prometheus.yml")], check=True, timeout=30)


# --- systemd --------------------------------------------------------------------------------------------------------


def unit_lines(key):
    lines = (DEPLOY / "livedraft.service").read_text().splitlines()
    return [line.split("=", 1)[1] for line in lines if line.startswith(f"{key}=")]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path):
    """The program's path is another here: systemd refuses a unit whose program is not there."""
    unit = tmp_path / "livedraft.service"
    unit.write_text((DEPLOY / "livedraft.service").read_text().replace("/opt/livedraft/bin/livedraft", sys.executable))
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "livedraft.service" not in result.stderr  # a key it does not know is only a warning to it


def test_the_units_commands_and_settings_are_known():
    for line in (*unit_lines("ExecStart"), *unit_lines("ExecStartPre")):
        assert parse(line.removeprefix("/opt/livedraft/bin/")) is not None
    variables = dict(word.split("=", 1) for line in unit_lines("Environment") for word in line.split())
    given = {name: value for name, value in variables.items() if name.startswith("LIVEDRAFT_")}
    settings = json.loads(livedraft("config", "show", "--json", **given).stdout)
    assert settings["model"]["state"] == "%S/livedraft"
    drain = settings["server"]["drain_timeout_seconds"]
    assert int(unit_lines("TimeoutStopSec")[0]) > drain + 10
    assert unit_lines("KillMode") == ["mixed"]


# --- Docker ---------------------------------------------------------------------------------------------------------


def dockerfile():
    """(instruction, rest) of each, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


HADOLINT = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing():
    command = [HADOLINT, "--no-color", str(ROOT / "Dockerfile")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_image_is_built_from_what_is_there_and_nothing_else():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        word for name, rest in dockerfile() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_runs_as_nobody_special_and_its_settings_and_command_are_known():
    instructions = dockerfile()
    assert ("USER", "1000") in instructions
    assert max(index for index, (name, _) in enumerate(instructions) if name == "RUN") < instructions.index(
        ("USER", "1000")
    )
    environment = next(rest for name, rest in instructions if name == "ENV")
    variables = dict(word.split("=", 1) for word in environment.split())
    settings = json.loads(
        livedraft(
            "config", "show", "--json", **{k: v for k, v in variables.items() if k.startswith("LIVEDRAFT_")}
        ).stdout
    )
    assert settings["server"]["host"] == "0.0.0.0"
    assert settings["model"]["state"].startswith("/data/")
    command = json.loads(next(rest for name, rest in instructions if name == "CMD"))
    for part in command[2].split("&&"):
        assert parse(part.strip()) is not None
    assert [name for name, _ in instructions].count("CMD") == 1


def test_the_image_takes_the_same_torch_as_the_makefile():
    makefile = re.search(r"TORCH \?= (\S+)", (ROOT / "Makefile").read_text())[1]
    assert ("ARG", f"TORCH={makefile}") in dockerfile()
