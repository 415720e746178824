"""The Helm chart, rendered by Helm itself: what it makes is valid, and no role has a right too many."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.test_deployment import command_of

CHART = Path(__file__).parents[1] / "deployment" / "helm" / "fedtrain"
NORTH = {
    "certs": "fedtrain-north", "address": "fl.example.org:443",
    "to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], "data": {"hostPath": {"path": "/srv/data"}},
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}  # fmt: skip
VALUES = {"sites": {"north": NORTH, "site-1": {"certs": "fedtrain-site-1"}}}


def helm():
    return pytest.importorskip(
        "helm_python.chart", reason="helm is not here: pip install helm-python-sdk (75 MB, Helm as a library)"
    )


def rendered(values):
    """kind/name -> what the chart makes of these values."""
    made = helm().Chart.load(CHART).render(values=values, name="fl").values()
    found = [each for text in made for each in yaml.safe_load_all(text) if each]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


@pytest.fixture(scope="module")
def all_of_them():
    return rendered(VALUES)


def pods(found):
    for name, each in found.items():
        if each["kind"] in ("StatefulSet", "Deployment"):
            yield name, each["spec"]["template"]["spec"]


def test_helm_finds_no_fault_in_the_chart_and_kubernetes_none_in_what_it_makes(all_of_them):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    assert helm().lint(str(CHART), VALUES)["errors"] == []
    for each in all_of_them.values():
        validate.validate(each, validate.latest_version(), strict=True)
    assert sorted(all_of_them) == [
        "Deployment/fl-site-north", "Deployment/fl-site-site-1", "NetworkPolicy/fl-aggregator",
        "NetworkPolicy/fl-site-north", "NetworkPolicy/fl-site-site-1",
        "PersistentVolumeClaim/fl-site-north", "PersistentVolumeClaim/fl-site-site-1",
        "Service/fl-aggregator", "StatefulSet/fl-aggregator",
    ]  # fmt: skip


def test_each_pod_starts_our_command_as_nobody_in_particular_and_writes_nowhere_but_to_its_volume(
    all_of_them,
):
    commands = {}
    for name, pod in pods(all_of_them):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        (main,), (init,) = pod["containers"], pod["initContainers"]
        commands[name] = main["args"]
        command_of(main["args"])
        for each in (main, init):
            may = each["securityContext"]
            assert (may["readOnlyRootFilesystem"], may["allowPrivilegeEscalation"]) == (True, False)
            assert may["capabilities"] == {"drop": ["ALL"]}
            written = {m["name"] for m in each["volumeMounts"] if not m.get("readOnly")}
            assert written <= {"state", "tmp"}
    assert commands == {
        "StatefulSet/fl-aggregator": ["aggregator"],
        "Deployment/fl-site-north": ["site", "north", "--data", "/data"],
        "Deployment/fl-site-site-1": ["site", "site-1"],
    }


def test_a_site_may_be_called_by_nobody_and_call_one_place(all_of_them):
    for site, port in (("north", 443), ("site-1", 8440)):
        rules = all_of_them[f"NetworkPolicy/fl-site-{site}"]["spec"]
        assert rules["policyTypes"] == ["Ingress", "Egress"]
        assert rules["ingress"] == []
        names, out = rules["egress"]
        assert {each["port"] for each in names["ports"]} == {53}
        assert [each["port"] for each in out["ports"]] == [port]
    assert out["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "aggregator"
    assert all_of_them["NetworkPolicy/fl-aggregator"]["spec"]["egress"] == []
    env = [e for _, pod in pods(all_of_them) for e in pod["containers"][0]["env"]]
    addresses = [e["value"] for e in env if e["name"] == "FEDTRAIN_NETWORK__ADDRESS"]
    assert sorted(addresses) == ["fl-aggregator:8440", "fl.example.org:443"]


def test_a_cluster_of_a_site_alone_has_no_aggregator():
    found = rendered({"aggregator": {"enabled": False}, "sites": {"north": NORTH}})
    assert {each.partition("/")[2] for each in found} == {"fl-site-north"}


def test_the_key_is_copied_so_that_only_its_owner_reads_it_and_one_that_was_renewed_stays(
    all_of_them, tmp_path
):
    """The init container's own words, in a shell here."""
    for name in ("key.pem", "cert.pem"):
        (tmp_path / name).write_text("first")
        (tmp_path / name).chmod(0o440)
    (pod,) = (pod for name, pod in pods(all_of_them) if name.endswith("north"))
    (script,) = pod["initContainers"][0]["args"]
    script = script.replace("/state", str(tmp_path / "state")).replace("cd /secret", f"cd {tmp_path}")
    script = script.replace("for file in *", "for file in *.pem")
    for _ in range(2):
        subprocess.run(["sh", "-ceu", script], check=True, cwd=tmp_path)
        key = tmp_path / "state/certs/sites/north/key.pem"
        assert key.stat().st_mode & 0o077 == 0
        (tmp_path / "state/certs/sites/north/cert.pem").chmod(0o600)
        (tmp_path / "state/certs/sites/north/cert.pem").write_text("renewed")
    assert (tmp_path / "state/certs/sites/north/cert.pem").read_text() == "renewed"
