"""The Helm chart, rendered by Helm's own engine and held against the schemas of Kubernetes."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError, lint

from agent.config import load_config

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm/warpwatch"
#: Kinds of the Prometheus Operator, of which Kubernetes has no schema.
FOREIGN = {"PodMonitor", "PrometheusRule"}


def render(**values):
    """Return the rendered objects by kind; those of rules, of which there are several, in a list."""
    rendered = Chart.load(str(CHART)).render(values, name="gpus", namespace="monitoring")
    objects = [
        one for name, text in rendered.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one
    ]
    rules = [one for one in objects if one["kind"] == "PrometheusRule"]
    by_kind = {one["kind"]: one for one in objects if one not in rules}
    assert len(by_kind) + len(rules) == len(objects)
    return {**by_kind, "PrometheusRule": rules}


def container_of(objects):
    (container,) = objects["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    return container


EVERYTHING = {
    "hostNetwork": False,
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "podResources": {"enabled": True},
    "stateFolder": "/var/lib/warpwatch",
    "priorityClassName": "system-node-critical",
    "imagePullSecrets": [{"name": "pull"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "gpu"},
    "affinity": {"nodeAffinity": {}},
    "config": '[export]\nhost = "off"\n',
}
WITH_TLS = {
    "config": '[export]\nweb_config = "/etc/warpwatch-web/web.yml"\n',
    "web": {"secretName": "warpwatch-web"},
    "podMonitor": {"tlsConfig": {"ca": {"secret": {"name": "ca", "key": "ca.crt"}}}, "basicAuth": {}},
}
LEAST = {
    "jobsFolder": "",
    "runtimeClassName": "",
    "podMonitor": {"enabled": False},
    "prometheusRule": {"enabled": False},
}


@pytest.mark.parametrize("values", [{}, EVERYTHING, WITH_TLS, LEAST], ids=["default", "everything", "tls", "least"])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_every_object_fits_the_schema_of_kubernetes(values, version):
    objects = render(**values)
    own = {kind: one for kind, one in objects.items() if kind not in FOREIGN}
    assert {"DaemonSet", "ConfigMap", "ServiceAccount"} <= own.keys()
    for one in own.values():
        kubernetes_validate.validate(one, version, strict=True)


def test_helm_finds_nothing_to_complain_of():
    assert [message for message in lint(str(CHART))["messages"] if message["severity"] >= 2] == []


def test_it_has_no_privilege():
    pod = render()["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})  # it must not take a GPU from a job
    mounted = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert mounted == {"/run/warpwatch/jobs.d"}


def test_names_of_pods_cost_root_and_no_capability():
    objects = render(podResources={"enabled": True})
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 0
    assert container_of(objects)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"]: mount for mount in container_of(objects)["volumeMounts"]}
    assert mounts["pod-resources"] == {
        "name": "pod-resources",
        "mountPath": "/var/lib/kubelet/pod-resources",
        "readOnly": True,
    }


def test_the_rules_are_all_the_shipped_ones():
    shipped = {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (ROOT / "exporters/rules").glob("*.rules.yml")
    }
    rendered = render(prometheusRule={"labels": {"release": "prometheus"}})["PrometheusRule"]
    names = {one["metadata"]["name"] for one in rendered}
    assert names == {"gpus-nodes", "gpus-jobs", "gpus-capacity"}
    assert {one["metadata"]["labels"]["release"] for one in rendered} == {"prometheus"}
    assert {path.name for path in (CHART / "files").iterdir()} == shipped.keys()
    by_first_group = sorted(shipped.values(), key=lambda rules: rules["groups"][0]["name"])
    assert sorted((one["spec"] for one in rendered), key=lambda rules: rules["groups"][0]["name"]) == by_first_group


@pytest.mark.parametrize("off", ["jobs", "capacity"])
def test_a_file_of_rules_can_be_left_out(off):
    names = {one["metadata"]["name"] for one in render(prometheusRule={"files": {off: False}})["PrometheusRule"]}
    assert names == {"gpus-nodes", "gpus-jobs", "gpus-capacity"} - {f"gpus-{off}"}
    assert render(prometheusRule={"enabled": False})["PrometheusRule"] == []


def test_prometheus_sees_the_job_the_rules_name_and_the_node():
    monitor = render()["PodMonitor"]["spec"]
    labels = render()["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == "warpwatch"
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"}]
    (port,) = container_of(render())["ports"]
    assert endpoint["port"] == port["name"]


def test_the_configuration_is_mounted_where_the_agent_reads_it(tmp_path):
    objects = render(config=EVERYTHING["config"], port=12345)
    file = tmp_path / "warpwatch.toml"
    file.write_text(objects["ConfigMap"]["data"]["warpwatch.toml"], encoding="utf-8")
    assert load_config(file).export.host == "off"
    assert container_of(objects)["args"] == ["run", "--config", "/etc/warpwatch/warpwatch.toml", "--listen", ":12345"]


def test_with_a_secret_the_kubelet_and_prometheus_speak_tls():
    objects = render(**WITH_TLS)
    container = container_of(objects)
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == WITH_TLS["podMonitor"]["tlsConfig"]
    (volume,) = (one for one in objects["DaemonSet"]["spec"]["template"]["spec"]["volumes"] if one["name"] == "web")
    assert volume["secret"] == {"secretName": "warpwatch-web", "defaultMode": 0o440}  # read by the pod's group
    assert {"name": "web", "mountPath": "/etc/warpwatch-web", "readOnly": True} in container["volumeMounts"]


def test_a_kubelet_that_would_be_refused_looks_at_the_port_alone():
    container = container_of(render(**{**WITH_TLS, "web": {"secretName": "warpwatch-web", "asksClients": True}}))
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["tcpSocket"] == {"port": "metrics"}
        assert "httpGet" not in container[probe]


def test_another_configuration_starts_new_pods():
    def annotations(config):
        return render(config=config)["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]

    assert annotations("") != annotations("[export]\n")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hostPid": True}, "hostPid"),
        ({"port": 80}, "port"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"networkPolicy": {"enabled": True}}, "hostNetwork"),
        ({"web": {"secretName": "warpwatch-web"}}, "web_config"),
        ({"prometheusRule": {"files": {"node": True}}}, "node"),
        ({"prometheusRule": {"files": {"nodes": False}}}, "set nodes to true or jobs to false"),
    ],
)
def test_a_wrong_value_is_named(values, named):
    with pytest.raises(HelmError, match=named):
        render(**values)
