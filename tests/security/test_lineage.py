"""S36: an exported model says where it comes from, signed by the aggregator that made it."""

import hashlib
import json
import shutil

import pytest
from click.testing import CliRunner

from fedtrain.cli import cli
from fedtrain.errors import CertificateError, ConfigError, StoreError
from fedtrain.events import ActionApproved, silent
from fedtrain.pki import Credentials
from fedtrain.pki.signing import Signed, Signer
from fedtrain.runtime import lineage, portable
from fedtrain.runtime.auditing import audited, root_of
from fedtrain.tracking.audit import audit_file
from fedtrain.tracking.export import export
from tests.security.test_audit import SITES, run  # noqa: F401


@pytest.fixture
def model(run, tmp_path):  # noqa: F811
    """The folder of the run's own export, and the federation's root."""
    return shutil.copytree(run.run_dir / "model", tmp_path / "model"), root_of(run)


def change(path, old, new):
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def test_s36_an_exported_model_verifies_and_a_changed_byte_of_it_does_not(run, model):  # noqa: F811
    folder, root = model
    log = audit_file(run, "aggregator")
    found = lineage.verify(folder, root, log)
    assert (found.round, found.sites, found.updates) == (2, SITES, 3)
    assert found.fingerprints.keys() == {*SITES}
    assert found.task_digest == json.loads((folder / "model.json").read_text())["task_digest"]
    (run.root / "fedtrain.toml").touch()
    done = CliRunner().invoke(cli, ["verify", str(folder), "--config", str(run.root / "fedtrain.toml")])
    assert "r, round 2: signed by its aggregator" in done.output
    for file, old, new, why in (
        ("lineage.json", b'"round": 2', b'"round": 3', "shows something else than what was signed"),
        ("model.json", b'"round": 2', b'"round": 3', "model.json has another round than what was signed"),
        ("model.json", b'"task_digest": "', b'"task_digest": "0', "another task_digest"),
    ):
        was = (folder / file).read_bytes()
        change(folder / file, old, new)
        with pytest.raises(CertificateError, match=why):
            lineage.verify(folder, root)
        (folder / file).write_bytes(was)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CertificateError, match=r"model.safetensors is not the model that was signed"):
        lineage.verify(folder, root)


def test_s36_a_lineage_that_anybody_else_signed_is_refused(run, model):  # noqa: F811
    """A site's key, however good, signs no model."""
    folder, root = model
    shown = json.loads((folder / "lineage.json").read_text())
    claim = lineage.verify(folder, root)
    signer = Signer.of(Credentials.load(run.root / "certs" / "sites" / SITES[0]))
    forged = Signed.by(signer, lineage.CONTEXT, claim).encode()
    shown["signed"] = lineage.b64encode(forged).decode()
    (folder / "lineage.json").write_text(json.dumps(shown))
    with pytest.raises(CertificateError, match="is not the aggregator of"):
        lineage.verify(folder, root)
    (folder / "lineage.json").unlink()
    with pytest.raises(StoreError, match=r"has no lineage.json"):
        lineage.verify(folder, root)


def test_s36_a_lineage_names_a_line_of_the_aggregators_audit_log(run, model, tmp_path):  # noqa: F811
    folder, root = model
    config = type(run).of(run.table(), tmp_path / "elsewhere")
    other = audited(config, "aggregator", silent)
    for _ in range(100):
        other.emit(ActionApproved(who="x", what="y"))
    other.close()
    with pytest.raises(StoreError, match=r"does not have line \d+ as the lineage names it"):
        lineage.verify(folder, root, audit_file(config, "aggregator"))


def test_s36_another_round_exported_by_hand_is_signed_for_itself(run, tmp_path):  # noqa: F811
    (run.root / "fedtrain.toml").touch()
    out = tmp_path / "first"
    export(run.run_dir, out, 1)
    assert lineage.sign(run, out)
    assert lineage.verify(out, root_of(run)).round == 1


def test_s36_a_graph_beside_the_model_is_signed_with_it(run, tmp_path, monkeypatch):  # noqa: F811
    """`--format`: the lineage names each file that the command made, and what is put in its place later is
    refused. Where a graph can't be made the model itself is signed all the same."""
    (run.root / "fedtrain.toml").touch()
    (run.run_dir / "events.jsonl").touch()  # by which a run is found
    out, root = tmp_path / "out", root_of(run)
    made = {"onnx": ("model.onnx", "model.onnx.data"), "torch-export": ("model.pt2",)}

    def add(config, source, folder, kind, **_):
        if broken:
            raise ConfigError("torch can't follow the model")
        for name in made[kind]:
            (folder / name).write_bytes(name.encode())
        return 0.0

    def exported(*kinds):
        formats = [argument for kind in kinds for argument in ("--format", kind)]
        toml = str(run.root / "fedtrain.toml")
        return CliRunner().invoke(
            cli, ["export", "--config", toml, "--set", "run.name=r", "-o", str(out), *formats]
        )

    monkeypatch.setattr(portable, "add", add)
    for kinds in (["onnx", "torch-export"], ["torch-export"], []):
        broken = False
        done = exported(*kinds)
        assert done.exit_code == 0, done.output
        names = [name for kind in kinds for name in made[kind]]
        found = lineage.verify(out, root)
        assert found.graphs == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
        checked = CliRunner().invoke(cli, ["verify", str(out), "--config", str(run.root / "fedtrain.toml")])
        assert [name for name in lineage.GRAPHS if f"  graph       {name}" in checked.output] == names
        for name in lineage.GRAPHS:
            (out / name).write_bytes(b"another")
            with pytest.raises(CertificateError, match=f"{name} is not the one that was signed"):
                lineage.verify(out, root)
            (out / name).unlink()
            lineage.verify(out, root)  # a copy without the graph is of the same model
    broken = True
    assert exported("onnx").exit_code == 1
    assert lineage.verify(out, root).graphs == {}
