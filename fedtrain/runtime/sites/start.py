"""What must be in order at a site before its task is loaded: `fedtrain site` and `fedtrain doctor` ask here.

Its approval is the last of it: approval.Approvals.check.
"""

from __future__ import annotations

from pathlib import Path

from ...config import Config, SitePolicy
from ...errors import CertificateError
from ...messages import SiteId
from ...pki import Credentials
from ...pki.identity import Current
from .approval import policy_of
from .gate import check_policy


def folder_of(config: Config, name: SiteId) -> Path:
    """Where a site's key lies, with its certificate, its policy and its approvals."""
    return config.root / config.network.certs / "sites" / name


def credentials_of(config: Config, name: SiteId) -> Current:
    """The site's credentials; CertificateError where they are not in order, or another's."""
    current = Current(folder_of(config, name))
    identity = current().identity
    if identity.role != "site" or identity.name != name:
        raise CertificateError(
            f"the certificate is {identity.name}'s, not {name}'s. "
            f"Give the name {identity.name}, or issue one for {name}."
        )
    return current


def checked_policy(config: Config, name: SiteId, credentials: Credentials) -> SitePolicy:
    """The site's policy; ConfigError without one, or for settings under which it would refuse everything."""
    policy = policy_of(folder_of(config, name), credentials)
    check_policy(config, policy)
    return policy
