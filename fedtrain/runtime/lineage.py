"""Whose work an exported model is: lineage.json beside it, signed by the aggregator that made it.

The statement binds the bytes of the model, and of the graphs beside it, to the task, the settings, the sites
and the round, to the privacy that the aggregator's own log has as spent, and to the head of its audit log,
which other ends keep too.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any, cast

import msgspec

from ..config import Config
from ..digest import sha256_of
from ..errors import CertificateError, StoreError
from ..events import Admitted, PrivacySpent
from ..pki import Credentials
from ..pki.identity import certificates, identity_of
from ..pki.signing import Signed, Signer, Verifier, signed_claim
from ..tracking.audit import audit_file, lines_of
from ..tracking.export import MODEL

FILE = "lineage.json"
GRAPHS = ("model.onnx", "model.onnx.data", "model.pt2")  # of `fedtrain export --format`, beside the model
CONTEXT = b"fedtrain lineage 1;"
SAME = ("run", "round", "sites", "updates", "task_digest", "config_digest", "schema_digest", "sha256")


class Lineage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the aggregator signs of a model."""

    sha256: str  # of model.safetensors
    run: str
    round: int
    sites: list[str]  # that joined the run
    fingerprints: dict[str, str]  # of their keys: SHA-256 in hex
    updates: int | None  # sites in this round
    task_digest: str | None
    config_digest: str
    schema_digest: str | None
    epsilon: dict[str, tuple[float, float]]  # site -> (epsilon, delta) that the aggregator's log has
    privacy: dict[str, Any]  # the agreed settings of [privacy], by which sites add noise of their own
    audit: tuple[int, str]  # lines of the aggregator's audit log then, and the last one's seal
    fedtrain: str
    graphs: dict[str, str] = {}  # file -> SHA-256, of those that were made with it


def sign(config: Config, folder: Path, *, graphs: bool = False) -> bool:
    """Write lineage.json beside an export of this project's aggregator; False where its key is not here.
    `graphs`: those in the folder are of this model."""
    certs = config.root / config.network.certs / "aggregator"
    log = audit_file(config, "aggregator")
    if not (certs / "key.pem").exists() or not log.exists():
        return False
    about = msgspec.json.decode((folder / "model.json").read_bytes(), type=dict[str, Any])
    place, epsilon, prints = (0, ""), dict[str, tuple[float, float]](), dict[str, str]()
    for line in lines_of(log):
        place = line.number, line.seal
        if isinstance(line.entry, PrivacySpent):
            epsilon[line.entry.site] = line.entry.epsilon, line.entry.delta
        elif isinstance(line.entry, Admitted):
            prints[line.entry.site] = line.entry.fingerprint
    lineage = Lineage(
        **cast("dict[str, Any]", {name: about.get(name) for name in SAME}), audit=place, epsilon=epsilon,
        fedtrain=about["fedtrain"], graphs=_graphs(folder) if graphs else {},
        fingerprints={site: prints[site] for site in about["sites"] if site in prints},
        privacy={key: value for key, value in about["config"].items() if key.startswith("privacy.")},
    )  # fmt: skip
    signed = Signed.by(Signer.of(Credentials.load(certs)), CONTEXT, lineage).encode()
    found = {**msgspec.to_builtins(lineage), "signed": b64encode(signed).decode()}
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return True


def verify(folder: Path, root: bytes, log: Path | None = None) -> Lineage:
    """The lineage of an exported model; CertificateError unless the aggregator of the federation with this
    `root` (PEM) has signed it for these very files, and StoreError where its audit `log` is another one."""
    file = folder / FILE
    try:
        shown = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        data = b64decode(shown.pop("signed"), validate=True)
        certificate = msgspec.msgpack.decode(data, type=Signed).certificate
    except FileNotFoundError:
        raise StoreError(
            f"{folder} has no {FILE}: it was exported where the aggregator's key is not."
        ) from None
    except (msgspec.MsgspecError, KeyError, ValueError, UnicodeDecodeError) as e:
        raise CertificateError(f"{file} is no signed lineage: {e}") from None
    issued = certificates(certificate)[0].not_valid_before_utc  # whether it has expired since is no matter
    verifier = Verifier(root, identity_of(certificate).federation, now=lambda: issued)
    _, lineage, _ = signed_claim(data, Lineage, CONTEXT, "lineage", verifier, "aggregator")
    if shown != msgspec.json.decode(msgspec.json.encode(lineage)):
        raise CertificateError(f"{file} shows something else than what was signed")
    if sha256_of(folder / MODEL) != lineage.sha256:
        raise CertificateError(f"{folder / MODEL} is not the model that was signed")
    if odd := [name for name, digest in _graphs(folder).items() if lineage.graphs.get(name) != digest]:
        raise CertificateError(f"{folder / odd[0]} is not the one that was signed with the model")
    about = msgspec.json.decode((folder / "model.json").read_bytes(), type=dict[str, Any])
    if odd := [name for name in SAME if about.get(name) != getattr(lineage, name)]:
        raise CertificateError(f"{folder / 'model.json'} has another {odd[0]} than what was signed")
    if log is not None and not any((line.number, line.seal) == lineage.audit for line in lines_of(log)):
        raise StoreError(f"{log.name} does not have line {lineage.audit[0]} as the lineage names it")
    return lineage


def _graphs(folder: Path) -> dict[str, str]:
    """The SHA-256 of each graph that is in a folder."""
    return {name: sha256_of(folder / name) for name in GRAPHS if (folder / name).exists()}
