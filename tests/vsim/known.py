"""What follows from a certificate, a file of the ground or settings alone: it is worked out once for all
seeds, not at each start of a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fedtrain.config import Config
from fedtrain.pki import Credentials, callers, renewal, revocation, signing
from fedtrain.pki.identity import Current
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.privacy import accountant
from fedtrain.runtime import auditing
from fedtrain.runtime.sites import approval, pins, site, start
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers.workbench import source_digest
from fedtrain.store import folder, ledger

KNOWN: list[tuple[Any, str, Any]] = []  # where, name, what stands there while a world runs


def once(where: Any, name: str, key: Callable[..., Any], of_class: bool = False) -> None:
    known, real = dict[Any, Any](), getattr(where, name)

    def get(*arguments: Any) -> Any:
        if (own := key(*arguments)) not in known:
            known[own] = real(*arguments)
        return known[own]

    KNOWN.append((where, name, staticmethod(get) if of_class else get))


def agreed(config: Config, real: Callable[[Config], dict[str, str]] = Config.agreed) -> dict[str, str]:
    if "known" not in vars(config):
        vars(config)["known"] = real(config)
    found: dict[str, str] = vars(config)["known"]
    return found


@lru_cache
def task_of(root: Any, task: str) -> str:
    """The digest of the ground's task."""
    return source_digest(Config.of({"run": {"task": task}}, root))


once(Verifier, "_trust", lambda self, certificate, role: (self._federation, certificate, role))
once(Credentials, "load", lambda where: where, of_class=True)
once(Signer, "of", lambda credentials: (credentials.chain, credentials.key), of_class=True)
for module in (renewal, revocation, signing):
    once(module, "certificates", lambda pem, *path: pem)
once(pins, "fingerprint", lambda pem: pem)
once(auditing, "identity_of", lambda pem: pem)
once(callers, "identity_of", lambda pem: pem)
once(approval.Approvals, "check", lambda self, config: (self.folder, config.run.task))
once(start, "policy_of", lambda where, credentials: where)
KNOWN.append((pins, "policy_of", lambda where, credentials, signed: start.policy_of(where, credentials)))
once(site, "Approvals", lambda own: own)
once(accountant, "gaussian_delta", lambda mu, eps: (mu, eps))
KNOWN.append((Config, "agreed", agreed))
KNOWN.append((Current, "__call__", lambda self: self._now))
KNOWN += [(module, "keep_freed", lambda **about: None) for module in (site, aggregator)]
KNOWN += [(module, "refuse_network_disk", lambda path: None) for module in (folder, ledger)]
